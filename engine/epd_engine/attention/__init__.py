"""Attention: over the paged KV cache, and within pictures. One module a way of computing it, with one
contract (`base`); what the device can do is tried at start (`choice`)."""
