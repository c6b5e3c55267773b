"""Generation and measurement of clips: the engine generates several clips at once, the networks measure one by one."""

import logging
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

import torch
from torch import Tensor

from decoder import Decoder
from terra.actions import ActionSpace
from terra.evaluation.clips import Clip, LoadedClip, load_clips
from terra.evaluation.contrasts import CounterfactualGroup
from terra.evaluation.kept import KeptFiles, clip_facts, scores_from_tensors, scores_to_tensors
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
    """The results of one clip: its scores, its true tokens and actions, and its videos, context included.

    Of results that were kept in a file there are no videos.
    """

    scores: ClipScores
    truth_tokens: TokenGrid
    actions: Actions
    variants: dict[str, Frames]


@dataclass(frozen=True)
class Encoded:
    """The true tokens of a clip, and the action between each two frames."""

    clip: Clip
    tokens: TokenGrid
    actions: Actions


@dataclass(frozen=True)
class ExaminedGroup:
    """The results of a counterfactual group: each future's recovered motion by variant, and the generated videos.

    Of results that were kept in a file there are no videos.
    """

    group: CounterfactualGroup
    steps: dict[str, list[Steps]]
    generated: list[Frames]


class Bench:
    """Generates clips and measures them; only a few clips' frames are in memory at a time.

    Args:
        tokenizer, decoder: encode and decode the recordings; the decoder also decodes the generated tokens.
        space: the world model's action space.
        rollouts: generates tokens and keeps them in files.
        kept: keeps what was measured.
        scorer: measures the videos of a clip.
        at_once: number of rollouts generated together.
        workers: number of videos decoded at once.
    """

    def __init__(
        self,
        tokenizer: LFQTokenizer,
        decoder: Decoder,
        rollouts: KeptRollouts,
        kept: KeptFiles,
        scorer: Scorer,
        *,
        space: ActionSpace,
        at_once: int,
        workers: int,
    ) -> None:
        self._tokenizer, self._decoder, self._rollouts, self._kept = tokenizer, decoder, rollouts, kept
        self._scorer = scorer
        self._space = space
        self._at_once, self._workers = at_once, workers
        self.damaged: list[str] = []

    def examine(self, clips: Sequence[Clip], shown: Collection[str] = ()) -> Iterator[Examined]:
        """Generate and measure each clip, the kept ones first; `damaged` gets a line for each that can't be read.

        Args:
            clips: the clips.
            shown: names of those whose videos are needed, which are decoded and measured in any case.
        """
        missing = []
        for clip in clips:
            examined = None if clip.name in shown else self._read(clip)
            if examined is None:
                missing.append(clip)
            else:
                yield examined
        for part in _parts(self._load(missing), self._at_once):
            requests = [_request(loaded, loaded.frames) for loaded in part]
            generated = self._rollouts.tokens([loaded.clip.name for loaded in part], requests)
            for loaded, tokens in zip(part, generated, strict=True):
                clip = loaded.clip
                truth_tokens = self._tokenizer.encode(loaded.frames).cpu()
                variants = decode_variants(loaded.frames, truth_tokens, tokens, clip.num_context, self._decoder)
                examined = Examined(self._scorer.score(clip, variants), truth_tokens, loaded.actions, variants)
                content = {"tokens": truth_tokens, "actions": loaded.actions, **scores_to_tensors(examined.scores)}
                self._kept.write(clip.name, self._key(clip), content)
                yield examined

    def examine_groups(self, groups: Sequence[CounterfactualGroup], num_shown: int = 0) -> Iterator[ExaminedGroup]:
        """Generate each group's futures from the first one's context; a group with a damaged recording is left out.

        Args:
            groups: the groups.
            num_shown: of how many first ones the videos are needed; the others may come from kept files.
        """
        num_futures = max((len(group.clips) for group in groups), default=1)
        for part in _parts(enumerate(groups), max(self._at_once // num_futures, 1)):
            kept = {index: self._read_group(group) for index, group in part if index >= num_shown}
            loaded = self._load_all([group for index, group in part if kept.get(index) is None])
            made = iter(self._examine_loaded(list(loaded)))
            following = next(made, None)
            for index, group in part:
                found = kept.get(index)
                if found is None and following is not None and following.group is group:
                    found, following = following, next(made, None)
                if found is not None:
                    yield found

    def encode(self, clips: Sequence[Clip]) -> list[Encoded]:
        """The tokens of clips of which nothing is generated, in order; `damaged` gets a line for each bad one."""
        found: dict[str, Encoded] = {}
        for clip in clips:
            stored = self._kept.read(f"tokens_{clip.name}", self._key(clip))
            if stored is not None:
                found[clip.name] = Encoded(clip, stored["tokens"], stored["actions"])
        for loaded in self._load([clip for clip in clips if clip.name not in found]):
            clip = loaded.clip
            found[clip.name] = Encoded(clip, self._tokenizer.encode(loaded.frames).cpu(), loaded.actions)
            content = {"tokens": found[clip.name].tokens, "actions": loaded.actions}
            self._kept.write(f"tokens_{clip.name}", self._key(clip), content)
        return [found[clip.name] for clip in clips if clip.name in found]

    def _examine_loaded(
        self, loaded: Sequence[tuple[CounterfactualGroup, list[LoadedClip]]]
    ) -> Iterator[ExaminedGroup]:
        names = [each.clip.name for _, futures in loaded for each in futures]
        requests = [_request(each, futures[0].frames) for _, futures in loaded for each in futures]
        tokens = iter(self._rollouts.tokens(names, requests))
        for group, futures in loaded:
            yield self._examine_group(group, futures, list(islice(tokens, len(futures))))

    def _read(self, clip: Clip) -> Examined | None:
        stored = self._kept.read(clip.name, self._key(clip))
        if stored is None:
            return None
        return Examined(scores_from_tensors(clip, stored), stored["tokens"], stored["actions"], {})

    def _read_group(self, group: CounterfactualGroup) -> ExaminedGroup | None:
        stored = self._kept.read(_group_name(group), self._key(*group.clips))
        if stored is None:
            return None
        steps: dict[str, list[Steps]] = {}
        for index in range(len(group.clips)):
            for variant in (TRUE, RE_ENCODED, GENERATED):
                steps.setdefault(variant, []).append(stored[f"{variant}/{index}"].numpy())
        return ExaminedGroup(group, steps, [])

    def _key(self, *clips: Clip) -> Tensor:
        facts = [clip_facts(clip) for clip in clips]
        return self._kept.key(" ".join(text for text, _ in facts), *(poses for _, poses in facts))

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
        content = {
            f"{name}/{index}": torch.from_numpy(each)
            for name, each_of in steps.items()
            for index, each in enumerate(each_of)
        }
        self._kept.write(_group_name(group), self._key(*group.clips), content)
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
        for loaded in load_clips(clips, self._workers, self._space):
            if isinstance(loaded, str):
                logger.warning("left out: %s", loaded)
                self.damaged.append(loaded)
            else:
                yield loaded


def _group_name(group: CounterfactualGroup) -> str:
    return f"{group.contrast.name}_{group.clips[0].name}"


def _request(loaded: LoadedClip, context: Frames) -> RolloutRequest:
    return RolloutRequest(context[: loaded.clip.num_context], loaded.actions, loaded.clip.seed)


def _parts(items: Iterable[_T], size: int) -> Iterator[list[_T]]:
    """Split items into lists of `size`; the last list may be shorter."""
    iterator = iter(items)
    while part := list(islice(iterator, size)):
        yield part
