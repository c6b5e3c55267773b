"""The Triton kernels in Triton's interpreter, on a CPU, against torch."""

import itertools

import torch
from interpreted import run_interpreted

from terra.engine.graph import many_rows
from terra.engine.graph.matrix import as_it_is, in_fp8, linear, rounded

PROGRAM = """
import itertools

import torch
import triton
import triton.language as tl
from interpreted import round_to_8_bits_rightly

from terra.engine.graph.attention import attend
from terra.engine.graph.attention_kernel import attend_split
from terra.engine.graph.matrix import FP8, as_it_is, in_fp8, linear, rounded
from terra.engine.graph.layers import Layer, Norm, Place, mix, project, rms_norm
from terra.engine.graph import many_rows, one_row
from terra.engine.graph import lanes as plain
from terra.engine.graph import tokens
from terra.noise import vocabulary_noise
from terra.sampling import SamplingParams, sample_tokens
from terra.world_model.positions import SpatioTemporalPositions


round_to_8_bits_rightly()


def assert_nearly_all_equal(narrow, expected):
    # Next to a step the last place decides.
    assert narrow.dtype == expected.dtype == FP8
    assert (narrow.view(torch.uint8) != expected.view(torch.uint8)).float().mean() < 0.01


def picked(best):
    return 2147483647 - (best & 0xFFFFFFFF)


def tokens_as_best(picks):
    return (torch.randint(-1000, 1000, picks.shape) << 32) + 2147483647 - picks


def sampled(logits, draws, width):
    rows = []
    for lane, temperature in enumerate(draws.temperature.tolist()):
        own = slice(lane * width, (lane + 1) * width)
        positions = draws.start[lane] + torch.arange(width)
        seeds = draws.seed[lane].repeat(width)
        rows.append(sample_tokens(logits[own], SamplingParams(temperature=temperature), seeds, positions))
    return torch.cat(rows)


cases = itertools.product([1, 5, 33], [(2, 1, 64), (8, 2, 16)], [(0,), (3, 530)], [1, 40], [torch.float32, FP8])
for width, (heads, kv_heads, dim), start, processors, held in cases:
    lanes, length = len(start), 640
    torch.manual_seed(width * 1000 + lanes)
    queries = torch.randn(lanes, width, heads, dim)
    keys, values = torch.randn(lanes, kv_heads, length, dim), torch.randn(lanes, kv_heads, dim, length)
    at = torch.tensor(start)
    expected = attend(queries, keys.to(held), values.to(held), at)
    # What stands behind the last row's own position must not matter.
    huge = 400.0 if held == FP8 else 1e4  # 8 bits end at 448
    for lane, first in enumerate(start):
        keys[lane, :, first + width :], values[lane, :, :, first + width :] = huge, huge
    for invariant in (False, True):
        attended = attend_split(queries, keys.to(held), values.to(held), at, processors, invariant=invariant)
        torch.testing.assert_close(attended, expected, rtol=1e-5, atol=1e-5)
    narrow = attend_split(queries, keys.to(held), values.to(held), at, processors, round_by=100.0).float()
    torch.testing.assert_close(narrow, 100 * expected, rtol=2**-4 + 1e-4, atol=2**-9)
    values[-1, :, :, start[-1]] += 5.0
    attended = attend_split(queries, keys.to(held), values.to(held), at, processors)
    assert not torch.allclose(attended, expected, atol=1e-3)

hidden, inner, epsilon = 72, 101, 1e-5
heads, kv_heads, dim, length = 4, 2, 16, 40
LARGEST = 20.0  # of any states here


def as_matrices(shapes, fp8):
    weights = [torch.randn(shape) / shape[1] ** 0.5 for shape in shapes]
    return [in_fp8(weight, LARGEST) if fp8 else as_it_is(weight) for weight in weights]


def norms(hidden, epsilon, fp8):
    return [Norm(torch.randn(hidden), epsilon, 448 / LARGEST if fp8 else None) for _ in range(2)]


states = torch.randn(1, 1, hidden)
attended = torch.randn(1, 1, 3, 16)
sizes = [((heads + 2 * kv_heads) * dim, hidden), (hidden, 48), (2 * inner, hidden), (hidden, inner)]
tables = torch.randn(length, dim), torch.randn(length, dim), torch.tensor([[7]])
few, many = 128, 4096  # elements of a tile, so rows, and two tiles a program or one
for one_row._ELEMENTS, fp8 in itertools.product((few, many), (False, True)):
    (norm, next_norm), matrices = norms(hidden, epsilon, fp8), as_matrices(sizes, fp8)
    layer = Layer(matrices[0], matrices[1], norm, matrices[2], matrices[3])
    caches = 2 * [torch.zeros(1, kv_heads, length, dim), torch.zeros(1, kv_heads, dim, length)]
    caches = [each.clone() for each in caches]
    expected = project(rms_norm(states, norm), norm, layer, Place(*tables, *caches[:2]))
    queries = one_row.project(states, norm, layer, Place(*tables, *caches[2:]))
    torch.testing.assert_close(queries, expected)
    torch.testing.assert_close(caches[2:], caches[:2])
    taken = rounded(attended, layer.output.states_by) if fp8 else attended
    expected, _ = mix(attended, states, layer, next_norm)
    mixed, _ = one_row.mix(taken, states, layer, next_norm)
    # In 8 bits what differs in the last place may be rounded apart.
    torch.testing.assert_close(mixed, expected, **({"rtol": 0.02, "atol": 0.02} if fp8 else {}))
    torch.testing.assert_close(one_row.product(taken.flatten(2), layer.output), linear(taken.flatten(2), layer.output))

hidden, inner = 128, 704
for (lanes, width), fp8, processors in itertools.product([(3, 5), (2, 1), (19, 1)], (False, True), (1, 8)):
    many_rows.processors = lambda device: processors  # so one split or several
    heads, kv_heads, dim, length = 6, 2, 16, 256
    torch.manual_seed(lanes)
    positions = torch.randint(0, length - width, (lanes, 1)) + torch.arange(width)
    states, attended = torch.randn(lanes, width, hidden), torch.randn(lanes, width, heads, dim)
    sizes = [((heads + 2 * kv_heads) * dim, hidden), (hidden, heads * dim), (2 * inner, hidden), (hidden, inner)]
    (norm, next_norm), matrices = norms(hidden, epsilon, fp8), as_matrices(sizes, fp8)
    layer = Layer(matrices[0], matrices[1], norm, matrices[2], matrices[3])
    tables = torch.randn(length, dim), torch.randn(length, dim), positions
    caches = 2 * [torch.zeros(lanes, kv_heads, length, dim), torch.zeros(lanes, kv_heads, dim, length)]
    caches = [each.clone() for each in caches]
    normal = many_rows.normalise(states, norm)
    if fp8:
        assert_nearly_all_equal(normal, rounded(rms_norm(states, norm), norm.states_by))
    else:
        torch.testing.assert_close(normal, rms_norm(states, norm))
    expected = project(normal, norm, layer, Place(*tables, *caches[:2]))
    parts = many_rows.split_product(normal, layer.query_key_value)
    queries = many_rows.rotate_and_store(parts, Place(*tables, *caches[2:]))
    torch.testing.assert_close(queries, expected)
    torch.testing.assert_close(caches[2:], caches[:2])
    assert caches[0].abs().sum() > 0
    if width == 1:
        # Attention sums and rotates, and keeps keys and values, itself.
        past = torch.randn(lanes, kv_heads, length, dim), torch.randn(lanes, kv_heads, dim, length)
        keys, values = (each.clone() for each in past)
        following = Place(*tables, keys, values)
        expected = project(normal, norm, layer, Place(*tables, *past))
        expected = attend(expected, *past, positions[:, 0])
        for invariant in (False, True):
            keys.copy_(past[0]), values.copy_(past[1])
            lane = torch.arange(lanes)
            keys[lane, :, positions[:, 0]], values[lane, :, :, positions[:, 0]] = 7.0, 7.0
            projected = many_rows.project(normal, norm, layer, following)
            made = attend_split(projected, keys, values, positions[:, 0].contiguous(), processors, invariant=invariant)
            torch.testing.assert_close(made, expected)
            torch.testing.assert_close((keys, values), past)
    taken = rounded(attended, layer.output.states_by) if fp8 else attended
    parts = many_rows.split_product(taken.flatten(2), layer.output)
    added, within = many_rows.add_and_normalise(states, parts, norm)
    torch.testing.assert_close(added, states + linear(attended.flatten(2), layer.output))
    gated = many_rows.gated_product(within, layer.gate_up, layer.down.states_by)
    assert gated.dtype == (FP8 if fp8 else torch.float32)
    parts = many_rows.split_product(gated, layer.down)
    assert (len(parts) > 1) == (processors > 1), parts.shape
    expected = mix(attended, states, layer, next_norm)
    made, following = many_rows.mix(taken, states, layer, next_norm)
    # In 8 bits what differs in the last place may be rounded apart.
    torch.testing.assert_close(made, expected[0], **({"rtol": 0.02, "atol": 0.02} if fp8 else {}))
    if fp8:
        assert_nearly_all_equal(following, rounded(rms_norm(made, next_norm), next_norm.states_by))
    else:
        torch.testing.assert_close(following, expected[1])
    draws = tokens.Draws(torch.rand(lanes), torch.randint(0, 2**63 - 1, (lanes,)), positions[:, 0].contiguous())
    best = torch.full((lanes * width,), tokens.NOTHING)
    many_rows.product_and_pick(normal, layer.query_key_value, draws, best)
    assert torch.equal(picked(best), sampled(linear(normal, layer.query_key_value).flatten(0, 1), draws, width))

for (lanes, width, vocab), temperature, programs in itertools.product(
    [(1, 1, 5000), (3, 4, 1500), (2, 1, 1024)], (0.0, 0.9), (1, 32)
):
    tokens._PROGRAMS = programs  # so blocks of one program of which the best so far passes most over, or a single one
    torch.manual_seed(vocab)
    logits = torch.randn(lanes * width, vocab) * programs**0.5
    seeds, start = torch.randint(0, 2**63 - 1, (lanes,)), torch.randint(0, 14550, (lanes,))
    draws = tokens.Draws(torch.full((lanes,), temperature), seeds, start)
    best = torch.full((lanes * width,), tokens.NOTHING)
    tokens.pick(logits, draws, best)
    assert torch.equal(picked(best), sampled(logits, draws, width))
    if temperature:
        # Without logits, what is highest is the noise itself.
        best.fill_(tokens.NOTHING)
        tokens.pick(torch.zeros_like(logits), draws, best)
        positions = (start[:, None] + torch.arange(width)).flatten()
        noise = vocabulary_noise(seeds.repeat_interleave(width), positions, vocab)
        values = (best >> 32).int()
        values = torch.where(values < 0, values ^ 0x7FFFFFFF, values).view(torch.float32)
        torch.testing.assert_close(values, noise.max(1).values, rtol=1e-5, atol=1e-6)



@triton.jit
def compare(words, gap, logit, temperature, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    uniform = tl.maximum(tl.load(words + at).to(tl.float32) * 4.6566127342e-10, 4.6566127342e-10)
    scaled = tl.zeros([BLOCK], tl.float32) + logit * (1.0 / temperature)
    exact = tl.div_rn(tl.zeros([BLOCK], tl.float32) + logit, temperature) + tokens._gumbel(uniform)
    tl.store(gap + at, tokens._most(scaled, uniform) - exact)


near_powers = (2 ** torch.arange(31)[:, None] + torch.arange(-2, 3)).clamp(0, 2**31 - 1).flatten()
words = torch.cat([near_powers, torch.randint(0, 2**31, (1024 - len(near_powers),))])
for logit, temperature in itertools.product((0.0, -7.3, 31.7, -60.0, 300.0), (0.1, 0.9)):
    gap = torch.zeros(1024)
    compare[(4,)](words, gap, logit, temperature, BLOCK=256)
    assert (gap > 0).all(), (logit, temperature, gap.min())
    small = words < 2**21
    assert (gap[small] < 0.062 + 4e-6 * abs(logit) / temperature).all(), (logit, temperature, gap[small].max())

block, image_tokens, slots, frames, hidden = 7, 5, 6, 3, 24
table, slot_rows = torch.randn(50, hidden), torch.randn(4, slots, hidden)
places = SpatioTemporalPositions(block, frames, hidden)
for width in (1, 6):
    for attempt in range(20):
        torch.manual_seed(100 * width + attempt)
        ids, start = torch.randint(0, 50, (4, 40)), torch.randint(0, block * frames - 1, (4,))
        last = start + torch.randint(0, 9, (4,))
        positions, states = tokens.embed(ids, start, slot_rows, table, places, image_tokens, width)
        assert torch.equal(positions, start[:, None] + torch.arange(width))
        for lane in range(4):
            for position, state in zip(positions[lane], states[lane]):
                frame, place = divmod(int(position), block)
                slot = min(2 * frame + place - image_tokens, slots - 1)
                own = table[ids[lane, position]] if place < image_tokens else slot_rows[lane, slot]
                torch.testing.assert_close(state, own + places(position).detach())
        picks = torch.randint(0, 50, (4, width))
        following = positions + 1
        guessed = torch.rand(4, width) < 0.8  # so drafts are right now and then
        ids.scatter_(1, following, torch.where(guessed, picks, ids.gather(1, following)))
        best = tokens_as_best(picks.flatten())
        expected, expected_start = ids.clone(), start.clone()
        plain.accept(expected, expected_start, last, torch.ones(4, dtype=bool), picks, block, image_tokens)
        tokens.accept(best, ids, start, last, block, image_tokens)
        assert torch.equal(ids, expected) and torch.equal(start, expected_start), (width, attempt)
        assert (best == tokens.NOTHING).all()
print("all equal")
"""


