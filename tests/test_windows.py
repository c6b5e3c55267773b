import pytest
import torch
from hypothesis import given, strategies as st
from window_plans import CountingEngine, plans

from terra.errors import ConfigError
from terra.prompt import build_prompt
from terra.sampling import SamplingParams, window_seed
from terra.window_plan import plan_windows
from terra.windows import SlidingSession

SAMPLING = SamplingParams()


@given(plans())
def test_windows_tile_the_rollout(plan):
    num_frames, num_context, max_frames, overlap = plan
    windows = list(plan_windows(*plan))
    made = [frame for w in windows for frame in range(w.start + w.num_given, w.start + w.num_frames)]
    assert made == list(range(num_context, num_frames))
    assert windows[0].start == 0
    assert windows[0].num_given == num_context
    assert all(w.num_given == overlap for w in windows[1:])
    assert all(w.num_given < w.num_frames <= max_frames for w in windows)


@pytest.mark.parametrize(("num_frames", "count"), [(25, 1), (26, 2), (47, 2), (50, 3)])
def test_published_rounds(num_frames, count):
    windows = list(plan_windows(num_frames, 3, 25, 3))
    assert len(windows) == count
    assert [w.start for w in windows] == [22 * index for index in range(count)]


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ((25, 0, 25, 3), "num_context: expected 1 to 24"),
        ((30, 25, 25, 3), "num_context: expected 1 to 24"),
        ((3, 3, 25, 3), "num_frames: expected more than num_context=3, got 3"),
        ((25, 3, 25, 25), "overlap: expected 1 to 24"),
        ((25, 3, 25, 0), "overlap: expected 1 to 24"),
    ],
)
def test_impossible_plans_are_refused(plan, message):
    with pytest.raises(ConfigError, match=message):
        list(plan_windows(*plan))


@given(plans(), st.integers(0, 1000), st.data())
def test_sliding_session_opens_the_planned_windows(plan, seed, data):
    import asyncio

    num_frames, num_context, max_frames, overlap = plan
    engine = CountingEngine(max_frames)
    actions = torch.arange(num_frames - 1.0)[:, None, None].expand(-1, 1, 3)
    prompt = build_prompt(torch.arange(num_context)[:, None, None], actions[: num_context - 1])
    cut, live = sorted(data.draw(st.integers(num_context - 1, num_frames - 1)) for _ in range(2))

    async def rollout():
        session = await SlidingSession.open(engine, prompt, SAMPLING, seed, overlap)
        frames = [await session.step(action) for action in actions[num_context - 1 : cut]]
        frames += [frame async for frame in session.run_live(iter(actions[cut:live]))]
        frames += [frame async for frame in session.run(actions[live:])]
        await session.close()
        return [int(frame) for frame in frames]

    assert asyncio.run(rollout()) == list(range(num_context, num_frames))
    windows = list(plan_windows(*plan))
    assert engine.opened == [
        (
            list(range(w.start, w.start + w.num_given)),
            [float(index) for index in range(w.start, w.start + w.num_given - 1)],
            window_seed(seed, index),
        )
        for index, w in enumerate(windows)
    ]
