"""The ACT-Estimator: it classifies the maneuver of a video and estimates the path of its camera.

The published estimator (huggingface.co/turing-motors/ACT-Estimator, weights CC-BY-NC-SA-4.0) loads from its folder or
Hub id without its remote code. Its source gives the architecture and all sizes (20,405,547 parameters). That its
tensors' names begin with "model." is inferred: it was saved inside a wrapper with that attribute; both forms load. The
published code has some oddities, with which the weights were trained; they are kept, each with a comment.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, Self

import torch
from einops import rearrange
from jaxtyping import Float, UInt8
from pydantic import ConfigDict, Field, model_validator
from torch import Tensor, nn
from torch.nn import functional as F

from terra.act_bench.i3d import CHANNELS, TIME_STRIDE, inception_i3d
from terra.errors import CheckpointError, EngineError
from tokenizer.checkpoint import CONFIG_NAME, load_tensors, read_config, read_layout, verify_layout
from tokenizer.settings import Settings, checked

MODEL_TYPE = "ACT-Estimator"
FPS = 10.0
_WRAPPER = "model."
_ENCODER_WIDTH, _ENCODER_LAYERS = 512, 2

Frames = Annotated[int, Field(ge=1, le=1024)]
Side = Annotated[int, Field(ge=1, le=1024)]
Classes = Annotated[int, Field(ge=1, le=1024)]
Width = Annotated[int, Field(ge=1, le=8192)]
Heads = Annotated[int, Field(ge=1, le=256)]
Cells = Annotated[int, Field(ge=1, le=16)]


class ActEstimatorConfig(Settings):
    """The size of an ACT-Estimator; by default that of the published one.

    Attributes:
        num_frames: number of a video's frames; videos of other lengths are not accepted.
        side: side of the square frames, in pixels.
        num_classes: number of maneuvers.
        d_model, num_heads: width and heads of the attention.
        feature_map_size: cells along each side of the pooled feature map.
    """

    num_frames: Frames = 44
    side: Side = 224
    num_classes: Classes = 9
    d_model: Width = 512
    num_heads: Heads = 8
    feature_map_size: Cells = 4

    @model_validator(mode="after")
    def _heads(self) -> Self:
        if self.d_model % (2 * self.num_heads):
            raise ValueError(f"d_model: expected a multiple of 2 num_heads = {2 * self.num_heads}, got {self.d_model}")
        return self

    @property
    def memory_length(self) -> int:
        """Length of the memory that the attention reads: cells in time and space."""
        return -(-self.num_frames // TIME_STRIDE) * self.feature_map_size**2

    @classmethod
    def load(cls, path: Path) -> Self:
        """Read the published config.json; its other keys (the class names of the remote code) are ignored.

        Raises:
            CheckpointError: the file is missing or another model's, or a value is missing or not allowed.
        """
        content = read_config(path)
        if content.get("model_type") != MODEL_TYPE:
            raise CheckpointError(
                f"{path}: expected the model_type {MODEL_TYPE}, got {content.get('model_type')!r:.80}"
            )
        published = checked(_PublishedConfig, content, str(path), CheckpointError)
        sizes = {name: getattr(published, name) for name in cls.model_fields if name in content}
        sizes |= {"num_frames": published.max_seq_len, "side": published.input_shape[3]}
        return checked(cls, sizes, str(path), CheckpointError)


class _PublishedConfig(Settings):
    """The keys of the published config.json that say something about the architecture."""

    model_config = ConfigDict(extra="ignore")

    input_shape: Annotated[tuple[Literal[3], Frames, Side, Side], Field(strict=False)]
    num_classes: Classes
    max_seq_len: Frames
    timestamp_dim: Literal[1]
    d_model: Width
    num_heads: Heads
    feature_map_size: Cells

    @model_validator(mode="after")
    def _square(self) -> Self:
        _, frames, height, width = self.input_shape
        if frames != self.max_seq_len or height != width:
            raise ValueError(f"input_shape: expected [3, max_seq_len, side, side], got {list(self.input_shape)}")
        return self


@dataclass(frozen=True)
class Estimates:
    """The estimator's outputs for a batch of videos, float32 on the CPU.

    Attributes:
        commands: a logit for each maneuver.
        waypoints: the camera's position at each frame, [right, forward] in meters, (0, 0) at the first frame.
    """

    commands: Float[Tensor, "batch classes"]
    waypoints: Float[Tensor, "batch frames 2"]


class ActEstimator(nn.Module):
    """Video features, attention over them, a classifier, and a recurrent decoder of the path; for inference."""

    def __init__(self, config: ActEstimatorConfig) -> None:
        super().__init__()
        self.config = config
        width = config.d_model
        self.backbone = inception_i3d()
        self.squeeze_linear = nn.Linear(CHANNELS, width)
        self.positional_encoding = _SinePositions(config.memory_length, width)
        layer = nn.TransformerEncoderLayer(
            width, config.num_heads, dim_feedforward=_ENCODER_WIDTH, activation=F.gelu, batch_first=True
        )
        self.self_attn = nn.TransformerEncoder(layer, _ENCODER_LAYERS)
        self.classifier = nn.Sequential(
            nn.Linear(width, width), nn.Dropout(0.1), nn.GELU(), nn.Linear(width, config.num_classes)
        )
        self.visual_odmetry = _PathDecoder(config)  # the published spelling

    def forward(
        self, frames: Float[Tensor, "batch 3 frames side side"]
    ) -> tuple[Float[Tensor, "batch classes"], Float[Tensor, "batch frames 2"]]:
        """Logits of the maneuvers, and waypoints, from frames in [0, 1] at 10 per second, of the configured sizes."""
        size = self.config.feature_map_size
        x = F.adaptive_avg_pool3d(self.backbone(frames), (-(-self.config.num_frames // TIME_STRIDE), size, size))
        # The published model reshapes here instead of moving the channels to the end, so that each memory entry holds
        # 1024 values of one or two channels. The weights were trained this way.
        x = x.reshape(len(x), self.config.memory_length, CHANNELS)
        x = self.self_attn(self.positional_encoding(self.squeeze_linear(x)))
        return self.classifier(x.mean(dim=1)), self.visual_odmetry(x)

    @torch.inference_mode()
    def estimate(self, videos: UInt8[Tensor, "batch 3 frames side side"], dtype: torch.dtype) -> Estimates:
        """Estimate maneuver and path of 8-bit videos.

        Args:
            videos: clips from `terra.act_bench.videos.read_clip`, on any device.
            dtype: data type of the computation, by autocast unless it is float32. The published scores used bfloat16.

        Raises:
            EngineError: the outputs are not finite.
        """
        device = self.squeeze_linear.weight.device
        frames = videos.to(device).float() / 255
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            commands, waypoints = (output.float().cpu() for output in self(frames))
        if not (commands.isfinite().all() and waypoints.isfinite().all()):
            raise EngineError(
                f"estimator: expected finite numbers, got others in {dtype} (damaged weights, or float16?)"
            )
        return Estimates(commands, waypoints)

    @classmethod
    def check(cls, folder: Path) -> ActEstimatorConfig:
        """Compare a folder's configuration, names and shapes with the architecture, without loading weights.

        Raises:
            CheckpointError: files missing, damaged or of another model.
        """
        config = ActEstimatorConfig.load(folder / CONFIG_NAME)
        with torch.device("meta"):
            expected = cls(config).state_dict()
        prefix = _prefix(folder)
        verify_layout(folder, {prefix + name: tuple(tensor.shape) for name, tensor in expected.items()})
        return config

    @classmethod
    def from_pretrained(cls, folder: Path) -> Self:
        """Read a folder of config.json and safetensors, in evaluation mode, float32 on the CPU.

        Raises:
            CheckpointError: see `check`.
        """
        model = cls(cls.check(folder))
        prefix = _prefix(folder)
        model.load_state_dict({name.removeprefix(prefix): tensor for name, tensor in load_tensors(folder).items()})
        return model.eval().requires_grad_(False)


class _SinePositions(nn.Module):
    """Adds sinusoidal positions (Vaswani et al. 2017, arXiv 1706.03762, section 3.5), stored with the weights."""

    def __init__(self, length: int, width: int) -> None:
        super().__init__()
        rates = torch.exp(torch.arange(0, width, 2) * (-math.log(10000.0) / width))
        angles = torch.arange(length)[:, None] * rates
        self.pe: Tensor
        self.register_buffer("pe", rearrange([angles.sin(), angles.cos()], "two l w -> 1 l (w two)").contiguous())

    def forward(self, x: Float[Tensor, "batch length width"]) -> Float[Tensor, "batch length width"]:
        return x + self.pe


class _CrossAttention(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self._num_heads = num_heads
        self.query_proj, self.key_proj = nn.Linear(width, width), nn.Linear(width, width)
        self.value_proj, self.out_proj = nn.Linear(width, width), nn.Linear(width, width)

    def forward(
        self, query: Float[Tensor, "batch queries width"], memory: Float[Tensor, "batch length width"]
    ) -> Float[Tensor, "batch queries width"]:
        q, k, v = (
            rearrange(each, "b l (heads w) -> b heads l w", heads=self._num_heads)
            for each in (self.query_proj(query), self.key_proj(memory), self.value_proj(memory))
        )
        return self.out_proj(rearrange(F.scaled_dot_product_attention(q, k, v), "b heads l w -> b l (heads w)"))


class _FeedForward(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.linear1, self.linear2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Float[Tensor, "batch length width"]) -> Float[Tensor, "batch length width"]:
        return self.linear2(F.gelu(self.linear1(x)))


class _MemoryReader(nn.Module):
    """Transforms the memory conditioned on the decoder's state, by cross-attention."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.pre_norm0, self.pre_norm1, self.pre_norm2 = (nn.LayerNorm(width) for _ in range(3))
        self.self_attention = nn.MultiheadAttention(width, num_heads, batch_first=True)
        self.cross_attention = _CrossAttention(width, num_heads)
        self.ffn = _FeedForward(width, width // 2)

    def forward(
        self, state: Float[Tensor, "batch width"], memory: Float[Tensor, "batch length width"]
    ) -> Float[Tensor, "batch length width"]:
        # The single query's output is added to every entry of the memory.
        x = memory + self.cross_attention(state[:, None], self.pre_norm1(memory))
        y = self.pre_norm0(x)
        x = x + self.self_attention(y, y, y, need_weights=False)[0]
        return x + self.ffn(self.pre_norm2(x))


class _PathDecoder(nn.Module):
    """Decodes the path frame by frame with a GRU; each waypoint is the previous one plus a predicted step."""

    def __init__(self, config: ActEstimatorConfig) -> None:
        super().__init__()
        width = config.d_model
        self._num_frames = config.num_frames
        self.hidden_state = nn.Parameter(torch.randn(1, width))
        self.pos_embedding = nn.Parameter(torch.randn(1, config.memory_length, width))
        self.pre_gru_layer = _MemoryReader(width, config.num_heads)
        self.gru = nn.GRUCell(2 + width + 1, width)
        self.head = nn.Sequential(nn.Linear(width, width // 2), nn.Dropout(0.1), nn.ReLU(), nn.Linear(width // 2, 2))

    def forward(self, memory: Float[Tensor, "batch length width"]) -> Float[Tensor, "batch frames 2"]:
        batch = len(memory)
        memory = memory + self.pos_embedding.to(memory.dtype)
        state = self.hidden_state.to(memory.dtype).expand(batch, -1)
        place = memory.new_zeros(batch, 2)
        waypoints = [place]
        # The step to a frame gets the time of the previous frame, from 0 s.
        for seconds in (torch.arange(self._num_frames - 1) / FPS).tolist():
            seen = self.pre_gru_layer(state, memory).mean(dim=1)
            state = self.gru(torch.cat([place, seen, seen.new_full((batch, 1), seconds)], dim=1), state)
            place = place + self.head(state)
            waypoints.append(place)
        return torch.stack(waypoints, dim=1)


def _prefix(folder: Path) -> str:
    return _WRAPPER if all(name.startswith(_WRAPPER) for name in read_layout(folder)) else ""
