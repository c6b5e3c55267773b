"""Makes the rollout of a record again, and compares tokens and pixels; the heavy part of `terra replay`."""

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

from decoder.thread import DecodedFrames
from decoder.video import Pixels, read_video
from terra.config.spec import PipelineSpec
from terra.context import context_files, load_context, natural_key
from terra.engine.base import EngineSpec
from terra.errors import ConfigError, OutputError
from terra.memory import Poses
from terra.pipeline import Pipeline
from terra.place_map import load_map
from terra.progress import frames_shown
from terra.prompt import Actions
from terra.replay.settings import ReplaySettings
from terra.rollout import (
    PNGS,
    TOKENS,
    VIDEO,
    RolloutWriter,
    inputs_sha256,
    load_action_file,
    pixels_sha256,
)
from terra.rollout_record import RECORD
from terra.sampling import SamplingParams
from tokenizer import Frames, TokenGrid

SAME, DIFFERENT = 0, 1


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
        spec = PipelineSpec.from_provenance(
            record, engine=settings.engine, device=settings.device, dtype=settings.dtype
        )
        sampling = SamplingParams(**record["sampling"])
        _check_weights(spec, record)
        context, actions = _find_inputs(folder, record, spec.spec, spec.image_size, stored["actions"])
        place = _find_map(folder, record, spec)
    except (SafetensorError, OSError) as error:
        raise OutputError(f"{folder / TOKENS}: expected the tokens of the rollout, got: {error}") from None
    except (KeyError, TypeError, ValueError) as error:
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


def _check_weights(spec: PipelineSpec, record: dict[str, Any]) -> None:
    for name, sha256 in spec.hashes().items():
        part = name.removesuffix("_sha256")
        recorded = (record["adapter"] if part == "adapter" else record["checkpoints"][part])["sha256"]
        if sha256 != recorded:
            raise ConfigError(f"{part}: expected the weights {recorded[:12]} of the rollout, got {sha256[:12]}")


def _find_inputs(
    folder: Path, record: dict[str, Any], spec: EngineSpec, image_size: tuple[int, int], stored: Tensor
) -> tuple[Frames | None, Actions]:
    """The context frames (None if they came from no file), and the actions."""
    inputs, num_context = record["inputs"], record["num_context"]
    context = None if inputs["context"] is None else [_find(folder, "context", path) for path in inputs["context"]]
    trajectory = None if inputs["trajectory"] is None else _find(folder, "trajectory", inputs["trajectory"])
    found = inputs_sha256(context or [""], num_context, trajectory)
    for name, source in (("context", context), ("trajectory", trajectory)):
        expected, got = inputs[f"{name}_sha256"], found.get(f"{name}_sha256")
        if source is not None and expected != got:
            at = source[0] if isinstance(source, list) else source
            raise ConfigError(
                f"{name} {at}: expected the content that the rollout was made from ({str(expected)[:12]}), "
                f"got another ({str(got)[:12]})"
            )
    frames = None
    if context is not None:
        frames = load_context(context, num_frames=num_context, image_size=image_size, fps=spec.fps)
    if trajectory is None:
        return frames, stored
    return frames, load_action_file(trajectory, spec, record["num_frames"], sample_id=inputs["sample_id"])[0]


def _find_map(folder: Path, record: dict[str, Any], spec: PipelineSpec) -> tuple[Pixels, Poses] | None:
    """The map's pictures and poses; None for a rollout without a map."""
    recorded = (record.get("memory") or {}).get("map")
    if recorded is None:
        return None
    found = load_map(_find(folder, "map", recorded["path"]), spec.image_size, spec.spec.fps)
    if found.sha256 != recorded["sha256"]:
        raise ConfigError(f"map {found.source}: expected the content that the rollout was made from, got another")
    return found.pixels, found.seen_from(recorded["pose"])


def _find(folder: Path, name: str, recorded: str) -> Path:
    """The path of an input: the recorded one, or beside the record. Raises ConfigError."""
    for path in (Path(recorded), folder / Path(recorded).name):
        if path.exists() or (name == "context" and context_files(path, 1)):
            return path
    raise ConfigError(f"{name} {recorded}: expected it there or in {folder}, found none")


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