def test_kernels_equal_torch(tmp_path):
    run_interpreted(tmp_path, PROGRAM)


def test_programs_fit_a_small_gpus_shared_memory(monkeypatch):
    monkeypatch.setattr(many_rows, "shared_memory", lambda device: 99 << 10)
    shapes = [many_rows._SPLIT, many_rows._GATED, many_rows._HEAD]
    for dtype, tokens, shape in itertools.product((torch.float32, torch.bfloat16), (1, 64, 300), shapes):
        tiles = many_rows._tiles(as_it_is(torch.zeros(1, 1, dtype=dtype)), tokens, shape)
        elements = (tiles["BLOCK_TOKENS"] + tiles["BLOCK_ROWS"]) * tiles["BLOCK_COLUMNS"]
        assert tiles["num_stages"] > 1
        assert (tiles["num_stages"] + tiles["HELD"]) * elements * dtype.itemsize <= 99 << 10


def test_a_matrix_in_8_bits_is_nearly_itself():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 64, generator=generator) * torch.logspace(-3, 3, 96)[:, None]
    states = torch.randn(2, 3, 64, generator=generator) * torch.logspace(-1, 1, 3)[None, :, None]
    for spare in (1, 30):
        matrix = in_fp8(weight, spare * states.abs().max().item())
        assert matrix.weight.dtype == torch.float8_e4m3fn
        expected, made = linear(states, as_it_is(weight)), linear(states, matrix)
        torch.testing.assert_close(expected, states @ weight.T)
        # Each factor has 3 bits behind the point, so an error of 1/16 at most (and of a little where it is near 0).
        within = states.abs() @ weight.abs().T
        assert ((made - expected).abs() <= 0.14 * within).all()
        assert 0.0 < (made - expected).norm() < 0.05 * expected.norm()
        assert torch.equal(linear(torch.zeros(1, 64), matrix), torch.zeros(1, 96))
        assert torch.equal(linear(rounded(states, matrix.states_by), matrix), made)


def test_what_is_larger_than_expected_is_cut_off():
    states = torch.tensor([[3.0, -9.0, torch.nan]])
    narrow = rounded(states, 448 / 3.0)
    assert narrow[0, :2].tolist() == [448.0, -448.0]
    assert narrow[0, 2].isnan()
