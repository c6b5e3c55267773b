"""Rotary position embedding (RoPE): of queries and keys, which with the values come as a GEMM's split-K parts."""

# A kernel's launch is beyond the type checker.
# pyright: reportArgumentType=false, reportCallIssue=false, reportIndexIssue=false

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Float32
from torch import Tensor

from terra.engine.graph.kernels.epilogues import store_pair, sum_split_k
from terra.engine.graph.kernels.launch import DeviceLimits, wait_for_inputs
from terra.engine.graph.kv_cache import KVTarget


@triton.jit
def rotate_element(element, other, cosine, sine):
    """RoPE of one element with that of the head's other half: element * cosine + other * sine.

    The fused multiply-add is called by name. A compiler may fuse either product of such a sum, and another one in each
    kernel: then the kernels that rotate one token and many tokens would differ in the last bit.
    """
    return tl.math.fma(element, cosine, other * sine)


@triton.jit
def load_angles(cosine, sine, at, half):
    """Cosines and sines of a head's first half, then of its second half; `at` is where the tables have the first."""
    return tl.load(cosine + at), tl.load(sine + at), tl.load(cosine + at + half), tl.load(sine + at + half)


@triton.jit
def rotate_pair(first, second, angles):
    """Elements of a head's two halves after RoPE."""
    cosine, sine, cosine_of_second, sine_of_second = angles
    return rotate_element(first, -second, cosine, sine), rotate_element(second, first, cosine_of_second, sine_of_second)


@triton.jit
def load_rotated(
    parts, cosine, sine, token, head, dim, used, position, tokens, features, DIM: tl.constexpr, SPLITS: tl.constexpr
):  # fmt: skip
    """Elements of a token's heads after RoPE, from a GEMM's split-K parts; the same bits as `rotate_pair`'s."""
    kind = cosine.dtype.element_ty
    feature, other = head * DIM + dim, head * DIM + (dim + DIM // 2) % DIM
    own = sum_split_k(parts, token, feature, used, tokens, features, SPLITS).to(kind)
    other = sum_split_k(parts, token, other, used, tokens, features, SPLITS).to(kind)
    other = tl.where(dim < DIM // 2, -other, other)
    cosines, sines = tl.load(cosine + position * DIM + dim), tl.load(sine + position * DIM + dim)
    return rotate_element(own, other, tl.broadcast_to(cosines, own.shape), tl.broadcast_to(sines, own.shape))


@triton.jit
def _sum_halves(parts, token, feature, used, tokens, features, half, SPLITS: tl.constexpr):
    """`sum_split_k` of features of heads' first halves, and of those of their second halves."""
    first = sum_split_k(parts, token, feature, used, tokens, features, SPLITS)
    return first, sum_split_k(parts, token, feature + half, used, tokens, features, SPLITS)


@triton.jit
def _rope_and_store(
    parts, cosine, sine, start, queries, keys, values, tokens, width, length,
    HEADS: tl.constexpr, GROUP: tl.constexpr, DIM: tl.constexpr,
    PADDED: tl.constexpr, PADDED_CACHED: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """All heads of one token: queries after RoPE; keys after RoPE and values into the cache.

    HEADS are the cache's, each shared by GROUP query heads. `start` and the tables are read before the wait: `accept`
    writes `start` at the end of the PREVIOUS graph replay.
    """
    token = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = DIM // 2
    features: tl.constexpr = (GROUP + 2) * HEADS * DIM
    low = tl.arange(0, half)[None, :]
    query = tl.arange(0, PADDED)[:, None]
    cached = tl.arange(0, PADDED_CACHED)[:, None]
    position = tl.load(start + token // width) + token % width
    of_cache = (token // width * HEADS + cached) * length
    angles = load_angles(cosine, sine, position * DIM + low, half)
    kind = queries.dtype.element_ty
    wait_for_inputs(PDL)

    used = query < GROUP * HEADS
    feature = query * DIM + low
    first, second = _sum_halves(parts, token, feature, used, tokens, features, half, SPLITS)
    first, second = rotate_pair(first.to(kind), second.to(kind), angles)
    store_pair(queries + token * (GROUP * HEADS * DIM) + feature, first, second, half, used)

    used = cached < HEADS
    feature = (GROUP * HEADS + cached) * DIM + low
    first, second = _sum_halves(parts, token, feature, used, tokens, features, half, SPLITS)
    first, second = rotate_pair(first.to(kind), second.to(kind), angles)
    store_pair(keys + (of_cache + position) * DIM + low, first, second, half, used)

    feature += HEADS * DIM
    first, second = _sum_halves(parts, token, feature, used, tokens, features, half, SPLITS)
    store_pair(values + of_cache * DIM + low * length + position, first.to(kind), second.to(kind), half * length, used)


def rope_and_store(
    parts: Float32[Tensor, "splits tokens features"], target: KVTarget, limits: DeviceLimits
) -> Float[Tensor, "slots width heads dim"]:
    """`terra.engine.graph.reference.rope_and_store` of a GEMM's split-K parts; `dim` is a power of two."""
    slots, kv_heads, length, dim = target.keys.shape
    splits, tokens, features = parts.shape
    width = tokens // slots
    heads = features // dim - 2 * kv_heads
    queries = torch.empty(slots, width, heads, dim, dtype=target.cosine.dtype, device=parts.device)
    _rope_and_store[(tokens,)](
        parts, target.cosine, target.sine, target.start, queries, target.keys, target.values, tokens, width,
        length,
        HEADS=kv_heads, GROUP=heads // kv_heads, DIM=dim, PADDED=triton.next_power_of_2(heads),
        PADDED_CACHED=triton.next_power_of_2(kv_heads), SPLITS=splits, num_warps=8, **limits.launch_options,
    )  # fmt: skip
    return queries
