"""Writes a world's scenes for `terra serve` from held-out recordings: context pictures and actions that begin there.

    python scripts/world_contexts.py --data outputs/doom/recording --output outputs/doom/world/contexts

A scene is three frames of an episode, all scenes of different places. `recorded.json` has what the player or
driver did there; in a world of keys there is also a file for each key, which is held after the context.
"""

import argparse
from pathlib import Path

import numpy as np

from decoder.video import write_png_sequence
from terra.actions import Keys, Waypoints, require_table, save_actions
from terra.dataset import Episode, read_frames, read_split
from terra.errors import DatasetError
from terra.trajectory import save_poses

CONTEXT = 3


def choose(episodes: tuple[Episode, ...], count: int, ahead: int) -> list[tuple[Episode, int]]:
    """Starts in episodes of different places, evenly spread; in each where most changes between two pictures.

    Raises:
        DatasetError: fewer places than scenes.
    """
    usable = [each for each in episodes if each.group is None and each.num_frames > CONTEXT + ahead]
    firsts = {each.place: each for each in reversed(usable)}
    places = sorted(firsts)
    if len(places) < count:
        raise DatasetError(f"expected held-out recordings of {count} places or more, got {len(places)}")
    chosen = [firsts[places[index]] for index in np.linspace(0, len(places) - 1, count).round().astype(int)]
    return [(each, _liveliest(each, ahead)) for each in chosen]


def write_scene(folder: Path, episode: Episode, start: int, ahead: int) -> None:
    """Write the context pictures from frame `start` on, and the files of actions. Raises OutputError, DatasetError."""
    write_png_sequence(read_frames(episode)[start : start + CONTEXT], folder)
    if isinstance(episode.space, Waypoints):
        x, y, heading, time = (getattr(episode.poses, name)[start:] for name in ("x", "y", "heading", "time"))
        positions = np.column_stack([x - x[0], y - y[0]])
        save_poses(folder / "recorded.json", time - time[0], positions, heading, episode.fps)
        return
    space, values = require_table(episode.space, folder.name), episode.actions
    if values is None:
        raise DatasetError(f"{episode.id}: expected actions, got poses")
    given = values[start : start + CONTEXT - 1]
    save_actions(folder / "recorded.json", space, episode.fps, values[start : start + CONTEXT + ahead])
    if isinstance(space, Keys):
        for index, name in enumerate(space.names):
            held = np.tile(np.eye(len(space.names))[index], (ahead + 1, 1))
            save_actions(folder / f"{name}.json", space, episode.fps, np.concatenate([given, held]))


def _liveliest(episode: Episode, ahead: int) -> int:
    frames = read_frames(episode)[:, ::8, ::8].astype(np.int16)
    changes = np.abs(np.diff(frames, axis=0)).mean(axis=(1, 2, 3))
    sums = np.convolve(changes, np.ones(ahead), "valid")
    return int(sums[: episode.num_frames - CONTEXT - ahead + 1].argmax())


def main() -> None:
    """Write the scenes as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--scenes", type=int, default=4)
    parser.add_argument("--ahead", type=int, default=60, help="frames after the context that the actions last")
    given = parser.parse_args()
    given.output.mkdir(parents=True, exist_ok=True)
    episodes = read_split(given.data, "held_out").episodes
    for number, (episode, start) in enumerate(choose(episodes, given.scenes, given.ahead), 1):
        write_scene(given.output / f"scene_{number}", episode, start, given.ahead)


if __name__ == "__main__":
    main()
