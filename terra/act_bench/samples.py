"""The benchmark's samples: the context, the reference path and the maneuver of each."""

import re
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float64

from terra.errors import ConfigError, TrajectoryError
from terra.rollouts.manifest import read_lines
from terra.trajectory.checks import check_finite
from tokenizer.files import parse_json
from tokenizer.settings import Natural, checked

# Maneuvers in the order of the estimator's outputs. No sample instructs the last one.
CLASSES = (
    *("curving_to_left", "curving_to_right", "straight_constant_high_speed", "straight_constant_low_speed"),
    *("straight_accelerating", "straight_decelerating", "starting", "stopping", "stopped"),
)
NUM_CONTEXT = 3
_CONSTANT = "straight_constant_speed"
_LOW_SPEED = 20  # km/h, and less
_SPEED = re.compile(r"(?<!\d)(\d{1,3})kmph$")


@dataclass(frozen=True, eq=False)
class Sample:
    """A scored sample.

    Attributes:
        sample_id: an integer, part of the video's name.
        label: "category/subcategory" from the manifest.
        class_id: the label's maneuver, an index into `CLASSES`.
        context_frames: paths of pictures, relative to nuScenes' folder.
        reference: position of the instructed drive at each scored frame, [right, forward] in meters.
    """

    sample_id: int
    label: str
    class_id: int
    context_frames: tuple[str, ...]
    reference: Float64[np.ndarray, "frames 2"]

    @property
    def name(self) -> str:
        """The benchmark's name for the sample's video, without ".mp4"."""
        return f"NUSCENES_ACTION_{self.sample_id:06}"

    @property
    def drive(self) -> str:
        """The nuScenes log of the context, such as "n015-2018-08-02-17-16-37+0800": samples of one are not independent.

        nuScenes names a picture LOG__CHANNEL__TIMESTAMP.jpg; with other names a sample is a drive by itself.
        """
        first = self.context_frames[0].rpartition("/")[2] if self.context_frames else ""
        log, marker, _ = first.partition("__")
        return log if marker else self.name


def read_samples(manifest: Path, num_frames: int) -> tuple[list[Sample], int]:
    """Read act_bench.jsonl, or some of its lines; return the scored samples, and the number of all samples.

    Args:
        manifest: a file as in huggingface.co/datasets/turing-motors/ACT-Bench. This function reads `sample_id`,
            `label`, `context_frames` and `reference_traj`; `terra.trajectory.act_bench` reads `instruction_trajs`.
        num_frames: number of scored frames; the reference needs at least as many rows.

    Raises:
        ConfigError: no such file, an empty one, a field that is missing or of another kind, or a repeated id.
        TrajectoryError: a line is no JSON object, or numbers are not finite.
    """
    samples: list[Sample] = []
    lines: dict[int, int] = {}
    for line in read_lines(manifest):
        where = f"{manifest}: line {line.number}"
        record = parse_json(line.text.decode(errors="replace"), str(manifest), TrajectoryError, first_line=line.number)
        sample_id = checked(Natural, record.get("sample_id"), f"{where}: sample_id")
        if sample_id in lines:
            raise ConfigError(f"{where}: sample_id {sample_id}: already on line {lines[sample_id]}")
        lines[sample_id] = line.number
        label = record.get("label")
        class_id = class_of(label, f"{where}: label")
        if class_id is not None:
            reference = reference_waypoints(record.get("reference_traj"), num_frames, f"{where}: reference_traj")
            samples.append(Sample(sample_id, str(label), class_id, _context_frames(record, where), reference))
    if not lines:
        raise ConfigError(f"manifest={manifest}: expected a sample a line, got an empty file")
    if not samples:
        raise ConfigError(f"manifest={manifest}: expected samples that are scored, got none among {len(lines)}")
    return samples, len(lines)


def class_of(label: object, where: str) -> int | None:
    """The index of a label's maneuver; None for categories that are not scored.

    The label is "category/subcategory". A constant speed is low up to 20 km/h and high above, by the number at the end
    of the subcategory.

    Raises:
        ConfigError: a label of another form.
    """
    category, slash, subcategory = label.partition("/") if isinstance(label, str) else ("", "", "")
    if not slash:
        raise ConfigError(f"{where}: expected category/subcategory, got {reprlib.repr(label)}")
    if category == _CONSTANT:
        speed = _SPEED.search(subcategory)
        if speed is None:
            raise ConfigError(f"{where}: expected a speed such as 10kmph at the end, got {label!r}")
        category = f"straight_constant_{'low' if int(speed[1]) <= _LOW_SPEED else 'high'}_speed"
    return CLASSES.index(category) if category in CLASSES else None


def reference_waypoints(points: object, num_frames: int, where: str) -> Float64[np.ndarray, "frames 2"]:
    """Convert the first rows of `reference_traj`, [x forward, y left, ...], to the estimator's axes [right, forward].

    Raises:
        ConfigError: fewer than `num_frames` rows, or rows of fewer than two numbers.
        TrajectoryError: NaN or infinity.
    """
    rows = points[:num_frames] if isinstance(points, list) else []
    if len(rows) < num_frames:
        got = f"{len(rows)} rows" if isinstance(points, list) else reprlib.repr(points)
        raise ConfigError(f"{where}: expected {num_frames} rows or more, got {got}")
    for index, row in enumerate(rows):
        if not isinstance(row, list) or len(row) < 2 or not all(type(number) in (int, float) for number in row[:2]):
            raise ConfigError(f"{where}[{index}]: expected the numbers x, y, ..., got {reprlib.repr(row)}")
    forward, left = np.array([row[:2] for row in rows], dtype=np.float64).T
    waypoints = np.stack([-left, forward], axis=1)
    check_finite(waypoints, where)
    return waypoints


def spread(samples: list[Sample], limit: int | None) -> list[Sample]:
    """Choose `limit` samples, evenly spread; all of them if there are fewer or `limit` is None."""
    if limit is None or limit >= len(samples):
        return samples
    return [samples[index * len(samples) // limit] for index in range(limit)]


def _context_frames(record: Mapping[str, object], where: str) -> tuple[str, ...]:
    frames = record.get("context_frames")
    if not isinstance(frames, list) or len(frames) < NUM_CONTEXT or not all(isinstance(each, str) for each in frames):
        raise ConfigError(f"{where}: context_frames: expected {NUM_CONTEXT} paths, got {reprlib.repr(frames)}")
    return tuple(frames)
