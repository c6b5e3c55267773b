"""Training of the world model on windows of tokens and actions, and how well it predicts held-out driving."""

import importlib.util
import logging
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from terra.errors import ConfigError
from terra.prompt import SLOT_FILLER
from terra.training.loop import Batch, TrainingResult, train
from terra.training.randomness import StepRandom, draw_indices
from terra.training.settings import LoopConfig
from terra.training.tokens import TokenisedDriving
from terra.world_model import LlamaActionConfig, LlamaActionV2ForCausalLM, load_world_model
from terra.world_model.attention import use_causal_attention
from tokenizer.checkpoint import write_json

logger = logging.getLogger(__name__)

FOLDER = "world_model"
EVALUATION_BATCH = 4


@dataclass(frozen=True, kw_only=True)
class WorldModelSize:
    """The free choices of an architecture; everything else follows from the tokens. Names are those of config.json."""

    hidden_size: int = 384
    intermediate_size: int = 1024
    num_hidden_layers: int = 8
    num_attention_heads: int = 6
    num_key_value_heads: int = 2


def build_config(tokenised: TokenisedDriving, window: int, size: WorldModelSize) -> LlamaActionConfig:
    """The configuration of a model over windows of `window` frames of these tokens and actions."""
    _, rows, cols = tokenised.tokens.shape
    _, slots, action_dim = tokenised.actions.shape
    block = rows * cols + slots
    return LlamaActionConfig(
        vocab_size=tokenised.codebook_size + 1,
        **size.__dict__,
        max_position_embeddings=window * block,
        num_image_patches=rows * cols,
        num_action_tokens=slots,
        num_spatio_embeddings=block,
        num_temporal_embeddings=window,
        action_dim=action_dim,
        fps=tokenised.fps,
        waypoint_times=list(tokenised.waypoint_times),
        tokenizer_sha256=tokenised.tokenizer_sha256,
    )


def pack_windows(tokens: Int[Tensor, "batch window rows cols"], slots: int) -> Int[Tensor, "batch length"]:
    """Ids as they stand in the model's context: [tokens of frame 1][slots][tokens of frame 2][slots] ..."""
    flat = rearrange(tokens, "batch window rows cols -> batch window (rows cols)")
    return rearrange(F.pad(flat, (0, slots), value=SLOT_FILLER), "batch window block -> batch (window block)")


class WorldModelObjective:
    """Next-token prediction on random windows; the loss counts image tokens only.

    With `max_corruption` above 0 each window draws a rate uniformly in [0, max_corruption] and that fraction of its
    input tokens is replaced by random ids, while the labels stay clean: in a rollout the model reads its own mistakes
    (Valevski et al. 2024, "Diffusion Models Are Real-Time Game Engines", arXiv 2408.14837, does so with noise).
    """

    samples = "windows"

    def __init__(
        self, model: LlamaActionV2ForCausalLM, tokenised: TokenisedDriving, window: int, max_corruption: float
    ):
        if not 0 <= max_corruption < 1:
            raise ConfigError(f"max_corruption: expected a fraction in [0, 1), got {max_corruption}")
        self.model: nn.Module = model
        self._tokenised, self._window, self._max_corruption = tokenised, window, max_corruption
        self._starts = tokenised.window_starts(window).to(tokenised.tokens.device)
        self.flops_per_sample = flops_per_window(model)

    def draw(self, random: StepRandom, batch_size: int) -> Batch:
        """Windows drawn with replacement from all that lie inside one episode."""
        starts = self._starts[draw_indices(random, len(self._starts), batch_size, self._starts.device)]
        tokens, actions = self._tokenised.windows(starts, self._window)
        labels = pack_windows(tokens, actions.shape[2])
        return {"input_ids": self._corrupt(labels, random.device), "actions": actions, "labels": labels}

    def loss(self, batch: Batch, progress: float) -> dict[str, Tensor]:
        """Mean cross-entropy over image tokens, in nats."""
        return {"loss": self.model(**batch, use_cache=False).loss}

    def _corrupt(self, labels: Int[Tensor, "batch length"], generator: torch.Generator) -> Int[Tensor, "batch length"]:
        if self._max_corruption == 0:
            return labels
        like: dict[str, Any] = {"generator": generator, "device": labels.device}
        rate = self._max_corruption * torch.rand((len(labels), 1), **like)
        ids = torch.randint(self._tokenised.codebook_size, labels.shape, **like)
        return torch.where(torch.rand(labels.shape, **like) < rate, ids, labels)


