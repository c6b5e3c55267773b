"""Terra: autoregressive world models. Context frames and actions in, the imagined video out.

    import terra

    with terra.Pipeline.from_pretrained("demo") as pipeline:
        request = pipeline.load_request("frames/", "drive.csv", num_frames=80, seed=7)
        (rollout,) = pipeline.generate([request], progress=True)
    rollout.save("drive.mp4")

`Pipeline` generates and drives; the docstrings of the names here are the manual, and `terra --help` lists the commands.
All names but the version are imported when they are first used: `import terra` itself needs no torch. If it comes
before `import torch`, it sets GOMP_SPINCOUNT, unless that is set: OpenMP's threads then spin for microseconds before
they sleep.
"""

import gc
import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from terra.context import load_context
    from terra.errors import TerraError
    from terra.locations import DEMO
    from terra.pipeline import Drive, Pipeline, Rollout, RolloutRequest
    from terra.sampling import SamplingParams
    from terra.trajectory import Trajectory, load_trajectory

if "torch" not in sys.modules:  # else it has been read, and `tokenizer.cores.SpinLimiter` does what it can
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

__version__ = "0.1.0"

__all__ = [
    "DEMO",
    "Drive",
    "Pipeline",
    "Rollout",
    "RolloutRequest",
    "SamplingParams",
    "TerraError",
    "Trajectory",
    "__version__",
    "load_context",
    "load_trajectory",
]

_MODULES = {
    "DEMO": "terra.locations",
    "Drive": "terra.pipeline",
    "Pipeline": "terra.pipeline",
    "Rollout": "terra.pipeline",
    "RolloutRequest": "terra.pipeline",
    "SamplingParams": "terra.sampling",
    "TerraError": "terra.errors",
    "Trajectory": "terra.trajectory",
    "load_context": "terra.context",
    "load_trajectory": "terra.trajectory",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with without_garbage_collection():
        value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
    return value


@contextmanager
def without_garbage_collection() -> Iterator[None]:
    """Collect no garbage within the block: nearly all that an import makes stays, and to look through it takes time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
