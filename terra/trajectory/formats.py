"""Reading of trajectory files; the suffix of a file tells its format."""

from pathlib import Path

from terra.errors import TrajectoryError
from terra.trajectory.act_bench import load_act_bench
from terra.trajectory.document import load_json, load_npz, read_json_poses
from terra.trajectory.model import PoseTable, Trajectory
from terra.trajectory.pose_table import read_csv
from tokenizer.limits import LIMITS, Limits


def _load_csv(path: Path, seconds: float | None, limits: Limits) -> Trajectory:
    return read_csv(path, limits).trajectory(seconds, limits)


LOADERS = {".json": load_json, ".npz": load_npz, ".csv": _load_csv}
POSE_READERS = {".json": read_json_poses, ".csv": read_csv}


def load_trajectory(
    path: str | Path,
    *,
    sample_id: int | str | None = None,
    seconds: float | None = None,
    limits: Limits = LIMITS,
) -> Trajectory:
    """Load a trajectory from JSON, NPZ, CSV, or one line of ACT-Bench's JSONL.

    Args:
        path: the file; its suffix says which format it has.
        sample_id: id of the sample in a .jsonl file; needed if the file has several lines.
        seconds: how much of a long drive is needed; of poses, later frames are then not made.
        limits: bounds on what is read.

    Raises:
        TrajectoryError: one line with the file, the line or field in it, what was expected and what came.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix != ".jsonl" and suffix not in LOADERS:
        raise TrajectoryError(f"{path}: expected a file that ends in .json, .jsonl, .csv or .npz, got {suffix!r}")
    if suffix != ".jsonl" and sample_id is not None:
        raise TrajectoryError(f"{path}: expected a .jsonl file to choose a sample from, got {sample_id = }")
    try:
        if not path.exists():
            raise TrajectoryError(f"{path}: expected a trajectory file, got no such file")
        if suffix == ".jsonl":
            return load_act_bench(path, sample_id, limits)
        return LOADERS[suffix](path, seconds, limits)
    except OSError as error:
        raise TrajectoryError(f"{path}: expected a file that can be read, got: {error.strerror or error}") from error


def load_poses(path: str | Path, *, as_logged: bool = False, limits: Limits = LIMITS) -> PoseTable:
    """Read a vehicle's poses from JSON or CSV, without cutting future paths out of them.

    `as_logged`: of a recording, see `terra.trajectory.pose_table.read_csv`.

    Raises:
        TrajectoryError: the file is missing, malformed, does not declare its units, or holds paths instead of poses.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix not in POSE_READERS:
        raise TrajectoryError(f"{path}: expected poses in a file that ends in .json or .csv, got {path.suffix!r}")
    if suffix == ".csv":
        return read_csv(path, limits, as_logged=as_logged)
    return POSE_READERS[suffix](path, limits)
