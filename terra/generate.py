"""What `terra-generate` does: check every input, load the weights, make the rollout, write its folder."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from decoder.video import to_uint8
from terra.config import build_camera, build_sampling
from terra.errors import ConfigError
from terra.models import Models
from terra.output import check_output, output_folder
from terra.pipeline import Rollout, RolloutRequest
from terra.rollout import RolloutWriter, describe_inputs, inputs_sha256, load_inputs, rollout_record
from terra.windows import plan_windows

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
    list(plan_windows(num_frames, num_context, spec.layout.max_frames, overlap))
    output = Path(_given(config, "output"))
    needed = num_frames * image_size[0] * image_size[1] * _BYTES_A_PIXEL + _SPARE_BYTES
    check_output(output, overwrite=_flag(config, "overwrite"), needed_bytes=needed)
    context, path, sample_id = _given(config, "context"), _given(config, "trajectory"), config.sample_id
    inputs = load_inputs(
        context,
        path,
        sample_id=sample_id,
        num_frames=num_frames,
        num_context=num_context,
        image_size=image_size,
        spec=spec,
    )
    described = describe_inputs(context, path, sample_id, inputs_sha256(context, num_context, path))
    checked = time.perf_counter()

    with console.status("loading the model"):
        pipeline = models.build()
    loaded = time.perf_counter()
    request = RolloutRequest(inputs.context_frames, inputs.actions, seed)
    with (
        pipeline,
        output_folder(output) as folder,
        RolloutWriter(folder, spec.fps, camera=camera, gif=True, png=png) as writer,
    ):
        with _frame_bar(console, num_frames - num_context) as on_frame:
            show = lambda _request, frames: writer.extend(to_uint8(frames))  # noqa: E731
            (rollout,) = pipeline.generate([request], sampling, on_frame, on_pixels=show)
        record = rollout_record(
            pipeline.provenance,
            spec,
            inputs=described,
            num_frames=num_frames,
            num_context=num_context,
            seed=seed,
            sampling=sampling,
            overlap=overlap,
            seconds={"check": checked - started, "load": loaded - checked, **rollout.seconds},
        )
        writer.finish(rollout.tokens, inputs.actions, record, inputs.paths)
    _report(console, output, rollout, time.perf_counter() - started)
    return output


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
