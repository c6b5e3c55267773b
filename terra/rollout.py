"""Loads the inputs of a rollout, and writes its output folder and record:

    video.mp4            the frames, context included
    video_NAME.mp4       the part of each view, where several cameras share a picture
    video.gif            the same frames, if requested
    overlay.mp4          the same frames with each frame's path drawn in, if a camera is given, or its action in words;
                         of several cameras a path is drawn into the part of the first
    frames/              the same frames as PNGs, if requested
    tokens.safetensors   `tokens` (frames, rows, cols) and `actions` (frames - 1, slots, action_dim)
    rollout.json         the record: everything that the rollout depends on, for `terra replay` and for readers

The record, version 3, has the same keys for every command; a value that is unknown or does not apply is null. It holds
no absolute path: files are named by locations, see `terra.locations`, and known by their SHA-256.

    format, version      "terra-rollout", 3
    views                only of rollouts whose picture several cameras share: see `terra.views`
    inputs               context (locations; of files for each view by its name), trajectory (location of the file with
                         the actions: a trajectory where these are waypoints), sample_id, and context_sha256 and
                         trajectory_sha256 of the files' content; null where nothing was read from a file
    num_frames, num_context, fps, seed, sampling
    overlap, windows     frames read again when the window slides; start, num_given and num_frames of each window
    memory               only of rollouts with memory: frames, field_of_view, range and kind, see `terra.memory`, and
                         windows: the memory frames of each window that has any, by their index in the rollout, those of
                         a map by negative ones (-1 is its first); with a map also map: its location and sha256, and
                         the pose of the first frame in it
    checkpoints          tokenizer and world_model: the sha256 of the weights, and where they came from: model (a name
                         such as "demo" or "doom") and revision; or folder (a location) and subfolder; or hub
                         (owner/name on the Hugging Face Hub), subfolder and revision
    adapter              sha256 of the rollout's adapter, and where it came from: shipped (the name of one that ships
                         with Terra) or folder (a location); also name, if the rollout named one of several; null
                         without an adapter
    engine, decoder      name, and the settings (dtype, device and others); for a decoder with weights of its own
                         checkpoint, as in checkpoints
    tokenizer_device     where the tokenizer encoded
    pixels_sha256        of the 8-bit RGB frames, before they were compressed
    versions             of Python, Terra and the packages under it
    seconds              what each stage took
    batch                of `terra rollout`: id, sample, manifest (a location) and line, request and made_with
    score                of `terra rollout`: function and value
    files                of each other file in the folder, by name: bytes and sha256, see `terra.rollout_files`
    reconstruction       psnr of the decoded context frames, and expected, that of the tokenizer's held-out frames
                         (dB), see `terra.reconstruction`; of several cameras also by_view
"""

import hashlib
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from decoder.overlay import Camera, compose_rollout, compose_words
from decoder.video import Pixels, VideoWriter, write_png_sequence, write_video
from terra.actions import ActionTrack
from terra.context import Source, context_files, load_context, view_sources
from terra.engine.base import EngineSpec
from terra.errors import ContextError, TerraError
from terra.inputs import Drawn, read_action_file, track_rows
from terra.locations import with_locations
from terra.output import package_versions
from terra.prompt import Actions
from terra.reconstruction import Reconstruction
from terra.rollout_files import describe_files
from terra.rollout_record import FORMAT, GIF, OVERLAY, PNGS, RECORD, TOKENS, VERSION, VIDEO, view_video
from terra.sampling import SamplingParams
from terra.trajectory import Trajectory
from terra.views import Views
from terra.window_plan import plan_windows
from tokenizer import Frames, TokenGrid
from tokenizer.checkpoint import write_tensors
from tokenizer.files import file_sha256, write_json
from tokenizer.limits import LIMITS, Limits


@dataclass(frozen=True, eq=False)
class RolloutInputs:
    """The inputs of a rollout, loaded and checked.

    Attributes:
        context_frames: frames in [-1, 1], of the model's size and rate.
        actions: one between each two frames of the rollout.
        drawn: what the overlay shows of the actions.
    """

    context_frames: Frames
    actions: Actions
    drawn: Drawn


def load_inputs(
    context: Source,
    trajectory: str | Path,
    *,
    sample_id: int | str | None = None,
    num_frames: int,
    num_context: int,
    image_size: tuple[int, int],
    spec: EngineSpec,
    limits: Limits = LIMITS,
) -> RolloutInputs:
    """Load the context and the actions of a rollout of `num_frames` frames, `num_context` of them given.

    Args:
        context: see `terra.context.load_context`.
        trajectory: the file of the actions, see `load_action_file`; `sample_id` says which line of a .jsonl.
        image_size: (height, width) in pixels of the tokenizer's frames.
        spec: the world model's frame rate, action space and views.
        limits: bounds on what is read.

    Raises:
        ActionError, ContextError, VideoError: a file that can't be read, or is too short.
        ConfigError: numbers of frames that are not positive.
    """
    actions, drawn = load_action_file(trajectory, spec, num_frames, sample_id=sample_id, limits=limits)
    frames = load_context(
        context, num_frames=num_context, image_size=image_size, fps=spec.fps, limits=limits, views=spec.views
    )
    return RolloutInputs(frames, actions, drawn)


