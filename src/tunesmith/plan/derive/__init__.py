"""Derivation of what fits the devices: limits of tokens, memory of the KV cache, offloading,
checkpointing."""
