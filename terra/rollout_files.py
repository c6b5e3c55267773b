"""Lists the files of a rollout's folder for its record, with sizes and hashes, and finds damaged ones.

The look that every run takes reads little: whether the files are there, their sizes, their headers and, because tokens
are small, the tokens' hash. With `verify` all files are read and hashed.
"""

from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from decoder.containers import check_boxes
from terra.errors import CheckpointError, OutputError, VideoError
from tokenizer.checkpoint import read_header
from tokenizer.files import file_sha256

_HEADERS = {".gif": b"GIF8", ".png": b"\x89PNG\r\n\x1a\n"}
_HASHED_ALWAYS = ".safetensors"


def describe_files(folder: Path) -> dict[str, dict[str, Any]]:
    """The value `files` of a record: for each file in the folder, by its path there, `bytes` and `sha256`.

    Raises:
        OutputError: a file can't be read.
    """
    found = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        name = path.relative_to(folder).as_posix()
        found[name] = {"bytes": path.stat().st_size, "sha256": file_sha256(path, OutputError)}
    return found


def find_damage(folder: Path, files: Mapping[str, Mapping[str, Any] | None], *, verify: bool = False) -> dict[str, str]:
    """The damaged files of a rollout's folder.

    Args:
        folder: the rollout's folder.
        files: what `describe_files` found when they were written; None for a file that nothing is known of.
        verify: compare all hashes, too, which reads all files.

    Returns:
        For each damaged file what was expected, and what is there.
    """
    found = ((name, _damage(folder, name, known, verify)) for name, known in files.items())
    return {name: reason for name, reason in found if reason is not None}


def _damage(folder: Path, name: str, known: Mapping[str, Any] | None, verify: bool) -> str | None:
    pure = PurePosixPath(name)
    if pure.is_absolute() or ".." in pure.parts:
        return "expected a file within the folder"
    path = folder / pure
    try:
        if not path.is_file():
            return "expected a file, got none"
        size = path.stat().st_size
        if known is not None and size != known["bytes"]:
            return f"expected {known['bytes']} bytes, got {size}"
        reason = _header_damage(path)
        if reason is None and known is not None and (verify or path.suffix == _HASHED_ALWAYS):
            got = file_sha256(path, OutputError)
            if got != known["sha256"]:
                reason = f"expected the content {known['sha256'][:12]}, got {got[:12]}"
    except OSError as error:
        return f"expected a readable file, got: {error.strerror or error}"
    except (CheckpointError, OutputError, VideoError) as error:
        return str(error).removeprefix(f"{path}: ")
    else:
        return reason


def _header_damage(path: Path) -> str | None:
    if path.suffix == ".safetensors":
        read_header(path)  # checks that the tensors fill the file exactly
        return None
    if path.suffix == ".mp4":
        check_boxes(path)
        return None
    start = _HEADERS.get(path.suffix, b"")
    with path.open("rb") as file:
        return None if file.read(len(start)) == start else f"expected the header of a {path.suffix} file, got another"
