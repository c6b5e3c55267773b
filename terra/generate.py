"""What `terra-generate` does: check every input, load the weights, make the rollout, write its folder."""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import UInt8
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from decoder.overlay import Camera, compose_rollout
from decoder.video import VideoWriter, to_uint8, write_png_sequence, write_video
from terra.config import build_camera, build_sampling
from terra.context import load_context
from terra.errors import ConfigError
from terra.models import Models
from terra.output import check_output, output_folder, package_versions
from terra.pipeline import Rollout, RolloutRequest
from terra.trajectory import load_trajectory
from terra.windows import plan_windows
from tokenizer import Frames, TokenGrid
from tokenizer.checkpoint import write_tensors

_BYTES_A_PIXEL = 8  # of all files together, generously: MP4s, the GIF's palette pixels, tokens
_SPARE_BYTES = 32 << 20


def run(config: DictConfig, console: Console | None = None) -> Path:
    """Generate one rollout and return its folder.

    Raises:
        TerraError: anything wrong with the input or the configuration; nothing is written then.
    """
    started, console = time.perf_counter(), console or Console(stderr=True)
    sampling = build_sampling(config.sampling)
    png = _flag(config, "png")
    camera = build_camera(config.camera)
    num_frames, num_context, seed = (_whole(config, name) for name in ("num_frames", "num_context", "seed"))
    if seed < 0:
        raise ConfigError(f"seed: expected 0 or more, got {seed}")
    overlap = _whole(config, "overlap")
    models = Models.check(config)
    spec, image_size = models.spec, models.image_size
    windows = list(plan_windows(num_frames, num_context, spec.layout.max_frames, overlap))
    output = Path(_given(config, "output"))
    needed = num_frames * image_size[0] * image_size[1] * _BYTES_A_PIXEL + _SPARE_BYTES
    check_output(output, overwrite=_flag(config, "overwrite"), needed_bytes=needed)
    trajectory = load_trajectory(Path(_given(config, "trajectory")), sample_id=config.sample_id).resample(spec.fps)
    trajectory.require(num_frames)
    actions = trajectory.actions(num_frames - 1, spec.waypoint_times)
    context = load_context(_given(config, "context"), num_frames=num_context, image_size=image_size, fps=spec.fps)
    checked = time.perf_counter()

    with console.status("loading the model"):
        pipeline = models.build()
    loaded = time.perf_counter()
    request = RolloutRequest(context, torch.from_numpy(actions), seed)
    size = image_size[1], image_size[0]
    pieces: list[UInt8[np.ndarray, "frames height width 3"]] = []
    with pipeline, output_folder(output) as folder:
        with (
            VideoWriter(folder / "video.mp4", spec.fps, size) as video,
            _frame_bar(console, num_frames - num_context) as on_frame,
        ):

            def encode(_request: int, frames: Frames) -> None:
                """Frames are encoded as they are decoded."""
                pieces.append(to_uint8(frames))
                video.extend(pieces[-1])

            (rollout,) = pipeline.generate([request], sampling, on_frame, on_pixels=encode)
        record = {
            "format": "terra-rollout",
            "seed": seed,
            "num_frames": num_frames,
            "num_context": num_context,
            "fps": spec.fps,
            "windows": [vars(window) for window in windows],
            "context": str(config.context),
            "trajectory": str(config.trajectory),
            **models.hashes(),
            "config": OmegaConf.to_container(config, resolve=True),
            "versions": package_versions(),
            "seconds": {"check": checked - started, "load": loaded - checked, **rollout.seconds},
        }
        paths = trajectory.paths[: num_frames - 1]
        _write(folder, rollout.tokens, np.concatenate(pieces), record, actions, paths, camera, png=png)
    _report(console, output, rollout, time.perf_counter() - started)
    return output


def _write(
    folder: Path,
    tokens: TokenGrid,
    frames: UInt8[np.ndarray, "frames height width 3"],
    record: dict[str, Any],
    actions: np.ndarray,
    paths: np.ndarray,
    camera: Camera,
    *,
    png: bool,
) -> None:
    fps = record["fps"]
    write_video(frames, folder / "video.gif", fps)
    # The last frame has no action of its own: nothing follows it.
    drawn = np.concatenate([paths, paths[-1:]])
    write_video(compose_rollout(frames, drawn, camera, record["num_context"], fps), folder / "overlay.mp4", fps)
    if png:
        write_png_sequence(frames, folder / "frames")
    write_tensors(folder / "tokens.safetensors", {"tokens": tokens, "actions": torch.from_numpy(actions)})
    (folder / "rollout.json").write_text(json.dumps(record, indent=2) + "\n")


@contextmanager
def _frame_bar(console: Console, total: int) -> Iterator[Callable[[int, int], None]]:
    columns = (TextColumn("generating"), BarColumn(), MofNCompleteColumn(), TextColumn("frames"))
    with Progress(
        *columns, TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), console=console
    ) as progress:
        task = progress.add_task("frames", total=total)
        on_frame: Callable[[int, int], None] = lambda _request, _frame: progress.advance(task)  # noqa: E731
        yield on_frame


def _report(console: Console, output: Path, rollout: Rollout, seconds: float) -> None:
    made = rollout.tokens.shape[0] - rollout.num_context
    speed = made / rollout.seconds["generate"]
    console.print(f"{made} frames generated at {speed:.2f} frames/s, {seconds:.0f} s in all")
    for name in ("video.mp4", "video.gif", "overlay.mp4"):
        console.print(f"  {output / name}", highlight=False, soft_wrap=True)


def _given(config: DictConfig, name: str) -> str:
    if OmegaConf.is_missing(config, name) or config[name] is None:
        raise ConfigError(f"{name}: expected a path, got nothing: {name}=... is needed (or experiment=demo)")
    return str(config[name])


def _whole(config: DictConfig, name: str) -> int:
    value = config[name]
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"{name}: expected a whole number, got {value!r}")
    return value


def _flag(config: DictConfig, name: str) -> bool:
    value = config[name]
    if not isinstance(value, bool):
        raise ConfigError(f"{name}: expected true or false, got {value!r}")
    return value
