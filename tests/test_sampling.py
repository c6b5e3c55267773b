import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st

from terra import noise
from terra.noise import _tensor_noise, gumbel_noise, vocabulary_noise
from terra.sampling import SamplingParams, sample_tokens, window_seed

SEED = torch.tensor([7])
AT = torch.tensor([11])


def philox(counter: int, key_low: int, key_high: int) -> int:
    """Philox4x32-10 on Python integers, from the paper's description."""
    c = [counter, 0, 0, 0]
    k0, k1 = key_low, key_high
    for _ in range(10):
        first, second = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(second >> 32) ^ c[1] ^ k0, second & 0xFFFFFFFF, (first >> 32) ^ c[3] ^ k1, first & 0xFFFFFFFF]
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c[0]


def test_philox_known_answer():
    # Random123's published known-answer test for philox4x32-10 with counter and key of zeros.
    assert philox(0, 0, 0) == 0x6627E8D5


@settings(max_examples=50)
@given(seed=st.integers(0, 2**63 - 1), position=st.integers(0, 2**31), token=st.integers(0, 2**20))
def test_noise_is_philox_by_seed_position_and_token(seed, position, token):
    word = philox(token, philox(position, seed & 0xFFFFFFFF, seed >> 32), 0)
    signed = word - (1 << 32) if word >= 1 << 31 else word
    uniform = max(np.float32(-signed - 1 if signed < 0 else signed) * np.float32(4.6566127342e-10), 4.6566127342e-10)
    expected = -math.log(-math.log1p(-float(uniform)))
    for draw in (gumbel_noise, _tensor_noise):  # on a CPU, and on any device
        drawn = draw(torch.tensor([seed]), torch.tensor([position]), torch.tensor([[token]]))
        assert drawn.item() == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_noise_is_standard_gumbel():
    drawn = gumbel_noise(SEED, AT, torch.arange(200_000)[None]).double()
    assert drawn.mean().item() == pytest.approx(0.5772, abs=0.01)
    assert drawn.var().item() == pytest.approx(math.pi**2 / 6, rel=0.02)
    assert torch.isfinite(drawn).all()


# Where Philox gives the words 0 and 2**32 - 1 for seed 0, which both fold to the uniform number 0: found by trying all
# token ids of a vocabulary of 2**18 at one position after the other. It is one pair in 2**31.
SMALLEST_UNIFORM = [(17165, 214903, 0), (14267, 167894, 0xFFFFFFFF)]


@pytest.mark.parametrize(("position", "token", "word"), SMALLEST_UNIFORM)
def test_the_smallest_uniform_number_is_no_infinite_noise(position, token, word):
    assert philox(token, philox(position, 0, 0), 0) == word
    seed, at = torch.tensor([0]), torch.tensor([position])
    noise = gumbel_noise(seed, at, torch.tensor([[token]])).item()
    assert noise == pytest.approx(-math.log(4.6566127342e-10), abs=1e-3)
    logits = torch.zeros(1, 1 << 18)
    assert sample_tokens(logits, SamplingParams(temperature=1.0), seed, at).tolist() == [token]
    logits[0, 7] = 40.0  # e**40 times as likely as each of the others: no noise may outweigh it
    assert sample_tokens(logits, SamplingParams(temperature=1.0), seed, at).tolist() == [7]


def test_noise_of_a_row_does_not_depend_on_the_others():
    tokens = torch.arange(100)[None].expand(3, -1)
    rows = gumbel_noise(torch.tensor([1, 2, 3]), torch.tensor([4, 5, 6]), tokens)
    alone = gumbel_noise(torch.tensor([2]), torch.tensor([5]), tokens[:1])
    assert torch.equal(rows[1:2], alone)
    assert len({row.sum().item() for row in rows}) == 3


def counts(logits: torch.Tensor, params: SamplingParams, draws: int) -> torch.Tensor:
    positions = torch.arange(draws)
    tokens = sample_tokens(logits.expand(draws, -1), params, torch.full((draws,), 5), positions)
    return torch.bincount(tokens, minlength=logits.shape[-1]).double()


def test_samples_follow_the_distribution():
    logits, draws = torch.tensor([1.0, 0.0, -1.0, 2.0, 0.5, -0.3]), 20_000
    params = SamplingParams(temperature=0.8)
    expected = torch.softmax(logits.double() / 0.8, -1) * draws
    chi2 = ((counts(logits, params, draws) - expected) ** 2 / expected).sum().item()
    assert chi2 < 20.5  # 5 degrees of freedom, p = 0.001


