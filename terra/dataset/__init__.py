"""Driving on disk, in one format whatever it came from: read, written, checked, described and imported.

    record, import --ShardWriter--> DIR/<split>/<source>_<place>/ --read_split--> Episode --read_frames--> frames
                                                                                   +------episode_actions--> actions

`terra.dataset.format` says what the files hold.
"""

from terra.dataset.episode import Episode, Split
from terra.dataset.poses import NUM_FUTURE_POSES, Poses
from terra.dataset.reading import episode_actions, read_episode, read_frames, read_split, trajectory_of
from terra.dataset.writing import ShardWriter, create_dataset

__all__ = [
    "NUM_FUTURE_POSES",
    "Episode",
    "Poses",
    "ShardWriter",
    "Split",
    "create_dataset",
    "episode_actions",
    "read_episode",
    "read_frames",
    "read_split",
    "trajectory_of",
]
