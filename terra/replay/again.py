"""Makes the rollout of a record again, and compares tokens and pixels; the heavy part of `terra replay`."""

import reprlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from rich.console import Console
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from decoder.pictures import natural_key
from decoder.thread import DecodedFrames
from decoder.video import Pixels, read_video
from terra.config.spec import PipelineSpec
from terra.context import load_context
from terra.errors import ConfigError, OutputError, TerraError
from terra.inputs import action_field, action_file
from terra.memory import Poses
from terra.pipeline import Pipeline
from terra.place_map import load_map, map_sha256
from terra.progress import frames_shown
from terra.prompt import Actions
from terra.replay.files import MissingError, Recorded
from terra.replay.models import recorded_spec
from terra.replay.settings import ReplaySettings
from terra.rollout import (
    PNGS,
    TOKENS,
    VIDEO,
    RolloutWriter,
    context_sha256,
    files_sha256,
    load_action_file,
    pixels_sha256,
)
from terra.rollout_record import RECORD
from terra.sampling import SamplingParams
from tokenizer import Frames, TokenGrid
from tokenizer.settings import MAX_SEED

SAME, DIFFERENT = 0, 1
_MOST_FPS = 1000  # of a record that can be replayed


@dataclass(frozen=True)
class PixelDifference:
    """Difference of two stacks of 8-bit frames: the largest one in levels, and the share of values that differ."""

    levels: int
    share: float
    compressed: bool

    def __str__(self) -> str:
        if not self.levels:
            return "the same"
        where = " (compared as the MP4s have them: there are no PNGs)" if self.compressed else ""
        limit = "within" if self.levels == 1 else "not within"
        return f"differ by up to {self.levels} levels in {self.share:.4%} of the numbers, {limit} 1/255{where}"


def make_again(settings: ReplaySettings, record: dict[str, Any], console: Console) -> int:
    """Make the rollout of a record again; 0 if its tokens came out the same, 1 if not.

    Raises:
        TerraError: see `terra.replay.command.run`.
    """
    folder = settings.folder
    try:
        stored = load_file(folder / TOKENS)
        _check_record(folder, record, stored["tokens"])
        sampling = SamplingParams(**record["sampling"])
        spec = recorded_spec(record, settings)
        context, actions = _find_inputs(settings, record, spec, stored["actions"], console)
        place = _find_map(settings, record, spec)
    except (SafetensorError, OSError) as error:
        raise OutputError(f"{folder / TOKENS}: expected the tokens of the rollout, got: {error}") from None
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise OutputError(f"{folder / RECORD}: expected a whole record, got: {error!r}") from None
    spec.announce()
    with console.status("loading the model"):
        pipeline = Pipeline.from_spec(spec)
    given = stored["tokens"][: record["num_context"]]
    with pipeline, frames_shown("making the rollout again", len(stored["tokens"]) - len(given)) as show:
        making = _make(pipeline, context, given, actions, sampling, record["seed"], place, show)
        tokens, pixels = pipeline.wait(making)
    differing = int((tokens != stored["tokens"]).sum())
    _print(console, "tokens", f"{differing} of {tokens.numel()} differ" if differing else "the same")
    _report_pixels(console, folder, record, pixels, tokens, actions)
    return DIFFERENT if differing else SAME


def _check_record(folder: Path, record: dict[str, Any], tokens: TokenGrid) -> None:
    """Refuse values that would fail after the rollout is made. Raises OutputError, and what a wrong type raises."""
    fps, seed, pixels = float(record["fps"]), record["seed"], record["pixels_sha256"]
    for name, value, fits, expected in (
        ("num_frames", record["num_frames"], record["num_frames"] == len(tokens), f"{len(tokens)}, as in {TOKENS}"),
        ("num_context", record["num_context"], 1 <= record["num_context"] < len(tokens), f"1 to {len(tokens) - 1}"),
        ("fps", record["fps"], 0 < fps <= _MOST_FPS, f"above 0, up to {_MOST_FPS}"),
        ("seed", seed, type(seed) is int and 0 <= seed <= MAX_SEED, "0 to 2**63 - 1"),
        ("pixels_sha256", pixels, isinstance(pixels, str), "a hash"),
    ):
        if not fits:
            raise OutputError(f"{folder / RECORD}: {name}: expected {expected}, got {reprlib.repr(value)}")
    if not (folder / VIDEO).is_file():
        raise OutputError(f"{folder / VIDEO}: expected the video to compare with, got no such file")


async def _make(
    pipeline: Pipeline,
    context: Frames | None,
    given: TokenGrid,
    actions: Actions,
    sampling: SamplingParams,
    seed: int,
    place: tuple[Pixels, Poses] | None,
    show: Callable[[int], None],
) -> tuple[TokenGrid, Pixels]:
    """Generate tokens and pixels; without context frames, from the stored context tokens."""
    first = given if context is None else await pipeline.encode(context)
    decoding = pipeline.decoding.start(DecodedFrames.pixels)
    known = None if place is None else await pipeline.encode_map(*place)
    on_frame: Callable[[int], None] = lambda index: show(index + 1 - len(first))  # noqa: E731
    tokens = await pipeline.rollout_tokens(first, actions, sampling, seed, on_frame, decoding, place=known)
    return tokens, np.concatenate(await decoding.finish())


