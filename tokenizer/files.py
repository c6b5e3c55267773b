"""Writing of files that appear whole or not at all, and reading of JSON with checks; imports nothing heavy."""

import hashlib
import json
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tokenizer.errors import OutputError, TerraError


def temporary_name(path: Path) -> Path:
    """A hidden name beside `path` that no other process or call uses, to be renamed to `path` at the end."""
    return path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to, and rename it to `path` when the block ends without an exception.

    After an exception the temporary file is removed, and an older file at `path` is untouched.

    Raises:
        OutputError: an `OSError` in the block or in the renaming, as one line.
    """
    temporary = temporary_name(path)
    try:
        temporary.touch()
        permissions = temporary.stat().st_mode
        yield temporary
        temporary.chmod(permissions)  # safetensors makes files that only the owner can read
        temporary.replace(path)
    except OSError as error:
        raise OutputError(f"{path}: expected a writable file, got: {_reason(error)}") from error
    finally:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write an object as indented JSON, whole or not at all; missing folders are made. Raises OutputError."""
    text = json.dumps(content, indent=2) + "\n"
    make_folder(path.parent)
    with replacing(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def make_folder(folder: Path) -> None:
    """Make a folder and its missing parents; it may exist. Raises OutputError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OutputError(f"{folder}: expected a writable file, got: {_reason(error)}") from error


def read_json(path: Path, error_class: type[TerraError], expected: str = "a readable file") -> dict[str, Any]:
    """Read the object in a JSON file.

    Args:
        path: the file.
        error_class: class of the errors raised.
        expected: the expectation in the message about a file that is missing or can't be read.

    Raises:
        error_class: no such file, no UTF-8 text, no JSON (with the line), or no object in it.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise error_class(f"{path}, line {error.lineno}: expected JSON, got: {error.msg}") from None
    except UnicodeDecodeError as error:
        raise error_class(f"{path}: expected UTF-8 text, got another byte at offset {error.start}") from None
    except OSError as error:
        raise error_class(f"{path}: expected {expected}, got: {_reason(error)}") from None
    if not isinstance(content, dict):
        raise error_class(f"{path}: expected a JSON object, got a {type(content).__name__}")
    return content


def file_sha256(path: Path, error_class: type[TerraError]) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal. Raises `error_class` if it can't be read."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise error_class(f"{path}: expected a readable file, got: {_reason(error)}") from None


def _reason(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__