def flops_per_window(model: LlamaActionV2ForCausalLM) -> float:
    """Floating-point operations of one window's forward and backward pass.

    6 a parameter and token (Kaplan et al. 2020, arXiv 2001.08361, section 2.1), without the embedding tables, with the
    head; and 6 length^2 hidden_size a layer for attention: 12 (Chowdhery et al. 2022, "PaLM", appendix B), half of
    which the causal mask saves.
    """
    config = model.config
    tables = sum(module.weight.numel() for module in model.modules() if isinstance(module, nn.Embedding))
    parameters = sum(parameter.numel() for parameter in model.parameters()) - tables
    length = config.layout.max_length
    return 6.0 * parameters * length + 6.0 * config.num_hidden_layers * config.hidden_size * length**2


def train_world_model(
    tokenised: TokenisedDriving,
    held_out: TokenisedDriving,
    config: LoopConfig,
    size: WorldModelSize,
    *,
    window: int = 25,
    max_corruption: float = 0.0,
    evaluation_windows: int = 64,
) -> TrainingResult:
    """Train, then write `world_model/` (averaged weights, bfloat16, 15 MB shards) and `metrics.json`.

    The tokens' device is where training runs. What is measured are the stored weights, read back; where matplotlib is
    installed, `metrics.png` plots them. A run that SIGTERM stops writes only its state.

    Raises:
        ConfigError: the two token files come from different tokenizers, or see `terra.training.loop.train`.
        DatasetError: no episode of `window` frames.
        CheckpointError, OutputError: see `terra.training.loop.train`.
    """
    if tokenised.tokenizer_sha256 != held_out.tokenizer_sha256:
        raise ConfigError(
            f"held-out tokens: expected those of tokenizer {tokenised.tokenizer_sha256[:12]}, "
            f"got {held_out.tokenizer_sha256[:12]}"
        )
    held_out.window_starts(window)  # raises now, not after the training
    device = tokenised.tokens.device
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        model = LlamaActionV2ForCausalLM(build_config(tokenised, window, size))
    model.to(device)  # pyright: ignore[reportArgumentType]
    use_causal_attention(model)
    result = train(WorldModelObjective(model, tokenised, window, max_corruption), config)
    if result.stopped_by == "sigterm":
        return result
    result.ema.copy_to_model()
    save_world_model(model, config.output / FOLDER)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    stored = load_world_model(config.output / FOLDER, dtype=dtype, device=device)
    metrics = evaluate_world_model(stored, held_out.to(device), window, evaluation_windows)
    write_json(config.output / "metrics.json", {**metrics, "step": result.step, "seconds": result.elapsed_seconds})
    plot_metrics(metrics, config.output / "metrics.png")
    logger.info("held out: cross-entropy %.4f nats, accuracy %.4f", metrics["cross_entropy"], metrics["accuracy"])
    return result


def save_world_model(model: LlamaActionV2ForCausalLM, folder: Path) -> None:
    """Write the weights in bfloat16 (the model is left so) as shards of at most 15 MB, under `folder` when complete."""
    temporary, old = (folder.with_name(f".{folder.name}.{state}") for state in ("tmp", "old"))
    for leftover in (temporary, old):
        shutil.rmtree(leftover, ignore_errors=True)
    model.set_attn_implementation("sdpa")
    model.to(torch.bfloat16).save_pretrained(temporary, max_shard_size="15MB")  # pyright: ignore[reportArgumentType]
    if folder.exists():
        folder.replace(old)
    temporary.replace(folder)
    shutil.rmtree(old, ignore_errors=True)


