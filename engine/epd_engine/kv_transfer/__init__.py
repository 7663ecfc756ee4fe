"""KV from prefill to decode: config, contract, factory, connectors."""
