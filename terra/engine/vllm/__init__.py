"""The engine on vLLM: an out-of-tree plugin (model, "actions" modality, sampler) and the sessions over it."""
