"""Devices and data types by the names that settings use."""

import torch

from terra.errors import ConfigError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def torch_dtype(name: str) -> torch.dtype:
    """The torch data type of a name: "float32", "bfloat16" or "float16".

    Raises:
        ConfigError: an unknown name.
    """
    if name not in _DTYPES:
        raise ConfigError(f"dtype: expected one of {', '.join(_DTYPES)}, got {name!r}")
    return _DTYPES[name]


def torch_device(name: str) -> torch.device:
    """The torch device of a name such as "cpu", "cuda" or "cuda:1".

    Raises:
        ConfigError: the machine has no such device.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device: expected cpu or cuda, got {name!r}") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device: expected cpu (no CUDA device is available), got {name!r}")
    return device


def has_fp8(device: torch.device) -> bool:
    """Whether the device can multiply 8-bit (E4M3) matrices; a CPU emulates that in float32."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)
