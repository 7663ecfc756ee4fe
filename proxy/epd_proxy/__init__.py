"""The proxy: one OpenAI-compatible address in front of encoders and language-model instances."""
