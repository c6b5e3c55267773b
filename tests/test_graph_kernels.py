"""The graph engine's tiles and quantized matrices; the kernels themselves are tested in `tests/interpreted`."""

import dataclasses
import functools
import itertools

import pytest
import torch
from batch_invariance import TYPES, check_batch_invariance, check_shared_keys
from tiny import DEVICE

from terra.engine.graph.kernels import attention, gemm
from terra.engine.graph.kernels.launch import DeviceLimits, device_limits
from terra.engine.graph.quantization import FP8, linear, quantize_fp8, quantize_weight, unquantized


def test_tiles_fit_a_small_gpus_shared_memory():
    limits = DeviceLimits(num_sms=46, shared_memory=99 << 10, pdl=False, tma=False)
    configs = [gemm._SPLIT_K, gemm._GATED, gemm._LM_HEAD]
    for dtype, tokens, config in itertools.product((torch.float32, torch.bfloat16), (1, 64, 300, 600), configs):
        tiles = gemm.choose_tiles(config, unquantized(torch.zeros(1, 1, dtype=dtype)), tokens, limits)
        elements = (tiles["BLOCK_N"] + tiles["BLOCK_M"]) * tiles["BLOCK_K"]
        assert tiles["num_stages"] > 1
        assert (tiles["num_stages"] + tiles["PREFETCH_K"]) * elements * dtype.itemsize <= limits.shared_memory


def test_tiles_that_would_change_sums_in_8_bits_are_refused():
    limits = DeviceLimits(num_sms=132, shared_memory=227 << 10, pdl=True, tma=True)
    matrix = unquantized(torch.zeros(1, 1, dtype=FP8))
    for num_bytes in (128, 256):
        config = dataclasses.replace(gemm._SPLIT_K, block_k_bytes=num_bytes)
        assert gemm.choose_tiles(config, matrix, 1, limits)["BLOCK_K"] == num_bytes
    for num_bytes in (64, 192):
        config = dataclasses.replace(gemm._SPLIT_K, block_k_bytes=num_bytes)
        with pytest.raises(ValueError, match=f"BLOCK_K: expected a multiple of 128 in 8 bits .*, got {num_bytes}"):
            gemm.choose_tiles(config, matrix, 1, limits)


@pytest.mark.needs_cuda
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize(("dtype", "cache_dtype"), TYPES, ids=["float32", "bfloat16", "fp8_cache"])
def test_attention_is_batch_invariant_on_a_gpu(dtype, cache_dtype, dim):
    check_batch_invariance(DEVICE, dim, dtype, cache_dtype)


def test_several_sessions_with_many_drafts_take_wider_attention():
    """As measured on an H200: Terra v1's shape (4 heads of the cache, 8 query heads each), and town_hd's (2 and 4)."""
    taken = [attention.choose_wide(1, 4, 64 * 8), attention.choose_wide(1, 2, 64 * 4), attention.choose_wide(16, 2, 64)]
    assert taken == [attention._WIDE] * 3
    taken = [attention.choose_wide(4, 2, 64 * 4), attention.choose_wide(16, 2, 32 * 4)]
    assert taken == [attention._WIDER] * 2


