"""Writes README's first picture: rollouts that play side by side, a row for each world, at 10 frames a second.

    python scripts/worlds_picture.py --output terra/worlds/worlds.gif \\
      --row left=town/left straight=town/straight right=town/right \\
      --row left=doom/left forward=doom/forward right=doom/right

Each rollout is a folder of `terra generate` or `terra rollout`. Its frames are resized to one size, on white; those
of the context have an orange border. The GIF has as many frames as the shortest rollout.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageOps

from decoder.frames import stream_frames
from decoder.video import write_video

SIZE = (144, 256)  # pixels of a panel, height and width
BORDER = 3
FPS = 10.0


def main() -> None:
    """Write the picture that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="a GIF")
    parser.add_argument("--row", nargs="+", required=True, action="append", metavar="LABEL=FOLDER")
    given = parser.parse_args()
    if len({len(row) for row in given.row}) != 1:
        parser.error("expected as many rollouts in each row")
    rows = [[each.partition("=") for each in row] for row in given.row]
    panels = [[panel(Path(folder), label) for label, _, folder in row] for row in rows]
    write_video(grid(panels), given.output, FPS)


def panel(folder: Path, label: str) -> list[np.ndarray]:
    """A rollout's frames, each of SIZE and with the label in its corner."""
    num_context = json.loads((folder / "rollout.json").read_text())["num_context"]
    frames = []
    for index, frame in enumerate(stream_frames(folder / "video.mp4")):
        picture = ImageOps.pad(Image.fromarray(frame), (SIZE[1], SIZE[0]), Image.Resampling.BICUBIC, color="white")
        draw = ImageDraw.Draw(picture)
        draw.rectangle([0, 0, 8 + draw.textlength(label), 15], fill="black")
        draw.text((4, 2), label, fill="white")
        if index < num_context:
            draw.rectangle([0, 0, SIZE[1] - 1, SIZE[0] - 1], outline="darkorange", width=BORDER)
        frames.append(np.asarray(picture))
    return frames


def grid(panels: Sequence[Sequence[Sequence[np.ndarray]]]) -> np.ndarray:
    """Frames of all panels; shape (frames, height, width, 3)."""
    length = min(len(frames) for row in panels for frames in row)
    rows = [np.concatenate([np.stack(frames[:length]) for frames in row], axis=2) for row in panels]
    return np.concatenate(rows, axis=1)


if __name__ == "__main__":
    main()
