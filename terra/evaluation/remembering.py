"""What a world model remembers: drives that come back, generated with and without memory, measured where they do.

A return is generated from its first frames, with the drive before it as a map, and compared with the recording. There
is one rollout with the memory that the model has, one without any, one with the newest frames in place of chosen ones,
and one whose map is the recording of the return itself (the oracle). A model without memory makes one rollout. The
recording re-encoded is the ceiling; the best earlier view repeated is a second baseline.

A loop is a whole drive, generated from its first frames with nothing else given. What it shows on its return is
compared with what the same rollout showed there before, and so is the recording with itself. Loops have no oracle and
no best view.
"""

import logging
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from decoder import Decoder
from decoder.video import Pixels, to_uint8
from terra.actions import ActionSpace, require_waypoints
from terra.engine.base import EngineSpec
from terra.evaluation.clips import load_clips
from terra.evaluation.kept import KeptFiles, clip_facts, scores_from_tensors, scores_to_tensors
from terra.evaluation.measures import Bootstrap, Measure
from terra.evaluation.revisits import Revisit
from terra.evaluation.rollouts import KeptRollouts
from terra.evaluation.scores import GENERATED, RE_ENCODED, TRUE, ClipScores, Scorer
from terra.memory import MemoryRule, poses_along, relative
from terra.metrics.bootstrap import QUANTILES, Estimate, draw_units, mean_estimate, unit_members
from terra.pipeline import Pipeline, RecallOf, RolloutRequest
from terra.progress import ProgressLine
from terra.prompt import Actions
from terra.recall import PlaceMap, Recall
from tokenizer import Frames, TokenGrid

logger = logging.getLogger(__name__)

NO_MEMORY, RECENT, ORACLE, BEST_VIEW = "no memory", "recent", "oracle", "best view"
REVISIT_VARIANTS = (RE_ENCODED, GENERATED, NO_MEMORY, RECENT, ORACLE, BEST_VIEW)
REVISITS, LOOPS = "revisits", "loops"

_ENCODED_AT_ONCE = 64


@dataclass(frozen=True, eq=False)
class Remembered:
    """What was measured of one drive.

    Attributes:
        revisit: the return or the whole drive.
        scores: frame metrics by variant, one number for each of `Revisit.frames`.
        shown: the frames of `Revisit.frames` by variant, if they were asked for.
    """

    revisit: Revisit
    scores: ClipScores
    shown: dict[str, Pixels]


@dataclass(frozen=True, eq=False)
class _Loaded:
    """A drive up to the end of a clip, with only the needed frames loaded; tokens and actions are those of all."""

    revisit: Revisit
    context: Frames
    actions: Actions
    tokens: TokenGrid
    truth: Frames


