"""How well a world model predicts each token of held-out driving from the true tokens before it (teacher forcing)."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from terra.dataset.tokens import TokenizedDriving
from terra.progress import ProgressLine
from terra.prompt import pack_blocks
from terra.training.windows import MemoryWindows
from terra.world_model import LlamaActionForCausalLM, LlamaActionV2ForCausalLM
from tokenizer.files import replacing

EVALUATION_BATCH = 4


@torch.no_grad()
def evaluate_world_model(
    model: LlamaActionForCausalLM | LlamaActionV2ForCausalLM,
    held_out: TokenizedDriving,
    window: int,
    num_windows: int,
    *,
    neutral: Float[Tensor, "slots action_dim"] | None = None,
) -> dict[str, Any]:
    """Predict each image token from all true tokens and actions before it, over evenly spread windows.

    Returns lists with one number for each frame of a window: `cross_entropy_by_frame` (nats per token, over the image
    vocabulary), `accuracy_by_frame` (share of tokens that are the most probable id), `copy_accuracy_by_frame` (share of
    tokens that equal the previous frame's; 0 for the first frame) and, with two windows or more,
    `other_actions_cross_entropy_by_frame`: the cross-entropy with the actions of another window, which is higher if the
    model uses its actions. With `neutral`, the row of nothing done, also `no_actions_cross_entropy_by_frame`, with that
    at each frame. `cross_entropy`, `accuracy`, `copy_accuracy`, `other_actions_cross_entropy` and
    `no_actions_cross_entropy` are the means of these lists without the first frame, which nothing precedes; the same
    names and `_by_window` have one mean for each window, in the order of the windows.
    """
    all_starts = held_out.window_starts(window)
    chosen = torch.linspace(0, len(all_starts) - 1, min(num_windows, len(all_starts))).round().long()
    starts = all_starts[chosen].to(held_out.tokens.device)
    return _evaluate(model, lambda part: held_out.windows(starts[part], window), len(starts), neutral=neutral)


@torch.no_grad()
def evaluate_memory(
    model: LlamaActionForCausalLM | LlamaActionV2ForCausalLM, windows: MemoryWindows, num_windows: int
) -> dict[str, Any]:
    """Predict the same frames with and without memory frames before them.

    Returns the number of memory frames ("frames") and, as "with" and "without", what `evaluate_world_model` says of the
    consecutive frames of the windows, counted from the first one after the memory frames.
    """
    whole, alone = windows.spread(num_windows)
    return {
        "frames": windows.num_memory,
        **{
            name: _evaluate(
                model,
                lambda part, batch=batch: (batch.tokens[part], batch.actions[part]),
                len(batch.tokens),
                num_memory=batch.num_memory,
            )
            for name, batch in (("with", whole), ("without", alone))
        },
    }


def _evaluate(
    model: LlamaActionForCausalLM | LlamaActionV2ForCausalLM,
    read: Callable[[Int[Tensor, " part"]], tuple[Tensor, Tensor]],
    num_windows: int,
    *,
    num_memory: int = 0,
    neutral: Float[Tensor, "slots action_dim"] | None = None,
) -> dict[str, Any]:
    """See `evaluate_world_model`; `read` gives tokens and actions of some windows by their numbers."""
    device = next(model.parameters()).device
    numbers = torch.arange(num_windows)
    others = numbers.roll(num_windows // 2)
    sums: dict[str, Tensor] = {}
    windows: dict[str, list[float]] = {}
    patches = 0
    line, done = ProgressLine("held-out windows", num_windows), 0
    for part, other in zip(numbers.split(EVALUATION_BATCH), others.split(EVALUATION_BATCH), strict=True):
        line.show(done, f"{done} of {num_windows} predicted")
        done += len(part)
        tokens, actions = (tensor.to(device) for tensor in read(part))
        patches = tokens.shape[2] * tokens.shape[3]
        loss, hit = _score(model, tokens, actions)
        scores = {"cross_entropy": loss, "accuracy": hit, "copy_accuracy": _copy_hits(tokens)}
        if num_windows > 1:
            other_actions = read(other)[1].to(device)
            other_actions[:, :num_memory] = actions[:, :num_memory]
            scores["other_actions_cross_entropy"], _ = _score(model, tokens, other_actions)
        if neutral is not None:
            scores["no_actions_cross_entropy"], _ = _score(model, tokens, neutral.to(actions).expand_as(actions))
        for name, score in scores.items():
            windows.setdefault(name, []).extend(score[:, num_memory + 1 :].double().mean(dim=(1, 2)).tolist())
            sums[name] = sums.get(name, torch.zeros(())) + score[:, num_memory:].double().sum(dim=(0, 2)).cpu()
    counts = torch.full((len(sums["cross_entropy"]),), num_windows * patches, dtype=torch.float64)
    if num_memory == 0:
        counts[0] -= num_windows  # nothing predicts the very first token
    metrics: dict[str, Any] = {"evaluated_windows": num_windows}
    for name, total in sums.items():
        metrics[f"{name}_by_frame"] = (total / counts.clamp_min(1)).tolist()
        metrics[name] = (total[1:].sum() / counts[1:].sum().clamp_min(1)).item()
        metrics[f"{name}_by_window"] = windows[name]
    return metrics


def _score(
    model: LlamaActionForCausalLM | LlamaActionV2ForCausalLM,
    tokens: Int[Tensor, "batch window rows cols"],
    actions: Tensor,
) -> tuple[Float[Tensor, "batch window patches"], Float[Tensor, "batch window patches"]]:
    """Cross-entropy (nats) of each image token, and 1 where it is the likeliest id; 0 for a window's first token."""
    states = model.predicting_states(pack_blocks(tokens, actions.shape[2]), actions)
    targets = rearrange(tokens, "batch window rows cols -> batch window (rows cols)")
    losses, hits = [], []
    for frame in range(targets.shape[1]):  # one at a time: all logits of a window of the full size are 15 GB
        logits = model.image_logits(states[:, frame]).float()
        each = F.cross_entropy(logits.flatten(0, 1), targets[:, frame].flatten(), reduction="none")
        losses.append(each.view_as(targets[:, frame]))
        hits.append((logits.argmax(dim=-1) == targets[:, frame]).float())
    loss, hit = torch.stack(losses, dim=1), torch.stack(hits, dim=1)
    loss[:, 0, 0], hit[:, 0, 0] = 0.0, 0.0
    return loss, hit


def _copy_hits(tokens: Int[Tensor, "batch window rows cols"]) -> Float[Tensor, "batch window patches"]:
    same = (tokens[:, 1:] == tokens[:, :-1]).float()
    return rearrange(F.pad(same, (0, 0, 0, 0, 1, 0)), "batch window rows cols -> batch window (rows cols)")


def plot_metrics(metrics: Mapping[str, Any], path: Path) -> None:
    """Plot what `evaluate_world_model` returns, by frame index, as a PNG. Raises OutputError."""
    from matplotlib.figure import Figure

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
    with replacing(path) as temporary:
        figure.savefig(temporary, dpi=120, format="png")
