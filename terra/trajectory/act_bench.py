"""Trajectories from ACT-Bench's JSONL: one sample per line, a 60-point path for each frame, 10 frames per second."""

import functools
import json
import os
import re
import reprlib
from itertools import islice
from pathlib import Path

import numpy as np

from terra.errors import TrajectoryError
from terra.trajectory.checks import number_array
from terra.trajectory.model import Trajectory
from tokenizer.files import open_regular, parse_json
from tokenizer.limits import LIMITS, Limits

# From huggingface.co/datasets/turing-motors/ACT-Bench, because the file itself declares none of these numbers.
ACT_BENCH_FPS = 10.0
ACT_BENCH_POINTS = 60
ACT_BENCH_STEP = 0.05

SAMPLE_ID = re.compile(rb'"sample_id"\s*:\s*(-?\d+|"(?:[^"\\]|\\.){0,1000}")')


def load_act_bench(path: Path, sample_id: int | str | None, limits: Limits = LIMITS) -> Trajectory:
    """Load one sample's `instruction_trajs`: frames x 60 points x [x forward, y left, z up], meters, from t = 0.

    Args:
        path: the JSONL file. The offsets of its samples are cached, so that many samples are loaded with one scan.
        sample_id: id of the sample; 7 and "7" are the same. It may be None if there is one line.
        limits: bounds on the file's bytes, on bytes of a line, and on lines.

    Raises:
        TrajectoryError: no such sample, several and no `sample_id`, a broken line, another shape.
    """
    stat = path.stat()
    samples = _find_samples(path, stat.st_mtime_ns, stat.st_size, limits)  # pyright: ignore[reportArgumentType]
    first = ", ".join(islice(samples, 5)) + (", ..." if len(samples) > 5 else "")
    if not samples:
        raise TrajectoryError(f"{path}: expected one sample a line, got an empty file")
    if sample_id is None and len(samples) > 1:
        raise TrajectoryError(f"{path}: expected a sample_id, got none for {len(samples)} samples (ids {first})")
    wanted = next(iter(samples)) if sample_id is None else str(sample_id)
    if wanted not in samples:
        raise TrajectoryError(f"{path}: expected one of {len(samples)} sample ids ({first}), got {sample_id!r}")
    line, offset = samples[wanted]
    with open_regular(path, TrajectoryError) as file:
        file.seek(offset)
        text = file.readline(limits.json_bytes).decode("utf-8", errors="replace")
    where = f"{path}: line {line}"
    record = parse_json(text, str(path), TrajectoryError, first_line=line, limits=limits)
    if str(record.get("sample_id")) != wanted:
        raise TrajectoryError(f"{where}: sample_id: expected {wanted}, got {reprlib.repr(record.get('sample_id'))}")
    if "instruction_trajs" not in record:
        raise TrajectoryError(f"{where}: expected the field 'instruction_trajs', got {reprlib.repr(sorted(record))}")
    shape, place = (None, ACT_BENCH_POINTS, 3), f"{where}: instruction_trajs"
    points = number_array(record["instruction_trajs"], shape, place, limits)
    times = np.arange(ACT_BENCH_POINTS) * ACT_BENCH_STEP
    return Trajectory(points[..., :2], times, ACT_BENCH_FPS, where)


# The cache's key includes the file's time and size. The benchmark's file has hundreds of megabytes, so each file is
# scanned once and not once for each sample of a batch.
@functools.lru_cache(maxsize=8)
def _find_samples(path: Path, _mtime_ns: int, _size: int, limits: Limits) -> dict[str, tuple[int, int]]:
    """Map each sample id, in file order, to its line (from 1) and byte offset, without parsing the paths."""
    samples: dict[str, tuple[int, int]] = {}
    offset = 0
    with open_regular(path, TrajectoryError) as file:
        if (size := os.fstat(file.fileno()).st_size) > limits.manifest_bytes:
            raise TrajectoryError(f"{path}: expected at most {limits.manifest_bytes} bytes, got {size}")
        for number, line in enumerate(iter(lambda: file.readline(limits.json_bytes + 1), b""), start=1):
            if number > limits.manifest_lines:
                raise TrajectoryError(f"{path}: expected at most {limits.manifest_lines} lines, got more")
            if len(line) > limits.json_bytes:
                raise TrajectoryError(f"{path}: line {number}: expected at most {limits.json_bytes} bytes, got more")
            if line.strip():
                match = SAMPLE_ID.search(line)
                if match is None:
                    raise TrajectoryError(f"{path}: line {number}: expected a JSON object with a sample_id, got none")
                sample_id = _parse_id(match[1], f"{path}: line {number}")
                if sample_id in samples:
                    first = samples[sample_id][0]
                    raise TrajectoryError(f"{path}: line {number}: sample_id {sample_id}: already on line {first}")
                samples[sample_id] = (number, offset)
            offset += len(line)
    return samples


def _parse_id(text: bytes, where: str) -> str:
    try:
        return str(json.loads(text))
    except ValueError as error:
        raise TrajectoryError(f"{where}: sample_id: expected a number or text, got {reprlib.repr(text)}") from error
