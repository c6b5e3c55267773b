"""Engines predict tokens: `persistence`, `hf` and `vllm`, all behind the protocol of `terra.engine.base`."""
