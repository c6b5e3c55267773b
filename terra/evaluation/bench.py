"""Generation and measurement of clips: the engine generates several clips at once, the networks measure one by one."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

from decoder import Decoder
from terra.evaluation.clips import Clip, LoadedClip, load_clips
from terra.evaluation.contrasts import CounterfactualGroup
from terra.evaluation.motion import Steps
from terra.evaluation.rollouts import KeptRollouts
from terra.evaluation.scores import GENERATED, RE_ENCODED, TRUE, ClipScores, Scorer, decode_variants
from terra.pipeline import RolloutRequest
from terra.prompt import Actions
from tokenizer import Frames, LFQTokenizer, TokenGrid

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


@dataclass(frozen=True)
class Examined:
    """The results of one clip: its scores, its true tokens and actions, and its videos, context included."""

    scores: ClipScores
    truth_tokens: TokenGrid
    actions: Actions
    variants: dict[str, Frames]


@dataclass(frozen=True)
class ExaminedGroup:
    """The results of a counterfactual group: each future's recovered motion by variant, and the generated videos."""

    group: CounterfactualGroup
    steps: dict[str, list[Steps]]
    generated: list[Frames]


class Bench:
    """Generates clips and measures them; only a few clips' frames are in memory at a time.

    Args:
        tokenizer, decoder: encode and decode the recordings; the decoder also decodes the generated tokens.
        waypoint_times: for each row of the world model's actions, its time ahead of the frame, in seconds.
        rollouts: generates tokens and keeps them in files.
        scorer: measures the videos of a clip.
        at_once: number of rollouts generated together.
        workers: number of videos decoded at once.
    """

    def __init__(
        self,
        tokenizer: LFQTokenizer,
        decoder: Decoder,
        rollouts: KeptRollouts,
        scorer: Scorer,
        *,
        waypoint_times: Sequence[float],
        at_once: int,
        workers: int,
    ) -> None:
        self._tokenizer, self._decoder, self._rollouts, self._scorer = tokenizer, decoder, rollouts, scorer
        self._waypoint_times = waypoint_times
        self._at_once, self._workers = at_once, workers
        self.damaged: list[str] = []

    def examine(self, clips: Sequence[Clip]) -> Iterator[Examined]:
        """Generate and measure each clip, in order; `damaged` gets a line for each clip that can't be read."""
        for part in _parts(self._load(clips), self._at_once):
            requests = [_request(loaded, loaded.frames) for loaded in part]
            generated = self._rollouts.tokens([loaded.clip.name for loaded in part], requests)
            for loaded, tokens in zip(part, generated, strict=True):
                clip = loaded.clip
                truth_tokens = self._tokenizer.encode(loaded.frames).cpu()
                variants = decode_variants(loaded.frames, truth_tokens, tokens, clip.num_context, self._decoder)
                yield Examined(self._scorer.score(clip, variants), truth_tokens, loaded.actions, variants)

    def examine_groups(self, groups: Sequence[CounterfactualGroup]) -> Iterator[ExaminedGroup]:
        """Generate each group's futures from the first one's context; a group with a damaged recording is left out."""
        num_futures = max((len(group.clips) for group in groups), default=1)
        for part in _parts(groups, max(self._at_once // num_futures, 1)):
            loaded = list(self._load_all(part))
            names = [each.clip.name for _, futures in loaded for each in futures]
            requests = [_request(each, futures[0].frames) for _, futures in loaded for each in futures]
            tokens = iter(self._rollouts.tokens(names, requests))
            for group, futures in loaded:
                yield self._examine_group(group, futures, list(islice(tokens, len(futures))))

    def _examine_group(
        self, group: CounterfactualGroup, futures: Sequence[LoadedClip], tokens: Sequence[TokenGrid]
    ) -> ExaminedGroup:
        generated = [self._decoder.decode(each) for each in tokens]
        videos = {
            TRUE: [each.frames.to(generated[0].device) for each in futures],
            RE_ENCODED: [self._decoder.decode(self._tokenizer.encode(each.frames)) for each in futures],
            GENERATED: generated,
        }
        steps = {
            name: [self._scorer.recover(clip, frames) for clip, frames in zip(group.clips, each, strict=True)]
            for name, each in videos.items()
        }
        return ExaminedGroup(group, steps, generated)

    def _load_all(
        self, groups: Sequence[CounterfactualGroup]
    ) -> Iterator[tuple[CounterfactualGroup, list[LoadedClip]]]:
        clips = [clip for group in groups for clip in group.clips]
        loaded = {each.clip.name: each for each in self._load(clips)}
        for group in groups:
            if all(clip.name in loaded for clip in group.clips):
                yield group, [loaded[clip.name] for clip in group.clips]

    def _load(self, clips: Sequence[Clip]) -> Iterator[LoadedClip]:
        for loaded in load_clips(clips, self._workers, self._waypoint_times):
            if isinstance(loaded, str):
                logger.warning("left out: %s", loaded)
                self.damaged.append(loaded)
            else:
                yield loaded


def _request(loaded: LoadedClip, context: Frames) -> RolloutRequest:
    return RolloutRequest(context[: loaded.clip.num_context], loaded.actions, loaded.clip.seed)


def _parts(items: Iterable[_T], size: int) -> Iterator[list[_T]]:
    """Split items into lists of `size`; the last list may be shorter."""
    iterator = iter(items)
    while part := list(islice(iterator, size)):
        yield part
