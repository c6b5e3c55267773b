"""The script that compares ways to draft: each gives the engine's frames, and a branch counts as a chain does."""

import pytest
import torch
from entry import load_script
from tiny import COLS, ROWS

from terra.engine.drafts import decode_frame, draft_from_last_pass_or_previous_frame
from terra.prompt import Prompt
from terra.sampling import SamplingParams, sample_tokens
from terra.world_model import load_world_model
from terra.world_model.window import FramePrefix, WindowReader

script = load_script("accepted_lengths")
CONTEXT, MADE, TOKENS = 2, 3, ROWS * COLS


@pytest.fixture(scope="module", params=[0.0, 0.9])
def truth(request, tiny_model, hf_engine, wait):
    """A context whose right tokens are the engine's."""
    model = load_world_model(tiny_model)
    generator = torch.Generator().manual_seed(1)
    frames = torch.randint(0, model.config.image_vocab_size, (CONTEXT, ROWS, COLS), generator=generator)
    actions = torch.randn(CONTEXT + MADE - 1, 6, 3, generator=generator)
    sampling = SamplingParams(temperature=request.param)

    async def go():
        session = await hf_engine.open(Prompt(frames, actions[: CONTEXT - 1]), sampling, 0)
        made = [frame async for frame in session.run(actions[CONTEXT - 1 :])]
        await session.close()
        return torch.stack(made)

    right = wait(go()).flatten().tolist()
    return script.Truth(model, frames, actions, sampling, right)


@pytest.mark.parametrize("name", list(script.STRATEGIES))
def test_each_way_gives_the_engines_frames(truth, name):
    strategy = script.STRATEGIES[name]
    rollout = script.decode(truth, strategy, strategy.drafter(), 9)
    assert rollout.frames().flatten().tolist() == truth.right
    truth.check(rollout.frames())
    assert sum(rollout.lengths) == MADE * TOKENS


def test_other_tokens_are_refused(truth):
    frames = torch.tensor(truth.right).view(MADE, TOKENS)
    frames[1, 3] += 1
    with pytest.raises(script.EngineError, match="frame 1: expected what one pass over it samples"):
        truth.check(frames)


@pytest.mark.parametrize("drafts", [0, 3, 12])
def test_plain_takes_the_passes_of_the_engines_drafts(truth, drafts):
    model, layout, sampling = truth.model, truth.model.config.layout, truth.sampling
    reader = WindowReader(model)
    ids = Prompt(truth.context, truth.actions[: CONTEXT - 1]).ids(layout.action_slots)[:-1]
    reader.feed(ids[None], torch.arange(len(ids)), truth.actions[None, : CONTEXT - 1])
    last, lengths = truth.context[-1].flatten(), []
    for frame in range(CONTEXT, CONTEXT + MADE):

        def sample(logits, places, frame=frame):
            positions = torch.tensor(places) + frame * layout.block - 1
            return sample_tokens(logits[0], sampling, torch.zeros_like(positions), positions)[None]

        prefix = FramePrefix.after_frame(last[-1:], truth.actions[None, frame - 1], frame - 1, layout)
        drafter = draft_from_last_pass_or_previous_frame(last.tolist())
        last, passes = decode_frame(reader, prefix, sample, drafter, drafts)
        lengths += passes
    strategy = script.STRATEGIES["plain"]
    assert script.decode(truth, strategy, strategy.drafter(), drafts + 1).lengths == lengths


def test_a_right_branch_counts_as_a_right_chain(truth):
    """Each pass has wrong drafts, and a branch of right ones behind the second of them that is right."""

    def branch(rollout, room):
        right = script.chain(rollout, room, guess=script.right_token)
        right = [node._replace(token=script.right_token(rollout, node.position)) for node in right]
        wrong = [script.Node(index - 1, node.position, node.token + 1) for index, node in enumerate(right)]
        wrong[:2] = right[:2]
        return wrong + script._branch(right[2:], 1, right[2].token, len(wrong)) if len(right) > 2 else right

    in_chains = script.decode(truth, script.STRATEGIES["plain"], lambda rollout, room: [
        node._replace(token=script.right_token(rollout, node.position)) for node in script.chain(rollout, room)
    ], 6)  # fmt: skip
    in_branches = script.decode(truth, script.STRATEGIES["plain"], branch, 6)
    assert in_branches.lengths == in_chains.lengths
    assert in_branches.frames().flatten().tolist() == truth.right
