"""Rollouts over sliding windows for property tests, and an engine that notes how their windows are opened."""

from hypothesis import strategies as st

from terra.actions import Waypoints
from terra.engine.base import EngineSpec
from terra.engine.persistence import PersistenceEngine
from terra.prompt import Layout


@st.composite
def plans(draw) -> tuple[int, int, int, int]:
    """Numbers of frames, of context frames, of frames that a window holds, and of frames read again."""
    max_frames = draw(st.integers(2, 30))
    overlap = draw(st.integers(1, max_frames - 1))
    num_context = draw(st.integers(1, max_frames - 1))
    return draw(st.integers(num_context + 1, 120)), num_context, max_frames, overlap


@st.composite
def memory_plans(draw) -> tuple[int, int, int, int, int, bool]:
    """As `plans`, with a number of memory frames of a window, and whether there is a map."""
    memory, has_map = draw(st.integers(1, 5)), draw(st.booleans())
    max_frames = draw(st.integers(memory + 2, 30))
    overlap = draw(st.integers(1, max_frames - memory - 1))
    num_context = draw(st.integers(1, max_frames - 1 - (memory if has_map else 0)))
    return draw(st.integers(num_context + 1, 120)), num_context, max_frames, overlap, memory, has_map


class CountingEngine(PersistenceEngine):
    """Makes frames that count up from the last one, and notes tokens, times of actions, and seed of each window."""

    def __init__(self, max_frames: int) -> None:
        super().__init__(EngineSpec(Layout(1, 1, max_frames), 10_000, 10.0, Waypoints(times=(0.5,))))
        self.opened: list[tuple[list[int], list[float], int]] = []

    async def open(self, prompt, sampling, seed, adapter=None):
        session = await super().open(prompt, sampling, seed, adapter)
        self.opened.append((prompt.tokens.flatten().tolist(), prompt.actions[:, 0, 2].tolist(), seed))
        make = session.step

        async def step(action):
            session._frame = session._frame + 1
            return await make(action)

        session.step = step
        return session
