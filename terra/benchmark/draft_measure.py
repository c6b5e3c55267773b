"""What the experiment on drafts and diagonal decoding measures on held-out clips."""

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from terra.benchmark.diagonal import TruthPicks, decode_diagonally
from terra.benchmark.drafts import FramePicks, count_passes, from_own_picks, from_previous_frame, read_prompts
from terra.engine.drafts import Pick, decode_frame, from_both
from terra.errors import EngineError
from terra.evaluation.clips import Clip
from terra.evaluation.estimator import MotionEstimator
from terra.evaluation.fidelity import motion_errors
from terra.frame_metrics import psnr
from terra.prompt import Actions, build_prompt
from terra.sampling import window_seed
from terra.world_model.window import Head, WindowReader, sees_all_fed, sees_earlier_places
from tokenizer import Frames, LFQTokenizer, TokenGrid

logger = logging.getLogger(__name__)

SIGHTS = {"all fed": sees_all_fed, "earlier places": sees_earlier_places}
NEAR_TIE = 1e-3
"""Two scores closer than this (in nats) may change places with the number of tokens in a pass, by rounding."""


@dataclass(frozen=True, eq=False)
class Drive:
    """A clip with its true frames, in [-1, 1], and their tokens."""

    clip: Clip
    frames: Frames
    tokens: TokenGrid
    actions: Actions


@dataclass(frozen=True)
class Models:
    """What is run, in memory."""

    tokenizer: LFQTokenizer
    world_model: Any
    estimator: MotionEstimator


class KeyedPicks:
    """`FramePicks` that also keep how sure they were, once for each place.

    Attributes:
        entropy: nats, of the model's distribution at temperature 1.
        margin: between the best and the second score.
    """

    def __init__(self, picks: FramePicks) -> None:
        self._picks = picks
        self.entropy: list[float] = []
        self.margin: list[float] = []

    def __call__(self, logits: Float[Tensor, "batch n vocab"], places: Sequence[int]) -> Int[Tensor, "batch n"]:
        """See `terra.engine.drafts.Pick`."""
        scores = self._picks.scores(logits, places)
        best = scores.topk(2)
        self.margin += (best.values[..., 0] - best.values[..., 1]).flatten().tolist()
        self.entropy += torch.distributions.Categorical(logits=logits.float()).entropy().flatten().tolist()
        return best.indices[..., 0]


