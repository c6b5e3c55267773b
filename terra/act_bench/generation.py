"""Generates the videos of ACT-Bench with `terra rollout`'s machinery: resumable, on one GPU or many."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

from terra.act_bench.estimator import FPS
from terra.act_bench.samples import Sample
from terra.act_bench.settings import ActBenchSettings
from terra.errors import ConfigError
from terra.rollouts import batch
from terra.rollouts.folder import RolloutFolder
from terra.rollouts.manifest import sample_seed
from terra.rollouts.settings import RolloutSettings
from terra.world_model import load_config
from tokenizer.files import make_folder, replacing

VIDEOS = "videos"
_GENERATED = "generated"


def missing_pictures(samples: Sequence[Sample], settings: RolloutSettings) -> dict[int, str]:
    """The first missing context picture of each sample that lacks any, by sample id."""
    missing: dict[int, str] = {}
    for sample in samples:
        for frame in sample.context_frames[: settings.num_context]:
            if not (settings.root / frame).is_file():
                missing[sample.sample_id] = f"no picture {settings.root / frame}"
                break
    return missing


def generate(settings: ActBenchSettings, samples: Sequence[Sample]) -> tuple[dict[int, Path], int]:
    """Generate the missing videos of the samples; returns all videos by sample id, and `terra rollout`'s exit code.

    Writes manifest.jsonl, generated/ (see `terra.rollouts.folder`) and videos/, named as the benchmark has them.
    Each sample has a seed of its own, `sample_seed(seed, sample_id)`; the published run drew all from one generator.

    Raises:
        ConfigError: a model of another frame rate, or see `terra.rollouts.batch.run`.
        TerraError: see there.
    """
    fps = load_config(settings.world_model.folder()).fps
    if fps != FPS:
        raise ConfigError(f"world_model: expected one of {FPS:g} frames a second, as the benchmark has, got {fps:g}")
    manifest, output = settings.output / "manifest.jsonl", settings.output / _GENERATED
    _write_manifest(manifest, settings, samples)
    code = batch.run(settings.replace(manifest=manifest, output=output, context_root=settings.root.absolute()))
    return _name_videos(RolloutFolder(output, {}, "keep"), settings.output / VIDEOS, samples), code


def _write_manifest(path: Path, settings: RolloutSettings, samples: Sequence[Sample]) -> None:
    make_folder(path.parent)
    with replacing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        for sample in samples:
            line = {
                "id": sample.name,
                "context_frames": sample.context_frames,
                "trajectory": str(settings.manifest.absolute()),
                "sample_id": sample.sample_id,
                "seed": sample_seed(settings.seed, sample.sample_id),
            }
            file.write(json.dumps(line) + "\n")


def _name_videos(made: RolloutFolder, folder: Path, samples: Sequence[Sample]) -> dict[int, Path]:
    make_folder(folder)
    videos: dict[int, Path] = {}
    for sample in samples:
        if made.has(sample.name):
            path = videos[sample.sample_id] = folder / f"{sample.name}.mp4"
            source = made.rollout(sample.name) / "video.mp4"
            with replacing(path) as temporary:
                try:
                    temporary.hardlink_to(source)
                except OSError:  # a file system without links
                    shutil.copyfile(source, temporary)
    return videos
