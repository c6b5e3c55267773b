"""Drafts on small random models: the frames of drafted decoding are compared with the engine's."""

import itertools

import pytest
import torch
from hypothesis import given, strategies as st
from tiny import COLS, ROWS
from torch.nn import functional as F

from terra.engine.drafts import decode_frame, draft_from_last_pass_or_previous_frame, num_accepted
from terra.prompt import Prompt, build_prompt, pack_blocks
from terra.sampling import SamplingParams, sample_tokens
from terra.world_model import load_world_model
from terra.world_model.window import FramePrefix, WindowReader, sample_frame

TOKENS = ROWS * COLS
VOCAB = 64
CONTEXT, MADE = 2, 3
SEED = 7


@pytest.fixture(scope="module")
def model(tiny_model):
    return load_world_model(tiny_model)


@pytest.fixture(scope="module")
def drive():
    generator = torch.Generator().manual_seed(1)
    frames = torch.randint(0, VOCAB, (CONTEXT + MADE, ROWS, COLS), generator=generator)
    return frames, torch.randn(CONTEXT + MADE - 1, 6, 3, generator=generator)


def make_prompt(drive):
    return build_prompt(drive[0][:CONTEXT], drive[1][: CONTEXT - 1])


def from_engine(hf_engine, wait, drive, temperature, seed=SEED):
    async def go():
        session = await hf_engine.open(make_prompt(drive), SamplingParams(temperature=temperature), seed)
        frames = [frame async for frame in session.run(drive[1][CONTEXT - 1 :])]
        await session.close()
        return frames

    return wait(go())


def open_window(model, drive):
    """A reader that holds the drive's context but for its last token."""
    reader = WindowReader(model)
    ids = Prompt(drive[0][:CONTEXT], drive[1][: CONTEXT - 1]).ids(reader.layout.action_slots)[:-1]
    reader.feed(ids[None], torch.arange(len(ids)), drive[1][None, : CONTEXT - 1])
    return reader


def frame_sampler(temperature, frame, layout):
    """Chooses tokens of frame number `frame` as the engines do."""

    def pick(logits, places):
        # The noise of a token is that of the position before it.
        positions = torch.tensor(places) + frame * layout.block - 1
        sampling = SamplingParams(temperature=temperature)
        return sample_tokens(logits[0], sampling, torch.full_like(positions, SEED), positions)[None]

    return pick


def from_known(tokens):
    """Drafts the given tokens of the frame."""
    return lambda made, own, places: [tokens[place] for place in places]


def from_last_pass(before):
    """Drafts the last pass's own picks, and the newest token at places that it did not reach."""
    return lambda made, own, places: [own.get(place, made[-1] if made else before) for place in places]


def head_after(drive, frame, previous, layout):
    """The head of the frame after number `frame`, whose tokens are `previous` (a batch of them)."""
    return FramePrefix.after_frame(previous[:, -1, -1], drive[1][frame].expand(len(previous), 6, 3), frame, layout)


def first_head(drive, layout):
    return head_after(drive, CONTEXT - 1, drive[0][None, CONTEXT - 1], layout)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("name", ["previous", "own", "both"])
@pytest.mark.parametrize("num_drafts", [0, 1, 4, 40])
def test_drafted_frames_are_the_engines(model, hf_engine, wait, drive, temperature, name, num_drafts):
    reader, layout, frames = open_window(model, drive), model.config.layout, []
    for index in range(MADE):
        last = frames[-1] if frames else drive[0][CONTEXT - 1]
        head = head_after(drive, CONTEXT + index - 1, last[None], layout)
        previous = last.flatten().tolist()
        drafter = {
            "previous": from_known(previous),
            "own": from_last_pass(previous[-1]),
            "both": draft_from_last_pass_or_previous_frame(previous),
        }[name]
        pick = frame_sampler(temperature, CONTEXT + index, layout)
        tokens, lengths = decode_frame(reader, head, pick, drafter, num_drafts)
        frames.append(tokens.reshape(ROWS, COLS))
        assert sum(lengths) == TOKENS
        assert reader.length == layout.block * (CONTEXT + index) + TOKENS - 1
    assert torch.equal(torch.stack(frames), torch.stack(from_engine(hf_engine, wait, drive, temperature)))


