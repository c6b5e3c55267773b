"""The settings of `terra train`; checked before torch is imported."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from terra.memory import FieldOfView, Kind, MemoryCount, MemoryRule, ViewRange
from terra.training.settings import LoopConfig
from tokenizer.settings import Count, Device, FilePath, Fraction, Natural, NonNegative, Positive, Settings, Share, Text


class MemoryTraining(Settings):
    """Which windows hold memory frames (`terra.memory`), and which frames these are.

    Attributes:
        frames: memory frames of a window, 1 to 64; None trains without memory.
        field_of_view, range, kind: see `terra.memory.MemoryRule`.
        share: share of windows (0 to 1) that get memory frames, where they are late enough in their episode; the
            others are like a rollout's first window.
        other_drives: share of the windows with memory (0 to 1) that may also remember other drives of the same town.
        exact: share of the windows with memory (0 to 1) whose memory frames are the window's own frames at the times
            that memory frames are for; not with kind="recent". They teach what a memory frame is for: three given
            frames predict the next one so well that other windows hardly reward attention to memory
            (terra/training/LOG.md).
        exact_until: share of the run (0 to 1), from its start, in which all windows have such memory, whatever `share`
            says; not with kind="recent". Attention to memory is learned only where much depends on it.
        exact_corruption: in that part each window draws a rate uniformly from 0 to this, and that share of the tokens
            after its memory frames is replaced by random ids. Memory frames are not corrupted in that part; later
            `max_corruption` of the training corrupts them, too.
        overlap: frames of a window that are given when a rollout chooses what to remember, as in `terra generate`.

    A rollout remembers any frame before its window. In training a memory frame is at least 1 s older than the window
    (but with kind="recent", and in the windows of `exact`), so that it shows more than the frames beside it.
    """

    frames: MemoryCount | None = None
    field_of_view: FieldOfView = 90.0
    range: ViewRange = 40.0
    kind: Kind = "view"
    share: Share = 0.75
    other_drives: Share = 0.5
    exact: Share = 0.5
    exact_until: Share = 0.3
    exact_corruption: Share = 1.0
    overlap: Count = 3

    def is_exact(self, progress: float) -> bool:
        """Whether all windows have their own frames as memory at the run's progress, 0 to 1."""
        return self.frames is not None and self.kind != "recent" and progress < self.exact_until

    @property
    def rule(self) -> MemoryRule | None:
        """The rule by which memory frames are chosen; None without memory."""
        if self.frames is None:
            return None
        return MemoryRule(frames=self.frames, field_of_view=self.field_of_view, range=self.range, kind=self.kind)


class AdapterSettings(Settings):
    """A LoRA adapter on the attention and MLP projections of all layers, which is trained in place of the model.

    Attributes:
        rank: of the adapter; None trains the whole model.
        alpha: the update of a weight is alpha / rank times the product of its factors; None is twice the rank.
        also: modules that are trained whole and stored with the adapter.
    """

    rank: Annotated[int, Field(ge=1, le=512)] | None = None
    alpha: Positive | None = None
    also: Annotated[tuple[Literal["action_projection", "pos_embedding_spatio_temporal"], ...], Field(strict=False)] = ()


class WorldModelSize(Settings):
    """The free sizes of the architecture, named as in config.json; all other sizes follow from the tokens."""

    hidden_size: Count = 512
    intermediate_size: Count = 1408
    num_hidden_layers: Count = 8
    num_attention_heads: Count = 8
    num_key_value_heads: Count = 2


class WorldModelTraining(Settings):
    """Settings of the world model's training besides those of the loop.

    Attributes:
        window: frames of a training window, and of the model's context.
        max_corruption: each window draws a rate uniformly from 0 to this, and that fraction of its input tokens is
            replaced by random ids.
        z_loss: weight of the z-loss (see `LlamaActionV2ForCausalLM.forward`); 0 leaves it out.
        bit_vectors: whether the rows of the embedding table and the lm head share a vector for each bit of their ids
            while the model is trained (see `terra.training.bit_vectors`); only without `init_from`.
        checkpoint_layers: whether the backward pass recomputes each layer from its input (activation checkpointing):
            a third more computation, a fraction of the memory.
        attention: "fastest" (see `attention_kernels`), or "flash", torch's own flash kernels.
        evaluation_windows: held-out windows that are predicted at the end.
        preview_frames: frames of the rollouts that each save logs, where `preview_tokenizer` is given; 0: none.
        preview_tokenizer: folder of the tokenizer that made the tokens, which decodes the rollouts; None: no rollouts.
        max_shard_size: largest size of a file of the stored weights, as transformers writes sizes ("45MB").
        init_from: the model whose weights the training starts from, see `terra.training.start.find_world_model`; None
            starts from random weights.
        adapter: what of `init_from` is trained: all of it, or an adapter.
        keep: which averaged weights are stored: those of the "last" step, or the "best" of all saves by held-out
            cross-entropy (early stopping; with memory frames, if there are any), as few recordings are soon learned by
            heart.
        memory: which windows hold memory frames.
    """

    window: Count = 25
    max_corruption: Fraction = 0.0
    z_loss: NonNegative = 0.0
    bit_vectors: bool = False
    checkpoint_layers: bool = False
    attention: Literal["fastest", "flash"] = "fastest"
    evaluation_windows: Count = 64
    preview_frames: Natural = 0
    preview_tokenizer: FilePath | None = None
    max_shard_size: Text = "45MB"
    init_from: Text | None = None
    adapter: AdapterSettings = AdapterSettings()
    keep: Literal["last", "best"] = "last"
    memory: MemoryTraining = MemoryTraining()

    @model_validator(mode="after")
    def _fits_its_start(self) -> Self:
        if self.adapter.rank is not None and self.init_from is None:
            raise ValueError("init_from: expected a model with adapter.rank, got null")
        if self.bit_vectors and self.init_from is not None:
            raise ValueError(f"bit_vectors: expected false with init_from={self.init_from}, got true")
        return self


class TrainWorldModelSettings(WorldModelTraining, LoopConfig):
    """The whole of conf/train.yaml.

    Attributes:
        data: folder of tokens, with one folder for each split.
        train_split, held_out_split: names of the two splits.
        max_frames: the model is trained on so many first frames of `train_split`; None takes all.
        old_data: folder of the tokens that `init_from` was trained on; with it, its `held_out_split` tells what is
            forgotten.
        device: where the model is trained; None takes a GPU if there is one.
        world_model: the architecture without `init_from`, which has its own.
    """

    data: FilePath
    train_split: Text
    held_out_split: Text
    max_frames: Count | None
    old_data: FilePath | None
    device: Device | None
    world_model: WorldModelSize

    @model_validator(mode="after")
    def _whole_matrices(self) -> Self:
        if self.muon is not None and self.adapter.rank is not None:
            raise ValueError(f"muon: expected null with adapter.rank={self.adapter.rank}, got {self.muon}")
        return self
