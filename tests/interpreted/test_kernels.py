"""Each Triton kernel against torch, in Triton's interpreter."""

import functools
import itertools
from types import SimpleNamespace

import pytest
import torch
import triton
import triton.language as tl
from batch_invariance import TYPES, check_batch_invariance, check_shared_keys

from terra.engine.graph import reference
from terra.engine.graph.kernels import attention, gemm, rope, sampling
from terra.engine.graph.kernels.backend import TritonBackend
from terra.engine.graph.kernels.launch import DeviceLimits
from terra.engine.graph.kv_cache import KVTarget
from terra.engine.graph.quantization import FP8, linear, quantize_fp8, quantize_weight, unquantized
from terra.engine.graph.slots import NO_TOKEN
from terra.engine.graph.step import TorchBackend
from terra.engine.graph.weights import Layer, Norm
from terra.noise import vocabulary_noise
from terra.prompt import Layout
from terra.world_model.positions import SpatioTemporalPositions

# numpy computes both sides of a `tl.where`.
pytestmark = pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")

MAX_STATE = 20.0  # bounds all states here
IN_8_BITS = pytest.mark.parametrize("fp8", [False, True], ids=["float32", "fp8"])


def limits(num_sms: int, *, tma: bool = True) -> DeviceLimits:
    return DeviceLimits(num_sms, shared_memory=1 << 30, pdl=False, tma=tma)


def assert_nearly_all_equal(quantized, expected):
    """Next to a rounding step the last bit before it decides."""
    assert quantized.dtype == expected.dtype == FP8
    assert (quantized.view(torch.uint8) != expected.view(torch.uint8)).float().mean() < 0.01


def cache_target(keys, values, start):
    table = torch.zeros(keys.shape[2], keys.shape[3])
    return KVTarget(table, table, start, keys, values)


HEADS = {"one_head": (2, 1, 64), "two_heads": (8, 2, 16)}
STARTS = {"empty": (0,), "two_slots": (3, 530)}


# One SM: a CTA has all blocks of keys; 40: one block, or with 33 queries two, whose partial results are combined.
@pytest.mark.parametrize(
    ("width", "heads", "start", "num_sms", "cache_dtype"),
    [
        *itertools.product((1, 5), HEADS, STARTS, (1, 40), (torch.float32, FP8)),
        *itertools.product((33,), HEADS, STARTS, (1,), (FP8,)),
        *itertools.product((33,), ("one_head",), STARTS, (1,), (torch.float32,)),
        (33, "one_head", "two_slots", 40, FP8),
        (33, "two_heads", "two_slots", 40, torch.float32),
        (33, "one_head", "empty", 40, FP8),
    ],
    ids=str,
)
def test_attention(width, heads, start, num_sms, cache_dtype):
    (heads, kv_heads, dim), start = HEADS[heads], STARTS[start]
    slots, length = len(start), 640
    torch.manual_seed(width * 1000 + slots)
    queries = torch.randn(slots, width, heads, dim)
    keys, values = torch.randn(slots, kv_heads, length, dim), torch.randn(slots, kv_heads, dim, length)
    start = torch.tensor(start)

    def target():
        return cache_target(keys.to(cache_dtype), values.to(cache_dtype), start)

    expected = reference.cached_attention(queries, target())
    # What stands behind the last query's own position must not matter.
    huge = 400.0 if cache_dtype == FP8 else 1e4  # 8 bits end at 448
    for slot, first in enumerate(start.tolist()):
        keys[slot, :, first + width :], values[slot, :, :, first + width :] = huge, huge
    attended = attention.cached_attention(queries, target(), limits(num_sms))
    torch.testing.assert_close(attended, expected, rtol=1e-5, atol=1e-5)
    quantized = attention.cached_attention(queries, target(), limits(num_sms), output_scale=100.0)
    assert quantized.dtype == FP8
    torch.testing.assert_close(quantized.float(), 100 * expected, rtol=2**-4 + 1e-4, atol=2**-9)
    values[-1, :, :, start[-1]] += 5.0
    assert not torch.allclose(attention.cached_attention(queries, target(), limits(num_sms)), expected, atol=1e-3)