def test_a_frame_is_what_whole_passes_without_a_cache_sample(model):
    generator = torch.Generator().manual_seed(3)
    context = torch.randint(0, VOCAB, (2, CONTEXT, ROWS, COLS), generator=generator)
    actions = torch.randn(2, CONTEXT + 1, 6, 3, generator=generator)
    reader, layout, seeds = WindowReader(model), model.config.layout, torch.tensor([SEED, 0])
    first = sample_frame(reader, FramePrefix.after_context(context, actions[:, :-1]), SamplingParams(), seeds)
    prefix = FramePrefix.after_frame(first[:, -1], actions[:, -1], CONTEXT, layout)
    second = sample_frame(reader, prefix, SamplingParams(), seeds)
    assert reader.length == (CONTEXT + 1) * layout.block + TOKENS - 1

    ids = pack_blocks(context, layout.action_slots)
    for frame, num_actions in ((first, CONTEXT), (second, CONTEXT + 1)):
        for index in range(TOKENS):
            logits = model(input_ids=ids, actions=actions[:, :num_actions]).logits[:, -1, :VOCAB]
            last = torch.full_like(seeds, ids.shape[1] - 1)
            assert torch.equal(sample_tokens(logits, SamplingParams(), seeds, last), frame[:, index])
            ids = torch.cat([ids, frame[:, index, None]], dim=1)
        ids = F.pad(ids, (0, layout.action_slots))


def test_a_frame_ends_with_what_is_raised_before_a_pass(model, drive):
    passes = iter(range(3))
    with pytest.raises(StopIteration):
        sample_frame(
            open_window(model, drive),
            first_head(drive, model.config.layout),
            SamplingParams(),
            torch.tensor([SEED]),
            lambda: next(passes),
        )


def test_right_drafts_fill_each_pass(model, drive):
    layout = model.config.layout
    head = first_head(drive, layout)
    pick = frame_sampler(0.9, CONTEXT, layout)
    right, _ = decode_frame(open_window(model, drive), head, pick, from_last_pass(0), 0)
    drafted, lengths = decode_frame(open_window(model, drive), head, pick, from_known(right.tolist()), 4)
    assert torch.equal(drafted, right)
    assert lengths == [1, 5, 5, 1]  # the first pass reads the action too: more than 5 tokens


def test_own_picks_are_kept_from_one_pass_to_the_next(model, drive):
    layout = model.config.layout
    head = first_head(drive, layout)
    asked = []

    def drafter(made, own, places):
        asked.append((len(made), dict(own), places))
        return [own.get(place, 0) for place in places]

    decode_frame(open_window(model, drive), head, frame_sampler(0.9, CONTEXT, layout), drafter, 4)
    for (done, _, places), (then, own, _) in itertools.pairwise(asked):
        # The pass picked one place beyond its drafts; what it did not add to the frame is passed on.
        assert list(own) == list(range(then, places.stop + 1))
        assert then > done


@given(st.lists(st.integers(0, 1), max_size=9), st.lists(st.integers(0, 1), min_size=9, max_size=9))
def test_drafts_are_right_up_to_the_first_that_differs(drafts, picks):
    right = num_accepted(drafts, picks)
    assert drafts[:right] == picks[:right]
    assert right == len(drafts) or drafts[right] != picks[right]


def test_slots_need_their_actions(model):
    layout = model.config.layout
    with pytest.raises(ValueError, match="expected 6 rows for the slots, got 0"):
        WindowReader(model).feed(torch.zeros(1, layout.block, dtype=torch.int64), torch.arange(layout.block))
