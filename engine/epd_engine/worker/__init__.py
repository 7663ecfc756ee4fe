"""Executing a step: encoder, language model over paged KV, sampling."""
