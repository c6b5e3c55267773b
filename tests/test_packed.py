"""The packed decoder: transformers' logits in float32, and the same logits in passes of any length in 16 and 8 bits."""

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings, strategies as st
from tiny import COLS, DEVICE, ROWS

from terra.engine import packed
from terra.engine.int8 import Int8Weight
from terra.engine.jacobi import JacobiEngine
from terra.engine.packed import CHUNK, KEY_BLOCK, PackedDecoder, PackedReader
from terra.prompt import build_prompt, pack_blocks
from terra.sampling import SamplingParams
from terra.world_model import load_world_model
from terra.world_model.window import WindowReader

FRAMES = 7
BLOCK = ROWS * COLS + 6


# From 2 columns on, as no weight has fewer: torch's product of integers over one column is not exact (2.13, AVX-512).
@pytest.mark.parametrize("integers", [True, False])
@pytest.mark.parametrize("columns", [2, 40, 1024, 1025, 2500])
@pytest.mark.parametrize("largest", [True, False])
def test_products_of_8_bits_are_exact(monkeypatch, integers, columns, largest):
    monkeypatch.setattr("terra.engine.int8._INTEGER_GEMM", integers)
    generator = torch.Generator().manual_seed(columns)
    states, rows = (
        torch.randint(-127, 128, (count, columns), generator=generator, dtype=torch.int8) for count in (CHUNK, 24)
    )
    if largest:
        states, rows = torch.full_like(states, 127), torch.full_like(rows, -127)
    product = Int8Weight(rows, torch.ones(24, 1)).product(states)
    assert torch.equal(product.long(), states.long() @ rows.long().t())


@pytest.fixture(scope="module")
def drive():
    generator = torch.Generator().manual_seed(3)
    frames = torch.randint(0, 64, (FRAMES, ROWS, COLS), generator=generator)
    return frames, torch.randn(FRAMES, 6, 3, generator=generator)


REDUCED = ["bfloat16", "int8", "int8 without oneDNN"]


def reduced(folder, kind):
    """A decoder in 16 or 8 bits; without oneDNN as on a CPU that does not multiply bfloat16."""
    int8 = kind != "bfloat16"
    model = load_world_model(folder, dtype=torch.float32 if int8 else torch.bfloat16, device=DEVICE)
    with pytest.MonkeyPatch.context() as patch:
        if kind == "int8 without oneDNN":
            patch.setitem(packed._ONEDNN_TYPES, torch.bfloat16, False)
        return PackedDecoder(model, int8=int8)


@pytest.fixture(scope="module", params=REDUCED)
def exact_decoder(tiny_model, request):
    return reduced(tiny_model, request.param)


def read(reader, drive, *lengths):
    """The logits behind each token of the drive, read in passes of whole blocks or of single tokens."""
    frames, actions = drive
    ids, done, logits = pack_blocks(frames, 6), 0, []
    for length in lengths:
        positions = torch.arange(done, done + length)
        slots = actions[done // BLOCK : -(-(done + length) // BLOCK)] if length >= 6 else None
        logits.append(reader.feed(ids[None, done : done + length], positions, None if slots is None else slots[None]))
        done += length
    return torch.cat(logits, dim=1)


def test_float32_gives_the_logits_of_transformers(tiny_model, drive):
    expected = read(WindowReader(load_world_model(tiny_model, device=DEVICE)), drive, FRAMES * BLOCK)
    decoder = PackedDecoder(load_world_model(tiny_model, device=DEVICE), int8=False)
    for lengths in ([FRAMES * BLOCK], [BLOCK] * FRAMES):
        got = read(PackedReader(decoder), drive, *lengths)
        torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)


def test_eight_bits_are_near(tiny_model, drive):
    exact, narrow = (
        read(PackedReader(PackedDecoder(load_world_model(tiny_model, device=DEVICE), int8=int8)), drive, FRAMES * BLOCK)
        for int8 in (False, True)
    )
    assert not torch.equal(exact, narrow)
    assert (exact - narrow).norm() < 0.05 * exact.norm()


@given(st.lists(st.integers(1, FRAMES - 1), max_size=3, unique=True))
def test_a_pass_of_any_length_gives_the_same_bits(exact_decoder, drive, cuts):
    bounds = [0, *sorted(cuts), FRAMES]
    lengths = [(b - a) * BLOCK for a, b in pairwise(bounds)]
    whole = read(PackedReader(exact_decoder), drive, FRAMES * BLOCK)
    assert torch.equal(read(PackedReader(exact_decoder), drive, *lengths), whole)