def drafted_frames(models: Models, drive: Drive, temperature: float, drafts: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Of each generated frame what it was like, and the passes that it took with each kind and number of drafts.

    Passes are None where a near tie made it another frame.

    Raises:
        EngineError: drafted tokens that are not those of sequential decoding.
    """
    model, clip = models.world_model, drive.clip
    layout, vocab = model.config.layout, model.config.image_vocab_size
    reader = WindowReader(model)
    read_prompts(reader, [build_prompt(drive.tokens[: clip.num_context], drive.actions[: clip.num_context - 1])])
    previous = drive.tokens[clip.num_context - 1].flatten()
    for frame in range(clip.num_context, clip.num_frames):
        head = Head.after_frame(previous[-1:], drive.actions[None, frame - 1], frame - 1, layout)
        picks = FramePicks(temperature, [window_seed(clip.seed, 0)], frame, layout, vocab)
        before, known = reader.length, previous.tolist()
        drafters = {
            "previous frame": from_previous_frame(known),
            "own picks": from_own_picks(known[-1]),
            "both": from_both(known),
        }
        sure = KeyedPicks(picks)
        tokens, _ = decode_frame(reader, head, sure, drafters["own picks"], 0)
        passes: dict[str, dict[int, int | None]] = {name: {} for name in drafters}
        for (name, drafter), num_drafts in itertools.product(drafters.items(), drafts):
            if name == "previous frame" and num_drafts != min(drafts):
                # Known before a frame begins, so that the passes can be counted; run once as a check.
                passes[name][num_drafts] = count_passes(tokens.tolist(), known, num_drafts)
                continue
            reader.drop(reader.length - before)
            made, lengths = decode_frame(reader, head, picks, drafter, num_drafts)
            equal = is_equal(made, tokens, sure.margin, f"{clip.name}, frame {frame}, {name}, {num_drafts} drafts")
            passes[name][num_drafts] = len(lengths) if equal else None
        # Whatever a near tie did to the last one, the window goes on with the sequential frame.
        reader.drop(reader.length - before)
        reader.feed(head.ids, head.positions, head.actions)
        start = int(head.positions[-1]) + 1
        reader.feed(tokens[None, :-1], torch.arange(start, start + len(tokens) - 1))
        yield {
            "frame": frame,
            "tokens": len(tokens),
            "copied": (tokens == previous).double().mean().item(),
            "entropy": sum(sure.entropy) / len(sure.entropy),
            "passes": passes,
        }
        previous = tokens


def is_equal(
    ours: Int[Tensor, " image_tokens"], sequential: Int[Tensor, " image_tokens"], margin: Sequence[float], where: str
) -> bool:
    """Whether a frame is the one of sequential decoding; it may differ from a near tie on alone.

    Raises:
        EngineError: it differs where there was none.
    """
    differing = (ours != sequential).nonzero().flatten().tolist()
    if not differing:
        return True
    if margin[differing[0]] >= NEAR_TIE:
        raise EngineError(
            f"{where}: expected the tokens of sequential decoding, got another at place {differing[0]}, where the "
            f"best score was {margin[differing[0]]:.2g} above the next"
        )
    logger.info("%s: left out, a near tie at place %d", where, differing[0])
    return False


def diagonal_frames(
    models: Models, drives: Sequence[Drive], temperature: float, lag: int, sight: str
) -> dict[str, dict[str, float]]:
    """By clip its name: nats a token of the true frames, PSNR of generated frames to the true ones (dB), ADE (m)."""
    clip, config = drives[0].clip, models.world_model.config
    seeds = [window_seed(drive.clip.seed, 0) for drive in drives]
    truth = torch.stack([drive.tokens for drive in drives])
    forced: list[TruthPicks] = []

    def picks_freely(frame: int) -> Pick:
        return FramePicks(temperature, seeds, frame, config.layout, config.image_vocab_size)

    def picks_truth(frame: int) -> Pick:
        forced.append(TruthPicks(truth[:, frame]))
        return forced[-1]

    made = _decode_clips(models, drives, picks_freely, lag, sight)
    _decode_clips(models, drives, picks_truth, lag, sight)
    nats = torch.cat([picks.nats for picks in forced], dim=1).mean(dim=1)
    found = {}
    for index, drive in enumerate(drives):
        tokens = torch.cat([drive.tokens[: clip.num_context], made[index]])
        pixels = models.tokenizer.decode(tokens).cpu()
        steps = models.estimator.estimate(pixels)[clip.num_context - 1 :].numpy()
        errors = motion_errors(steps, drive.clip.instructed, config.fps)
        found[drive.clip.name] = {
            "nats": nats[index].item(),
            "psnr": psnr(pixels[clip.num_context :], drive.frames[clip.num_context :]).mean().item(),
            "ADE": float(errors["displacement"].mean()),
        }
    return found


def _decode_clips(
    models: Models, drives: Sequence[Drive], picks: Callable[[int], Pick], lag: int, sight: str
) -> Int[Tensor, "batch frames rows cols"]:
    """The frames after the context of clips side by side, `picks` of each frame's number choosing their tokens."""
    clip, layout = drives[0].clip, models.world_model.config.layout
    reader = WindowReader(models.world_model, SIGHTS[sight])
    count = clip.num_context
    read_prompts(reader, [build_prompt(drive.tokens[:count], drive.actions[: count - 1]) for drive in drives])
    actions = torch.stack([drive.actions for drive in drives])
    previous = torch.stack([drive.tokens[count - 1] for drive in drives])
    frames = []
    for frame in range(count, clip.num_frames):
        head = Head.after_frame(previous[:, -1, -1], actions[:, frame - 1], frame - 1, layout)
        previous = decode_diagonally(reader, head, picks(frame), previous, lag)
        frames.append(previous)
    return torch.stack(frames, dim=1)