def load_action_file(
    path: str | Path,
    spec: EngineSpec,
    num_frames: int,
    *,
    sample_id: int | str | None = None,
    limits: Limits = LIMITS,
) -> tuple[Actions, Drawn]:
    """The actions of `terra.inputs.read_action_file` as a tensor; arguments and errors are the same.

    `spec` has the world model's frame rate and action space.
    """
    rows, drawn = read_action_file(path, spec.space, spec.fps, num_frames, sample_id=sample_id, limits=limits)
    return torch.from_numpy(rows), drawn


def track_actions(track: Trajectory | ActionTrack, num_frames: int, spec: EngineSpec) -> tuple[Actions, Drawn]:
    """The actions of `terra.inputs.track_rows` as a tensor; arguments and errors are the same."""
    rows, drawn = track_rows(track, num_frames, spec.space, spec.fps)
    return torch.from_numpy(rows), drawn


def describe_inputs(
    context: Source | None,
    trajectory: str | Path | None,
    sample_id: int | str | None,
    sha256: Mapping[str, str],
) -> dict[str, Any]:
    """The key `inputs` of a record; `sha256` is the result of `inputs_sha256`."""
    paths = [context] if isinstance(context, str | Path) else context
    located: dict[str, str] | list[str] | None = None
    if isinstance(paths, Mapping):
        located = {name: str(Path(path).absolute()) for name, path in paths.items()}
    elif paths is not None:
        located = [str(Path(path).absolute()) for path in paths]
    return {
        "context": located,
        "trajectory": None if trajectory is None else str(Path(trajectory).absolute()),
        "sample_id": sample_id,
        "context_sha256": sha256.get("context_sha256"),
        "trajectory_sha256": sha256.get("trajectory_sha256"),
    }


def inputs_sha256(context: Source, num_context: int, trajectory: str | Path | None) -> dict[str, str]:
    """The hashes `context_sha256` and `trajectory_sha256` of the files, without the hash of unreadable files."""
    found = {
        "context_sha256": context_sha256(context, num_context),
        "trajectory_sha256": None if trajectory is None else files_sha256([Path(trajectory)]),
    }
    return {name: value for name, value in found.items() if value is not None}


def context_sha256(context: Source, num_context: int, views: Views | None = None) -> str | None:
    """The hash of the files of a context's first frames; None if there are too few, or one can't be read.

    Of a context with files for each of `views` the hash of each view's hash.
    """
    if not isinstance(context, Mapping):
        try:
            context = view_sources(context, views)
        except ContextError:
            return None
    if isinstance(context, Mapping):
        each = [f"{name} {context_sha256(context[name], num_context)}" for name in sorted(context)]
        return None if any(line.endswith(" None") for line in each) else _sha256("\n".join(each))
    paths = context_files(context, num_context)
    is_one_file = isinstance(context, str | Path) or len(context) == 1
    are_too_few = len(paths) < num_context and not (is_one_file and len(paths) == 1 and paths[0].is_file())
    return None if are_too_few else files_sha256(paths)


def files_sha256(paths: Sequence[Path]) -> str | None:
    """The hash of the files' hashes; None if there is no file, or one can't be read."""
    try:
        hashes = [file_sha256(path, TerraError) for path in paths]
    except TerraError:
        return None
    return _sha256("".join(hashes)) if hashes else None


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


