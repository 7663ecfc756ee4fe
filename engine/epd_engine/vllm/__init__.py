"""Our EC store inside vLLM, as an EC connector that it loads by `ec_connector_module_path` (docs/vllm.md).

Needs of the engine's dependencies only those that vLLM brings, and `xxhash`.
"""