def test_top_k_keeps_k():
    assert (counts(torch.tensor([1.0, 0.0, 3.0, 2.0]), SamplingParams(temperature=2.0, top_k=2), 500) > 0).tolist() == [
        False, False, True, True,
    ]  # fmt: skip


def test_top_p_keeps_the_smallest_set_that_reaches_p():
    logits = torch.log(torch.tensor([0.5, 0.3, 0.15, 0.05]))
    for top_p, kept in [(0.5, 1), (0.51, 2), (0.8, 2), (0.81, 3), (1.0, 4)]:
        seen = counts(logits, SamplingParams(temperature=1.0, top_p=top_p), 2000) > 0
        assert seen.sum() == kept
        assert seen[:kept].all()


def test_filtering_does_not_change_the_noise():
    logits = torch.randn(64, 50, generator=torch.Generator().manual_seed(0))
    positions = torch.arange(64)
    seeds = torch.full((64,), 9)
    every = sample_tokens(logits, SamplingParams(temperature=1.0), seeds, positions)
    filtered = sample_tokens(logits, SamplingParams(temperature=1.0, top_k=25), seeds, positions)
    survives = (logits.topk(25).indices == every[:, None]).any(-1)
    assert torch.equal(every[survives], filtered[survives])
    assert survives.any()


def test_greedy_takes_the_likeliest():
    logits = torch.randn(8, 30, generator=torch.Generator().manual_seed(1))
    assert torch.equal(sample_tokens(logits, SamplingParams(temperature=0.0), SEED, AT), logits.argmax(-1))


def test_half_precision_logits_are_sampled_in_float32():
    logits = torch.randn(4, 30, generator=torch.Generator().manual_seed(1)).bfloat16()
    arguments = SamplingParams(), torch.arange(4), torch.arange(4)
    assert torch.equal(sample_tokens(logits, *arguments), sample_tokens(logits.float(), *arguments))


@pytest.mark.parametrize(
    "bad",
    [
        *({"temperature": value} for value in (-1.0, math.nan, math.inf, 100.1, "0.9", True, None, [1.0])),
        *({"top_k": value} for value in (-1, 2.5, 2.0, True, "2", None)),
        *({"top_p": value} for value in (0.0, 1.1, math.nan, "0.5", True, None)),
    ],
)
def test_bad_parameters_are_refused(bad):
    with pytest.raises(ValueError, match=f"{next(iter(bad))}: expected"):
        SamplingParams(**bad)


@pytest.mark.parametrize("temperature", [1e-37, 1e-38, 1e-39, 9e-7])
def test_temperatures_whose_logits_overflow_are_refused(temperature):
    with pytest.raises(ValueError, match=r"temperature: expected 0 \(greedy\) or at least 1e-6, got"):
        SamplingParams(temperature=temperature)


def test_the_lowest_temperature_takes_the_likeliest_token():
    logits = torch.tensor([[1.0, 5.0, 9.0, -3.0], [1e4, -1e4, 1e4 - 1, 0.0]])
    for params in (SamplingParams(temperature=1e-6), SamplingParams(temperature=1e-6, top_k=3, top_p=0.9)):
        assert sample_tokens(logits, params, SEED.expand(2), AT.expand(2)).tolist() == [2, 0]


@given(seed=st.integers(0, 2**40), windows=st.integers(2, 20))
def test_window_seeds_differ(seed, windows):
    seeds = [window_seed(seed, index) for index in range(windows)]
    assert len(set(seeds)) == windows
    assert all(0 <= value < 2**63 for value in seeds)
    assert window_seed(seed, 0) != window_seed(seed + 1, 0)


def test_negative_seed_is_refused():
    with pytest.raises(ValueError, match="expected 0 or more"):
        window_seed(-1, 0)


