"""A drive's future path for each frame: one typed, unit-checked `Trajectory`, and the files it is read from."""

from terra.trajectory.document import save_poses
from terra.trajectory.formats import load_poses, load_trajectory
from terra.trajectory.model import WAYPOINT_TIMES, Trajectory

__all__ = ["WAYPOINT_TIMES", "Trajectory", "load_poses", "load_trajectory", "save_poses"]
