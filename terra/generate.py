"""The command `terra generate`: checks every input, loads the weights, makes a rollout, and writes its folder."""

import time
from pathlib import Path

from rich.console import Console

from decoder.video import to_uint8
from terra.config.spec import PipelineSpec
from terra.context import view_sources
from terra.engine.base import EngineSpec
from terra.generate_settings import GenerateSettings, check_plan
from terra.memory import memory_frames
from terra.output import output_folder
from terra.pipeline import Pipeline, Rollout, RolloutRequest
from terra.place_map import load_map
from terra.progress import stage
from terra.rollout import RolloutWriter, describe_inputs, inputs_sha256, load_inputs, rollout_record
from terra.rollout_record import GIF, OVERLAY, VIDEO, view_video
from terra.window_plan import check_frames


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
    context, sample_id = view_sources(settings.context, model.views), settings.sample_id
    pose = settings.map_pose or (0.0, 0.0, 0.0)
    memory, max_frames = memory_frames(spec.memory), model.layout.max_frames
    path, check = check_plan(settings, context, image_size, model.space, max_frames, memory, spec.folders())
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
    _report(console, settings.output, rollout, model, time.perf_counter() - started)
    return settings.output


def _report(console: Console, output: Path, rollout: Rollout, spec: EngineSpec, seconds: float) -> None:
    made = rollout.tokens.shape[0] - rollout.num_context
    speed = made / rollout.seconds["generate"]
    console.print(f"{made} frames generated at {speed:.2f} frames/s, {seconds:.0f} s in all")
    found = rollout.reconstruction
    console.print(found.line if found.warning is None else f"WARNING: {found.warning}", soft_wrap=True)
    views = () if spec.views is None else spec.views.names
    for name in (VIDEO, *map(view_video, views), GIF, OVERLAY):
        console.print(f"  {output / name}", highlight=False, soft_wrap=True)
