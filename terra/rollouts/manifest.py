"""Reads manifests: JSON lines, each of which requests a rollout, or several samples of one.

    {"id": "left-7", "context": "drives/7", "trajectory": "drives/7/left.json", "seed": 3}

id            names the folder: letters, digits, '.', '_' and '-'. Without it the sample_id is taken.
context       a folder, glob or video, as `terra generate` takes it; or `context_frames`, a list of pictures in order.
              Relative paths start from `context_root=`, by default the manifest's folder.
trajectory    .json, .csv, .npz or .jsonl; relative paths start from the manifest's folder.
actions       in its place, where the model's actions are vectors, keys or choices.
sample_id     which line of a .jsonl trajectory; the id, if there is none. Other trajectories have no use for it.
map, map_pose a place that the rollout remembers from its beginning, and where the first context frame is in it, as in
              `terra generate`; relative paths of maps start from the manifest's folder.
adapter       one of the names of `adapters=`; the rollout is made with that adapter, else with the command's model.
num_frames, num_context, seed, num_samples, sampling
              instead of the command's; `sampling` is an object of temperature, top_k and top_p, and may have one alone.

ACT-Bench's act_bench.jsonl works as it is: a line with `instruction_trajs` is its own trajectory, and what else is in
it is left alone. Any other unknown field is an error. Blank lines are skipped.

Several samples: sample 0 is the rollout ID with the line's seed, as if there were one; sample k is ID+k, and its seed
is that of `numpy.random.SeedSequence(seed, spawn_key=(k,))`, see `sample_seed`.
"""

import hashlib
import json
import os
import re
import reprlib
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from terra.config.groups import FolderName, MapPose, read_sampling
from terra.errors import ConfigError, TerraError
from terra.locations import location
from terra.rollouts.settings import RolloutSettings, Samples
from terra.sampling import SamplingParams
from terra.trajectory import Trajectory
from terra.trajectory.act_bench import ACT_BENCH_FPS, ACT_BENCH_POINTS, ACT_BENCH_STEP
from terra.trajectory.checks import number_array
from terra.window_plan import check_frames
from tokenizer.files import decode_text, open_regular, parse_json
from tokenizer.limits import LIMITS, Limits
from tokenizer.settings import Count, Seed, Settings, checked, expecting

PATHS = "instruction_trajs"
_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_QUICK_BYTES = 1 << 20  # of a manifest that is read in a blink

_Path = Annotated[Annotated[str, Field(min_length=1)] | None, expecting("a path")]


class _Fields(Settings):
    """A line's fields, without its id and ACT-Bench's paths."""

    context: _Path = None
    context_frames: Annotated[tuple[str, ...], Field(strict=False, min_length=1)] | None = None
    trajectory: _Path = None
    actions: _Path = None
    sample_id: Annotated[int | str | None, expecting("a number or text")] = None
    map: _Path = None
    map_pose: MapPose | None = None
    adapter: Annotated[FolderName | None, expecting("a name of adapters=")] = None
    num_frames: Count
    num_context: Count
    seed: Seed
    num_samples: Samples
    sampling: dict[str, Any] | None = None


FIELDS = ("id", *_Fields.model_fields)


@dataclass(frozen=True)
class Line:
    """One line of the manifest, not parsed yet: its number from 1, its place in the file in bytes, its text.

    Of a line above the bound on its bytes only the beginning is there, one byte more than may be.
    """

    number: int
    offset: int
    text: bytes


@dataclass(frozen=True)
class Job:
    """One rollout to make.

    Attributes:
        name: name of the rollout's folder.
        where: the manifest and the line, for messages.
        line: the line's number from 1.
        sample: index of the sample within its line, from 0.
        contexts: a folder, glob or video; or the pictures one by one.
        trajectory: the file of the actions, and `sample_id` its line; None if `paths` are in the manifest itself.
        request: all that the line and the command's defaults say about the rollout, as JSON has it.
        map: the file of the map that the rollout remembers, None for none; its first frame is at `map_pose` there.
        adapter: name of the adapter that the rollout is made with, and `adapter_folder` its folder; None for none.
    """

    name: str
    where: str
    line: int
    sample: int
    contexts: tuple[str, ...]
    trajectory: Path | None
    sample_id: int | str | None
    paths: object
    num_frames: int
    num_context: int
    seed: int
    sampling: SamplingParams
    request: dict[str, Any]
    map: Path | None = None
    map_pose: tuple[float, float, float] = (0.0, 0.0, 0.0)
    adapter: str | None = None
    adapter_folder: Path | None = None

    @property
    def several_trajectories(self) -> bool:
        """Whether `sample_id` is needed to find the trajectory in its file."""
        return self.trajectory is not None and self.trajectory.suffix.lower() == ".jsonl"

    def inline_trajectory(self, limits: Limits = LIMITS) -> Trajectory:
        """The trajectory whose `paths` are in the manifest, at its own frame rate. Raises TrajectoryError."""
        where = f"{self.where}: {PATHS}"
        points = number_array(self.paths, (None, ACT_BENCH_POINTS, 3), where, limits)
        return Trajectory(points[..., :2], np.arange(ACT_BENCH_POINTS) * ACT_BENCH_STEP, ACT_BENCH_FPS, where)


