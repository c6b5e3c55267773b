"""Reads the record of a rollout's folder, which `terra.rollout` describes and writes. Imports nothing heavy."""

import reprlib
from pathlib import Path
from typing import Any

from terra.errors import OutputError
from tokenizer.files import read_json

FORMAT, VERSION = "terra-rollout", 3
RECORD, TOKENS, VIDEO, GIF = "rollout.json", "tokens.safetensors", "video.mp4", "video.gif"
OVERLAY, PNGS = "overlay.mp4", "frames"
ROLLOUT_FILES = RECORD, TOKENS, VIDEO, "video_*.mp4", GIF, OVERLAY, f"{PNGS}/frame_*.png", "tokens.npz"
"""Shell patterns of all that `terra.rollout.RolloutWriter` may write, or wrote before."""


def view_video(name: str) -> str:
    """The name of the video of one view."""
    return f"video_{name}.mp4"


def read_record(folder: Path) -> dict[str, Any]:
    """The record of a rollout's folder.

    Raises:
        OutputError: no record, or one of another version.
    """
    path, record = folder / RECORD, read_any_record(folder)
    if (version := record.get("version")) != VERSION:
        again = "another Terra wrote it: make the rollout again, with its seed"
        raise OutputError(f"{path}: expected version {VERSION}, got {reprlib.repr(version)}: {again}")
    return record


def read_any_record(folder: Path) -> dict[str, Any]:
    """The record of a rollout's folder, whatever version of Terra wrote it.

    Raises:
        OutputError: no record.
    """
    path = folder / RECORD
    record = read_json(path, OutputError, f"the {RECORD} of a rollout")
    if record.get("format") != FORMAT:
        raise OutputError(f"{path}: expected format {FORMAT!r}, got {reprlib.repr(record.get('format'))}")
    return record
