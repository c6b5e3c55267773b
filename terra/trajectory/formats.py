"""Reading of trajectory files; the suffix of a file tells its format."""

from pathlib import Path

from terra.errors import TrajectoryError
from terra.trajectory.act_bench import load_act_bench
from terra.trajectory.document import load_json, load_npz, read_json_poses
from terra.trajectory.model import PoseTable, Trajectory
from terra.trajectory.pose_table import read_csv

LOADERS = {".json": load_json, ".npz": load_npz, ".csv": lambda path: read_csv(path).trajectory()}
POSE_READERS = {".json": read_json_poses, ".csv": read_csv}


def load_trajectory(path: str | Path, *, sample_id: int | str | None = None) -> Trajectory:
    """Load a trajectory from JSON, NPZ, CSV, or one line of ACT-Bench's JSONL.

    Args:
        path: the file; its suffix says which format it has.
        sample_id: id of the sample in a .jsonl file; needed if the file has several lines.

    Raises:
        TrajectoryError: one line with the file, the line or field in it, what was expected and what came.
    """
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix != ".jsonl" and suffix not in LOADERS:
        raise TrajectoryError(f"{path}: expected a file that ends in .json, .jsonl, .csv or .npz, got {suffix!r}")
    if suffix != ".jsonl" and sample_id is not None:
        raise TrajectoryError(f"{path}: expected a .jsonl file to choose a sample from, got {sample_id = }")
    if not path.exists():
        raise TrajectoryError(f"{path}: expected a trajectory file, got no such file")
    try:
        return load_act_bench(path, sample_id) if suffix == ".jsonl" else LOADERS[suffix](path)
    except OSError as error:
        raise TrajectoryError(f"{path}: expected a file that can be read, got: {error.strerror or error}") from error


def load_poses(path: str | Path) -> PoseTable:
    """Read a vehicle's poses from JSON or CSV, without cutting future paths out of them.

    Raises:
        TrajectoryError: the file is missing, malformed, does not declare its units, or holds paths instead of poses.
    """
    path = Path(path)
    reader = POSE_READERS.get(path.suffix.lower())
    if reader is None:
        raise TrajectoryError(f"{path}: expected poses in a file that ends in .json or .csv, got {path.suffix!r}")
    try:
        return reader(path)
    except OSError as error:
        raise TrajectoryError(f"{path}: expected a file that can be read, got: {error.strerror or error}") from error