def sample_seed(seed: int, sample: int) -> int:
    """The seed of one of a line's samples, below 2**63: the line's own for sample 0, else numpy's `sample`-th spawn."""
    if sample == 0:
        return seed
    return int(np.random.SeedSequence(seed, spawn_key=(sample,)).generate_state(1, np.uint64)[0] >> np.uint64(1))


def read_lines(manifest: Path, limits: Limits = LIMITS) -> Iterator[Line]:
    """Iterate over the lines that are not blank, with one line in memory at a time.

    Raises:
        ConfigError: no regular file, or more lines than `limits` allow.
    """
    most = limits.json_bytes + 1
    with open_regular(manifest, ConfigError, setting="manifest") as file:
        if (size := os.fstat(file.fileno()).st_size) > limits.manifest_bytes:
            raise ConfigError(f"manifest={manifest}: expected at most {limits.manifest_bytes} bytes, got {size}")
        offset = number = 0
        while text := file.readline(most):
            number += 1
            if number > limits.manifest_lines:
                raise ConfigError(f"manifest={manifest}: expected at most {limits.manifest_lines} lines, got more")
            if text.strip():
                yield Line(number, offset, text)
            while len(text) == most and not text.endswith(b"\n"):
                offset += len(text)
                text = file.readline(most)
            offset += len(text)


def read_line(manifest: Path, number: int, offset: int, limits: Limits = LIMITS) -> Line:
    """Read a line again. Raises ConfigError."""
    with open_regular(manifest, ConfigError) as file:
        file.seek(offset)
        return Line(number, offset, file.readline(limits.json_bytes + 1))


def count_rollouts(settings: RolloutSettings) -> int:
    """Number of rollouts that the manifest requests; those of a line that can't be parsed fail later.

    Keeps 16 bytes a line while it reads.

    Raises:
        ConfigError: no such file, no line in it, or an id twice.
    """
    manifest = settings.manifest
    total, digests, numbers = 0, array("Q"), array("Q")
    for line in read_lines(manifest, settings.limits):
        names = rollout_names(line, settings)
        digests.append(int.from_bytes(hashlib.blake2b(names[0].encode(), digest_size=8).digest(), "little"))
        numbers.append(line.number)
        total += len(names)
    if not total:
        raise ConfigError(f"manifest={manifest}: expected one rollout a line, got an empty file")
    values = np.frombuffer(digests, dtype=np.uint64)
    order = np.argsort(values, kind="stable")
    same = np.flatnonzero(values[order][1:] == values[order][:-1])
    if len(same):
        first, second = (numbers[order[same[0] + place]] for place in (0, 1))
        raise ConfigError(f"manifest={manifest}: line {second}: expected an id of its own, got that of line {first}")
    return total


def check_manifest(settings: RolloutSettings) -> None:
    """Refuse what `count_rollouts` refuses, before torch is imported; a manifest that is long to read is left to it."""
    if settings.manifest.stat().st_size <= _QUICK_BYTES:
        count_rollouts(settings)


def rollout_names(line: Line, settings: RolloutSettings) -> list[str]:
    """The names of a line's rollouts, even if the line has other errors; "line+N" for a line without an id."""
    try:
        record = _parse(line, settings)
        name = _name(record, "")
    except TerraError:
        return [f"line+{line.number}"]
    try:
        samples = checked(Samples, record.get("num_samples", settings.num_samples), "num_samples")
    except TerraError:
        samples = 1
    return [_sample_name(name, sample) for sample in range(samples)]


