"""The operator and the `epd` command line."""
