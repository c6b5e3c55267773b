"""Defines the interface of engines: an engine opens sessions, a session generates the tokens of frames.

A session is one live rollout within one window of the model: one action in, one frame's tokens out. An engine owns
the weights, the device and the KV cache, and runs many sessions at once. The interface is asynchronous only;
`terra.pipeline` adds the blocking one.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import torch

from terra.actions import ActionSpace, require_waypoints
from terra.errors import ConfigError, EngineError
from terra.memory import MemoryRule
from terra.prompt import Action, Actions, FrameTokens, Layout, Prompt
from terra.sampling import SamplingParams
from terra.views import Views

if TYPE_CHECKING:
    from terra.world_model import LlamaActionConfig


@dataclass(frozen=True)
class EngineSpec:
    """The facts about an engine's model that the pipeline needs.

    Attributes:
        layout: where the image tokens and action slots of a window stand.
        vocab_size: number of image tokens; their ids are 0 to `vocab_size` - 1.
        fps: frames a second.
        space: what the model's actions mean.
        tokenizer_sha256: hash of the tokenizer's weights that the model was trained with; None where it is not known.
        architecture: class of the model, as the checkpoint's config.json names the class; None where it is not known.
        memory: how the model's memory frames are chosen; None for a model without memory.
        views: the cameras whose pictures share each frame; None for one camera.
    """

    layout: Layout
    vocab_size: int
    fps: float
    space: ActionSpace
    tokenizer_sha256: str | None = None
    architecture: str | None = None
    memory: MemoryRule | None = None
    views: Views | None = None

    @classmethod
    def of(cls, config: "LlamaActionConfig") -> "EngineSpec":
        """The spec of a world model's configuration."""
        return cls(
            layout=config.layout,
            vocab_size=config.image_vocab_size,
            fps=config.fps,
            space=config.space,
            tokenizer_sha256=config.tokenizer_sha256,
            architecture=(config.architectures or [None])[0],
            memory=config.memory_rule,
            views=config.camera_views,
        )

    @property
    def action_shape(self) -> tuple[int, int]:
        """Shape of one action: (slots, action_dim)."""
        return self.space.shape

    @property
    def waypoint_times(self) -> tuple[float, ...]:
        """Seconds from a frame to each of its action's waypoints. Raises ActionError for another action space."""
        return require_waypoints(self.space, "driving").times


@dataclass(frozen=True)
class EngineCounters:
    """What an engine has computed since it started; engines leave at their defaults what they do not count.

    Attributes:
        prefilled: tokens of prompts (context frames with their action slots) that were computed when a window began.
        cached: tokens of prompts whose keys and values were found in a prefix cache or in another session instead.
        sampled: tokens that were sampled.
        kv_cache_usage: share of the KV cache that open sessions hold, 0 to 1; None where the engine does not say.
        passes: passes over a session by the number of tokens that they gave it: `passes[n]` gave n tokens, one and the
            accepted drafts. A pass over action slots alone gives none. Empty where an engine has no drafts.
    """

    prefilled: int = 0
    cached: int = 0
    sampled: int = 0
    kv_cache_usage: float | None = None
    passes: tuple[int, ...] = ()


@runtime_checkable
class Session(Protocol):
    """One live rollout within a window. Not for use by two callers at once."""

    async def step(self, action: Action) -> FrameTokens:
        """Apply the last frame's action and return the tokens of the next frame.

        Raises:
            EngineError: the window is full, or the session or its engine is closed.
        """
        ...

    def run(self, actions: Actions) -> AsyncIterator[FrameTokens]:
        """Apply several actions known beforehand and yield each frame's tokens as soon as they are sampled.

        The same tokens as a `step` for each action, with nothing to wait for between frames.

        Raises:
            EngineError: as `step`; actions beyond the window are refused before any frame is made.
        """
        ...

    async def close(self) -> None:
        """Free what the session holds in the engine. Closing twice does nothing."""
        ...


@runtime_checkable
class RunsLive(Protocol):
    """A live session whose engine pulls the next action from an iterator as soon as the action's frame can begin."""

    def run_live(self, actions: Iterator[Action | None]) -> AsyncGenerator[FrameTokens, None]:
        """Apply actions that are chosen one by one and yield each frame's tokens as soon as they are sampled.

        The same tokens as a `step` for each action, but the next frame may begin while the one before is still on its
        way to the caller.

        Args:
            actions: the engine pulls an action when the action's frame can begin. The run ends where the iterator ends
                or gives None; but an engine that pulls ahead, while the frame before is decoded, pulls again after
                None. The engine's own thread may do so, and all sessions wait until the iterator answers.

        Raises:
            EngineError: as `step`, in place of the frame.
            Exception: what `actions` raises, in place of the frame.
        """
        ...


def run_live(session: Session, actions: Iterator[Action | None]) -> AsyncGenerator[FrameTokens, None]:
    """See `RunsLive.run_live`; a `step` for each action where the session has nothing faster."""
    return session.run_live(actions) if isinstance(session, RunsLive) else _run_by_steps(session, actions)