# One SM: a CTA has a bundle of keys; 40: one block.
@pytest.mark.parametrize("num_sms", [1, 40])
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize(
    ("cache_dtype", "tma"),
    [(torch.float16, True), (torch.float16, False), (FP8, True)],
    ids=["float16", "float16_without_tma", "fp8_cache"],
)
def test_attention_of_many_queries(cache_dtype, tma, start, num_sms):
    start = torch.tensor(STARTS[start])
    slots, length, width, heads, dim = len(start), 640, 9, 4, 32
    torch.manual_seed(slots)
    queries = torch.randn(slots, width, heads, dim, dtype=torch.float16)
    keys, values = torch.randn(slots, 2, length, dim), torch.randn(slots, 2, dim, length)
    target = cache_target(keys.to(cache_dtype), values.to(cache_dtype), start)
    expected = reference.cached_attention(queries.float(), target)
    for slot, first in enumerate(start.tolist()):  # what stands behind the last query's own position
        target.keys[slot, :, first + width :], target.values[slot, :, :, first + width :] = 400.0, 400.0
    attended = attention.cached_attention(queries, target, limits(num_sms, tma=tma))
    torch.testing.assert_close(attended.float(), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize(("dtype", "cache_dtype"), TYPES, ids=["float32", "bfloat16", "fp8_cache"])
def test_attention_is_batch_invariant(dtype, cache_dtype):
    check_batch_invariance("cpu", 32, dtype, cache_dtype)


@pytest.mark.parametrize(("dtype", "cache_dtype"), TYPES, ids=["float32", "bfloat16", "fp8_cache"])
def test_slots_that_share_keys_attend_as_if_each_had_a_copy(dtype, cache_dtype):
    check_shared_keys("cpu", 32, dtype, cache_dtype)


def test_attention_refuses_a_cache_of_part_blocks():
    keys, values = torch.zeros(1, 1, 192, 16), torch.zeros(1, 1, 16, 192)
    target = cache_target(keys, values, torch.tensor([3]))
    with pytest.raises(ValueError, match="expected a multiple of BLOCK_KEYS = 128, got 192"):
        attention.cached_attention(torch.zeros(1, 1, 2, 16), target, limits(4))


@pytest.fixture(params=[(3, 5), (2, 1), (19, 1)], ids=["drafts", "two_slots", "many_slots"])
def shape(request):
    return request.param


@pytest.fixture
def layer_case(shape, fp8):
    """Weights of a layer, and random inputs of its operations for so many slots and tokens."""
    hidden, inner, epsilon = 128, 704, 1e-5
    heads, kv_heads, dim, length = 6, 2, 16, 256
    slots, width = shape
    torch.manual_seed(slots)
    start = torch.randint(0, length - width, (slots,))
    states, attended = torch.randn(slots, width, hidden), torch.randn(slots, width, heads, dim)
    norm, next_norm = (Norm(torch.randn(hidden), epsilon, 448 / MAX_STATE if fp8 else None) for _ in range(2))
    sizes = [((heads + 2 * kv_heads) * dim, hidden), (hidden, heads * dim), (2 * inner, hidden), (hidden, inner)]
    weights = [torch.randn(size) / size[1] ** 0.5 for size in sizes]
    qkv, output, gate_up, down = (
        quantize_weight(weight, MAX_STATE) if fp8 else unquantized(weight) for weight in weights
    )
    cosine, sine = torch.randn(length, dim), torch.randn(length, dim)

    def target(keys=None, values=None):
        keys = torch.zeros(slots, kv_heads, length, dim) if keys is None else keys
        values = torch.zeros(slots, kv_heads, dim, length) if values is None else values
        return KVTarget(cosine, sine, start, keys, values)

    return SimpleNamespace(
        layer=Layer(qkv, output, norm, gate_up, down), norm=norm, next_norm=next_norm, states=states, attended=attended,
        target=target, cache_shape=(slots, kv_heads, length, dim), taken=quantize_fp8(attended, output.input_scale)
        if fp8 else attended,
    )  # fmt: skip


@IN_8_BITS
def test_rms_norm(layer_case, fp8):
    case = layer_case
    normalized = TritonBackend(limits(4)).rms_norm(case.states, case.norm)
    expected = reference.rms_norm(case.states, case.norm)
    if fp8:
        assert_nearly_all_equal(normalized, quantize_fp8(expected, case.norm.output_scale))
    else:
        torch.testing.assert_close(normalized, expected)


@IN_8_BITS
@pytest.mark.parametrize("num_sms", [1, 8], ids=["one_split", "splits"])
def test_qkv_rope_and_store(layer_case, num_sms):
    case = layer_case
    hidden = TritonBackend(limits(num_sms)).rms_norm(case.states, case.norm)
    expected_target, target = case.target(), case.target()
    expected = reference.rope_and_store(linear(hidden, case.layer.qkv), expected_target)
    parts = gemm.split_k_gemm(hidden, case.layer.qkv, limits(num_sms))
    torch.testing.assert_close(rope.rope_and_store(parts, target, limits(num_sms)), expected)
    torch.testing.assert_close((target.keys, target.values), (expected_target.keys, expected_target.values))
    assert target.keys.abs().sum() > 0


@IN_8_BITS
@pytest.mark.parametrize("num_sms", [1, 8], ids=["one_split", "splits"])
@pytest.mark.parametrize("shape", [(2, 1), (19, 1)], ids=["two_slots", "many_slots"])
def test_attention_sums_rotates_and_stores_by_itself(layer_case, num_sms):
    """With one token a slot, from the QKV projection's split-K parts."""
    case = layer_case
    hidden = TritonBackend(limits(num_sms)).rms_norm(case.states, case.norm)
    keys, values = torch.randn(case.cache_shape), torch.randn(case.cache_shape).mT.contiguous()
    expected_target, target = case.target(keys, values), case.target(keys.clone(), values.clone())
    slot, position = torch.arange(len(keys)), target.start
    target.keys[slot, :, position], target.values[slot, :, :, position] = 7.0, 7.0
    queries = reference.rope_and_store(linear(hidden, case.layer.qkv), expected_target)
    expected = reference.cached_attention(queries, expected_target)
    parts = gemm.split_k_gemm(hidden, case.layer.qkv, limits(num_sms))
    torch.testing.assert_close(attention.rope_store_attention(parts, target, limits(num_sms)), expected)
    torch.testing.assert_close((target.keys, target.values), (keys, values))


@IN_8_BITS
def test_one_cta_sums_the_splits_of_many_tokens(layer_case, fp8, monkeypatch):
    """To the bits of the kernel behind the GEMM, which sums the parts of few tokens."""
    matrix = layer_case.layer.down
    states = torch.randn(2, 10, matrix.weight.shape[1])
    states = quantize_fp8(states, matrix.input_scale) if fp8 else states
    parts = gemm.split_k_gemm(states, matrix, limits(8))
    assert len(parts) > 1
    monkeypatch.setattr(gemm, "_MIN_SUMMED_TOKENS", 20)
    (merged,) = gemm.split_k_gemm(states, matrix, limits(8))
    assert torch.equal(merged, functools.reduce(torch.add, parts))


@IN_8_BITS
def test_several_tiles_of_tokens(fp8):
    """From 256 tokens on tiles are larger."""
    torch.manual_seed(0)
    rows, columns = 200, 288  # no multiples of a tile's
    states, weight = torch.randn(300, 1, columns), torch.randn(rows, columns) / columns**0.5
    matrix = quantize_weight(weight, MAX_STATE) if fp8 else unquantized(weight)
    states = quantize_fp8(states, matrix.input_scale) if fp8 else states
    expected = linear(states, matrix)
    parts = gemm.split_k_gemm(states, matrix, limits(8))
    assert len(parts) > 1
    torch.testing.assert_close(parts.sum(0).view_as(expected), expected)
    torch.testing.assert_close(gemm.lm_head_gemm(states, matrix, limits(8)), expected)
    gate, up = expected.chunk(2, -1)
    torch.testing.assert_close(gemm.gated_gemm(states, matrix, limits(8), None), torch.nn.functional.silu(gate) * up)


@IN_8_BITS
@pytest.mark.parametrize("num_sms", [1, 8], ids=["one_split", "splits"])
def test_attention_output_and_mlp(layer_case, fp8, num_sms):
    case, backend = layer_case, TritonBackend(limits(num_sms))
    inner = torch.randn(*case.states.shape[:2], case.layer.down.weight.shape[1])
    inner = quantize_fp8(inner, case.layer.down.input_scale) if fp8 else inner
    assert (len(gemm.split_k_gemm(inner, case.layer.down, limits(num_sms))) > 1) == (num_sms > 1)
    gated = gemm.gated_gemm(
        backend.rms_norm(case.states, case.norm), case.layer.gate_up, limits(num_sms), case.layer.down.input_scale
    )
    assert gated.dtype == (FP8 if fp8 else torch.float32)
    expected, expected_hidden = TorchBackend().attention_output_and_mlp(
        case.attended, case.states, case.layer, case.next_norm
    )
    states, hidden = backend.attention_output_and_mlp(case.taken, case.states, case.layer, case.next_norm)
    # In 8 bits values that differ in the last place may be rounded apart.
    torch.testing.assert_close(states, expected, **({"rtol": 0.02, "atol": 0.02} if fp8 else {}))
    if fp8:
        normalized = reference.rms_norm(states, case.next_norm)
        assert_nearly_all_equal(hidden, quantize_fp8(normalized, case.next_norm.output_scale))
    else:
        torch.testing.assert_close(hidden, expected_hidden)


@IN_8_BITS
def test_logits_and_samples(layer_case, shape):
    case, (slots, _) = layer_case, shape
    hidden, head = TritonBackend(limits(4)).rms_norm(case.states, case.norm), case.layer.qkv
    keys = torch.rand(slots), torch.randint(0, 2**63 - 1, (slots,)), case.target().start
    logits = gemm.lm_head_gemm(hidden, head, limits(4)).flatten(0, 1)
    expected = linear(hidden, head).flatten(0, 1)
    torch.testing.assert_close(logits, expected)
    assert torch.equal(sampling.sample(logits, *keys, limits(4)), reference.sample(expected, *keys))


@pytest.mark.parametrize("ctas_per_sm", [1, 32])  # several blocks a CTA, of which a bound passes most over; one block
@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(("slots", "width", "vocab"), [(1, 1, 5000), (3, 4, 1500), (2, 1, 1024)])
def test_samples(monkeypatch, slots, width, vocab, temperature, ctas_per_sm):
    monkeypatch.setattr(sampling, "_CTAS_PER_SM", ctas_per_sm)
    torch.manual_seed(vocab)
    logits = torch.randn(slots * width, vocab) * ctas_per_sm**0.5
    seeds, start = torch.randint(0, 2**63 - 1, (slots,)), torch.randint(0, 14550, (slots,))
    keys = torch.full((slots,), temperature), seeds, start
    assert torch.equal(sampling.sample(logits, *keys, limits(4)), reference.sample(logits, *keys))
    if temperature:
        # Without logits, the highest score is the noise itself.
        best = torch.full((slots * width,), NO_TOKEN)
        sampling.gumbel_argmax(torch.zeros_like(logits), *keys, best, limits(4))
        positions = (start[:, None] + torch.arange(width)).flatten()
        noise = vocabulary_noise(seeds.repeat_interleave(width), positions, vocab)
        scores = (best >> 32).int()
        scores = torch.where(scores < 0, scores ^ 0x7FFFFFFF, scores).view(torch.float32)
        torch.testing.assert_close(scores, noise.max(1).values, rtol=1e-5, atol=1e-6)


@triton.jit
def _bound_minus_score(words, gap, logit, temperature, BLOCK: tl.constexpr):  # noqa: N803
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    uniform = tl.maximum(tl.load(words + at).to(tl.float32) * 4.6566127342e-10, 4.6566127342e-10)
    scaled = tl.zeros([BLOCK], tl.float32) + logit * (1.0 / temperature)
    exact = tl.div_rn(tl.zeros([BLOCK], tl.float32) + logit, temperature) + sampling._gumbel(uniform)
    tl.store(gap + at, sampling._gumbel_upper_bound(scaled, uniform) - exact)


@pytest.mark.parametrize("temperature", [0.1, 0.9])
@pytest.mark.parametrize("logit", [0.0, -7.3, 31.7, -60.0, 300.0])
def test_the_bound_of_a_noisy_logit_is_above_and_near(logit, temperature):
    near_powers = (2 ** torch.arange(31)[:, None] + torch.arange(-2, 3)).clamp(0, 2**31 - 1).flatten()
    words = torch.cat([near_powers, torch.randint(0, 2**31, (1024 - len(near_powers),))])
    gap = torch.zeros(1024)
    _bound_minus_score[(4,)](words, gap, logit, temperature, BLOCK=256)
    assert (gap > 0).all(), gap.min()
    small = words < 2**21
    assert (gap[small] < 0.062 + 4e-6 * abs(logit) / temperature).all(), gap[small].max()


@pytest.mark.parametrize("attempt", range(20))
@pytest.mark.parametrize("width", [1, 6])
def test_embed_and_accept(width, attempt):
    layout, action_slots, hidden = Layout(image_tokens=5, action_slots=2, max_frames=3), 6, 24
    torch.manual_seed(100 * width + attempt)
    table, action_embeddings = torch.randn(50, hidden), torch.randn(4, action_slots, hidden)
    position_embeddings = SpatioTemporalPositions(layout.block, layout.max_frames, hidden)
    ids, start = torch.randint(0, 50, (4, 40)), torch.randint(0, layout.block * layout.max_frames - 1, (4,))
    last = start + torch.randint(0, 9, (4,))
    states = sampling.embed(
        ids, start, action_embeddings, table, position_embeddings, layout.image_tokens, width, limits(4)
    )
    positions = start[:, None] + torch.arange(width)
    weights = SimpleNamespace(layout=layout, token_embedding=table, position_embeddings=position_embeddings)
    torch.testing.assert_close(states, reference.embed(weights, ids, action_embeddings, positions).detach())
    for slot in range(4):
        for position, state in zip(positions[slot], states[slot], strict=True):
            frame, pos_in_block = divmod(int(position), layout.block)
            action_slot = min(2 * frame + pos_in_block - layout.image_tokens, action_slots - 1)
            is_image = pos_in_block < layout.image_tokens
            own = table[ids[slot, position]] if is_image else action_embeddings[slot, action_slot]
            torch.testing.assert_close(state, own + position_embeddings(position).detach())
    sampled = torch.randint(0, 50, (4, width))
    following = positions + 1
    guessed = torch.rand(4, width) < 0.8  # so drafts are right now and then
    ids.scatter_(1, following, torch.where(guessed, sampled, ids.gather(1, following)))
    best = (torch.randint(-1000, 1000, sampled.shape) << 32) + 2147483647 - sampled
    best = best.flatten()
    assert torch.equal(sampling.unpack_ids(best), sampled.flatten())
    expected, expected_start = ids.clone(), start.clone()
    passes, expected_passes = torch.zeros(2, width + 1, dtype=torch.int64)
    everywhere = torch.ones(4, dtype=torch.bool)
    blocks = layout.block, layout.image_tokens
    reference.accept(expected, expected_start, last, expected_passes, everywhere, sampled, *blocks)
    sampling.accept(best, ids, start, last, passes, *blocks, limits(4))
    assert torch.equal(ids, expected)
    assert torch.equal(start, expected_start)
    assert torch.equal(passes, expected_passes)
    assert passes.sum() == (positions[:, 0] < last).sum()
    assert (best == NO_TOKEN).all()