def _find_inputs(
    settings: ReplaySettings, record: dict[str, Any], spec: PipelineSpec, stored: Tensor, console: Console
) -> tuple[Frames | None, Actions]:
    """The context frames, and the actions.

    Files that are not there, and for which no setting is given, are said; the rollout's own tokens (None instead of
    frames) and actions are taken then, as where nothing came from a file.
    """
    inputs, num_context = record["inputs"], record["num_context"]
    frames, model = None, spec.spec
    if inputs["context"] is not None:
        named = inputs["context"] if isinstance(inputs["context"], dict) else None
        # Of files for each view the record has their names; a setting names a folder of them.
        by_view = lambda paths: dict(zip(named, paths, strict=True)) if named and len(paths) == len(named) else paths  # noqa: E731
        hash_of = lambda paths: context_sha256(by_view(paths), num_context, model.views)  # noqa: E731
        locations = list(named.values()) if named else inputs["context"]
        context = Recorded("context", locations, inputs["context_sha256"], hash_of)
        paths = _find(context, settings.folder, settings.context, console)
        if paths is not None:
            size, fps = spec.image_size, model.fps
            frames = load_context(by_view(paths), num_frames=num_context, image_size=size, fps=fps, views=model.views)
    elif settings.context is not None:
        raise _not_from_a_file("context", settings.context)
    given = settings.trajectory or settings.actions
    if given is not None:
        given = action_file(model.space, trajectory=settings.trajectory, actions=settings.actions)
    if inputs["trajectory"] is not None:
        track = Recorded(action_field(model.space), [inputs["trajectory"]], inputs["trajectory_sha256"], files_sha256)
        paths = _find(track, settings.folder, given, console)
        if paths is None:
            return frames, stored
        return frames, load_action_file(paths[0], model, record["num_frames"], sample_id=inputs["sample_id"])[0]
    if given is not None:
        raise _not_from_a_file("trajectory" if settings.trajectory else "actions", given)
    return frames, stored


def _find(recorded: Recorded, folder: Path, given: str | Path | None, console: Console) -> list[Path] | None:
    """An input's files; None, and a line that says so, where they are missing and no setting names them."""
    try:
        return recorded.find(folder, given)
    except MissingError:
        if given is not None:
            raise
        name = " ".join(recorded.locations)
        console.print(f"{recorded.setting}: {name} is not here: taken from {TOKENS}", highlight=False, soft_wrap=True)
        return None


def _find_map(settings: ReplaySettings, record: dict[str, Any], spec: PipelineSpec) -> tuple[Pixels, Poses] | None:
    """The map's pictures and poses; None for a rollout without a map."""
    recorded = (record.get("memory") or {}).get("map")
    if recorded is None:
        if settings.map is not None:
            raise ConfigError(f"map={settings.map}: expected none, as the rollout was made without")
        return None
    (path,) = Recorded("map", [recorded["path"]], recorded["sha256"], _map_sha256).find(settings.folder, settings.map)
    found = load_map(path, spec.image_size, spec.spec.fps)
    return found.pixels, found.seen_from(recorded["pose"])


def _map_sha256(paths: list[Path]) -> str | None:
    try:
        return map_sha256(paths[0])
    except TerraError:
        return None


def _not_from_a_file(name: str, given: str | Path) -> ConfigError:
    return ConfigError(
        f"{name}={given}: expected none: the rollout was made from no file, its {TOKENS} has what it needs"
    )


def _report_pixels(
    console: Console, folder: Path, record: dict[str, Any], pixels: Pixels, tokens: TokenGrid, actions: Actions
) -> None:
    with tempfile.TemporaryDirectory(prefix="terra-replay-") as made:
        with RolloutWriter(Path(made), record["fps"]) as writer:
            writer.extend(pixels)
            writer.finish(tokens, actions, record)
        again, before = Path(made) / VIDEO, folder / VIDEO
        if pixels_sha256(pixels) == record["pixels_sha256"]:
            difference = PixelDifference(0, 0.0, compressed=False)
        else:
            difference = _difference(folder, pixels, read_video(before), read_video(again))
        same_bytes = again.read_bytes() == before.read_bytes()
    _print(console, "pixels", str(difference))
    _print(console, VIDEO, "the same bytes" if same_bytes else "other bytes")


def _difference(folder: Path, pixels: Pixels, before: Pixels, again: Pixels) -> PixelDifference:
    """The difference between the rollout's PNGs and the new pixels, or without PNGs between the videos."""
    paths = sorted((folder / PNGS).glob("*.png"), key=natural_key)
    if len(paths) == len(pixels):
        before, again = np.stack([np.asarray(Image.open(path).convert("RGB")) for path in paths]), pixels
    if before.shape != again.shape:
        raise OutputError(f"{folder / VIDEO}: expected frames {again.shape}, got {before.shape}")
    apart = np.abs(before.astype(np.int16) - again)
    return PixelDifference(int(apart.max()), float((apart > 0).mean()), compressed=again is not pixels)


def _print(console: Console, name: str, text: str) -> None:
    console.print(f"{name:<10} {text}", highlight=False, soft_wrap=True)
