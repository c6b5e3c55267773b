"""The two ends of a decode step: tokens become states, and logits become tokens, which accept drafts.

A token is sampled as `terra.sampling.sample_tokens` samples it without filters: the largest sum of logit and Gumbel
noise (greedily without noise). CTAs that see a part of the vocabulary put the best they find into one 64-bit number by
an atomic maximum: the noisy logit in the upper half, the token in the lower half.
"""

# A kernel's launch is beyond the type checker.
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from terra.engine.graph.kernels.launch import DeviceLimits, wait_for_inputs
from terra.engine.graph.slots import NO_TOKEN
from terra.world_model.positions import SpatioTemporalPositions

_BLOCK = 256  # tokens that a CTA looks at together
_WARPS = 1
_CTAS_PER_SM = 32  # if there is enough to do


@triton.jit
def _embed(
    ids, start, action_embeddings, token_table, spatio_table, temporal_table, states,
    width, length, image_tokens, block, action_slots, frames,
    COLUMNS: tl.constexpr, PADDED: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One state: a token's or an action slot's embedding, plus those of its position in the frame and of the frame."""
    wait_for_inputs(PDL)
    slot, step = tl.program_id(0), tl.program_id(1)
    position = tl.load(start + slot) + step
    frame, pos_in_block = position // block, position % block
    column = tl.arange(0, PADDED)
    used = column < COLUMNS
    if pos_in_block < image_tokens:
        state = tl.load(token_table + tl.load(ids + slot * length + position) * COLUMNS + column, mask=used)
    else:
        action_slot = tl.minimum(frame * (block - image_tokens) + pos_in_block - image_tokens, action_slots - 1)
        state = tl.load(action_embeddings + (slot * action_slots + action_slot) * COLUMNS + column, mask=used)
    where = tl.load(spatio_table + pos_in_block * COLUMNS + column, mask=used)
    where += tl.load(temporal_table + tl.minimum(frame, frames - 1) * COLUMNS + column, mask=used)
    row = (slot * width + step).to(tl.int64)
    tl.store(states + row * COLUMNS + column, state + where, mask=used)


def embed(
    ids: Int64[Tensor, "slots length"],
    start: Int64[Tensor, " slots"],
    action_embeddings: Float[Tensor, "slots action_slots hidden"],
    token_embedding: Float[Tensor, "vocab hidden"],
    position_embeddings: SpatioTemporalPositions,
    image_tokens: int,
    width: int,
    limits: DeviceLimits,
) -> Float[Tensor, "slots width hidden"]:
    """`terra.engine.graph.reference.embed` of `width` tokens a slot, from `start` on."""
    slots, action_slots, hidden = action_embeddings.shape
    spatio, temporal = position_embeddings.spatio_embeddings, position_embeddings.temporal_embeddings
    states = torch.empty(slots, width, hidden, dtype=token_embedding.dtype, device=ids.device)
    _embed[(slots, width)](
        ids, start, action_embeddings, token_embedding, spatio.weight, temporal.weight, states,
        width, ids.stride(0), image_tokens, spatio.num_embeddings, action_slots, temporal.num_embeddings,
        COLUMNS=hidden, PADDED=triton.next_power_of_2(hidden), **limits.launch_options,
    )  # fmt: skip
    return states


@triton.jit
def _uniform(key, token):
    """The uniform numbers in (0, 1) of `terra.noise.gumbel_noise` from a position's key and tokens."""
    return tl.maximum(tl.rand(key, token), 4.6566127342e-10)


@triton.jit
def _gumbel(uniform):
    """The noise of `terra.noise.gumbel_noise` from its uniform numbers."""
    left = 1.0 - uniform
    # log(1 + x) of small x, exactly: log(w) x / (w - 1) with w = 1 + x rounded (Goldberg 1991, theorem 4).
    log = tl.where(left == 1.0, -uniform, tl.log(left) * (uniform / (1.0 - left)))
    return -tl.log(-log)


@triton.jit
def _gumbel_upper_bound(scaled, uniform):
    """A bound of a scaled logit plus `_gumbel`, however that is rounded, and 0.06 above it at most where u is small.

    -log(-log(1 - u)) <= -log(u), and log2(u) is no less than its bits as a number: between powers of two it is concave.
    The noise is below 22; 1e-4 and 2e-6 are 50 and 16 units in the last place of it and of the logit.
    """
    bits = uniform.to(tl.int32, bitcast=True).to(tl.float32)
    return scaled + (88.0298 - 8.262958e-8 * bits) + 2e-6 * tl.abs(scaled)


@triton.jit
def _pack_score_and_id(score, token):
    """A number that is larger for a larger score, and among equal scores for the lower token."""
    bits = score.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return order * 4294967296 + (2147483647 - token)


@triton.jit
def _gumbel_argmax(
    logits, temperatures, seeds, start, best, vocab, width, size, BLOCK: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One token's best of a part of the vocabulary."""
    wait_for_inputs(PDL)
    row, part = tl.program_id(0), tl.program_id(1)
    slot = row // width
    temperature = tl.load(temperatures + slot)
    key = tl.randint(tl.load(seeds + slot), tl.load(start + slot) + row % width).to(tl.uint32, bitcast=True)
    inverse = 1.0 / tl.where(temperature > 0.0, temperature, 1.0)
    highest, first = float("-inf"), 0
    for at in range(part * size, part * size + size, BLOCK):
        token = at + tl.arange(0, BLOCK)
        within = token < vocab
        value = tl.load(logits + row.to(tl.int64) * vocab + token, mask=within, other=0.0).to(tl.float32)
        uniform = value
        bound = value
        if temperature > 0.0:
            uniform = _uniform(key, token)
            bound = _gumbel_upper_bound(value * inverse, uniform)
        # Most blocks hold nothing that could be the best, and need no exact logarithms.
        if tl.max(tl.where(within, bound, float("-inf")), 0) > highest:
            if temperature > 0.0:
                value = tl.div_rn(value, temperature) + _gumbel(uniform)
            value = tl.where(within, value, float("-inf"))
            top = tl.max(value, 0)
            if top > highest:
                highest, first = top, tl.min(tl.where(value == top, token, 2147483647), 0)
    tl.atomic_max(best + row, _pack_score_and_id(highest, first))


def gumbel_argmax(
    logits: Float[Tensor, "tokens vocab"],
    temperature: Float32[Tensor, " slots"],
    seed: Int64[Tensor, " slots"],
    start: Int64[Tensor, " slots"],
    best: Int64[Tensor, " tokens"],
    limits: DeviceLimits,
) -> None:
    """Put the samples of `terra.engine.graph.reference.sample`, packed with their scores, into `best`.

    `best` must hold `NO_TOKEN`: a larger number that is left there would win.
    """
    tokens, vocab = logits.shape
    blocks = triton.cdiv(vocab, _BLOCK)
    each = min(blocks, triton.cdiv(blocks * tokens, _CTAS_PER_SM * limits.num_sms))
    _gumbel_argmax[(tokens, triton.cdiv(blocks, each))](
        logits, temperature, seed, start, best, vocab, tokens // len(start), each * _BLOCK,
        BLOCK=_BLOCK, num_warps=_WARPS, **limits.launch_options,
    )  # fmt: skip


def sample(
    logits: Float[Tensor, "tokens vocab"],
    temperature: Float32[Tensor, " slots"],
    seed: Int64[Tensor, " slots"],
    start: Int64[Tensor, " slots"],
    limits: DeviceLimits,
) -> Int64[Tensor, " tokens"]:
    """`terra.engine.graph.reference.sample`."""
    best = torch.full((len(logits),), NO_TOKEN, dtype=torch.int64, device=logits.device)
    gumbel_argmax(logits, temperature, seed, start, best, limits)
    return unpack_ids(best)


def unpack_ids(best: Int64[Tensor, " tokens"]) -> Int64[Tensor, " tokens"]:
    """The tokens of packed scores and tokens."""
    return torch.iinfo(torch.int32).max - (best & 0xFFFFFFFF)


@triton.jit
def _accept(
    best, ids, start, last, passes, width, length, block, image_tokens, PADDED: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """One slot of `accept`. The last kernel of a pass: it alone writes `start`, and leaves NO_TOKEN in `best`."""
    wait_for_inputs(PDL)
    slot = tl.program_id(0)
    step = tl.arange(0, PADDED)
    used = step < width
    found = tl.load(best + slot * width + step, mask=used, other=0)
    tl.store(best + slot * width + step, tl.full([PADDED], -9223372036854775808, tl.int64), mask=used)
    sampled = 2147483647 - (found & 0xFFFFFFFF)
    first, limit = tl.load(start + slot), tl.load(last + slot)
    following = first + 1 + step
    at = ids + slot * length + following
    draft = tl.load(at, mask=used, other=0)
    is_image = following % block < image_tokens
    right = (draft == sampled) | (is_image == 0)
    num_accepted = tl.min(tl.where(right & (step < width - 1), width - 1, tl.minimum(step, width - 1)), 0)
    written = used & is_image & (following <= limit)
    tl.store(at, sampled, mask=written)
    tl.store(at + block, sampled, mask=written & (step + block >= width))
    end = tl.minimum(first + num_accepted + 1, limit)
    tl.store(start + slot, end)
    num_tokens = tl.sum((used & is_image & (following <= end)).to(tl.int32), 0)
    tl.atomic_add(passes + num_tokens, 1, mask=first < limit)


def accept(
    best: Int64[Tensor, " tokens"],
    ids: Int64[Tensor, "slots length"],
    start: Int64[Tensor, " slots"],
    last: Int64[Tensor, " slots"],
    passes: Int64[Tensor, " counts"],
    block: int,
    image_tokens: int,
    limits: DeviceLimits,
) -> None:
    """`terra.engine.graph.reference.accept` in all slots of what `gumbel_argmax` put into `best`; `best` is cleared."""
    width = len(best) // len(ids)
    _accept[(len(ids),)](
        best, ids, start, last, passes, width, ids.stride(0), block, image_tokens,
        PADDED=triton.next_power_of_2(width), num_warps=1, **limits.launch_options,
    )  # fmt: skip