@torch.inference_mode()
def evaluate_world_model(model: nn.Module, held_out: TokenisedDriving, window: int, num_windows: int) -> dict[str, Any]:
    """Predict each image token from all true tokens and actions before it, over windows spread evenly.

    Returns lists by the frame's index in the window: `cross_entropy_by_frame` (nats a token), `accuracy_by_frame` (of
    the most probable id), `copy_accuracy_by_frame` (of repeating the previous frame; 0 for the first), and, with two
    windows or more, `other_actions_cross_entropy_by_frame` with the actions of another window, which a model that
    listens to actions predicts worse from. `cross_entropy`, `accuracy`, `copy_accuracy` and
    `other_actions_cross_entropy` are their means without the first frame, which nothing precedes.
    """
    all_starts = held_out.window_starts(window)
    chosen = torch.linspace(0, len(all_starts) - 1, min(num_windows, len(all_starts))).round().long()
    starts = all_starts[chosen].to(held_out.tokens.device)
    others = starts.roll(len(starts) // 2)
    sums: dict[str, Tensor] = {}
    for part, other in zip(starts.split(EVALUATION_BATCH), others.split(EVALUATION_BATCH), strict=True):
        tokens, actions = held_out.windows(part, window)
        loss, hit = _score(model, tokens, actions)
        scores = {"cross_entropy": loss, "accuracy": hit, "copy_accuracy": _copy_hits(tokens)}
        if len(starts) > 1:
            scores["other_actions_cross_entropy"], _ = _score(model, tokens, held_out.windows(other, window)[1])
        for name, score in scores.items():
            sums[name] = sums.get(name, torch.zeros(())) + score.double().sum(dim=(0, 2)).cpu()
    patches = held_out.tokens.shape[1] * held_out.tokens.shape[2]
    counts = torch.full((window,), len(starts) * patches, dtype=torch.float64)
    counts[0] -= len(starts)  # nothing predicts the very first token
    metrics: dict[str, Any] = {"evaluated_windows": len(starts)}
    for name, total in sums.items():
        metrics[f"{name}_by_frame"] = (total / counts.clamp_min(1)).tolist()
        metrics[name] = (total[1:].sum() / counts[1:].sum().clamp_min(1)).item()
    return metrics


def _score(
    model: nn.Module, tokens: Int[Tensor, "batch window rows cols"], actions: Tensor
) -> tuple[Float[Tensor, "batch window patches"], Float[Tensor, "batch window patches"]]:
    """Cross-entropy and hit of each image token; 0 for the window's first one."""
    slots, frames = actions.shape[2], tokens.shape[1]
    ids = pack_windows(tokens, slots)
    logits = model(input_ids=ids, actions=actions, use_cache=False).logits[:, :-1]
    targets = ids[:, 1:]
    loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
    hit = (logits.argmax(dim=-1) == targets).float()
    loss, hit = (
        rearrange(F.pad(score, (1, 0)), "batch (frames block) -> batch frames block", frames=frames)[..., :-slots]
        for score in (loss, hit)
    )
    return loss, hit


def _copy_hits(tokens: Int[Tensor, "batch window rows cols"]) -> Float[Tensor, "batch window patches"]:
    same = (tokens[:, 1:] == tokens[:, :-1]).float()
    return rearrange(F.pad(same, (0, 0, 0, 0, 1, 0)), "batch window rows cols -> batch window (rows cols)")


def plot_metrics(metrics: dict[str, Any], path: Path) -> None:
    """Plot cross-entropy and accuracy by frame index, where matplotlib is installed."""
    if importlib.util.find_spec("matplotlib") is None:
        logger.info("%s is left out: matplotlib is not installed", path.name)
        return
    from matplotlib.figure import Figure  # pyright: ignore[reportMissingImports]

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    curves = (
        (left, "cross_entropy", "model"),
        (left, "other_actions_cross_entropy", "another window's actions"),
        (right, "accuracy", "model"),
        (right, "copy_accuracy", "previous frame repeated"),
    )
    for axes, name, label in curves:
        if f"{name}_by_frame" in metrics:
            axes.plot(metrics[f"{name}_by_frame"], label=label)
    left.set(xlabel="frame of the window", ylabel="cross-entropy (nats a token)")
    right.set(xlabel="frame of the window", ylabel="token accuracy")
    left.legend()
    right.legend()
    temporary = path.with_name(f".{path.name}.tmp")
    figure.savefig(temporary, dpi=120, format="png")
    temporary.replace(path)
