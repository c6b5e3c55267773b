"""The settings of `terra generate`, and the checks of its inputs that need no torch, whose import takes seconds."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated

from decoder.camera import Camera
from terra.actions import ActionSpace
from terra.config.groups import MapPose, PipelineSettings, Sampling
from terra.context import Source, context_files, read_context, view_sources
from terra.errors import CheckpointError, ConfigError
from terra.inputs import action_file, read_action_file
from terra.memory import memory_frames, memory_in_use
from terra.model_facts import ModelFacts
from terra.output import check_output
from terra.rollout_record import ROLLOUT_FILES, read_any_record
from terra.window_plan import check_frames, plan_windows
from tokenizer.limits import LIMITS, Limits
from tokenizer.settings import Count, FilePath, Seed, Text, expecting

_BYTES_A_PIXEL = 8  # of all files together, generously: MP4s, the GIF's palette pixels, tokens
_SPARE_BYTES = 32 << 20


class GenerateSettings(PipelineSettings):
    """The settings of conf/generate.yaml.

    Attributes:
        context: folder or glob of pictures, or a video; or one for each view of a world with several cameras, by its
            name.
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

    context: Annotated[Text | dict[str, Text], expecting("a folder, a glob or a video, or {view:source,...}")]
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


def check_inputs(settings: GenerateSettings) -> None:
    """Refuse inputs that do not fit the model, before torch is imported; `terra.generate.run` checks all of them again.

    What is wrong with the model itself is left to `run`. So are all inputs where an adapter is given, since an adapter
    may have actions of its own, and a map.

    Raises:
        TerraError: a length, a file of actions, a context or an output folder that can't be used.
    """
    check_frames(settings.num_frames, settings.limits)
    if settings.adapter is not None:
        return
    folders = [settings.tokenizer.folder(), settings.world_model.folder()]
    try:
        facts = ModelFacts.read(*folders)
    except CheckpointError:
        return
    memory = memory_frames(memory_in_use(facts.memory, settings.memory))
    context = view_sources(settings.context, facts.views)
    path, _ = check_plan(settings, context, facts.image_size, facts.space, facts.max_frames, memory, folders)
    limits, num_frames = settings.limits, settings.num_frames
    read_action_file(path, facts.space, facts.fps, num_frames, sample_id=settings.sample_id, limits=limits)
    size, num_context = facts.image_size, settings.num_context
    read_context(context, num_frames=num_context, image_size=size, fps=facts.fps, limits=limits, views=facts.views)


def check_plan(
    settings: GenerateSettings,
    context: Source,
    image_size: tuple[int, int],
    space: ActionSpace,
    max_frames: int,
    memory: int,
    folders: Sequence[Path],
) -> tuple[Path, Callable[..., None]]:
    """Check the rollout's windows, which of the files of actions is given, and the output folder.

    Args:
        settings: the settings.
        context: their context, by view where it has files for each (`terra.context.view_sources`).
        image_size: (height, width) of the model's frames, in pixels.
        space: what the model's actions mean.
        max_frames: frames that the model's window holds.
        memory: memory frames of a window.
        folders: those that the models are read from.

    Returns:
        The file of the actions, and a function of `needed_bytes` that checks the output folder again.

    Raises:
        ConfigError, OutputError: see `plan_windows`, `action_file` and `check_output`.
    """
    has_map = settings.map is not None
    if settings.map_pose is not None and not has_map:
        raise ConfigError("map_pose: expected none without map=, got one")
    num_frames, num_context = settings.num_frames, settings.num_context
    list(plan_windows(num_frames, num_context, max_frames, settings.overlap, memory, has_map=has_map))
    path = action_file(space, trajectory=settings.trajectory, actions=settings.actions)
    inputs = [*context_files(context, num_context), path, *folders]
    check = functools.partial(
        check_output,
        settings.output,
        replaced=ROLLOUT_FILES if settings.overwrite else (),
        check_replaced=read_any_record,
        inputs=inputs if settings.map is None else [*inputs, settings.map],
    )
    check(needed_bytes=num_frames * image_size[0] * image_size[1] * _BYTES_A_PIXEL + _SPARE_BYTES)
    return path, check
