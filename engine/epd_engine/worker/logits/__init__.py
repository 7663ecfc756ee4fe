"""What stands between a model's logits and a token, each concern over all rows that ask for it at once."""
