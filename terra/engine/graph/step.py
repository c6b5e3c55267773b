"""One decode step: some tokens of every slot of a batch go through the decoder, and samples and drafts are compared.

A step reads the same number of tokens in each slot, from the first one on that is not in the KV cache: at least one
that is certain, and drafts, which are the tokens that the step before sampled there, else the previous frame's (Jacobi
decoding, see `terra.engine.jacobi`). What a step is made of is computed by a `Backend`: Triton kernels on a GPU, torch
elsewhere and as the reference.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from terra.engine.graph import reference
from terra.engine.graph.kv_cache import KVTarget
from terra.engine.graph.quantization import Matrix, linear
from terra.engine.graph.slots import Batch, Slots
from terra.engine.graph.transfers import mark
from terra.engine.graph.weights import DecoderWeights, Layer, LayerOps
from terra.sampling import SamplingParams, sample_tokens


class Backend(LayerOps, Protocol):
    """The operations of a decode step. Every backend gives the same tokens, up to the rounding of logits."""

    def embed(self, weights: DecoderWeights, batch: Batch) -> Float[Tensor, "slots width hidden"]:
        """States of the batch's tokens, from each slot's `start` on."""
        ...

    def logits(self, hidden: Tensor, lm_head: Matrix) -> Float[Tensor, "slots width vocab"]:
        """The lm head's product."""
        ...

    def sample(self, logits: Float[Tensor, "tokens vocab"], batch: Batch) -> Int64[Tensor, " tokens"]:
        """Samples without filters, each slot at its own temperature."""
        ...

    def sample_and_accept(self, logits: Float[Tensor, "tokens vocab"], weights: DecoderWeights, batch: Batch) -> None:
        """`sample`, and `terra.engine.graph.reference.accept` of the samples in all slots."""
        ...

    def capture(self, work: Callable[[], None], mutated: Sequence[Tensor]) -> Callable[[], None]:
        """The same work for repeated calls, see `terra.engine.graph.cuda_graph.capture`."""
        ...


class TorchBackend:
    """Decode steps by torch, operation by operation."""

    rms_norm = staticmethod(reference.rms_norm)
    attention_output_and_mlp = staticmethod(reference.attention_output_and_mlp)

    def attention(self, hidden: Tensor, layer: Layer, target: KVTarget) -> Tensor:
        """See `terra.engine.graph.weights.LayerOps`."""
        queries = reference.rope_and_store(linear(hidden, layer.qkv), target)
        return reference.cached_attention(queries, target, layer.output.input_scale)

    def embed(self, weights: DecoderWeights, batch: Batch) -> Float[Tensor, "slots width hidden"]:
        """See `Backend`."""
        return reference.embed(weights, batch.ids, batch.action_embeddings, batch.positions)

    def logits(self, hidden: Tensor, lm_head: Matrix) -> Float[Tensor, "slots width vocab"]:
        """See `Backend`."""
        return linear(hidden, lm_head)

    def sample(self, logits: Float[Tensor, "tokens vocab"], batch: Batch) -> Int64[Tensor, " tokens"]:
        """See `Backend`."""
        return reference.sample(logits, batch.temperature, batch.seed, batch.start)

    def sample_and_accept(self, logits: Float[Tensor, "tokens vocab"], weights: DecoderWeights, batch: Batch) -> None:
        """See `Backend`."""
        everywhere = torch.ones(len(batch.ids), dtype=torch.bool, device=batch.ids.device)
        _accept(self.sample(logits, batch), weights, batch, everywhere)

    def capture(self, work: Callable[[], None], mutated: Sequence[Tensor]) -> Callable[[], None]:
        """The work as it is."""
        return work