@given(st.integers(1, ROWS * COLS), st.integers(0, 2 * CHUNK), st.integers(0, 5))
@settings(max_examples=30)
def test_drafts_leave_no_trace(exact_decoder, drive, known, num_drafts, seed):
    """A token behind dropped drafts has the logits that it has alone, and each draft those of its prefix."""
    frames, actions = drive
    ids = pack_blocks(frames[:5], 6)
    alone, drafted = PackedReader(exact_decoder), PackedReader(exact_decoder)
    start = 4 * BLOCK
    for reader in (alone, drafted):
        reader.feed(ids[None, :start], torch.arange(start), actions[None, :4])
    drafts = torch.randint(0, 64, (1, num_drafts), generator=torch.Generator().manual_seed(seed))
    drafts = drafts[:, : ROWS * COLS - known]
    fed = torch.cat([ids[None, start : start + known], drafts], dim=1)
    got = drafted.feed(fed, torch.arange(start, start + fed.shape[1]))
    expected = [alone.feed(fed[:, [i]], torch.tensor([start + i])) for i in range(fed.shape[1])]
    assert torch.equal(got, torch.cat(expected, dim=1))
    drafted.drop(drafts.shape[1])
    alone.drop(drafts.shape[1])
    assert drafted.length == alone.length == start + known
    following = ids[None, [start + known]] if known < ROWS * COLS else ids[None, :1]
    at = torch.tensor([start + min(known, ROWS * COLS - 1)])
    assert torch.equal(drafted.feed(following, at), alone.feed(following, at))


def test_logits_of_the_last_tokens_are_those_of_all(exact_decoder, drive):
    frames, actions = drive
    ids, positions = pack_blocks(frames, 6)[None], torch.arange(FRAMES * BLOCK)
    whole = PackedReader(exact_decoder).feed(ids, positions, actions[None])
    for last in (1, 5, CHUNK, CHUNK + 1):
        assert torch.equal(PackedReader(exact_decoder).feed(ids, positions, actions[None], last=last), whole[:, -last:])


def test_a_window_longer_than_blocks_of_keys(tmp_path_factory):
    from tiny import save_tiny

    from terra.world_model import LlamaActionV2ForCausalLM

    frames = 3 * KEY_BLOCK // BLOCK + 4  # four blocks of keys
    folder = save_tiny(
        tmp_path_factory.mktemp("models") / "long",
        LlamaActionV2ForCausalLM,
        num_temporal_embeddings=frames,
        max_position_embeddings=frames * BLOCK,
    )
    generator = torch.Generator().manual_seed(4)
    drive = (
        torch.randint(0, 64, (frames, ROWS, COLS), generator=generator),
        torch.randn(frames, 6, 3, generator=generator),
    )
    expected = read(WindowReader(load_world_model(folder, device=DEVICE)), drive, frames * BLOCK)
    decoder = PackedDecoder(load_world_model(folder, device=DEVICE), int8=False)
    got = read(PackedReader(decoder), drive, *[BLOCK] * frames)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4)
    for kind in REDUCED:
        narrow = reduced(folder, kind)
        whole = read(PackedReader(narrow), drive, frames * BLOCK)
        assert torch.equal(read(PackedReader(narrow), drive, *[BLOCK] * frames), whole)


@pytest.mark.parametrize("types", [{torch.float32: False, torch.bfloat16: False}, None], ids=["torch", "oneDNN"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_is_torchs_own(tiny_model, monkeypatch, types, dtype):
    monkeypatch.setattr(packed, "_ONEDNN_TYPES", types or packed._ONEDNN_TYPES)
    decoder = PackedDecoder(load_world_model(tiny_model, dtype=dtype, device=DEVICE), int8=False)
    generator = torch.Generator().manual_seed(6)
    for first in (0, 5, KEY_BLOCK - 1, 3 * KEY_BLOCK):
        mask = decoder._mask(first)
        queries, keys, values = (
            torch.randn(1, 2, count, decoder._dim, generator=generator).to(DEVICE, dtype)
            for count in (len(mask), first + mask.shape[1], first + mask.shape[1])
        )
        whole = torch.nn.functional.pad(mask, (first, 0))
        expected = torch.nn.functional.scaled_dot_product_attention(queries, keys, values, attn_mask=whole)[0]
        got = decoder._attend(queries[0], torch.cat([keys, values]), mask)
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("types", [{"int8_weights": True}, {"dtype": "bfloat16"}], ids=["int8", "bfloat16"])
def test_no_number_of_drafts_changes_a_token(tiny_model, drive, wait, types):
    frames, actions = drive

    async def generated(drafts):
        engine = JacobiEngine(tiny_model, drafts=drafts, device=DEVICE, **types)
        session = await engine.open(build_prompt(frames[:2], actions[:1]), SamplingParams(), 5)
        made = [frame async for frame in session.run(actions[1:6])]
        await engine.close()
        return torch.stack(made)

    sequential = wait(generated(0))
    for drafts in (1, 4, 31, 40):
        assert torch.equal(wait(generated(drafts)), sequential)
