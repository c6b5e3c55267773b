"""Decode steps by Triton kernels, captured as CUDA graphs."""

from collections.abc import Callable, Sequence

from jaxtyping import Float, Int64
from torch import Tensor

from terra.engine.graph import cuda_graph
from terra.engine.graph.kernels import attention, epilogues, gemm, rope, sampling
from terra.engine.graph.kernels.launch import DeviceLimits
from terra.engine.graph.kv_cache import KVTarget
from terra.engine.graph.quantization import Matrix
from terra.engine.graph.slots import Batch, Capture
from terra.engine.graph.weights import DecoderWeights, Layer, Norm


class TritonBackend:
    """A `terra.engine.graph.step.Backend` of Triton kernels, which is batch-invariant: each token's arithmetic is the
    same whatever else is in the batch, so tokens are the same to the bit alone, beside others, and with drafts.

    Args:
        limits: of the GPU.
        capture: how repeated work is kept; the default needs a GPU.
    """

    def __init__(self, limits: DeviceLimits, capture: Capture = cuda_graph.capture) -> None:
        self._limits, self._capture = limits, capture

    def embed(self, weights: DecoderWeights, batch: Batch) -> Float[Tensor, "slots width hidden"]:
        """See `terra.engine.graph.step.Backend`."""
        return sampling.embed(
            batch.ids, batch.start, batch.action_embeddings, weights.token_embedding, weights.position_embeddings,
            weights.layout.image_tokens, batch.width, self._limits,
        )  # fmt: skip

    def rms_norm(self, states: Tensor, norm: Norm) -> Tensor:
        """See `terra.engine.graph.weights.LayerOps`."""
        return epilogues.rms_norm(states, norm, self._limits)

    def attention(self, hidden: Tensor, layer: Layer, target: KVTarget) -> Tensor:
        """See `terra.engine.graph.weights.LayerOps`.

        With one token a slot RoPE is a part of the attention kernel, unless slots share keys.
        """
        parts = gemm.split_k_gemm(hidden, layer.qkv, self._limits)
        scale = layer.output.input_scale
        if hidden.shape[1] == 1 and target.shared is None:
            return attention.rope_store_attention(parts, target, self._limits, scale)
        queries = rope.rope_and_store(parts, target, self._limits)
        return attention.cached_attention(queries, target, self._limits, scale)

    def attention_output_and_mlp(
        self, attended: Tensor, states: Tensor, layer: Layer, next_norm: Norm
    ) -> tuple[Tensor, Tensor]:
        """See `terra.engine.graph.weights.LayerOps`."""
        parts = gemm.split_k_gemm(attended.flatten(2), layer.output, self._limits)
        states, hidden = epilogues.add_rms_norm(states, parts, layer.norm, self._limits)
        inner = gemm.gated_gemm(hidden, layer.gate_up, self._limits, layer.down.input_scale)
        parts = gemm.split_k_gemm(inner, layer.down, self._limits)
        return epilogues.add_rms_norm(states, parts, next_norm, self._limits)

    def logits(self, hidden: Tensor, lm_head: Matrix) -> Float[Tensor, "slots width vocab"]:
        """See `terra.engine.graph.step.Backend`."""
        return gemm.lm_head_gemm(hidden, lm_head, self._limits)

    def sample(self, logits: Float[Tensor, "tokens vocab"], batch: Batch) -> Int64[Tensor, " tokens"]:
        """See `terra.engine.graph.step.Backend`."""
        return sampling.sample(logits, batch.temperature, batch.seed, batch.start, self._limits)

    def sample_and_accept(self, logits: Float[Tensor, "tokens vocab"], weights: DecoderWeights, batch: Batch) -> None:
        """See `terra.engine.graph.step.Backend`."""
        layout, passes = weights.layout, batch.passes
        sampling.gumbel_argmax(logits, batch.temperature, batch.seed, batch.start, batch.best, self._limits)
        sampling.accept(
            batch.best, batch.ids, batch.start, batch.last, passes, layout.block, layout.image_tokens, self._limits
        )

    def capture(self, work: Callable[[], None], mutated: Sequence[Tensor]) -> Callable[[], None]:
        """See `terra.engine.graph.step.Backend`."""
        return self._capture(work, mutated)