class DecodeSteps:
    """The decode steps over a number of slots, each built (on a GPU: captured) at its first use and kept.

    A step goes over the first 1, 4, 16, ... or all slots, so that few of them have to be captured. There are two kinds:
    one where all slots sample without filters, which is a single graph from tokens to tokens; and one where some slots
    use top-k or top-p. The second kind is slower for ALL its slots: only the logits are a graph, and torch filters and
    samples them with the host's help.

    Args:
        slots: the batch.
        backend: computes the steps.
    """

    def __init__(self, slots: Slots, backend: Backend) -> None:
        self._slots, self._backend = slots, backend
        # By the number of slots, and whether some of them share a context.
        self._unfiltered: dict[tuple[int, bool], Callable[[], None]] = {}
        self._logits: dict[tuple[int, bool], tuple[Callable[[], None], Float[Tensor, "tokens vocab"]]] = {}
        self._under_way: Callable[[], None] | None = None

    def width(self, count: int) -> int:
        """Tokens that a step over the first `count` slots reads in each; many slots have fewer drafts."""
        return max(1, min(self._slots.drafts + 1, self._slots.step_tokens // self.bucket(count)))

    def bucket(self, count: int) -> int:
        """How many slots a step goes over that is needed for the first `count`."""
        size = 1
        while size < count:
            size *= 4
        return min(size, self._slots.num_slots)

    def min_steps(self, tokens_remaining: dict[int, int]) -> int:
        """How many steps at least until one of these slots has its frame: as many as if all drafts were accepted."""
        width = self.width(max(tokens_remaining) + 1)
        return min(-(-tokens // width) for tokens in tokens_remaining.values())

    @torch.no_grad()
    def run(self, slots: Sequence[int], samplings: frozenset[SamplingParams], num_steps: int) -> None:
        """Make steps over slots in which frames were begun.

        On a GPU they are under way then, and those of the call before are done: so the device is never out of work, and
        what the host gives it in between waits no longer than for two calls.
        """
        step = self.step(samplings, self.bucket(max(slots) + 1), self._slots.any_share(slots))
        for _ in range(num_steps):
            step()
        before, self._under_way = self._under_way, mark(self._slots.ids.device)
        if before:
            before()

    @torch.no_grad()
    def warm_up(self, num_context: int) -> None:
        """Build all steps without filters, and make each once, while no slot makes a frame.

        The first prefill of a context of so many frames is captured from then on.
        """
        slots = self._slots
        slots.capture_prefill(num_context, self._backend.capture)
        can_share = slots.num_slots > 1 and slots.shared_keys(slots.layout.max_frames - 1) > 0
        for count in sorted({self.bucket(count) for count in range(1, slots.num_slots + 1)}):
            for sharing in (False, True) if can_share else (False,):
                self.step(frozenset(), count, sharing)()

    def clear(self) -> None:
        """Forget the steps built so far; the next ones are built (and kernels compiled) anew."""
        self._unfiltered.clear()
        self._logits.clear()

    def step(self, samplings: frozenset[SamplingParams], count: int, shares: bool = False) -> Callable[[], None]:
        """The step over the first `count` slots, which sample in these ways.

        Without `shares` no slot that makes a frame has keys in another one; what the step computes for others is of no
        use, and is computed again when they go on.
        """
        kind = count, shares
        if not any(sampling.filters for sampling in samplings):
            if kind not in self._unfiltered:
                self._unfiltered[kind] = self._build_unfiltered(*kind)
            return self._unfiltered[kind]
        if kind not in self._logits:
            self._logits[kind] = self._build_logits(*kind)
        compute, logits = self._logits[kind]
        batch = self._slots.batch(count, self.width(count))

        def filtered() -> None:
            compute()
            self._sample_filtered(logits, batch, samplings)

        return filtered

    def _build_unfiltered(self, count: int, shares: bool) -> Callable[[], None]:
        batch = self._slots.batch(count, self.width(count))

        def step() -> None:
            self._backend.sample_and_accept(self._forward(batch, shares), self._slots.weights, batch)

        return self._backend.capture(step, [batch.ids, batch.start, batch.passes])

    def _build_logits(self, count: int, shares: bool) -> tuple[Callable[[], None], Float[Tensor, "tokens vocab"]]:
        """What fills a tensor of logits, and the tensor."""
        weights, batch = self._slots.weights, self._slots.batch(count, self.width(count))
        logits = torch.zeros(len(batch.best), weights.vocab_size, dtype=weights.dtype, device=weights.device)

        def compute() -> None:
            logits.copy_(self._forward(batch, shares))

        return self._backend.capture(compute, []), logits

    def _forward(self, batch: Batch, shares: bool) -> Float[Tensor, "tokens vocab"]:
        slots, weights = self._slots, self._slots.weights
        states = self._backend.embed(weights, batch)
        sharing = (slots.holder[batch.slots], slots.shared[batch.slots]) if shares else None
        hidden = weights.forward(states, slots.cache, batch.slots, batch.start, self._backend, sharing)
        return self._backend.logits(hidden, weights.lm_head).flatten(0, 1)

    def _sample_filtered(
        self, logits: Float[Tensor, "tokens vocab"], batch: Batch, samplings: frozenset[SamplingParams]
    ) -> None:
        positions = batch.positions.flatten()
        seeds = batch.seed.repeat_interleave(batch.width)
        for sampling in samplings:
            if sampling.filters:
                sampled = sample_tokens(logits, sampling, seeds, positions)
            else:  # the same tokens as in a batch without filters
                sampled = self._backend.sample(logits, batch)
            _accept(sampled, self._slots.weights, batch, self._slots.sampled_with[sampling][batch.slots])


def _accept(sampled: Int64[Tensor, " tokens"], weights: DecoderWeights, batch: Batch, concerned: Tensor) -> None:
    layout, by_slot = weights.layout, sampled.view(len(batch.ids), batch.width)
    reference.accept(
        batch.ids, batch.start, batch.last, batch.passes, concerned, by_slot, layout.block, layout.image_tokens
    )