class RolloutWriter:
    """Writes the files of one rollout into an existing folder; the video while its frames arrive.

    For use in a `with` statement, in which `finish` is called last.

    Args:
        folder: see `terra.output.output_folder` for one that appears when it is complete; it may be renamed to one of
            as many parents, because the record's locations are relative to it.
        fps: frames a second.
        camera: the camera of the overlay; None for no overlay.
        gif, png: also write these.

    Raises:
        OutputError: a file can't be written.
        VideoError: frames that an MP4 or GIF can't hold.
    """

    def __init__(
        self,
        folder: Path,
        fps: float,
        *,
        camera: Camera | None = None,
        gif: bool = False,
        png: bool = False,
    ) -> None:
        self._folder, self._fps, self._camera, self._gif, self._png = folder, fps, camera, gif, png
        self._pieces: list[Pixels] = []
        self._video: VideoWriter | None = None
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def extend(self, pixels: Pixels) -> None:
        """Write the next frames."""
        if self._video is None:
            size = pixels.shape[2], pixels.shape[1]
            self._video = self._stack.enter_context(VideoWriter(self._folder / VIDEO, self._fps, size))
        self._video.extend(pixels)
        self._pieces.append(pixels)

    def finish(
        self, tokens: TokenGrid, actions: Actions, record: Mapping[str, Any], drawn: Drawn | None = None
    ) -> None:
        """End the video, and write all other files; no frame may follow.

        Args:
            tokens: tokens of all frames.
            actions: actions between the frames.
            record: see `rollout_record`; what is an absolute path in it becomes a location.
            drawn: what the overlay shows; None for no overlay. Paths need the writer's camera.
        """
        pixels = self._pieces[0] if len(self._pieces) == 1 else np.concatenate(self._pieces)
        self._stack.close()  # the record lists the video, too
        views = Views.read(record, RECORD)
        parts = {} if views is None else views.split(pixels)
        for name, part in parts.items():
            write_video(part, self._folder / view_video(name), self._fps)
        if self._gif:
            write_video(pixels, self._folder / GIF, self._fps)
        if isinstance(drawn, list):
            overlay = compose_words(pixels, [*drawn, ""], record["num_context"], self._fps)
            write_video(overlay, self._folder / OVERLAY, self._fps)
        elif self._camera is not None and drawn is not None:
            # The last frame has no action of its own: nothing follows it.
            paths = np.concatenate([drawn, drawn[-1:]])
            shown = next(iter(parts.values()), pixels)  # the camera is that of the first view
            overlay = compose_rollout(shown, paths, self._camera, record["num_context"], self._fps)
            write_video(overlay, self._folder / OVERLAY, self._fps)
        if self._png:
            write_png_sequence(pixels, self._folder / PNGS)
        write_tensors(self._folder / TOKENS, {"tokens": tokens, "actions": actions})
        last = {"pixels_sha256": pixels_sha256(pixels), "files": describe_files(self._folder)}
        write_json(self._folder / RECORD, with_locations({**record, **last}, self._folder))


def rollout_record(
    provenance: Mapping[str, Any],
    spec: EngineSpec,
    *,
    inputs: Mapping[str, Any],
    num_frames: int,
    num_context: int,
    seed: int,
    sampling: SamplingParams,
    overlap: int,
    seconds: Mapping[str, float],
    batch: Mapping[str, Any] | None = None,
    score: Mapping[str, Any] | None = None,
    reconstruction: Reconstruction | None = None,
    adapter: str | None = None,
    memory: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A record as the module describes it, without `pixels_sha256` and `files`, and with absolute paths.

    Args:
        provenance: the pipeline's, see `terra.config.spec.PipelineSpec.provenance`.
        spec: the engine's.
        inputs: see `describe_inputs`.
        num_frames, num_context, seed, sampling, overlap: the rollout's.
        seconds: what each stage took.
        batch, score: of `terra rollout`.
        reconstruction: how well the context is shown; None where the context's frames are not at hand.
        adapter: name of the adapter that the rollout was made with; None for the model that the engine started with.
        memory: see `terra.pipeline.Pipeline.describe_memory`; None for a rollout without memory.
    """
    max_frames, num_memory = spec.layout.max_frames, 0 if memory is None else memory["frames"]
    has_map = memory is not None and "map" in memory
    windows = plan_windows(num_frames, num_context, max_frames, overlap, num_memory, has_map=has_map)
    used = provenance.get("adapter")
    if adapter is not None:
        used = {"name": adapter, **provenance.get("adapters", {}).get(adapter, {})}
    return {
        "format": FORMAT,
        "version": VERSION,
        **({} if spec.views is None else {"views": spec.views.describe()}),
        "inputs": dict(inputs),
        "num_frames": num_frames,
        "num_context": num_context,
        "fps": spec.fps,
        "seed": seed,
        "sampling": vars(sampling),
        "overlap": overlap,
        "windows": [vars(window) for window in windows],
        **({} if memory is None else {"memory": memory}),
        "checkpoints": provenance.get("checkpoints"),
        "adapter": used,
        **{name: provenance.get(name) for name in ("engine", "decoder", "tokenizer_device")},
        "versions": package_versions(),
        "seconds": {name: round(value, 4) for name, value in seconds.items()},
        "batch": batch,
        "score": score,
        "reconstruction": None if reconstruction is None else reconstruction.describe(),
    }


def pixels_sha256(pixels: Pixels) -> str:
    """The SHA-256 of the shape and values of 8-bit RGB frames."""
    total = hashlib.sha256(repr(pixels.shape).encode())
    total.update(np.ascontiguousarray(pixels).data)
    return total.hexdigest()