class RevisitBench:
    """Generates drives that come back and measures the frames that show again what was seen.

    Args:
        pipeline: makes the rollouts; its memory is the model's own.
        rollouts, kept: keep what was made and what was measured.
        scorer: measures frames.
        space: the world model's action space.
        at_once: number of rollouts generated together.
        workers: number of videos decoded at once.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        rollouts: KeptRollouts,
        kept: KeptFiles,
        scorer: Scorer,
        *,
        space: ActionSpace,
        at_once: int,
        workers: int,
    ) -> None:
        self._pipeline, self._rollouts, self._kept, self._scorer = pipeline, rollouts, kept, scorer
        self._space, self._at_once, self._workers = space, at_once, workers
        self.damaged: list[str] = []

    def examine(self, revisits: Sequence[Revisit], shown: Collection[str] = ()) -> Iterator[Remembered]:
        """Generate and measure each drive, the kept ones first; `damaged` gets a line for each that can't be read.

        Args:
            revisits: the drives.
            shown: names of the clips whose videos are needed, which are decoded and measured in any case.
        """
        missing = []
        for revisit in revisits:
            name = revisit.clip.name
            stored = None if name in shown else self._kept.read(f"{REVISITS}_{name}", self._key(revisit))
            if stored is None:
                missing.append(revisit)
            else:
                yield Remembered(revisit, scores_from_tensors(revisit.clip, stored), {})
        for first in range(0, len(missing), self._at_once):
            part = list(self._load(missing[first : first + self._at_once]))
            for loaded, tokens in zip(part, self._generate(part), strict=True):
                scores, videos = self._score(loaded, tokens)
                name = loaded.revisit.clip.name
                self._kept.write(f"{REVISITS}_{name}", self._key(loaded.revisit), scores_to_tensors(scores))
                pictures = {variant: to_uint8(frames) for variant, frames in videos.items()} if name in shown else {}
                yield Remembered(loaded.revisit, scores, pictures)

    def _variants(self, revisit: Revisit) -> list[str]:
        """The rollouts of a drive; a whole one has no oracle."""
        if self._pipeline.memory is None:
            return [GENERATED]
        return [GENERATED, NO_MEMORY, RECENT, *([ORACLE] if revisit.clip.start else [])]

    def _generate(self, part: Sequence[_Loaded]) -> list[dict[str, TokenGrid]]:
        """The rollouts of some drives by variant, all made together."""
        asked = [(index, variant) for index, each in enumerate(part) for variant in self._variants(each.revisit)]
        rule, spec = self._pipeline.memory, self._pipeline.engine.spec
        names, requests, recalls, recalled = [], [], [], []
        for index, variant in asked:
            loaded, clip = part[index], part[index].revisit.clip
            names.append(f"{clip.name}_{variant.replace(' ', '_')}")
            requests.append(RolloutRequest(loaded.context, loaded.actions[clip.start :], clip.seed))
            recalls.append(recall_of(variant, rule, spec, loaded.tokens, loaded.actions, clip.start))
            recalled.append(loaded.tokens.numpy().tobytes() + loaded.actions.numpy().tobytes())
        found: list[dict[str, TokenGrid]] = [{} for _ in part]
        made = self._rollouts.tokens(names, requests, recalls, recalled)
        for (index, variant), tokens in zip(asked, made, strict=True):
            found[index][variant] = tokens
        return found

    def _score(self, loaded: _Loaded, tokens: dict[str, TokenGrid]) -> tuple[ClipScores, dict[str, Frames]]:
        """A clip's scores, and the frames to show."""
        clip, decoder = loaded.revisit.clip, self._pipeline.decoder
        frames, before = torch.from_numpy(loaded.revisit.frames), torch.from_numpy(loaded.revisit.before)
        if clip.start:
            re_encoded = _decoded(decoder, loaded.tokens, clip.start + frames)
            videos = {TRUE: loaded.truth.to(re_encoded.device), RE_ENCODED: re_encoded}
            videos |= {variant: _decoded(decoder, grid, frames) for variant, grid in tokens.items()}
            videos[BEST_VIEW] = _decoded(decoder, loaded.tokens, before)
            return self._scorer.measure_frames(clip, videos), videos
        scores, videos = ClipScores(clip), {}
        for variant, grid in ({RE_ENCODED: loaded.tokens} | tokens).items():
            seen, again = _decoded(decoder, grid, torch.cat([before, frames])).split(len(frames))
            scores.metrics |= self._scorer.measure_frames(clip, {TRUE: seen, variant: again}).metrics
            videos |= {f"{variant}, before": seen, f"{variant}, again": again}
        return scores, videos

    def _load(self, revisits: Sequence[Revisit]) -> Iterator[_Loaded]:
        by_name = {each.clip.name: each for each in revisits}
        until = [replace(each.clip, start=0, num_frames=each.clip.start + each.clip.num_frames) for each in revisits]
        for loaded in load_clips(until, self._workers, self._space):
            if isinstance(loaded, str):
                logger.warning("left out: %s", loaded)
                self.damaged.append(loaded)
                continue
            revisit = by_name[loaded.clip.name]
            encode = self._pipeline.tokenizer.encode
            tokens = torch.cat([encode(some).cpu() for some in loaded.frames.split(_ENCODED_AT_ONCE)])
            start = revisit.clip.start
            truth = loaded.frames[start + torch.from_numpy(revisit.frames)]
            context = loaded.frames[start : start + revisit.clip.num_context].clone()
            yield _Loaded(revisit, context, loaded.actions, tokens, truth)

    def _key(self, revisit: Revisit) -> Tensor:
        text, poses = clip_facts(revisit.clip)
        return self._kept.key(text, poses, revisit.frames.tobytes(), revisit.before.tobytes())


def examine_revisits(
    bench: RevisitBench, revisits: Sequence[Revisit], pictures: int, label: str = REVISITS
) -> list[Remembered]:
    """Run the bench over drives, with the videos of `pictures` evenly spread ones; in order of the drives."""
    names = [each.clip.name for each in revisits]
    shown = {names[index] for index in np.linspace(0, len(names) - 1, min(pictures, len(names))).round().astype(int)}
    found: dict[str, Remembered] = {}
    with ProgressLine(f"measuring {label}", len(names)) as line:
        for done, remembered in enumerate(bench.examine(revisits, shown), start=1):
            found[remembered.revisit.clip.name] = remembered
            line.show(done, f"{done} of {len(names)} drives")
    return [found[name] for name in names if name in found]


