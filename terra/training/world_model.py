"""Training of the world model on windows of tokens and actions: from nothing, from a model, or of an adapter.

init_from=null                   random weights -> world_model/
init_from=demo                   a model's weights, all trained further -> world_model/
init_from=demo adapter.rank=16   a model's weights, frozen, and a LoRA adapter that is trained -> adapter/
"""

import logging
import shutil
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate import Accelerator
from jaxtyping import Bool, Int
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from terra.actions import describe_space
from terra.dataset.tokens import TokenizedDriving, load_tokens
from terra.device import torch_dtype
from terra.errors import ConfigError
from terra.memory import MemoryRule
from terra.prompt import pack_blocks
from terra.training.adapter import add_adapter
from terra.training.bit_vectors import add_bit_vectors, merge_bit_vectors
from terra.training.curves import plot_learning
from terra.training.flops import flops_per_window
from terra.training.loop import Batch, TrainingResult, train
from terra.training.prediction import evaluate_memory, evaluate_world_model, plot_metrics
from terra.training.preview import HeldOutPreview, load_preview_tokenizer
from terra.training.processes import start_processes
from terra.training.randomness import StepRandom, send
from terra.training.settings import LoopConfig
from terra.training.start import WorldModel, find_world_model, record_start, start_from
from terra.training.state import BestWeights, Ema
from terra.training.windows import MemoryWindows, windows_of
from terra.training.world_model_settings import TrainWorldModelSettings, WorldModelSize, WorldModelTraining
from terra.views import title_of
from terra.world_model import LlamaActionConfig, LlamaActionV2ForCausalLM, load_config, load_world_model, write_weights
from terra.world_model.model import IGNORED_LABEL
from tokenizer.files import write_json

logger = logging.getLogger(__name__)

FOLDER, ADAPTER_FOLDER = "world_model", "adapter"


def build_config(
    tokenized: TokenizedDriving, window: int, size: WorldModelSize, memory: MemoryRule | None = None
) -> LlamaActionConfig:
    """The configuration of a model for windows of `window` frames, with the shapes of the tokens and actions given."""
    _, rows, cols = tokenized.tokens.shape
    _, slots, action_dim = tokenized.actions.shape
    block = rows * cols + slots
    return LlamaActionConfig(
        vocab_size=tokenized.codebook_size + 1,
        **vars(size),
        max_position_embeddings=window * block,
        num_image_patches=rows * cols,
        num_action_tokens=slots,
        num_spatio_embeddings=block,
        num_temporal_embeddings=window,
        action_dim=action_dim,
        fps=tokenized.fps,
        **describe_space(tokenized.space),
        tokenizer_sha256=tokenized.tokenizer_sha256,
        memory=None if memory is None else memory.model_dump(),
        views=None if tokenized.views is None else tokenized.views.describe(),
    )


class WorldModelObjective:
    """Next-token prediction on random windows; the loss counts image tokens only, and none of memory frames.

    `WorldModelTraining.max_corruption` corrupts input tokens and leaves the labels clean, because in a rollout the
    model reads its own mistakes (Valevski et al. 2024, "Diffusion Models Are Real-Time Game Engines", arXiv 2408.14837,
    corrupt with noise).
    """

    samples = "windows"
    discriminator: nn.Module | None = None

    def __init__(
        self,
        model: WorldModel,
        tokenized: TokenizedDriving,
        training: WorldModelTraining,
        device: torch.device,
        preview: HeldOutPreview | None = None,
        best: BestWeights | None = None,
    ):
        self.model: nn.Module = model
        model.checkpoint_layers = training.checkpoint_layers
        self._tokenized, self._training, self._device, self._preview = tokenized, training, device, preview
        self._best = best
        self._windows = windows_of(tokenized, training.window, training.memory)
        self.flops_per_sample: float | None = flops_per_window(model, training.window)
        self.tokens_per_sample: int | None = training.window * model.config.layout.block

    def draw(self, random: StepRandom, batch_size: int, progress: float) -> Batch:
        """Draw windows, each within one episode, with replacement; gather them on the device of the tokens."""
        windows = self._windows.draw(random.host, batch_size, progress)
        ids = send(pack_blocks(windows.tokens, windows.actions.shape[2]), self._device)
        frame = torch.arange(ids.shape[1], device=ids.device) // (ids.shape[1] // windows.tokens.shape[1])
        ignored = send(windows.remembers, self._device)[:, None] & (frame < windows.num_memory)
        return {
            "input_ids": self._corrupt(ids, ignored, random.device, progress),
            "actions": send(windows.actions, self._device),
            "labels": ids.masked_fill(ignored, IGNORED_LABEL),
        }

    def loss(self, batch: Batch, progress: float) -> dict[str, Tensor]:
        """The mean cross-entropy over image tokens, in nats, plus the z-loss if its weight is not 0."""
        return {"loss": self.model(**batch, z_loss=self._training.z_loss).loss}

    def discriminator_loss(self, batch: Batch, progress: float) -> dict[str, Tensor]:
        """There is no discriminator."""
        raise NotImplementedError

    def previews(self, ema: Ema) -> dict[str, Tensor]:
        """Held-out prediction and rollouts of the averaged weights, which are kept if they are the best so far."""
        shown = self._preview.show(ema) if self._preview is not None else {}
        if self._best is not None:
            measured = shown.get("held_out_memory_cross_entropy", shown["held_out_cross_entropy"])
            self._best.offer(float(measured), ema)
        return shown

    def _corrupt(
        self,
        ids: Int[Tensor, "batch length"],
        remembered: Bool[Tensor, "batch length"],
        generator: torch.Generator,
        progress: float,
    ) -> Int[Tensor, "batch length"]:
        is_exact = self._training.memory.is_exact(progress)
        most = self._training.memory.exact_corruption if is_exact else self._training.max_corruption
        if most == 0:
            return ids
        like: dict[str, Any] = {"generator": generator, "device": ids.device}
        rate = most * torch.rand((len(ids), 1), **like)
        wrong = torch.randint(self._tokenized.codebook_size, ids.shape, **like)
        is_wrong = torch.rand(ids.shape, **like) < rate
        return torch.where(is_wrong & ~remembered if is_exact else is_wrong, wrong, ids)


