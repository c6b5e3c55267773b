"""Devices and element types by the names that settings give them; None means what fits the machine."""

import torch

from terra.errors import ConfigError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def torch_dtype(name: str | None, device: torch.device | None = None) -> torch.dtype:
    """The element type that `name` ("float32", "bfloat16", "float16") means.

    None means bfloat16 on a GPU and float32 elsewhere.

    Raises:
        ConfigError: an unknown name.
    """
    if name is None:
        return torch.bfloat16 if device is not None and device.type == "cuda" else torch.float32
    if name not in _DTYPES:
        raise ConfigError(f"dtype: expected one of {', '.join(_DTYPES)}, got {name!r}")
    return _DTYPES[name]


def torch_device(name: str | None) -> torch.device:
    """The device that `name` ("cpu", "cuda", "cuda:1") means; None means a GPU if there is one, else the CPU.

    Raises:
        ConfigError: the machine has no such device.
    """
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name or "none")  # "" would be the CPU
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device: expected cpu or cuda, got {name!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device: expected cpu or cuda, got {name!r}")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"device: expected cpu (no CUDA device is available), got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"device: expected one of {torch.cuda.device_count()} CUDA devices from 0 on, got {name!r}")
    return device


def dtype_name(dtype: torch.dtype) -> str:
    """The name of an element type in settings."""
    return str(dtype).removeprefix("torch.")


def has_fp8(device: torch.device) -> bool:
    """Whether the device can multiply 8-bit (E4M3) matrices; a CPU emulates that in float32."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (8, 9)
