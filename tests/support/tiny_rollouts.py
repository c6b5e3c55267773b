"""Manifests over random pictures and straight drives, runs of `terra rollout` over them, and of `terra replay`."""

import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from entry import read_settings
from PIL import Image
from rich.console import Console
from safetensors.torch import load_file
from tiny import COLS, ROWS
from torch import Tensor

from decoder import FramewiseDecoder
from terra.config.files import register_resolvers
from terra.trajectory import save_poses
from tokenizer import LFQTokenizer


class Batch:
    """A folder with contexts c0 and c1, the trajectory drive.json, a manifest, and an output."""

    def __init__(self, folder: Path, model: Path, tokenizer: Path) -> None:
        self.folder, self.output, self.manifest = folder, folder / "out", folder / "manifest.jsonl"
        self.model, self.tokenizer = model, tokenizer
        random = np.random.default_rng(0)
        for name in ("c0", "c1"):
            (folder / name).mkdir()
            for index in range(3):
                pixels = random.integers(0, 256, (4 * ROWS, 4 * COLS, 3), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / name / f"{index}.png")
        times = np.arange(0, 9, 0.1)
        save_poses(folder / "drive.json", times, np.stack([5 * times, 0 * times], 1), 0 * times, 10.0)

    def line(self, index: int, **changes: Any) -> dict[str, Any]:
        settings = {"id": f"r{index}", "context": f"c{index % 2}", "trajectory": "drive.json", "seed": index}
        return settings | changes

    def write(self, *lines: dict[str, Any] | bytes) -> None:
        texts = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
        self.manifest.write_bytes(b"".join(text + b"\n" for text in texts))

    def overrides(self, **changes: Any) -> list[str]:
        settings = {
            "manifest": self.manifest,
            "output": self.output,
            "tokenizer.pretrained": self.tokenizer,
            "world_model.pretrained": self.model,
            "engine": "hf",
            "overlap": 2,
            "num_frames": 10,
            "at_once": 3,
            "retries": 0,
            "retry_seconds": 0,
        }
        return [f"{key}={value}" for key, value in (settings | changes).items()]

    def run(self, **changes: Any) -> int:
        return run(self.overrides(**changes))

    def tokens(self, name: str, output: Path | None = None) -> Tensor:
        return load_file((output or self.output) / "rollouts" / name / "tokens.safetensors")["tokens"]

    def record(self, name: str) -> dict[str, Any]:
        return json.loads((self.output / "rollouts" / name / "rollout.json").read_text())

    def index(self) -> list[dict[str, Any]]:
        return read_lines(self.output / "index.jsonl")

    def log(self) -> list[dict[str, Any]]:
        return read_lines(self.output / "log.jsonl")

    def names(self) -> list[str]:
        return sorted(path.name for path in (self.output / "rollouts").iterdir())


def mean_token(frames: Tensor, tokens: Tensor, actions: Tensor) -> float:
    """A score of `terra rollout`."""
    return float(tokens.double().mean())


def own_decoder(tokenizer: LFQTokenizer, notes: str, **_: Any) -> FramewiseDecoder:
    """A decoder that users wrote, with a path among its settings."""
    assert Path(notes).is_absolute()
    return FramewiseDecoder(tokenizer)


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def run(overrides: list[str]) -> int:
    from terra.rollouts.batch import run

    register_resolvers()
    return run(read_settings("rollout", overrides))


def told(folder: Path, **changes: Any) -> tuple[int, str]:
    """Run `terra replay`; its exit code, and what it says."""
    from terra.replay import run

    output = io.StringIO()
    settings = read_settings("replay", [f"folder={folder}", *(f"{key}={value}" for key, value in changes.items())])
    return run(settings, Console(file=output, width=200)), output.getvalue()


def texts(value: Any) -> Iterator[str]:
    """All strings in a JSON value, keys among them."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield key
            yield from texts(each)
    elif isinstance(value, list):
        for each in value:
            yield from texts(each)
    elif isinstance(value, str):
        yield value


def change(folder: Path, **values: Any) -> None:
    """Change keys of a rollout's record."""
    path = folder / "rollout.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def run_and_exit(overrides: list[str]) -> None:
    """Run `terra rollout` and exit with its code; the target of a process of its own."""
    sys.exit(run(overrides))