def run(settings: TrainWorldModelSettings) -> None:
    """Train a world model as conf/train.yaml says, in each process of the run.

    Raises:
        ConfigError, CheckpointError, DatasetError, OutputError: see `train_world_model`.
    """
    accelerator = start_processes(settings.device)
    splits = (settings.train_split, settings.held_out_split)
    tokenized, held_out = (load_tokens(settings.data / split) for split in splits)
    if settings.max_frames is not None:
        tokenized = tokenized.first(settings.max_frames)
    old = None if settings.old_data is None else load_tokens(settings.old_data / settings.held_out_split)
    if accelerator.is_main_process:
        write_json(settings.output / "settings.json", settings.model_dump(mode="json"))
    train_world_model(tokenized, held_out, settings, settings.world_model, settings, accelerator, old)
    accelerator.wait_for_everyone()
    accelerator.end_training()


def train_world_model(
    tokenized: TokenizedDriving,
    held_out: TokenizedDriving,
    config: LoopConfig,
    size: WorldModelSize,
    training: WorldModelTraining,
    accelerator: Accelerator,
    old: TokenizedDriving | None = None,
) -> TrainingResult:
    """Train, then write `world_model/` or `adapter/` (averaged weights, bfloat16), `metrics.json` and `metrics.png`.

    With `keep="best"` the weights of the best save are stored. Tokens stay on the CPU; batches are sent to the device.
    The metrics come from the stored weights, read back from disk. With `init_from`, "start" in `metrics.json` has those
    of the weights that the training started from, and "old" both on the old domain, and `learning.png` shows both
    domains. A run that SIGTERM stops writes only its state.

    Args:
        tokenized: what the model is trained on.
        held_out: what it is measured on.
        config: the loop's settings.
        size: the architecture, without `init_from`.
        training: all other settings.
        accelerator: see `terra.training.processes.start_processes`.
        old: held-out tokens of the domain that `init_from` was trained on, with the same actions.

    Raises:
        ConfigError: the token files, the tokenizer or `init_from` do not belong together; see also
            `terra.training.loop.train`.
        DatasetError: no episode of `window` frames.
        CheckpointError, OutputError: see `terra.training.loop.train` and `terra.training.start`.
    """
    _check_same_tokens(tokenized, held_out, "held-out tokens")
    if tokenized.views != held_out.views:
        expected, got = title_of(tokenized.views), title_of(held_out.views)
        raise ConfigError(f"held-out tokens: expected pictures of {expected}, got {got}")
    held_out.window_starts(training.window)  # raises now, not after the training
    remembered = None
    if training.memory.frames is not None:
        remembered = MemoryWindows(held_out, training.window, training.memory)
    if old is not None:
        _check_old(tokenized, old, training)
    device = accelerator.device
    tokenizer = None
    if training.preview_tokenizer is not None:  # the first process alone needs it, but all should see what is wrong
        tokenizer = load_preview_tokenizer(training.preview_tokenizer, tokenized, device)
    preview = HeldOutPreview(held_out, training.window, training.preview_frames, tokenizer, memory=remembered)
    if training.init_from is not None:  # the curve begins and ends with figures of as many windows
        preview = replace(preview, old=old, num_windows=training.evaluation_windows)
    base = None if training.init_from is None else find_world_model(training.init_from)
    lora, start = None, {}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(config.seed)
        if base is None:
            model = LlamaActionV2ForCausalLM(build_config(tokenized, training.window, size, training.memory.rule))
            if training.bit_vectors:
                add_bit_vectors(model)
        else:
            model = start_from(base, tokenized, training.window, training.memory.rule)
            record_start(config.output / "state", base, accelerator)
            if training.adapter.rank is not None:
                before, after = load_config(base), model.config
                new_actions = (before.space, before.fps) != (after.space, after.fps)
                new_tokens = before.tokenizer_sha256 != after.tokenizer_sha256
                new_config = new_tokens or before.memory_rule != after.memory_rule or before.views != after.views
                lora = add_adapter(model, base, training.adapter, new_actions=new_actions, new_config=new_config)
    if base is not None:
        start = _measured(model.to(device), held_out, old, remembered, training)  # pyright: ignore[reportArgumentType]
    best = BestWeights(config.output / "state") if training.keep == "best" else None
    objective = WorldModelObjective(model, tokenized, training, device, preview, best)
    with attention_kernels(training.attention, device):
        result = train(objective, config, accelerator)
    if result.stopped_by != "sigterm" and accelerator.is_main_process:
        result.ema.copy_to_model()
        if best is not None:
            best.copy_to(model)
        if lora is not None:
            lora.save(config.output / ADAPTER_FOLDER)
        else:
            merge_bit_vectors(model)
            save_world_model(model, config.output / FOLDER, training.max_shard_size)
        _evaluate(held_out, old, remembered, config, training, result, device, base, start)
    return result


