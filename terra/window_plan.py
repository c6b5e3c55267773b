"""Plans the sliding windows of a rollout, see `terra.windows`; needs no torch."""

from collections.abc import Iterator
from dataclasses import dataclass

from terra.errors import ConfigError
from tokenizer.limits import LIMITS, Limits


@dataclass(frozen=True)
class Window:
    """Frames `start` to `start + num_frames - 1` of a rollout; the first `num_given` of them are given.

    Memory frames are not counted.
    """

    start: int
    num_given: int
    num_frames: int


def check_overlap(overlap: int, max_frames: int, memory: int = 0) -> None:
    """Refuse an overlap that leaves nothing to read again, or nothing to generate.

    Raises:
        ConfigError: overlap below 1, or no room for it, `memory` memory frames and a frame in `max_frames`.
    """
    if not 1 <= overlap < max_frames - memory:
        raise ConfigError(
            f"overlap: expected 1 to {max_frames - memory - 1} ({_holds(max_frames, memory)}), got {overlap}"
        )


def check_frames(num_frames: int, limits: Limits = LIMITS, where: str = "") -> None:
    """Raise ConfigError for a rollout of more frames than `limits` allow; the line begins with `where`."""
    if num_frames > limits.rollout_frames:
        raise ConfigError(f"{where}num_frames: expected at most {limits.rollout_frames}, got {num_frames}")


def plan_windows(
    num_frames: int, num_context: int, max_frames: int, overlap: int, memory: int = 0, *, has_map: bool = False
) -> Iterator[Window]:
    """The windows of a rollout of `num_frames` frames, its context included; each generates at least one frame.

    Each has `memory` memory frames, but window 0 only with a map.

    Raises:
        ConfigError: a map without memory frames; a context that is empty, fills the window, or leaves nothing to
            generate; see also `check_overlap`.
    """
    if has_map and not memory:
        raise ConfigError("map: expected none for rollouts without memory, got one")
    check_overlap(overlap, max_frames, memory)
    at_first = memory if has_map else 0
    if not 1 <= num_context < max_frames - at_first:
        most = max_frames - at_first - 1
        raise ConfigError(f"num_context: expected 1 to {most} ({_holds(max_frames, at_first)}), got {num_context}")
    if num_frames <= num_context:
        raise ConfigError(f"num_frames: expected more than num_context={num_context}, got {num_frames}")
    start, given, room = 0, num_context, max_frames - at_first
    while True:
        window = Window(start, given, min(room, num_frames - start))
        yield window
        end = start + window.num_frames
        if end == num_frames:
            return
        start, given, room = end - overlap, overlap, max_frames - memory


def window_at(last: int, max_frames: int, overlap: int, memory: int = 0, *, has_map: bool = False) -> tuple[int, int]:
    """The window (its index, its first frame) of `plan_windows` in which the frame after `last` is generated.

    From the second on, these windows start `max_frames - overlap - memory` frames apart.
    """
    first = max_frames - (memory if has_map else 0)
    stride = max_frames - overlap - memory
    if last + 1 < first:
        return 0, 0
    index = 1 + (last + 1 - first) // stride
    return index, first - overlap + (index - 1) * stride


def _holds(max_frames: int, memory: int) -> str:
    return f"the window holds {max_frames}" + (f", {memory} of them memory" if memory else "")
