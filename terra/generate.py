"""The command `terra generate`: checks every input, loads the weights, makes a rollout, and writes its folder."""

import functools
import time
from pathlib import Path

from rich.console import Console

from decoder.camera import Camera
from decoder.video import to_uint8
from terra.config.groups import MapPose, PipelineSettings, Sampling
from terra.config.spec import PipelineSpec
from terra.context import context_files
from terra.errors import ConfigError
from terra.memory import memory_frames
from terra.output import check_output, output_folder
from terra.pipeline import Pipeline, Rollout, RolloutRequest
from terra.place_map import load_map
from terra.progress import stage
from terra.rollout import (
    ROLLOUT_FILES,
    RolloutWriter,
    action_file,
    describe_inputs,
    inputs_sha256,
    load_inputs,
    rollout_record,
)
from terra.rollout_record import read_any_record
from terra.windows import check_frames, plan_windows
from tokenizer.limits import LIMITS, Limits
from tokenizer.settings import Count, FilePath, Seed, Text

_BYTES_A_PIXEL = 8  # of all files together, generously: MP4s, the GIF's palette pixels, tokens
_SPARE_BYTES = 32 << 20


class GenerateSettings(PipelineSettings):
    """The settings of conf/generate.yaml.

    Attributes:
        context: folder or glob of pictures, or a video.
        trajectory: the drive's path, where actions are waypoints; `sample_id` chooses a line of a .jsonl.
        actions: the file of the actions, where these are vectors, keys or choices.
        map: pictures of the place with their poses, which the rollout remembers, see `terra.place_map`; None for none.
        map_pose: where the first context frame is in the map's axes; None for [0, 0, 0].
        num_context: context frames taken from the start of `context`.
        num_frames: frames of the video, context included.
        seed: seed of the sampling.
        output: folder of the results; an existing one is replaced only with `overwrite`.
        png: whether each frame is written as a PNG, too.
        sampling: how tokens are chosen.
        camera: camera of the overlay.
        limits: bounds on what is read.
    """

    context: Text
    trajectory: FilePath | None
    actions: FilePath | None
    sample_id: int | str | None
    map: FilePath | None
    map_pose: MapPose | None
    num_context: Count
    num_frames: Count
    seed: Seed
    output: FilePath
    overwrite: bool
    png: bool
    sampling: Sampling
    camera: Camera
    limits: Limits = LIMITS


def run(settings: GenerateSettings, console: Console | None = None) -> Path:
    """Generate one rollout and return its folder.

    Raises:
        TerraError: anything wrong with the input or the configuration; nothing is written then.
    """
    started, console = time.perf_counter(), console or Console(stderr=True)
    check_frames(settings.num_frames, settings.limits)
    spec = PipelineSpec.from_settings(settings)
    model, image_size = spec.spec, spec.image_size
    num_frames, num_context = settings.num_frames, settings.num_context
    has_map, pose = settings.map is not None, settings.map_pose or (0.0, 0.0, 0.0)
    if settings.map_pose is not None and not has_map:
        raise ConfigError("map_pose: expected none without map=, got one")
    memory, max_frames = memory_frames(spec.memory), model.layout.max_frames
    list(plan_windows(num_frames, num_context, max_frames, settings.overlap, memory, has_map=has_map))
    needed = num_frames * image_size[0] * image_size[1] * _BYTES_A_PIXEL + _SPARE_BYTES
    context, sample_id = settings.context, settings.sample_id
    path = action_file(model.space, trajectory=settings.trajectory, actions=settings.actions)
    check = functools.partial(
        check_output,
        settings.output,
        replaced=ROLLOUT_FILES if settings.overwrite else (),
        check_replaced=read_any_record,
        inputs=[*context_files(context, num_context), path, *([settings.map] if settings.map else []), *spec.folders()],
    )
    check(needed_bytes=needed)
    inputs = load_inputs(
        context,
        path,
        sample_id=sample_id,
        num_frames=num_frames,
        num_context=num_context,
        image_size=image_size,
        spec=model,
        limits=settings.limits,
    )
    place = None
    if settings.map is not None:
        place = load_map(settings.map, image_size, model.fps, settings.limits, at_least=memory)
    described = describe_inputs(context, path, sample_id, inputs_sha256(context, num_context, path))
    checked = time.perf_counter()
    spec.announce()

    with stage("loading the model", console):
        pipeline = Pipeline.from_spec(spec)
    loaded = time.perf_counter()
    seen = None if place is None else (place.pixels, place.seen_from(pose))
    request = RolloutRequest(inputs.context_frames, inputs.actions, settings.seed, place=seen)
    with (
        pipeline,
        output_folder(settings.output, lambda: check(needed_bytes=0)) as folder,
        RolloutWriter(folder, model.fps, camera=settings.camera, gif=True, png=settings.png) as writer,
    ):
        write = lambda _request, frames: writer.extend(to_uint8(frames))  # noqa: E731
        (rollout,) = pipeline.generate([request], settings.sampling, on_pixels=write, progress=True)
        of_map = None if place is None else place.describe(pose)
        remembered = pipeline.describe_memory(rollout.tokens, inputs.actions, num_context, rollout.place, of_map)
        record = rollout_record(
            pipeline.provenance,
            model,
            inputs=described,
            num_frames=num_frames,
            num_context=num_context,
            seed=settings.seed,
            sampling=settings.sampling,
            overlap=settings.overlap,
            seconds={"check": checked - started, "load": loaded - checked, **rollout.seconds},
            reconstruction=rollout.reconstruction,
            memory=remembered,
        )
        with stage("writing video.gif and overlay.mp4", console):
            writer.finish(rollout.tokens, inputs.actions, record, inputs.drawn)
    _report(console, settings.output, rollout, time.perf_counter() - started)
    return settings.output


def _report(console: Console, output: Path, rollout: Rollout, seconds: float) -> None:
    made = rollout.tokens.shape[0] - rollout.num_context
    speed = made / rollout.seconds["generate"]
    console.print(f"{made} frames generated at {speed:.2f} frames/s, {seconds:.0f} s in all")
    found = rollout.reconstruction
    console.print(found.line if found.warning is None else f"WARNING: {found.warning}", soft_wrap=True)
    for name in ("video.mp4", "video.gif", "overlay.mp4"):
        console.print(f"  {output / name}", highlight=False, soft_wrap=True)
