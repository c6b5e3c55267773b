"""Reads the record of a batch's finished rollout, and finds damage."""

import reprlib
from pathlib import Path
from typing import Any

from pydantic import ConfigDict

from terra.errors import ConfigError, OutputError
from terra.rollout import TOKENS, VIDEO
from terra.rollout_files import find_damage
from terra.rollout_record import FORMAT, RECORD, VERSION
from tokenizer.files import read_json
from tokenizer.settings import Count, Natural, Seed, Settings, checked


class _Part(Settings):
    """A part of a record, of which other keys are left alone."""

    model_config = ConfigDict(extra="ignore")


class _File(_Part):
    bytes: Natural
    sha256: str


class _Score(_Part):
    function: str
    value: float


class _Batch(_Part):
    sample: Natural
    request: dict[str, Any]
    made_with: dict[str, Any]


class Made(_Part):
    """What a batch reads of a finished rollout's record.

    Attributes:
        seed, num_frames, seconds, score: as in `terra.rollout`.
        batch: what the rollout was made from.
        inputs: hashes of the files that it was made from.
        memory: what it remembered; None for rollouts without memory.
        adapter: what the rollout was made with; None for no adapter.
        files: sizes and hashes.
    """

    seed: Seed
    num_frames: Count
    seconds: dict[str, float]
    batch: _Batch
    inputs: dict[str, Any]
    memory: dict[str, Any] | None = None
    adapter: dict[str, Any] | None = None
    score: _Score | None = None
    files: dict[str, _File]

    def damage(self, folder: Path, *, verify: bool) -> str | None:
        """What is damaged in the rollout's folder, in one line; None if nothing is."""
        known: dict[str, Any] = {VIDEO: None, TOKENS: None}
        known |= {name: vars(file) for name, file in self.files.items()}
        return next((f"{name}: {reason}" for name, reason in find_damage(folder, known, verify=verify).items()), None)


def read_made(folder: Path) -> Made:
    """The record of a finished rollout.

    Raises:
        OutputError: the record is missing or damaged; the message names the file and what was expected.
        ConfigError: another version of Terra wrote it.
    """
    path = folder / RECORD
    if not path.is_file():
        raise OutputError(f"{path}: expected a file, got none")
    try:
        record = read_json(path, OutputError)
    except (RecursionError, ValueError) as error:
        raise OutputError(f"{path}: expected JSON, got: {error}") from None
    if record.get("format") == FORMAT and (version := record.get("version")) != VERSION:
        got = f"got {reprlib.repr(version)}: another Terra wrote it"
        raise ConfigError(f"{path}: expected version {VERSION}, {got}: on_change=redo makes it again")
    made = checked(Made, record, str(path), OutputError)
    request = made.batch.request
    for name in ("seed", "num_frames"):
        if name in request and request[name] != getattr(made, name):
            raise OutputError(f"{path}: {name}: expected the request's {request[name]}, got {getattr(made, name)}")
    return made
