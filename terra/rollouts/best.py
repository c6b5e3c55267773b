"""Scores rollouts with the user's function, and finds the best future of each line of the manifest."""

import importlib
import json
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from terra.errors import ConfigError, OutputError, TerraError
from terra.prompt import Actions
from terra.rollout import TOKENS
from terra.rollout_record import RECORD
from terra.rollouts.folder import RolloutFolder
from tokenizer import Frames, TokenGrid
from tokenizer.files import read_json, replacing, write_json

BEST = "best.json"

Decode = Callable[[TokenGrid, str | None], Frames]
"""Gives the frames of a rollout from its tokens and the name of its adapter."""


class Score:
    """A user's function of (frames in [-1, 1], tokens, actions) that gives a number; the highest is the best.

    Args:
        name: "package.module:function".

    Raises:
        ConfigError: the name is not of a function.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        module, colon, attribute = name.partition(":")
        if not (module and colon and attribute):
            raise ConfigError(f"score: expected package.module:function, got {name!r}")
        try:
            function = getattr(importlib.import_module(module), attribute, None)
        except ImportError as error:
            raise ConfigError(f"score={name}: expected a module that can be imported, got: {error}") from None
        if not callable(function):
            raise ConfigError(
                f"score={name}: expected a function {attribute} in {module}, got {type(function).__name__}"
            )
        self._function: Callable[..., Any] = function

    def __call__(self, frames: Frames, tokens: TokenGrid, actions: Actions) -> float:
        """The score of a rollout, context included. Raises ConfigError if the function fails or gives no number."""
        try:
            score = float(self._function(frames, tokens, actions))
        except Exception as error:  # the user's code may raise anything, which concerns this rollout alone
            reason = (str(error).splitlines() or [""])[0]
            raise ConfigError(f"score={self.name}: expected a number, got {type(error).__name__}: {reason}") from error
        if not math.isfinite(score):
            raise ConfigError(f"score={self.name}: expected a finite number, got {score}")
        return score


def score_anew(folder: Path, score: Score, decode: Decode) -> None:
    """Score the rollout of a folder from its tokens, unless it has a score by this function.

    Raises:
        ConfigError: see `Score`.
        OutputError: a file can't be read or written.
    """
    record = read_json(folder / RECORD, OutputError)
    if (record.get("score") or {}).get("function") == score.name:
        return
    tensors = load_file(folder / TOKENS)
    frames = decode(tensors["tokens"], (record.get("adapter") or {}).get("name"))
    value = score(frames, tensors["tokens"], tensors["actions"])
    write_json(folder / RECORD, record | {"score": {"function": score.name, "value": value}})


def score_all(
    folder: RolloutFolder,
    lines: Iterable[tuple[list[str], int]],
    score: Score,
    decode: Decode,
    fail: Callable[[str, int, str], None],
) -> None:
    """Score the rollouts that another function scored, or none; `fail` gets (name, line, reason) of each failure.

    Raises:
        OutputError: a file can't be read or written.
    """
    for names, line in lines:
        for name in filter(folder.has, names):
            try:
                score_anew(folder.rollout(name), score, decode)
            except OutputError:
                raise
            except TerraError as error:
                fail(name, line, str(error))


def write_best(folder: RolloutFolder, lines: Iterable[tuple[list[str], int]], score: Score) -> None:
    """Write best.json: for each line with scored futures the best one's name and seed, and all scores.

    Of equal scores the first one wins. One line of the manifest is in memory at a time.

    Raises:
        OutputError: a file can't be read or written.
    """
    with replacing(folder.path / BEST) as temporary, temporary.open("w") as file:
        separator = "{\n"
        for names, _ in lines:
            records = {
                name: read_json(folder.rollout(name) / RECORD, OutputError) for name in names if folder.has(name)
            }
            scores = {
                name: record["score"]["value"]
                for name, record in records.items()
                if (record.get("score") or {}).get("function") == score.name
            }
            if scores:
                best = max(scores, key=lambda name: scores[name])
                entry = {"best": best, "seed": records[best]["seed"], "score": scores[best], "scores": scores}
                file.write(f"{separator}{json.dumps(names[0])}: {json.dumps(entry)}")
                separator = ",\n"
        file.write("{}\n" if separator == "{\n" else "\n}\n")
