"""KITTI's odometry benchmark (cvlibs.net/datasets/kitti/eval_odometry.php): pictures, camera poses, calibration."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float

from decoder.pictures import is_picture
from terra.dataset.importing.source import (
    Footage,
    Intrinsics,
    PoseFiles,
    SourceDrive,
    motion,
    picture_footage,
    say_left_out,
)
from terra.errors import DatasetError
from tokenizer.files import read_text
from tokenizer.limits import LIMITS

PICTURES = "image_2"  # the left color camera


@dataclass(frozen=True)
class KittiSource(PoseFiles):
    """ROOT/poses/NN.txt, and for each ROOT/sequences/NN/{image_2/*.png or *.jpg, times.txt, calib.txt}.

    A line of poses is a 3x4 matrix [R | t], row by row: the camera's position in the frame of the first camera, whose
    axes are x right, y down, z forward. The import converts positions to x forward, y left, z up; heading and pitch are
    those of the camera's z axis. The vehicle's origin is the camera. P2 of calib.txt, if there is one, gives the
    intrinsics.
    """

    folder: Path

    def list_drives(self) -> tuple[str, ...]:
        """The numbers of the sequences that have poses."""
        names = tuple(path.stem for path in sorted((self.folder / "poses").glob("[!.]*.txt")))
        if not names:
            raise DatasetError(f"{self.folder}: expected KITTI odometry with poses/NN.txt, got none")
        sequences = self.folder / "sequences"
        if sequences.is_dir():
            say_left_out(sequences, [sequences / name for name in names], "drives, because poses/NN.txt is missing")
        return names

    def open_drive(self, name: str) -> SourceDrive:
        """Open one sequence."""
        path, sequence = self.folder / "poses" / f"{name}.txt", self.folder / "sequences" / name
        matrices = _read_numbers(path, 12).reshape(-1, 3, 4)
        times = _read_numbers(sequence / "times.txt", 1)[:, 0]
        if len(matrices) != len(times):
            raise DatasetError(f"{sequence}: expected as many poses as times, got {len(matrices)} and {len(times)}")
        footage = _pictures(sequence / PICTURES, times)
        place, ahead = matrices[:, :, 3], matrices[:, :, 2]
        poses = motion(
            times,
            np.stack([place[:, 2], -place[:, 0], -place[:, 1]], axis=1),
            np.arctan2(-ahead[:, 0], ahead[:, 2]),
            np.arcsin(np.clip(-ahead[:, 1], -1.0, 1.0)),
        )

        return SourceDrive(
            name=name,
            track=poses,
            frame_times=footage.times,
            frames=footage.frames,
            intrinsics=_read_intrinsics(sequence / "calib.txt"),
            origin=str(path),
            breaks=footage.breaks,
            left_out=footage.left_out,
        )


def _pictures(folder: Path, times: Float[np.ndarray, " frames"]) -> Footage:
    """The pictures 000000.png (or .jpg), 000001.png, ..., each of the line of its number. Raises DatasetError."""
    found = {path.stem: path for path in filter(is_picture, folder.glob("*"))}
    numbered = {int(stem): path for stem, path in found.items() if stem.isdecimal()}
    if len(numbered) < len(found) or (numbered and max(numbered) >= len(times)):
        got = f"{len(found)} from {min(found)} to {max(found)}"
        raise DatasetError(f"{folder}: expected pictures 000000 to {len(times) - 1:06d}, as many as times, got {got}")
    if not numbered:
        raise DatasetError(f"{folder}: expected pictures (.png, .jpg), as many as the {len(times)} times, got none")
    # A picture that is not there counts as a damaged one.
    return picture_footage([numbered.get(index, folder / f"{index:06d}.png") for index in range(len(times))], times)


def _read_intrinsics(path: Path) -> Intrinsics | None:
    """Read the intrinsics from P2 of calib.txt, a 3x4 projection matrix; None without the file."""
    if not path.exists():
        return None
    for line in _read_lines(path):
        name, _, numbers = line.partition(":")
        if name == "P2":
            matrix = _parse_numbers(numbers, 12, f"{path}: P2").reshape(3, 4)
            return Intrinsics(float(matrix[0, 0]), float(matrix[0, 2]), float(matrix[1, 2]))
    raise DatasetError(f"{path}: expected a line 'P2: ' with 12 numbers, got none")


def _read_numbers(path: Path, columns: int) -> Float[np.ndarray, "rows columns"]:
    rows = [
        _parse_numbers(text, columns, f"{path}: line {line}")
        for line, text in enumerate(_read_lines(path), 1)
        if text.strip()
    ]
    if not rows:
        raise DatasetError(f"{path}: expected lines of {columns} numbers, got none")
    return np.stack(rows)


def _read_lines(path: Path) -> list[str]:
    return read_text(path, DatasetError, "a file of KITTI odometry", max_bytes=LIMITS.table_bytes).splitlines()


def _parse_numbers(text: str, count: int, where: str) -> Float[np.ndarray, " numbers"]:
    try:
        numbers = np.array([float(word) for word in text.split()])
    except ValueError as error:
        raise DatasetError(f"{where}: expected {count} numbers, got: {error}") from None
    if len(numbers) != count or not np.isfinite(numbers).all():
        raise DatasetError(f"{where}: expected {count} finite numbers, got {len(numbers)}: {text[:60]!r}")
    return numbers
