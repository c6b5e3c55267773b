"""Triton kernels at both ends of a pass: tokens become states, logits become tokens.

A token is picked as `terra.sampling.sample_tokens` does it without filters. Programs that see a part of the vocabulary
put the best they find into one number, of which the largest stays: the noisy logit above, the token below it.
"""

# A kernel's launch is beyond the type checker.
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float32, Int64
from torch import Tensor

from terra.engine.graph.launch import launched_early, processors, wait_for_inputs
from terra.world_model.positions import SpatioTemporalPositions

NOTHING = torch.iinfo(torch.int64).min
"""What stands where nothing has been picked yet."""

# Of a pick from logits: tokens that a program sees at once, its warps, and how many of them a multiprocessor gets, if
# there is enough to do.
_BLOCK = 256
_WARPS = 1
_PROGRAMS = 32


@dataclass(frozen=True)
class Draws:
    """How lanes pick; at temperature 0 without noise. `start` is the position of their first row."""

    temperature: Float32[Tensor, " lanes"]
    seed: Int64[Tensor, " lanes"]
    start: Int64[Tensor, " lanes"]


@triton.jit
def _embed(
    ids, start, slot_rows, token_table, spatio_table, temporal_table, positions, states,
    width, length, image_tokens, block, slots, frames,
    COLUMNS: tl.constexpr, PADDED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One row: a token's embedding or that of an action slot, with those of its place and frame."""
    wait_for_inputs(EARLY)
    lane, step = tl.program_id(0), tl.program_id(1)
    position = tl.load(start + lane) + step
    frame, place = position // block, position % block
    column = tl.arange(0, PADDED)
    used = column < COLUMNS
    if place < image_tokens:
        state = tl.load(token_table + tl.load(ids + lane * length + position) * COLUMNS + column, mask=used)
    else:
        slot = tl.minimum(frame * (block - image_tokens) + place - image_tokens, slots - 1)
        state = tl.load(slot_rows + (lane * slots + slot) * COLUMNS + column, mask=used)
    where = tl.load(spatio_table + place * COLUMNS + column, mask=used)
    where += tl.load(temporal_table + tl.minimum(frame, frames - 1) * COLUMNS + column, mask=used)
    row = (lane * width + step).to(tl.int64)
    tl.store(positions + row, position)
    tl.store(states + row * COLUMNS + column, state + where, mask=used)


def embed(
    ids: Int64[Tensor, "lanes length"],
    start: Int64[Tensor, " lanes"],
    slot_rows: Float[Tensor, "lanes slots hidden"],
    table: Float[Tensor, "vocab hidden"],
    places: SpatioTemporalPositions,
    image_tokens: int,
    width: int,
) -> tuple[Int64[Tensor, "lanes width"], Float[Tensor, "lanes width hidden"]]:
    """Positions and states of `width` tokens of each lane from its `start` on; action slots have rows of their own."""
    (lanes, slots, hidden), spatio, temporal = slot_rows.shape, places.spatio_embeddings, places.temporal_embeddings
    positions = torch.empty(lanes, width, dtype=torch.int64, device=ids.device)
    states = torch.empty(lanes, width, hidden, dtype=table.dtype, device=ids.device)
    _embed[(lanes, width)](
        ids, start, slot_rows, table, spatio.weight, temporal.weight, positions, states,
        width, ids.stride(0), image_tokens, spatio.num_embeddings, slots, temporal.num_embeddings,
        COLUMNS=hidden, PADDED=triton.next_power_of_2(hidden), **launched_early(ids.device),
    )  # fmt: skip
    return positions, states


@triton.jit
def _uniform(key, token):
    """What `terra.noise.gumbel_noise` makes of a position's key and tokens: above 0, below 1."""
    return tl.maximum(tl.rand(key, token), 4.6566127342e-10)


@triton.jit
def _gumbel(uniform):
    """`terra.noise.gumbel_noise` of such numbers."""
    left = 1.0 - uniform
    # log(1 + x) of small x, exactly: log(w) x / (w - 1) with w = 1 + x rounded (Goldberg 1991, theorem 4).
    log = tl.where(left == 1.0, -uniform, tl.log(left) * (uniform / (1.0 - left)))
    return -tl.log(-log)


@triton.jit
def _most(scaled, uniform):
    """No less than a scaled logit plus `_gumbel`, however that is rounded, and 0.06 above it at most where u is small.

    -log(-log(1 - u)) <= -log(u), and log2(u) is no less than its bits as a number: between powers of two it is concave.
    The noise is below 22; 1e-4 and 2e-6 are 50 and 16 units in the last place of it and of the logit.
    """
    bits = uniform.to(tl.int32, bitcast=True).to(tl.float32)
    return scaled + (88.0298 - 8.262958e-8 * bits) + 2e-6 * tl.abs(scaled)


@triton.jit
def _ranked(value, token):
    """A number that is larger for a larger value, and of equals for the lower token."""
    bits = value.to(tl.int32, bitcast=True)
    order = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    return order * 4294967296 + (2147483647 - token)


@triton.jit
def _pick(
    logits, temperatures, seeds, start, best, vocab, width, size, BLOCK: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """Of a row, the best of a part of the vocabulary."""
    wait_for_inputs(EARLY)
    row, part = tl.program_id(0), tl.program_id(1)
    lane = row // width
    temperature = tl.load(temperatures + lane)
    key = tl.randint(tl.load(seeds + lane), tl.load(start + lane) + row % width).to(tl.uint32, bitcast=True)
    inverse = 1.0 / tl.where(temperature > 0.0, temperature, 1.0)
    highest, first = float("-inf"), 0
    for at in range(part * size, part * size + size, BLOCK):
        token = at + tl.arange(0, BLOCK)
        within = token < vocab
        value = tl.load(logits + row.to(tl.int64) * vocab + token, mask=within, other=0.0).to(tl.float32)
        uniform = value
        most = value
        if temperature > 0.0:
            uniform = _uniform(key, token)
            most = _most(value * inverse, uniform)
        # Most blocks hold nothing that could be the best, and need no exact logarithms.
        if tl.max(tl.where(within, most, float("-inf")), 0) > highest:
            if temperature > 0.0:
                value = tl.div_rn(value, temperature) + _gumbel(uniform)
            value = tl.where(within, value, float("-inf"))
            top = tl.max(value, 0)
            if top > highest:
                highest, first = top, tl.min(tl.where(value == top, token, 2147483647), 0)
    tl.atomic_max(best + row, _ranked(highest, first))


def pick(logits: Float[Tensor, "tokens vocab"], draws: Draws, best: Int64[Tensor, " tokens"]) -> None:
    """Put the best of each row, which belong to the lanes in turn, into `best`, if it is better than what is there."""
    tokens, vocab = logits.shape
    blocks = triton.cdiv(vocab, _BLOCK)
    each = min(blocks, triton.cdiv(blocks * tokens, _PROGRAMS * processors(logits.device)))
    _pick[(tokens, triton.cdiv(blocks, each))](
        logits, draws.temperature, draws.seed, draws.start, best, vocab, tokens // len(draws.start), each * _BLOCK,
        BLOCK=_BLOCK, num_warps=_WARPS, **launched_early(logits.device),
    )  # fmt: skip


def picked(logits: Float[Tensor, "tokens vocab"], draws: Draws) -> Int64[Tensor, " tokens"]:
    """The best token of each row, which belong to the lanes in turn."""
    best = torch.full((len(logits),), NOTHING, dtype=torch.int64, device=logits.device)
    pick(logits, draws, best)
    return torch.iinfo(torch.int32).max - (best & 0xFFFFFFFF)


@triton.jit
def _accept(
    best, ids, start, last, width, length, block, image_tokens, PADDED: tl.constexpr, EARLY: tl.constexpr
):  # fmt: skip
    """One lane: what `terra.engine.graph.lanes.accept` does. What was best is forgotten."""
    wait_for_inputs(EARLY)
    lane = tl.program_id(0)
    step = tl.arange(0, PADDED)
    used = step < width
    found = tl.load(best + lane * width + step, mask=used, other=0)
    tl.store(best + lane * width + step, tl.full([PADDED], -9223372036854775808, tl.int64), mask=used)
    picked = 2147483647 - (found & 0xFFFFFFFF)
    first, limit = tl.load(start + lane), tl.load(last + lane)
    following = first + 1 + step
    place = ids + lane * length + following
    draft = tl.load(place, mask=used, other=0)
    at_image = following % block < image_tokens
    right = (draft == picked) | (at_image == 0)
    certain = tl.min(tl.where(right & (step < width - 1), width - 1, tl.minimum(step, width - 1)), 0)
    tl.store(place, picked, mask=used & at_image & (following <= limit))
    tl.store(start + lane, tl.minimum(first + certain + 1, limit))


def accept(
    best: Int64[Tensor, " tokens"],
    ids: Int64[Tensor, "lanes length"],
    start: Int64[Tensor, " lanes"],
    last: Int64[Tensor, " lanes"],
    block: int,
    image_tokens: int,
) -> None:
    """`terra.engine.graph.lanes.accept` in all lanes of what was picked; `best` is cleared."""
    width = len(best) // len(ids)
    _accept[(len(ids),)](
        best, ids, start, last, width, ids.stride(0), block, image_tokens,
        PADDED=triton.next_power_of_2(width), num_warps=1, **launched_early(best.device),
    )  # fmt: skip