async def _run_by_steps(session: Session, actions: Iterator[Action | None]) -> AsyncGenerator[FrameTokens, None]:
    while (action := next(actions, None)) is not None:
        yield await session.step(action)


@runtime_checkable
class Engine(Protocol):
    """Predicts tokens; owns weights, device and KV cache; many sessions at once."""

    @property
    def spec(self) -> EngineSpec:
        """The model's geometry and rates."""
        ...

    @property
    def failure(self) -> str | None:
        """Why the engine stopped by itself, in one line; None while it works, and after a `close`.

        A failed engine raises `EngineError` to all waiting and all later callers.
        """
        ...

    @property
    def counters(self) -> EngineCounters:
        """What the engine has computed so far. May be read from any thread."""
        ...

    @property
    def adapters(self) -> tuple[str, ...]:
        """The names of adapters that `open` takes."""
        ...

    async def open(self, prompt: Prompt, sampling: SamplingParams, seed: int, adapter: str | None = None) -> Session:
        """Start a session from context frames.

        Args:
            prompt: the context frames and the actions between them.
            sampling: how tokens are chosen.
            seed: the window's, 0 to 2**63 - 1, see `window_seed`.
            adapter: one of `adapters`; None for the model that the engine was started with.

        Raises:
            ValueError: the prompt does not fit the model.
            ConfigError: no such adapter.
            EngineError: the engine is closed or has failed.
        """
        ...

    async def close(self) -> None:
        """Free the weights and the device, without blocking the event loop. Closing twice does nothing.

        Every caller that waits for a frame gets an `EngineError` at once.
        """
        ...


@runtime_checkable
class WarmsUp(Protocol):
    """An engine whose first frames take longer, because kernels are compiled and graphs captured for them."""

    async def warm_up(self, num_context: int) -> None:
        """Compile and capture what sessions without top-k and top-p will need, before there is a session.

        The tokens of later sessions are as without a warm-up. Once a session has begun a frame, a call does nothing.

        Args:
            num_context: frames of the contexts that most windows will have; 1 or more, and fewer than a window holds.

        Raises:
            EngineError: the engine is closed or has failed.
        """
        ...


def check_adapter(adapter: str | None, adapters: Iterable[str]) -> None:
    """Refuse the name of an adapter that is none of an engine's `adapters`.

    Raises:
        ConfigError: no such adapter.
    """
    names = list(adapters)
    if adapter is not None and adapter not in names:
        expected = f"one of {', '.join(names)}" if names else "none (the engine was started without adapters)"
        raise ConfigError(f"adapter: expected {expected}, got {adapter!r:.80}")


def check_prompt(prompt: Prompt, spec: EngineSpec, seed: int) -> None:
    """Refuse a prompt that does not fit the model, before the engine sees it.

    Raises:
        ValueError: wrong number of tokens a frame, ids out of range, a full window, wrong slots, seed out of range.
    """
    layout = spec.layout
    frames, rows, cols = prompt.tokens.shape
    if rows * cols != layout.image_tokens:
        raise ValueError(f"prompt: expected {layout.image_tokens} tokens a frame, got {rows} x {cols} = {rows * cols}")
    if frames >= layout.max_frames:
        raise ValueError(f"prompt: expected at most {layout.max_frames - 1} context frames, got {frames}")
    if int(prompt.tokens.min()) < 0 or int(prompt.tokens.max()) >= spec.vocab_size:
        raise ValueError(
            f"prompt: expected token ids 0 to {spec.vocab_size - 1}, "
            f"got {int(prompt.tokens.min())} to {int(prompt.tokens.max())}"
        )
    if prompt.actions.shape[0] and prompt.actions.shape[1:] != spec.action_shape:
        raise ValueError(f"prompt: {_expected_action(prompt.actions, spec)}")
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed: expected 0 to 2**63 - 1, got {seed}")


def _expected_action(actions: Actions, spec: EngineSpec) -> str:
    return f"expected an action of shape {spec.action_shape}, {spec.space.title}, got {tuple(actions.shape[1:])}"


def check_actions(actions: Actions, num_frames: int, spec: EngineSpec) -> None:
    """Refuse actions that don't fit the model or the room left in the window, which holds `num_frames` so far.

    Raises:
        EngineError: no room, wrong shape, or a number that is not finite.
    """
    layout = spec.layout
    room = layout.max_frames - num_frames
    if actions.ndim != 3 or actions.shape[1:] != spec.action_shape:
        raise EngineError(f"action: {_expected_action(actions, spec)}")
    if actions.shape[0] > room:
        raise EngineError(f"the window holds {layout.max_frames} frames: room for {room} more, got {actions.shape[0]}")
    if not torch.isfinite(actions).all():
        raise EngineError("action: expected finite numbers, got NaN or infinity")