def tensor_noise(seeds: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """Noise as it is drawn on other devices than the CPU: all operations on int64 tensors."""
    keys = noise._philox(positions & noise._MASK, seeds & noise._MASK, (seeds >> 32) & noise._MASK)
    words = noise._philox(token_ids, keys[:, None], torch.zeros_like(keys)[:, None])
    return noise._noise_of_words(torch.where(words >= 1 << 31, words - (1 << 32), words))


def sorted_choice(logits, params, seeds, positions) -> torch.Tensor:
    """The rule written out: sort everything, cut, add noise."""
    values, ids = (logits.float() / params.temperature).topk(params.top_k or logits.shape[-1], dim=-1)
    before = values.softmax(-1).cumsum(-1).roll(1, -1)
    before[:, 0] = 0.0
    values = values.masked_fill(before >= params.top_p, -math.inf) + tensor_noise(seeds, positions, ids)
    return ids.gather(-1, values.argmax(-1, keepdim=True))[:, 0]


@settings(max_examples=30)
@given(
    rows=st.integers(1, 12),
    size=st.sampled_from([1, 7, 64, 1023, 4096, 40_000, 70_001]),
    seed=st.integers(0, 2**62),
    position=st.integers(0, 2**20),
)
def test_noise_is_the_same_bits_however_it_is_drawn(rows, size, seed, position):
    seeds, positions = torch.arange(rows) + seed, torch.arange(rows) * 5 + position
    ids = torch.arange(size).expand(rows, -1)
    expected = tensor_noise(seeds, positions, ids)
    assert torch.equal(gumbel_noise(seeds, positions, ids), expected)
    assert torch.equal(vocabulary_noise(seeds, positions, size), expected)
    shuffled = torch.stack([torch.randperm(size) for _ in range(rows)])
    assert torch.equal(gumbel_noise(seeds, positions, shuffled), expected.gather(1, shuffled))


@settings(max_examples=60)
@given(
    rows=st.integers(1, 4),
    size=st.sampled_from([5, 64, 2048, 5000]),
    spread=st.floats(0.0, 12.0),
    levels=st.sampled_from([0, 3, 40]),
    top_k=st.sampled_from([0, 1, 4]),
    top_p=st.sampled_from([0.01, 0.3, 0.5, 0.9, 0.999, 1.0]),
    draw=st.integers(0, 2**30),
)
def test_a_choice_is_that_of_sorting_everything(rows, size, spread, levels, top_k, top_p, draw):
    logits = torch.randn(rows, size, generator=torch.Generator().manual_seed(draw)) * spread
    if levels:
        logits = (logits * levels / 10).round() * 10 / levels  # many tokens equally likely
    params = SamplingParams(temperature=0.9, top_k=top_k, top_p=top_p)
    arguments = params, torch.arange(rows) + draw, torch.arange(rows) + 3
    assert torch.equal(sample_tokens(logits, *arguments), sorted_choice(logits, *arguments))


def test_sharp_and_flat_rows_of_a_batch_keep_their_own_seeds_and_positions():
    """A flat row is sorted whole, and is not the batch's first: the rows that are keep their place."""
    spread = torch.tensor([8.0, 0.1, 8.0, 0.1, 0.1])[:, None]
    logits = torch.randn(5, 5000, generator=torch.Generator().manual_seed(1)) * spread
    params = SamplingParams(temperature=0.9, top_p=0.9)
    seeds, positions = torch.tensor([11, 12, 13, 14, 15]), torch.tensor([5, 900, 7, 30, 2])
    assert torch.equal(sample_tokens(logits, params, seeds, positions), sorted_choice(logits, params, seeds, positions))


@pytest.mark.parametrize("size", [64, 5000])
def test_top_k_holds_together_with_top_p(size):
    """In a flat distribution top-p alone would keep most of the vocabulary."""
    logits = torch.randn(64, size, generator=torch.Generator().manual_seed(2)) * 0.1
    params = SamplingParams(temperature=1.0, top_k=3, top_p=0.9)
    chosen = sample_tokens(logits, params, torch.arange(64), torch.arange(64))
    kept = logits.topk(3, dim=-1).indices
    assert (kept == chosen[:, None]).any(-1).all()
    assert chosen.unique().numel() > 3


def test_a_tie_across_the_cut_of_top_p_is_that_of_sorting_everything():
    """Eight tokens are equally likely and five are kept: which ones, a partial sort may answer in another way."""
    rows, generator = 64, torch.Generator().manual_seed(0)
    logits = torch.full((rows, 4096), -20.0)
    for row in logits:
        row[torch.randperm(4096, generator=generator)[:8]] = 0.0
    arguments = SamplingParams(temperature=1.0, top_p=0.55), torch.arange(rows), torch.arange(rows)
    assert torch.equal(sample_tokens(logits, *arguments), sorted_choice(logits, *arguments))


def test_a_sharp_distribution_is_not_sorted_beyond_its_head(monkeypatch):
    logits = torch.randn(2, 8192, generator=torch.Generator().manual_seed(3)) * 6.0
    params = SamplingParams(temperature=0.9, top_p=0.9)
    seen = []
    topk = torch.Tensor.topk
    monkeypatch.setattr(torch.Tensor, "topk", lambda self, k, **rest: seen.append(k) or topk(self, k, **rest))
    chosen = sample_tokens(logits, params, torch.tensor([1, 2]), torch.tensor([3, 4]))
    assert seen == [1024]
    assert torch.equal(chosen, sorted_choice(logits, params, torch.tensor([1, 2]), torch.tensor([3, 4])))
