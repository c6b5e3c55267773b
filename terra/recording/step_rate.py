"""How many steps an environment takes in a second of its world, which is the rate at which its pictures are recorded.

Gymnasium's `render_fps` is the rate at which pictures are to be shown. It often differs from the rate of steps:
highway-env asks for twice the speed on purpose, ALE says 30 and VizDoom 35 whatever the frameskip, and Pendulum says
30 where a step is 0.05 s.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from math import isfinite, prod
from typing import Any

ATARI_FPS = 60  # frames a second of the console, NTSC
_SKIPS = ("frame_skip", "_skip")  # of AtariPreprocessing and MaxAndSkipObservation, also of other packages' wrappers
# Attributes that hint at a clock without saying enough of it.
_HINTS = ("frame_skip", "frameskip", "action_repeat", "dt", "tau", "timestep")

Told = tuple[float, str] | None
"""Steps a second and what tells them; None where nothing does."""


@dataclass(frozen=True)
class StepRate:
    """The steps a second of an environment.

    Attributes:
        per_second: the rate; whatever `render_fps` is, such as None, where `is_known` is false.
        told_by: what tells the rate, in words.
        is_known: false where nothing tells it and `render_fps` stands in.
    """

    per_second: Any
    told_by: str
    is_known: bool


def step_rate(env: Any) -> StepRate:
    """The steps a second of an environment: by what its own family tells of its clock, else by `render_fps`.

    A step of a wrapper that repeats an action is as many steps of the environment.

    Args:
        env: a Gymnasium environment.
    """
    inner = env.unwrapped
    repeats = prod(_repeats(env))
    repeated = f", {repeats} of which a wrapper makes one" if repeats > 1 else ""
    modules = [f"{kind.__module__}." for kind in type(inner).__mro__]
    tells = [tell for family, tell in _FAMILIES.items() if any(each.startswith(f"{family}.") for each in modules)]
    for tell in (*tells, _control):
        if told := _told(tell, inner):
            return StepRate(told[0] / repeats, told[1] + repeated, True)
    shown = env.metadata.get("render_fps")
    hints = [f"{name}={getattr(inner, name)}" for name in _HINTS if _is_number(getattr(inner, name, None))]
    words = f"render_fps={shown!r:.40}{repeated}" + (f" (it has {', '.join(hints)})" if hints else "")
    return StepRate(shown / repeats if repeats > 1 and _is_number(shown) else shown, words, False)


def _repeats(env: Any) -> list[int]:
    """How often each wrapper that repeats an action does so."""
    found: list[int] = []
    while env is not env.unwrapped:
        own = vars(env)
        found += [own[name] for name in _SKIPS if type(own.get(name)) is int and own[name] > 1][:1]
        env = env.env
    return found


def _told(tell: Callable[[Any], Told], inner: Any) -> Told:
    try:
        told = tell(inner)
    except (AttributeError, KeyError, TypeError, ZeroDivisionError):  # another version of the package
        return None
    return told if told is not None and isfinite(told[0]) and told[0] > 0 else None


def _highway(inner: Any) -> Told:
    """Highway-env simulates a whole number of its own steps for each action, rounded down."""
    simulation, policy = inner.config["simulation_frequency"], inner.config["policy_frequency"]
    count = int(simulation // policy)
    return simulation / count, f"highway-env's {count} steps of 1/{simulation} s an action"


def _atari(inner: Any) -> Told:
    skip = inner._frameskip
    if isinstance(skip, tuple):
        low, high = skip[0], skip[1] - 1
        return ATARI_FPS * 2 / (low + high), f"ALE's frameskip of {low} to {high} at {ATARI_FPS} frames/s, on average"
    return ATARI_FPS / skip, f"ALE's frameskip={skip} at {ATARI_FPS} frames/s"


def _vizdoom(inner: Any) -> Told:
    tics = inner.metadata["render_fps"]
    return tics / inner.frame_skip, f"VizDoom's frame_skip={inner.frame_skip} at {tics} tics/s"


def _dt(inner: Any) -> Told:
    return 1 / inner.dt, f"its dt={inner.dt:g} s a step"


def _classic(inner: Any) -> Told:
    name = next((name for name in ("tau", "dt") if hasattr(inner, name)), None)
    return None if name is None else (1 / getattr(inner, name), f"its {name}={getattr(inner, name):g} s a step")


def _box2d(inner: Any) -> Told:
    fps = vars(sys.modules[type(inner).__module__])["FPS"]
    return fps, f"FPS={fps} of its module"


def _own(inner: Any) -> Told:
    fps = inner.metadata["render_fps"]
    return fps, f"render_fps={fps:g} of Terra's own environment"


def _control(inner: Any) -> Told:
    name = next((name for name in ("control_hz", "control_freq") if _is_number(getattr(inner, name, None))), None)
    return None if name is None else (float(getattr(inner, name)), f"its {name}={getattr(inner, name):g}")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_FAMILIES: dict[str, Callable[[Any], Told]] = {
    "highway_env": _highway,
    "ale_py": _atari,
    "vizdoom": _vizdoom,
    "gymnasium.envs.mujoco": _dt,
    "gymnasium_robotics": _dt,
    "gymnasium.envs.classic_control": _classic,
    "gymnasium.envs.box2d": _box2d,
    "terra": _own,
}
"""What tells the steps a second, by the package of an environment's class or of one that it derives from."""