def revisit_measures(remembered: Sequence[Remembered], bootstrap: Bootstrap) -> list[Measure]:
    """The frame metrics of returns, over all, by kind of drive and by age.

    The run is "revisits" or, of some, such as "revisits-circle" and "revisits-10s" (`Revisit.age`). A metric's value is
    the mean over clips of the mean over frames. Where the model has memory, METRIC-gain is the metric minus that
    without memory, paired by clip, and METRIC-closed is the share of the oracle's gain that memory reaches.
    """
    runs: dict[str, list[Remembered]] = {}
    for name_of in (lambda _: REVISITS, lambda of: f"{REVISITS}-{of.kind}", lambda of: f"{REVISITS}-{of.age}s"):
        for each in remembered:
            runs.setdefault(name_of(each.revisit), []).append(each)
    return [measure for run, clips in runs.items() for measure in _measured(run, clips, bootstrap)]


def loop_measures(remembered: Sequence[Remembered], bootstrap: Bootstrap) -> list[Measure]:
    """The frame metrics of whole drives against what they showed before (run "loops"), and METRIC-gain."""
    return _measured(LOOPS, remembered, bootstrap) if remembered else []


def _measured(run: str, drives: Sequence[Remembered], bootstrap: Bootstrap) -> list[Measure]:
    measures: list[Measure] = []
    places = [each.revisit.clip.place for each in drives]
    options = {"units": places, "num_resamples": bootstrap.resamples, "seed": bootstrap.seed}
    for metric, by_variant in _means(drives).items():
        for variant, values in by_variant.items():
            measures.append(Measure(run, metric, variant, None, None, mean_estimate(values, **options)))
        if NO_MEMORY not in by_variant:
            continue
        without = by_variant[NO_MEMORY]
        for variant in (each for each in (GENERATED, RECENT, ORACLE) if each in by_variant):
            gain = mean_estimate(by_variant[variant] - without, **options)
            measures.append(Measure(run, f"{metric}-gain", variant, None, None, gain))
        for variant in (GENERATED, RECENT) if ORACLE in by_variant else ():
            closed = _ratio(by_variant[variant] - without, by_variant[ORACLE] - without, places, bootstrap)
            measures.append(Measure(run, f"{metric}-closed", variant, None, None, closed))
    return measures


def _means(drives: Sequence[Remembered]) -> dict[str, dict[str, np.ndarray]]:
    """By metric and variant, the mean over frames of each drive."""
    found: dict[str, dict[str, np.ndarray]] = {}
    for variant in (name for name in REVISIT_VARIANTS if name in drives[0].scores.metrics):
        for metric in drives[0].scores.metrics[variant]:
            means = np.array([each.scores.metrics[variant][metric].mean() for each in drives])
            found.setdefault(metric, {})[variant] = means
    return found


def _ratio(above: np.ndarray, below: np.ndarray, places: Sequence[str], bootstrap: Bootstrap) -> Estimate:
    """The ratio of two means, with its interval over places."""
    members = unit_members(len(above), places)
    sums = np.array([[each[clips].sum() for clips in members] for each in (above, below)])
    low = high = np.nan
    with np.errstate(divide="ignore", invalid="ignore"):
        value = float(sums[0].sum() / sums[1].sum())
        if len(members) > 1:
            drawn = sums[:, draw_units(len(members), bootstrap.resamples, bootstrap.seed)].sum(axis=-1)
            low, high = np.quantile(drawn[0] / drawn[1], QUANTILES)
    return Estimate(value, float(low), float(high), len(above), len(members))


def recall_of(
    variant: str, rule: MemoryRule | None, spec: EngineSpec, tokens: TokenGrid, actions: Actions, start: int
) -> RecallOf:
    """What a rollout of a drive remembers that begins at frame `start`.

    Poses follow from the drive's actions, as if all of it had been generated.

    Args:
        variant: one of `REVISIT_VARIANTS` that is generated.
        rule: the model's; None remembers nothing.
        spec: the engine's.
        tokens: (frames, rows, cols), those of the whole drive.
        actions: between each two of its frames.
        start: where the rollout begins; the frames before it are its map.
    """
    if rule is None or variant == NO_MEMORY:
        return _nothing
    place = None
    if start:
        of_map = slice(start, None) if variant == ORACLE else slice(start)
        poses = poses_along(actions.numpy(), require_waypoints(spec.space, "memory"), spec.fps)
        place = PlaceMap(tokens[of_map], relative(poses[of_map], poses[start]))
    return partial(Recall.begin, rule.replace(kind="recent") if variant == RECENT else rule, spec, place=place)


def _nothing(context: TokenGrid, actions: Actions) -> None:
    """What a rollout without memory remembers."""


def _decoded(decoder: Decoder, tokens: TokenGrid, frames: Tensor) -> Frames:
    """Some frames of a video."""
    return decoder.decode(tokens[frames]) if decoder.framewise else decoder.decode(tokens)[frames]
