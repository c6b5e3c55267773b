"""The command `terra act-bench`: generates or finds videos of the samples, and scores them.

act_bench.jsonl --read_samples--> samples --generate--> videos --estimate_videos--> maneuvers and paths
                                     |   (or videos=)                                    |
                                     +--------------------score_videos-------------------+--> table, JSON, CSV, plot
"""

import logging
import time
from collections.abc import Mapping, Sequence
from itertools import islice
from pathlib import Path

from rich.console import Console

from terra.act_bench.estimation import estimate_videos
from terra.act_bench.estimator import ActEstimator
from terra.act_bench.generation import generate, missing_pictures
from terra.act_bench.plots import plot_confusion
from terra.act_bench.report import Results, print_report, write_results
from terra.act_bench.samples import CLASSES, Sample, read_samples, spread
from terra.act_bench.scores import score_videos, summarize
from terra.act_bench.settings import ActBenchSettings
from terra.act_bench.videos import find_videos
from terra.device import torch_device, torch_dtype
from terra.errors import ConfigError, VideoError
from terra.output import check_output, package_versions
from terra.rollouts.batch import ALL_DONE, INTERRUPTED, SOME_FAILED
from tokenizer.checkpoint import checkpoint_sha256
from tokenizer.files import file_sha256

logger = logging.getLogger(__name__)

_NEEDED_BYTES = 64 << 20


def run(settings: ActBenchSettings, console: Console | None = None) -> int:
    """Generate the missing videos, score all videos, and return the exit code.

    Exit codes: 0 all is scored, 3 some samples are left out, 128 + n interrupted by signal n while generating.

    Raises:
        TerraError: anything wrong with the configuration, the manifest, the checkpoints, the engine or the output; or
            no video that can be scored.
    """
    started, console = time.perf_counter(), console or Console(stderr=True)
    manifest, output = settings.manifest, settings.output
    device = torch_device(settings.estimator.device)
    dtype = torch_dtype(settings.estimator.dtype, device)
    checkpoint = settings.estimator.folder()
    shape = ActEstimator.check(checkpoint)
    if shape.num_classes != len(CLASSES):
        raise ConfigError(f"estimator: expected {len(CLASSES)} classes, the benchmark's, got {shape.num_classes}")
    check_output(output, needed_bytes=_NEEDED_BYTES, replaced=None)
    samples, num_in_manifest = read_samples(manifest, shape.num_frames)
    if settings.videos is None:
        settings.check_length(shape)
        videos, left_out, code = _generate(settings, samples)
        if code >= INTERRUPTED:
            return code
    else:
        videos, left_out = _find(settings.videos, settings, samples)
    estimated = estimate_videos(
        ActEstimator.from_pretrained(checkpoint).to(device),
        [sample for sample in samples if sample.sample_id in videos],
        videos,
        dtype=dtype,
        batch_size=settings.estimator.batch_size,
        workers=settings.workers,
    )
    left_out |= estimated.failed
    if not estimated.samples:
        raise VideoError(f"expected a video to score, got none: {next(iter(left_out.values()))}")
    scores = score_videos(estimated.samples, estimated.logits, estimated.waypoints)
    facts = {
        "manifest": {"path": str(manifest), "sha256": file_sha256(manifest, ConfigError), "samples": num_in_manifest},
        "videos": str(settings.videos or output / "videos"),
        "other_frame_rates": estimated.other_rates,
        "estimator": {"path": str(checkpoint), "sha256": checkpoint_sha256(checkpoint), "dtype": str(dtype)},
        "versions": package_versions(),
        "seconds": time.perf_counter() - started,
    }
    results = Results(estimated, scores, summarize(scores, settings.resamples), left_out, facts)
    write_results(output, results)
    plot_confusion(results, output / "confusion.png")
    print_report(console, results)
    console.print(f"scores, plot and each video's estimates: {output}", highlight=False, soft_wrap=True)
    return SOME_FAILED if left_out else ALL_DONE


def _generate(settings: ActBenchSettings, samples: Sequence[Sample]) -> tuple[dict[int, Path], dict[int, str], int]:
    """Generated videos by sample id, why other samples have none, and `terra rollout`'s exit code."""
    left_out = missing_pictures(samples, settings)
    root = settings.root
    chosen = _choose(samples, left_out, settings, f"context_root={root}: expected the pictures of nuScenes")
    videos, code = generate(settings, chosen)
    failed = f"not generated, see {settings.output / 'generated/index.jsonl'}"
    left_out |= {sample.sample_id: failed for sample in chosen if sample.sample_id not in videos}
    return videos, left_out, code


def _find(
    folder: Path, settings: ActBenchSettings, samples: Sequence[Sample]
) -> tuple[dict[int, Path], dict[int, str]]:
    """Existing videos by sample id, and why other samples have none."""
    found = find_videos(folder)
    missing = {sample.sample_id: "no video" for sample in samples if sample.sample_id not in found}
    chosen = _choose(samples, missing, settings, f"videos={folder}: expected videos of the manifest's samples")
    others = len(found) + len(missing) - len(samples)
    if others:
        logger.info("videos of no scored sample of the manifest: %d", others)
    return {sample.sample_id: found[sample.sample_id] for sample in chosen}, missing


def _choose(
    samples: Sequence[Sample], missing: Mapping[int, str], settings: ActBenchSettings, expected: str
) -> list[Sample]:
    """The samples to score. Raises ConfigError if there are none."""
    usable = [sample for sample in samples if sample.sample_id not in missing]
    if not usable:
        raise ConfigError(
            f"{expected}, got none of {len(samples)} (sample {samples[0].sample_id}: {missing[samples[0].sample_id]})"
        )
    if missing:
        ids = ", ".join(map(str, islice(missing, 5))) + (", ..." if len(missing) > 5 else "")
        logger.warning("left out: %d samples (%s): %s", len(missing), ids, next(iter(missing.values())))
    return spread(usable, settings.limit)
