"""The experiment on drafts and diagonal decoding: held-out clips in, one result file for each part, then the report."""

import itertools
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from terra.benchmark.case import write_json
from terra.benchmark.diagonal import diagonal_places
from terra.benchmark.draft_measure import SIGHTS, Drive, Models, diagonal_frames, drafted_frames
from terra.benchmark.draft_report import write_report
from terra.config import check_pairing
from terra.dataset import Episode, read_split
from terra.device import torch_device, torch_dtype
from terra.errors import ConfigError, DatasetError
from terra.evaluation.clips import Clip, choose_clips, load_clips
from terra.evaluation.estimator import MotionEstimator
from terra.progress import ProgressLine
from terra.world_model import load_world_model
from tokenizer import LFQTokenizer
from tokenizer.checkpoint import checkpoint_sha256

logger = logging.getLogger(__name__)

SEQUENTIAL_SIGHT = "earlier places"


def run(values: dict[str, Any], tokenizer: Path, world_model: Path) -> str:
    """Measure what `values` (conf/draft_experiment.yaml) ask for and return the tables as text.

    Results that are in the output folder are kept, so the same command goes on where it was stopped.

    Raises:
        ConfigError: a value that is not possible, or a folder that holds another experiment's results.
        DatasetError: no episode that is long enough, or a damaged one.
        EngineError: drafted tokens that are not those of sequential decoding.
    """
    folder = Path(values["output"])
    models = _load(values, tokenizer, world_model)
    _check(values, models)
    split = read_split(values["data"], values["split"])
    for reason in split.damaged:
        logger.warning("left out: %s", reason)
    _check_kind(split.episodes, models)
    _keep_plan(folder, values, tokenizer, world_model)
    context = {"num_context": values["num_context"], "seed": values["seed"]}
    length = values["num_context"] + values["draft_frames"]
    drafted = _run_drafts(
        folder, values, models, choose_clips(split.episodes, values["draft_clips"], num_frames=length, **context)
    )
    length = values["num_context"] + values["diagonal_frames"]
    diagonal = _run_diagonal(
        folder, values, models, choose_clips(split.episodes, values["diagonal_clips"], num_frames=length, **context)
    )
    return write_report(folder, drafted, diagonal, values["resamples"])


def _load(values: Mapping[str, Any], tokenizer: Path, world_model: Path) -> Models:
    device, dtype = torch_device(values["device"]), torch_dtype(values["dtype"])
    model = load_world_model(world_model, dtype=dtype, device=device)
    check_pairing(tokenizer, model.config)
    return Models(
        LFQTokenizer.from_pretrained(tokenizer).to(device),
        model,
        MotionEstimator.from_pretrained(Path(values["estimator"])),
    )


def _check(values: Mapping[str, Any], models: Models) -> None:
    for name in ("draft_clips", "draft_frames", "diagonal_clips", "diagonal_frames", "num_context"):
        if values[name] < 1:
            raise ConfigError(f"{name}: expected 1 or more, got {values[name]}")
    if values["temperature"] <= 0:
        raise ConfigError(f"temperature: expected above 0 (greedy is measured too), got {values['temperature']}")
    if not values["drafts"] or min(values["drafts"]) < 1:
        raise ConfigError(f"drafts: expected numbers of 1 or more, got {values['drafts']}")
    cols = models.tokenizer.cols
    if not values["lags"] or not 1 <= min(values["lags"]) <= max(values["lags"]) < cols:
        raise ConfigError(f"lags: expected numbers of 1 to {cols - 1}, got {values['lags']}")
    room = models.world_model.config.layout.max_frames - values["num_context"]
    for name in ("draft_frames", "diagonal_frames"):
        if values[name] > room:
            raise ConfigError(f"{name}: expected at most {room} behind the context in a window, got {values[name]}")


