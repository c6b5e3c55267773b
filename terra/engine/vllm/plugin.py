"""Entry point `vllm.general_plugins`: tells vLLM of the world model. Runs in every vLLM process, repeatedly too."""


def register() -> None:
    """Register the configuration with transformers and both architectures with vLLM (as names, imported when used)."""
    from vllm import ModelRegistry

    from terra.world_model import ARCHITECTURES

    known = ModelRegistry.get_supported_archs()
    for name in ARCHITECTURES:
        if name not in known:
            ModelRegistry.register_model(name, f"terra.engine.vllm.model:{name}")
