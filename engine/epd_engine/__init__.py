"""The inference engine: encoder, prefill and decode roles over one EC store."""
