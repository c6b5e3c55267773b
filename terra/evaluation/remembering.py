"""What a world model remembers: rollouts of drives that come back, with and without memory, measured where they do.

The same drive is generated with the memory that the model has, without any, with the newest frames in place of chosen
ones, and with memory frames that show the truth (the oracle); a model without memory makes one rollout. The recording
re-encoded is the ceiling; the best earlier view repeated is a second baseline.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from decoder import Decoder
from decoder.video import to_uint8
from terra.actions import ActionSpace
from terra.evaluation.clips import load_clips
from terra.evaluation.kept import KeptFiles, clip_facts, scores_from_tensors, scores_to_tensors
from terra.evaluation.measures import Bootstrap, Measure
from terra.evaluation.revisits import Revisit
from terra.evaluation.rollouts import KeptRollouts
from terra.evaluation.scores import GENERATED, RE_ENCODED, TRUE, ClipScores, Pixels, Scorer
from terra.metrics.bootstrap import QUANTILES, Estimate, draw_units, mean_estimate, unit_members
from terra.pipeline import Pipeline, RecallOf, RolloutRequest
from terra.progress import ProgressLine
from terra.prompt import Action, Actions, FrameTokens
from terra.recall import Recall
from tokenizer import Frames, TokenGrid

logger = logging.getLogger(__name__)

NO_MEMORY, RECENT, ORACLE, BEST_VIEW = "no memory", "recent", "oracle", "best view"
REVISIT_VARIANTS = (RE_ENCODED, GENERATED, NO_MEMORY, RECENT, ORACLE, BEST_VIEW)
REVISITS = "revisits"

_ENCODED_AT_ONCE = 64


@dataclass(frozen=True, eq=False)
class Remembered:
    """What was measured of one drive.

    Attributes:
        revisit: the drive.
        scores: frame metrics by variant, one number for each of `Revisit.frames`.
        shown: the frames of `Revisit.frames` by variant, if they were asked for.
    """

    revisit: Revisit
    scores: ClipScores
    shown: dict[str, Pixels]


@dataclass(frozen=True, eq=False)
class _Loaded:
    """A drive with only the needed frames loaded."""

    revisit: Revisit
    context: Frames
    actions: Actions
    tokens: TokenGrid
    truth: Frames


class TrueRecall(Recall):
    """Remembers true frames in place of generated ones; which of them follows from the poses, as ever."""

    truth: TokenGrid

    def add(self, tokens: FrameTokens, action: Action) -> None:
        """Add the true frame that `action` led to."""
        super().add(self.truth[self.num_frames], action)


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
            tokens = {variant: self._generate(variant, recall, part) for variant, recall in self._variants().items()}
            for index, loaded in enumerate(part):
                videos = self._videos(loaded, {variant: grids[index] for variant, grids in tokens.items()})
                scores = self._scorer.measure_frames(loaded.revisit.clip, videos)
                name = loaded.revisit.clip.name
                self._kept.write(f"{REVISITS}_{name}", self._key(loaded.revisit), scores_to_tensors(scores))
                pictures = {variant: to_uint8(frames) for variant, frames in videos.items()} if name in shown else {}
                yield Remembered(loaded.revisit, scores, pictures)

    def _variants(self) -> dict[str, Callable[[_Loaded], RecallOf]]:
        """For each variant, what a rollout of a drive remembers."""
        rule, spec = self._pipeline.memory, self._pipeline.engine.spec
        if rule is None:
            return {GENERATED: lambda _: _nothing}
        recent = rule.replace(kind="recent")

        def truth(loaded: _Loaded) -> RecallOf:
            def begin(context: TokenGrid, actions: Actions) -> Recall:
                recall = TrueRecall.begin(rule, spec, context, actions)
                recall.truth = loaded.tokens
                return recall

            return begin

        return {
            GENERATED: lambda _: partial(Recall.begin, rule, spec),
            NO_MEMORY: lambda _: _nothing,
            RECENT: lambda _: partial(Recall.begin, recent, spec),
            ORACLE: truth,
        }

    def _generate(
        self, variant: str, recall: Callable[[_Loaded], RecallOf], part: Sequence[_Loaded]
    ) -> list[TokenGrid]:
        names = [f"{each.revisit.clip.name}_{variant.replace(' ', '_')}" for each in part]
        requests = [RolloutRequest(each.context, each.actions, each.revisit.clip.seed) for each in part]
        return self._rollouts.tokens(names, requests, [recall(each) for each in part])

    def _videos(self, loaded: _Loaded, tokens: dict[str, TokenGrid]) -> dict[str, Frames]:
        """The measured frames of each variant, and the true ones."""
        decoder, revisit = self._pipeline.decoder, loaded.revisit
        frames, before = torch.from_numpy(revisit.frames), torch.from_numpy(revisit.before)
        re_encoded = _decoded(decoder, loaded.tokens, frames)
        videos = {TRUE: loaded.truth.to(re_encoded.device), RE_ENCODED: re_encoded}
        videos |= {variant: _decoded(decoder, grid, frames) for variant, grid in tokens.items()}
        return {**videos, BEST_VIEW: _decoded(decoder, loaded.tokens, before)}

    def _load(self, revisits: Sequence[Revisit]) -> Iterator[_Loaded]:
        by_name = {each.clip.name: each for each in revisits}
        for loaded in load_clips([each.clip for each in revisits], self._workers, self._space):
            if isinstance(loaded, str):
                logger.warning("left out: %s", loaded)
                self.damaged.append(loaded)
                continue
            revisit = by_name[loaded.clip.name]
            encode = self._pipeline.tokenizer.encode
            tokens = torch.cat([encode(some).cpu() for some in loaded.frames.split(_ENCODED_AT_ONCE)])
            truth = loaded.frames[torch.from_numpy(revisit.frames)]
            yield _Loaded(revisit, loaded.frames[: loaded.clip.num_context].clone(), loaded.actions, tokens, truth)

    def _key(self, revisit: Revisit) -> Tensor:
        text, poses = clip_facts(revisit.clip)
        return self._kept.key(text, poses, revisit.frames.tobytes(), revisit.before.tobytes())


def examine_revisits(bench: RevisitBench, revisits: Sequence[Revisit], pictures: int) -> list[Remembered]:
    """Run the bench over drives, with the videos of `pictures` evenly spread ones; in order of the drives."""
    names = [each.clip.name for each in revisits]
    shown = {names[index] for index in np.linspace(0, len(names) - 1, min(pictures, len(names))).round().astype(int)}
    found: dict[str, Remembered] = {}
    with ProgressLine(REVISITS, len(names)) as line:
        for done, remembered in enumerate(bench.examine(revisits, shown), start=1):
            found[remembered.revisit.clip.name] = remembered
            line.show(done, f"{done} of {len(names)} drives")
    return [found[name] for name in names if name in found]


def revisit_measures(remembered: Sequence[Remembered], bootstrap: Bootstrap) -> list[Measure]:
    """The frame metrics where drives come back, over all drives and by kind of drive.

    The run is "revisits" or, of one kind, such as "revisits-circle". A metric's value is the mean over drives of the
    mean over frames. Where the model has memory, METRIC-gain is the metric minus that without memory, paired by drive,
    and METRIC-closed is how much of the way from no memory to the oracle memory goes.
    """
    runs: dict[str, list[Remembered]] = {}
    for run in (lambda _: REVISITS, lambda each: f"{REVISITS}-{each.revisit.kind}"):
        for each in remembered:
            runs.setdefault(run(each), []).append(each)
    measures = []
    for run, drives in runs.items():
        places = [each.revisit.clip.place for each in drives]
        options = {"units": places, "num_resamples": bootstrap.resamples, "seed": bootstrap.seed}
        for metric, by_variant in _means(drives).items():
            for variant, values in by_variant.items():
                measures.append(Measure(run, metric, variant, None, None, mean_estimate(values, **options)))
            if NO_MEMORY not in by_variant:
                continue
            without, oracle = by_variant[NO_MEMORY], by_variant[ORACLE]
            for variant in (GENERATED, RECENT, ORACLE):
                gain = mean_estimate(by_variant[variant] - without, **options)
                measures.append(Measure(run, f"{metric}-gain", variant, None, None, gain))
            for variant in (GENERATED, RECENT):
                closed = _ratio(by_variant[variant] - without, oracle - without, places, bootstrap)
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


def _nothing(context: TokenGrid, actions: Actions) -> None:
    """What a rollout without memory remembers."""


def _decoded(decoder: Decoder, tokens: TokenGrid, frames: Tensor) -> Frames:
    """Some frames of a video."""
    return decoder.decode(tokens[frames]) if decoder.framewise else decoder.decode(tokens)[frames]