def parse_line(line: Line, settings: RolloutSettings) -> list[Job]:
    """The rollouts that a line requests, one for each sample.

    Raises:
        TerraError: one line with the place, what was expected and what came.
    """
    where = f"{settings.manifest}: line {line.number}"
    record = _parse(line, settings)
    name = _name(record, where)
    defaults = {name: getattr(settings, name) for name in ("num_frames", "num_context", "seed", "num_samples")}
    given = {key: value for key, value in record.items() if key in FIELDS or PATHS not in record}
    given.pop("id", None)
    fields = checked(_Fields, defaults | given, where)
    check_frames(fields.num_frames, settings.limits, f"{where}: ")
    contexts = _contexts(fields, PATHS in record, where)
    paths_sha256 = None
    if fields.trajectory is not None and fields.actions is not None:
        raise ConfigError(f"{where}: expected one of trajectory and actions, got both")
    actions = fields.trajectory or fields.actions
    if actions is None:
        if PATHS not in record:
            raise ConfigError(f"{where}: trajectory: expected a path, got none")
        paths_sha256 = hashlib.sha256(json.dumps(record[PATHS]).encode()).hexdigest()
    pose = fields.map_pose or (0.0, 0.0, 0.0)
    if fields.map_pose is not None and fields.map is None:
        raise ConfigError(f"{where}: map_pose: expected none without map, got one")
    adapter = fields.adapter
    if adapter is not None and adapter not in settings.adapters:
        known = f"one of {', '.join(settings.adapters)}" if settings.adapters else "none (adapters= names none)"
        raise ConfigError(f"{where}: adapter: expected {known}, got {adapter!r}")
    sampling = _sampling(fields.sampling or {}, settings.sampling, where)
    shared = {
        "context": [_without_home(context, settings) for context in contexts],
        "trajectory": actions and _without_home(actions, settings),
        "sample_id": fields.sample_id,
        "paths_sha256": paths_sha256,
        "num_frames": fields.num_frames,
        "num_context": fields.num_context,
        "sampling": vars(sampling),
    }
    if adapter is not None:
        shared["adapter"] = adapter
    if fields.map is not None:
        shared |= {"map": _without_home(fields.map, settings), "map_pose": list(pose)}
    jobs = []
    for sample in range(fields.num_samples):
        seed = sample_seed(fields.seed, sample)
        jobs.append(
            Job(
                name=_sample_name(name, sample),
                where=where,
                line=line.number,
                sample=sample,
                contexts=tuple(str(settings.root / context) for context in contexts),
                trajectory=None if actions is None else settings.manifest.parent / actions,
                sample_id=fields.sample_id,
                paths=record.get(PATHS),
                num_frames=fields.num_frames,
                num_context=fields.num_context,
                seed=seed,
                sampling=sampling,
                request={**shared, "seed": seed},
                map=None if fields.map is None else settings.manifest.parent / fields.map,
                map_pose=pose,
                adapter=adapter,
                adapter_folder=None if adapter is None else settings.adapters[adapter],
            )
        )
    return jobs


def _without_home(path: str, settings: RolloutSettings) -> str:
    """A path of the manifest as a record has it: an absolute one as a location, see `terra.locations`."""
    return location(Path(path), settings.manifest.parent) if Path(path).is_absolute() else path


def _parse(line: Line, settings: RolloutSettings) -> dict[str, Any]:
    where, limits = str(settings.manifest), settings.limits
    if len(line.text) > limits.json_bytes:
        raise ConfigError(f"{where}: line {line.number}: expected at most {limits.json_bytes} bytes, got more")
    text = decode_text(line.text, where, ConfigError, first_line=line.number)
    return parse_json(text, where, ConfigError, first_line=line.number, limits=limits)


def _sample_name(name: str, sample: int) -> str:
    return name if sample == 0 else f"{name}+{sample}"


def _name(record: dict[str, Any], where: str) -> str:
    name = record.get("id", record.get("sample_id"))
    if isinstance(name, int) and not isinstance(name, bool):
        name = str(name)
    if not isinstance(name, str) or not _ID.fullmatch(name):
        expected = "1 to 200 letters, digits, '.', '_' or '-', beginning with a letter or digit"
        raise ConfigError(f"{where}: id (or sample_id): expected {expected}, got {reprlib.repr(name)}")
    return name


def _contexts(fields: _Fields, has_paths: bool, where: str) -> tuple[str, ...]:
    # ACT-Bench's own lines have no `context`; with both the line's author has the last word.
    if fields.context is not None and (fields.context_frames is None or has_paths):
        return (fields.context,)
    if fields.context is None and fields.context_frames is not None:
        return fields.context_frames
    got = "none" if fields.context is None else "both"
    raise ConfigError(f"{where}: expected either a context path or a list context_frames, got {got}")


def _sampling(changes: dict[str, Any], default: SamplingParams, where: str) -> SamplingParams:
    try:
        return read_sampling({**vars(default), **changes})
    except ValueError as error:
        raise ConfigError(f"{where}: sampling: {error}") from None
