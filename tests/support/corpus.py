"""A corpus of hostile inputs of `terra generate` and `terra rollout`; the files are made when a case is tried.

A case writes its files into a folder and gives the settings that name them. What happens then is `attack.py`'s matter.
"""

import json
import os
import random
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import numpy as np
from PIL import Image

HEIGHT, WIDTH = 12, 16
FRAMES = 4


@dataclass
class Place:
    """The folder in which a case's files are made, and the files with which the command works.

    Attributes:
        inputs: the case's own files.
        work: the folder in which the command runs; `output=out` lies in it.
        common: see `make_common`.
    """

    inputs: Path
    work: Path
    common: Path

    def write(self, name: str, content: str | bytes) -> Path:
        path = self.inputs / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode("utf-8", "surrogatepass"))
        return path

    def sparse(self, name: str, size: int, start: bytes = b"", end: bytes = b"") -> Path:
        """A file that has `size` bytes and takes no room on the disk."""
        path = self.write(name, start)
        with path.open("r+b") as file:
            file.truncate(size)
            file.seek(size - len(end))
            file.write(end)
        return path


Make = Callable[[Place], "dict[str, object] | list[str]"]


@dataclass(frozen=True)
class Case:
    """One hostile input.

    Attributes:
        group: the class in the table.
        name: unique within the group.
        make: writes the files; gives settings that replace those that work, or a list of further arguments.
        command: "generate" or "rollout".
        must: "refuse" if an exit code of 0 is a failure too, "accept" if 2 is one.
        outputs: names in the working folder that may be there after an exit code of 0.
        remove: names of settings that are not given.
    """

    group: str
    name: str
    make: Make
    command: str = "generate"
    must: str | None = None
    outputs: tuple[str, ...] = ("out",)
    remove: tuple[str, ...] = field(default=())

    @property
    def title(self) -> str:
        return f"{self.group}/{self.name}"


def make_common(folder: Path) -> None:
    """The files with which the commands work: pictures, a trajectory, a manifest; tiny models of random weights.

    The world model is one of driving, and the adapter is the world model's; world_keys, world_vector and world_choice
    have other action spaces.
    """
    import torch
    from corpus_actions import COLUMNS, SPACES
    from tiny import COLS, ROWS, save_tiny, tiny_tokenizer_config
    from tiny_adapter import save_adapter

    from terra.world_model import LlamaActionV2ForCausalLM
    from tokenizer import LFQTokenizer

    context = folder / "context"
    context.mkdir(parents=True)
    for index in range(3):
        picture(2 * HEIGHT, 2 * WIDTH, index).save(context / f"{index}.png")
    (folder / "drive.json").write_text(json.dumps(poses_document()))
    (folder / "manifest.jsonl").write_text(json.dumps({"id": "a", "context": "context", "trajectory": "drive.json"}))
    save_tiny(folder / "world_model", LlamaActionV2ForCausalLM)
    for kind, space in SPACES.items():
        save_tiny(
            folder / f"world_{kind}",
            LlamaActionV2ForCausalLM,
            num_action_tokens=1,
            action_dim=COLUMNS[kind],
            num_spatio_embeddings=ROWS * COLS + 1,
            max_position_embeddings=8 * (ROWS * COLS + 1),
            waypoint_times=None,
            action_space=space,
        )
    save_adapter(folder / "adapter", folder / "world_model", seed=1)
    torch.manual_seed(0)
    LFQTokenizer(tiny_tokenizer_config()).save_pretrained(folder / "tokenizer")


def picture(height: int, width: int, seed: int = 0) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def poses_document(count: int = 60, **changes: Any) -> dict[str, Any]:
    """A straight drive at 5 m/s that `terra generate` takes; `changes` replace keys, None removes one."""
    document: dict[str, Any] = {
        "format": "terra-trajectory",
        "frame": "world",
        "axes": "x_y_heading_ccw",
        "units": {"position": "m", "angle": "rad", "time": "s"},
        "fps": 10.0,
        "poses": [[index / 10, index / 2, 0.0, 0.0] for index in range(count)],
    }
    return {key: value for key, value in (document | changes).items() if value is not None}


def paths_document(frames: int = 10, points: int = 60, **changes: Any) -> dict[str, Any]:
    """The same drive as paths in ego frames."""
    times = [index / 20 for index in range(points)]
    document: dict[str, Any] = {
        "format": "terra-trajectory",
        "frame": "ego",
        "axes": "x_forward_y_left",
        "units": {"position": "m", "time": "s"},
        "fps": 10.0,
        "times": times,
        "paths": [[[5 * time, 0.0] for time in times] for _ in range(frames)],
    }
    return {key: value for key, value in (document | changes).items() if value is not None}


def ffmpeg(*arguments: str) -> None:
    program = imageio_ffmpeg.get_ffmpeg_exe()
    subprocess.run([program, "-loglevel", "error", "-y", *arguments], check=True, stdin=subprocess.DEVNULL)


def film(path: Path, size: str = "64x48", rate: str = "10", frames: int = 12, *options: str) -> Path:
    """An H.264 video of one color."""
    source = f"color=c=teal:s={size}:r={rate}"
    preset = ("-c:v", "libx264", "-preset", "ultrafast", "-pix_fmt", "yuv420p")
    ffmpeg("-f", "lavfi", "-i", source, "-frames:v", str(frames), *preset, *options, str(path))
    return path


def corpus(seed: int = 0) -> list[Case]:
    """All cases, in a fixed order for a seed."""
    import corpus_actions
    import corpus_inputs
    import corpus_models
    import corpus_settings

    cases: list[Case] = []
    for module in (corpus_inputs, corpus_actions, corpus_models, corpus_settings):
        cases += module.cases(random.Random(seed))
    titles = [case.title for case in cases]
    assert len(set(titles)) == len(titles), sorted(title for title in titles if titles.count(title) > 1)
    return cases


def grow(path: Path, bytes_a_second: int = 50 << 20) -> None:
    """Append to a file from a process of its own, until a minute is over or the file is gone."""
    if os.fork() == 0:
        import time

        os.setsid()
        chunk = b" " * (bytes_a_second // 20)
        for _ in range(60 * 20):
            if not path.exists():
                break
            with path.open("ab") as file:
                file.write(chunk)
            time.sleep(0.05)
        os._exit(0)


def named(values: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    yield from values.items()
