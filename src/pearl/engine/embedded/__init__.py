"""pearl's own engine on torch: continuous batching on a slot KV cache, for the Qwen3 dense family.

Import from the modules: `pearl.engine.embedded.engine` (synchronous), `pearl.engine.embedded.threaded` (the async port).
"""
