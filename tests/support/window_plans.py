"""Draws rollouts over sliding windows, for property tests."""

from hypothesis import strategies as st


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