def _check_kind(episodes: Sequence[Episode], models: Models) -> None:
    """Refuse recordings and an estimator of another rate, and recordings of another size, than the models take."""
    fps, image_size = models.world_model.config.fps, tuple(models.tokenizer.config.image_size)
    for episode in episodes:
        if (episode.fps, tuple(episode.image_size)) != (fps, image_size):
            raise ConfigError(
                f"{episode.video}: expected {fps:g} frames a second of {image_size} pixels as the models take them, "
                f"got {episode.fps:g} of {episode.image_size}"
            )
    if models.estimator.config.fps != fps:
        raise ConfigError(f"estimator: expected one of {fps:g} frames a second, got {models.estimator.config.fps:g}")


def _keep_plan(folder: Path, values: Mapping[str, Any], tokenizer: Path, world_model: Path) -> None:
    """Refuse results that were made otherwise; only clips and lags may be added to them."""
    free = ("output", "draft_clips", "diagonal_clips", "lags", "resamples", "workers", "device")
    plan = {name: value for name, value in values.items() if name not in (*free, "tokenizer", "world_model")}
    plan |= {"tokenizer": checkpoint_sha256(tokenizer), "world_model": checkpoint_sha256(world_model)}
    path = folder / "plan.json"
    if path.is_file():
        other = json.loads(path.read_text())
        differing = [name for name in plan if plan[name] != other.get(name)]
        if differing:
            raise ConfigError(f"output: {folder} holds results of another plan (differing: {', '.join(differing)})")
    write_json(path, plan)


def _read_drives(values: Mapping[str, Any], models: Models, clips: Sequence[Clip]) -> Iterator[Drive]:
    waypoint_times = models.world_model.config.waypoint_times
    for clip, loaded in zip(clips, load_clips(clips, values["workers"], waypoint_times), strict=True):
        if isinstance(loaded, str):
            raise DatasetError(loaded)
        yield Drive(clip, loaded.frames, models.tokenizer.encode(loaded.frames).cpu(), loaded.actions)


def _run_drafts(folder: Path, values: Mapping[str, Any], models: Models, clips: Sequence[Clip]) -> list[dict[str, Any]]:
    """A row for each clip and temperature, with its frames."""
    per_clip, done = 2 * values["draft_frames"], 0
    paths = {
        (clip.name, temperature): folder / "results" / f"drafts_{clip.name}_{temperature:g}.json"
        for clip in clips
        for temperature in (values["temperature"], 0.0)
    }
    missing = [clip for clip in clips if not all(path.exists() for key, path in paths.items() if key[0] == clip.name)]
    total = len(missing) * per_clip
    with ProgressLine("drafts", total) as line:
        for drive in _read_drives(values, models, missing):
            for temperature in (values["temperature"], 0.0):
                found = []
                for frame in drafted_frames(models, drive, temperature, values["drafts"]):
                    found.append(frame)
                    done += 1
                    line.show(done, f"{done} of {total} frames, each by every kind and number of drafts")
                row = {"clip": drive.clip.name, "temperature": temperature, "frames": found}
                write_json(paths[drive.clip.name, temperature], row)
    return [json.loads(path.read_text()) for path in paths.values()]


def _run_diagonal(
    folder: Path, values: Mapping[str, Any], models: Models, clips: Sequence[Clip]
) -> list[dict[str, Any]]:
    """A row for each way of decoding, the sequential one first."""
    cols = models.tokenizer.cols
    ways = [(cols, SEQUENTIAL_SIGHT), *itertools.product(values["lags"], SIGHTS)]
    # Clips are decoded side by side: with other clips it is another result.
    results = folder / "results" / f"diagonal_{len(clips)}_clips"
    paths = {(lag, sight): results / f"{lag}_{sight.replace(' ', '_')}.json" for lag, sight in ways}
    missing = [way for way, path in paths.items() if not path.exists()]
    drives = list(_read_drives(values, models, clips)) if missing else []
    with ProgressLine("diagonal", len(missing)) as line:
        for done, (lag, sight) in enumerate(missing, start=1):
            found = diagonal_frames(models, drives, values["temperature"], lag, sight)
            passes = len(diagonal_places(models.tokenizer.rows, cols, lag))
            row = {"lag": lag, "sight": sight, "sequential": lag == cols, "passes": passes, "clips": found}
            write_json(paths[lag, sight], row)
            line.show(done, f"{done} of {len(missing)} ways of decoding")
    return [json.loads(path.read_text()) for path in paths.values()]
