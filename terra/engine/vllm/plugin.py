"""Registers the world model with vLLM: entry point `vllm.general_plugins`, which may run repeatedly in a process."""


def register() -> None:
    """Register the configuration with transformers and both architectures with vLLM (as names, imported when used)."""
    from vllm import ModelRegistry

    from terra.world_model import ARCHITECTURES

    known = ModelRegistry.get_supported_archs()
    for name in ARCHITECTURES:
        if name not in known:
            ModelRegistry.register_model(name, f"terra.engine.vllm.model:{name}")
