"""What an import at some frame rate would keep of the drives that were looked at, and what it leaves out and why."""

from collections.abc import Sequence
from dataclasses import dataclass

from terra.dataset.importing.alignment import Losses, align
from terra.dataset.importing.cameras import align_cameras
from terra.dataset.importing.source import SourceDrive
from terra.errors import TerraError


@dataclass(frozen=True)
class Outlook:
    """What an import would keep.

    Attributes:
        fps: the frame rate that it would have.
        num_drives: drives of which something would be kept.
        losses: what would be kept of these, and what not; None if there are none.
        failed: (drive, why it would not be imported).
    """

    fps: float
    num_drives: int
    losses: Losses | None
    failed: tuple[tuple[str, str], ...]


def foresee(drives: Sequence[SourceDrive], fps: float) -> Outlook:
    """Align all drives as the import does, without reading a frame."""
    each: list[Losses] = []
    failed: list[tuple[str, str]] = []
    for drive in drives:
        try:
            each.append(align_cameras(drive, align(drive, fps), fps).losses)
        except TerraError as error:
            failed.append((drive.name, str(error)))
    return Outlook(fps, len(each), Losses.of_all(each) if each else None, tuple(failed))
