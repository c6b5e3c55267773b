"""How well the models show the frames that a rollout starts from, beside what its tokenizer reaches on held-out frames.

A tokenizer's folder may hold reconstruction.json, which `terra train-tokenizer` writes: {"psnr": mean PSNR in dB}. It
is a file of its own, because config.json is part of the checkpoint's hash, by which rollouts are recorded and resumed.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field
from torch.nn import functional as F

from terra.errors import CheckpointError
from terra.metrics.frames import PSNR_CAP, psnr, psnr_by_view
from terra.views import Views
from tokenizer import Frames
from tokenizer.files import read_json, write_json
from tokenizer.settings import Settings, checked

FILE = "reconstruction.json"
MARGIN = 6.0  # dB below the held-out frames: twice their error; single drives of the demo's world are up to 4 below


class HeldOut(Settings):
    """The content of reconstruction.json: mean PSNR (dB) of reconstructed held-out frames, 0 to 100."""

    psnr: Annotated[float, Field(ge=0, le=PSNR_CAP)]


@dataclass(frozen=True)
class Reconstruction:
    """How well context frames are reconstructed.

    Attributes:
        psnr: mean PSNR of the decoded context frames, in dB, at most 100.
        expected: that of held-out frames like the tokenizer's training data; None if it is not known.
        by_view: mean PSNR of the part of each view, by its name; None for one camera.
    """

    psnr: float
    expected: float | None
    by_view: dict[str, float] | None = None

    @classmethod
    def of(cls, decoded: Frames, truth: Frames, expected: float | None, views: Views | None = None) -> "Reconstruction":
        """Compare decoded context frames to the frames that were encoded, both in [-1, 1].

        A decoder may have a picture size of its own; frames that were encoded are compared at that size.
        """
        truth, size = truth.float().cpu(), decoded.shape[-2:]
        if truth.shape[-2:] != size:
            truth = F.interpolate(truth, size, mode="bilinear", antialias=True)
        decoded = decoded.cpu()
        each = {name: round(part.mean().item(), 2) for name, part in psnr_by_view(decoded, truth, views).items()}
        return cls(round(psnr(decoded, truth).mean().item(), 2), expected, each or None)

    @property
    def line(self) -> str:
        """One line for the user."""
        views = ", ".join(f"{name} {value:.1f}" for name, value in (self.by_view or {}).items())
        parts = [views] if views else []
        parts += [] if self.expected is None else [f"held-out frames: {self.expected:.1f} dB"]
        beside = f" ({'; '.join(parts)})" if parts else ""
        return f"the model shows the context at {self.psnr:.1f} dB PSNR{beside}"

    def describe(self) -> dict[str, Any]:
        """The key `reconstruction` of a rollout's record, which names views only where there are several."""
        return {name: value for name, value in vars(self).items() if name != "by_view" or value is not None}

    @property
    def warning(self) -> str | None:
        """One line if the context is reconstructed far worse than held-out frames, else None."""
        if self.expected is None or self.psnr >= self.expected - MARGIN:
            return None
        return f"{self.line}: it is unlike the training data, and details such as other cars may be lost"


def expected_psnr(tokenizer: Path) -> float | None:
    """The PSNR (dB) in a tokenizer folder's reconstruction.json; None without the file. Raises CheckpointError."""
    path = tokenizer / FILE
    if not path.exists():
        return None
    return checked(
        HeldOut, read_json(path, CheckpointError, "the PSNR of a tokenizer"), str(path), CheckpointError
    ).psnr


def write_expected(tokenizer: Path, value: float) -> None:
    """Write reconstruction.json into a tokenizer's folder. Raises OutputError."""
    write_json(tokenizer / FILE, {"psnr": round(value, 2)})