def _check_same_tokens(tokenized: TokenizedDriving, other: TokenizedDriving, name: str) -> None:
    if tokenized.tokenizer_sha256 != other.tokenizer_sha256:
        raise ConfigError(
            f"{name}: expected those of tokenizer {tokenized.tokenizer_sha256[:12]}, got {other.tokenizer_sha256[:12]}"
        )


def _check_old(tokenized: TokenizedDriving, old: TokenizedDriving, training: WorldModelTraining) -> None:
    if training.init_from is None:
        raise ConfigError("old_data: expected none without init_from, which knows the old domain")
    _check_same_tokens(tokenized, old, "old_data")
    if (old.space, old.fps) != (tokenized.space, tokenized.fps):
        expected = f"{tokenized.space.title} at {tokenized.fps:g} a second, as in data"
        raise ConfigError(f"old_data: expected {expected}, got {old.space.title} at {old.fps:g}")
    old.window_starts(training.window)


def attention_kernels(choice: Literal["fastest", "flash"], device: torch.device) -> AbstractContextManager[Any]:
    """A context that chooses attention kernels: "fastest" puts cuDNN's first on Hopper GPUs, else keeps torch's order.

    On Hopper, cuDNN's kernels are 1.7 to 2.3 times as fast as the flash kernels that torch ships, forward and backward;
    on other generations they are slower (huggingface/transformers, pull request 48163).
    """
    order = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    if choice == "flash":
        return sdpa_kernel(order, set_priority=True)
    if device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9:
        return sdpa_kernel([SDPBackend.CUDNN_ATTENTION, *order], set_priority=True)
    return nullcontext()


def save_world_model(model: WorldModel, folder: Path, max_shard_size: str = "45MB") -> None:
    """Convert the model to bfloat16 and write its weights; `folder` appears when all files are complete."""
    temporary, old = (folder.with_name(f".{folder.name}.{state}") for state in ("tmp", "old"))
    for leftover in (temporary, old):
        shutil.rmtree(leftover, ignore_errors=True)
    write_weights(model.to(torch.bfloat16), temporary, max_shard_size)  # pyright: ignore[reportArgumentType]
    if folder.exists():
        folder.replace(old)
    temporary.replace(folder)
    shutil.rmtree(old, ignore_errors=True)


def _measured(
    model: WorldModel,
    held_out: TokenizedDriving,
    old: TokenizedDriving | None,
    remembered: MemoryWindows | None,
    training: WorldModelTraining,
) -> dict[str, Any]:
    """What `evaluate_world_model` says of the new domain, and under "old" of the old one, if it is given.

    With memory, "memory" has what `evaluate_memory` says.
    """
    count = training.evaluation_windows
    metrics = evaluate_world_model(model, held_out, training.window, count)
    if remembered is not None:
        metrics["memory"] = evaluate_memory(model, remembered, count)
    return metrics | ({"old": evaluate_world_model(model, old, training.window, count)} if old is not None else {})


def _evaluate(
    held_out: TokenizedDriving,
    old: TokenizedDriving | None,
    remembered: MemoryWindows | None,
    config: LoopConfig,
    training: WorldModelTraining,
    result: TrainingResult,
    device: torch.device,
    base: Path | None,
    start: dict[str, Any],
) -> None:
    dtype = torch_dtype(None, device)
    if training.adapter.rank is not None and base is not None:
        stored = load_world_model(base, adapter=config.output / ADAPTER_FOLDER, dtype=dtype, device=device)
    else:
        stored = load_world_model(config.output / FOLDER, dtype=dtype, device=device)
    metrics = _measured(stored, held_out, old, remembered, training)
    more = {"start": start} if start else {}
    record = {**metrics, **more, "step": result.step, "seconds": result.elapsed_seconds}
    write_json(config.output / "metrics.json", record)
    plot_metrics(metrics, config.output / "metrics.png")
    if start:
        plot_learning(config.output, record)
    logger.info("held out: cross-entropy %.4f nats, accuracy %.4f", metrics["cross_entropy"], metrics["accuracy"])
    if remembered is not None:
        figures = [metrics["memory"][name]["cross_entropy"] for name in ("with", "without")]
        logger.info("held out: cross-entropy %.4f nats with memory frames, %.4f without", *figures)
