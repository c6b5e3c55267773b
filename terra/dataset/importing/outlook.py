"""What an import at some frame rate would keep of the drives that were looked at, and what it leaves out and why."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from terra.dataset.format import FUTURE_SECONDS
from terra.dataset.importing.alignment import align
from terra.dataset.importing.source import SourceDrive
from terra.dataset.poses import Poses
from terra.errors import TerraError


@dataclass(eq=False)
class Outlook:
    """What an import would keep.

    Attributes:
        fps: the frame rate that it would have.
        num_drives: drives of which something would be kept.
        num_frames: frames that would be kept.
        left_out: reason -> number of the sources' frames.
        num_repeated: frames that would be shown twice.
        failed: (drive, why it would not be imported).
    """

    fps: float
    num_drives: int = 0
    num_frames: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    num_repeated: int = 0
    failed: list[tuple[str, str]] = field(default_factory=list)


def foresee(drives: Sequence[SourceDrive], fps: float) -> Outlook:
    """Align all drives as the import does, without reading a frame."""
    seen = Outlook(fps)
    for drive in drives:
        try:
            alignment = align(drive, fps)
        except TerraError as error:
            seen.failed.append((drive.name, str(error)))
            continue
        seen.num_drives += 1
        seen.num_frames += len(alignment.frame_index)
        seen.num_repeated += alignment.num_repeated
        seen.left_out["at the start, without a pose or action"] += alignment.num_before
        after = f"at the end, with less than {FUTURE_SECONDS:g} s of poses to follow"
        if not isinstance(drive.track, Poses):
            after = "at the end, without an action"
        seen.left_out[after] += alignment.num_after
    return seen
