"""Recordings on disk in one format for all sources: reading, writing, checking, describing and importing.

    record, import --ShardWriter--> DIR/<split>/<source>_<place>/ --read_split--> Episode --read_frames--> frames
                                                                                   +------episode_actions--> actions

A recording is video with poses or actions. `terra.dataset.format` documents the files.
"""

from terra.dataset.episode import Episode, Split
from terra.dataset.poses import NUM_FUTURE_POSES, Poses
from terra.dataset.reading import episode_actions, episode_state, read_episode, read_frames, read_split, trajectory_of
from terra.dataset.writing import ShardWriter, create_dataset

__all__ = [
    "NUM_FUTURE_POSES",
    "Episode",
    "Poses",
    "ShardWriter",
    "Split",
    "create_dataset",
    "episode_actions",
    "episode_state",
    "read_episode",
    "read_frames",
    "read_split",
    "trajectory_of",
]