@pytest.mark.needs_cuda
@pytest.mark.parametrize(
    ("dtype", "fp8"),
    [(torch.float32, False), (torch.bfloat16, False), (torch.bfloat16, True)],
    ids=["float32", "bfloat16", "fp8"],
)
def test_gemms_are_batch_invariant_on_a_gpu(dtype, fp8, monkeypatch):
    """The products of a token have the same bits alone and beside others, in tiles of each size."""
    torch.manual_seed(0)
    limits, columns = device_limits(torch.device(DEVICE)), 1152 if fp8 else 1056  # no multiples of BLOCK_K
    weight = torch.randn(1600, columns, device=DEVICE, dtype=dtype) / columns**0.5
    states = torch.randn(700, 1, columns, device=DEVICE, dtype=dtype)
    matrix = quantize_weight(weight, 20.0) if fp8 else unquantized(weight)
    states = quantize_fp8(states, matrix.input_scale) if fp8 else states
    monkeypatch.setattr(gemm, "_MIN_SUMMED_TOKENS", 600)

    def products(tokens):
        parts = gemm.split_k_gemm(states[:tokens].contiguous(), matrix, limits)
        gated = gemm.gated_gemm(states[:tokens].contiguous(), matrix, limits, 20.0 if fp8 else None)
        logits = gemm.lm_head_gemm(states[:tokens].contiguous(), matrix, limits)
        return functools.reduce(torch.add, parts), gated.float().flatten(0, 1), logits.flatten(0, 1)

    all_tokens = products(700)
    for tokens in (1, 5, 17, 40, 100, 129, 255, 256, 257, 520):
        for found, expected in zip(products(tokens), all_tokens, strict=True):
            assert torch.equal(found, expected[:tokens]), tokens


@pytest.mark.needs_cuda
@pytest.mark.parametrize("fp8", [False, True], ids=["bfloat16", "fp8"])
@pytest.mark.parametrize(("rows", "columns"), [(1536, 1024), (1024, 2816), (2048, 5632)])
def test_one_cta_sums_the_splits_of_many_tokens_on_a_gpu(rows, columns, fp8, monkeypatch):
    """To the bits of the kernel behind the GEMM: in 8 bits the product with a scale is not fused with the sum."""
    torch.manual_seed(0)
    weight = torch.randn(rows, columns, device=DEVICE, dtype=torch.bfloat16) / columns**0.5
    states = torch.randn(1100, 1, columns, device=DEVICE, dtype=torch.bfloat16)
    matrix = quantize_weight(weight, 20.0) if fp8 else unquantized(weight)
    states = quantize_fp8(states, matrix.input_scale) if fp8 else states
    limits = device_limits(torch.device(DEVICE))
    (total,) = gemm.split_k_gemm(states, matrix, limits)
    monkeypatch.setattr(gemm, "_MIN_SUMMED_TOKENS", 2000)
    parts = gemm.split_k_gemm(states, matrix, limits)
    assert len(parts) > 1
    assert torch.equal(total, functools.reduce(torch.add, parts))


@pytest.mark.needs_cuda
@pytest.mark.parametrize(("dtype", "cache_dtype"), TYPES, ids=["float32", "bfloat16", "fp8_cache"])
def test_slots_that_share_keys_attend_as_if_each_had_a_copy_on_a_gpu(dtype, cache_dtype):
    check_shared_keys(DEVICE, 64, dtype, cache_dtype)


def test_a_matrix_in_8_bits_is_nearly_itself():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 64, generator=generator) * torch.logspace(-3, 3, 96)[:, None]
    states = torch.randn(2, 3, 64, generator=generator) * torch.logspace(-1, 1, 3)[None, :, None]
    for spare in (1, 30):
        matrix = quantize_weight(weight, spare * states.abs().max().item())
        assert matrix.weight.dtype == torch.float8_e4m3fn
        expected, made = linear(states, unquantized(weight)), linear(states, matrix)
        torch.testing.assert_close(expected, states @ weight.T)
        # Each factor has 3 bits behind the point, so an error of 1/16 at most (and of a little where it is near 0).
        within = states.abs() @ weight.abs().T
        assert ((made - expected).abs() <= 0.14 * within).all()
        assert 0.0 < (made - expected).norm() < 0.05 * expected.norm()
        assert torch.equal(linear(torch.zeros(1, 64), matrix), torch.zeros(1, 96))
        assert torch.equal(linear(quantize_fp8(states, matrix.input_scale), matrix), made)


def test_activations_beyond_the_bound_are_clamped():
    states = torch.tensor([[3.0, -9.0, torch.nan]])
    narrow = quantize_fp8(states, 448 / 3.0)
    assert narrow[0, :2].tolist() == [448.0, -448.0]
    assert narrow[0, 2].isnan()
