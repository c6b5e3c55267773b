"""Cuts context frames and a trajectory out of a recorded episode, as input of `terra generate`.

    python scripts/context_cut.py data/town/held_out/town_900000/town_900000_00.mp4 --start 120 --output outputs/cut

writes OUTPUT/frame_0000.png ... and OUTPUT/trajectory.json, which both begin at frame `start`.
"""

import argparse
import sys
from pathlib import Path

import numpy as np


def main() -> None:
    """Parse the command line; a user's error is one line and exit status 2."""
    from terra.errors import TerraError

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("episode", type=Path, help="the MP4 of an episode of a dataset")
    parser.add_argument("--start", type=int, default=0, help="first context frame")
    parser.add_argument("--num-context", type=int, default=3, help="context frames to write")
    parser.add_argument("--output", type=Path, required=True, help="folder to write to; must be new")
    arguments = parser.parse_args()
    try:
        cut(arguments.episode, arguments.start, arguments.num_context, arguments.output)
    except TerraError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


def cut(video: Path, start: int, num_context: int, output: Path) -> None:
    """Write the frames and the poses from `start` on."""
    from decoder.video import write_png_sequence
    from terra.dataset import read_episode, read_frames
    from terra.errors import ConfigError
    from terra.output import check_output, output_folder
    from terra.trajectory import save_poses

    episode = read_episode(video)
    if not 0 <= start <= episode.num_frames - num_context or num_context < 1:
        raise ConfigError(
            f"start and num-context: expected frames within 0 to {episode.num_frames - 1}, "
            f"got {start} to {start + num_context - 1}"
        )
    check_output(output, needed_bytes=1 << 20)
    frames = read_frames(episode)[start : start + num_context]
    poses = episode.poses
    with output_folder(output) as folder:
        write_png_sequence(frames, folder)
        times = poses.time[start:] - poses.time[start]
        positions = np.column_stack([poses.x, poses.y])[start:] - [poses.x[start], poses.y[start]]
        save_poses(folder / "trajectory.json", times, positions, poses.heading[start:], episode.fps)


if __name__ == "__main__":
    main()
