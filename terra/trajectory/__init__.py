"""Trajectories: the future path of each frame of a drive, with checked units, and the files that hold them."""

from terra.trajectory.document import save_poses
from terra.trajectory.formats import load_poses, load_trajectory
from terra.trajectory.model import WAYPOINT_TIMES, Trajectory

__all__ = ["WAYPOINT_TIMES", "Trajectory", "load_poses", "load_trajectory", "save_poses"]
