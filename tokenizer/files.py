"""Writing of files that appear whole or not at all, and bounded reading of text and JSON; imports nothing heavy."""

import hashlib
import json
import os
import re
import reprlib
import secrets
import stat
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from tokenizer.errors import OutputError, TerraError
from tokenizer.limits import LIMITS, Limits

_UNWRITABLE = re.compile(r"\\u(?:0000|[dD][89a-fA-F])")  # what an escape may make of text that is UTF-8
_SURROGATE = re.compile("[\ud800-\udfff]")


def temporary_name(path: Path) -> Path:
    """A hidden name beside `path` that no other process or call uses, to be renamed to `path` at the end."""
    return path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a temporary path to write to, and rename it to `path` when the block ends without an exception.

    After an exception the temporary file is removed, and an older file at `path` is untouched.

    Raises:
        OutputError: an `OSError` in the block or in the renaming, as one line; a folder, a device or a FIFO at `path`.
    """
    try:
        _check_replaceable(path)
    except OSError as error:
        raise OutputError(f"{path}: expected a writable file, got: {_reason(error)}") from error
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


def _check_replaceable(path: Path) -> None:
    """Raise `OutputError` if what is at `path` is no file: renaming would take a device away from all programs."""
    with suppress(FileNotFoundError):
        mode = path.lstat().st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
            raise OutputError(f"{path}: expected a file or none, got {_kind(mode)}")


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


@contextmanager
def open_regular(
    path: Path, error_class: type[TerraError], expected: str = "a readable file", *, setting: str | None = None
) -> Iterator[BinaryIO]:
    """Open a regular file to read its bytes; a FIFO, a device, a socket or a folder is refused without waiting.

    Args:
        path: the file.
        error_class: class of the errors raised.
        expected: the expectation in the message about a file that is missing or can't be read.
        setting: the setting that names the file, for that message.

    Raises:
        error_class: no such file, no regular one, or an `OSError` in the block.
    """
    refused = f"{path if setting is None else f'{setting}={path}'}: expected {expected}, got"
    try:
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            raise error_class(f"{refused} {_kind(mode)}")
        # The name may have become a FIFO's by now, so nothing is waited for.
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(mode := os.fstat(file.fileno()).st_mode):
                raise error_class(f"{refused} {_kind(mode)}")
            yield file
    except OSError as error:
        raise error_class(f"{refused}: {_reason(error)}") from None


def read_bytes(
    path: Path, error_class: type[TerraError], expected: str = "a readable file", *, max_bytes: int = LIMITS.json_bytes
) -> bytes:
    """Read a regular file of at most `max_bytes`; errors as in `open_regular`, and for a larger file."""
    with open_regular(path, error_class, expected) as file:
        size = os.fstat(file.fileno()).st_size
        data = b"" if size > max_bytes else file.read(max_bytes + 1)
    if size > max_bytes or len(data) > max_bytes:
        raise error_class(f"{path}: expected at most {max_bytes} bytes, got {max(size, len(data))}")
    return data


def read_text(
    path: Path, error_class: type[TerraError], expected: str = "a readable file", *, max_bytes: int = LIMITS.json_bytes
) -> str:
    """Read a file of UTF-8 text, with or without a byte order mark; errors as in `read_bytes`, and for other bytes."""
    data = read_bytes(path, error_class, expected, max_bytes=max_bytes)
    return decode_text(data, str(path), error_class)


def decode_text(data: bytes, where: str, error_class: type[TerraError], first_line: int = 1) -> str:
    """Bytes as UTF-8 text without the byte order mark. Raises `error_class` with the line of another byte."""
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = first_line + data[: error.start].count(b"\n")
        raise error_class(f"{where}: line {line}: expected UTF-8 text, got byte {data[error.start]:#04x}") from None


def read_json(
    path: Path, error_class: type[TerraError], expected: str = "a readable file", *, limits: Limits = LIMITS
) -> dict[str, Any]:
    """Read the object in a JSON file.

    Args:
        path: the file.
        error_class: class of the errors raised.
        expected: the expectation in the message about a file that is missing or can't be read.
        limits: bounds on bytes, depth, items and digits.

    Raises:
        error_class: see `read_text` and `parse_json`.
    """
    text = read_text(path, error_class, expected, max_bytes=limits.json_bytes)
    return parse_json(text, str(path), error_class, limits=limits)


def parse_json(
    text: str, where: str, error_class: type[TerraError], *, first_line: int = 1, limits: Limits = LIMITS
) -> dict[str, Any]:
    """Parse one JSON object, in memory and time that `limits` bounds.

    NaN and Infinity are numbers here, as for Python's `json`; whoever expects a finite number refuses them.

    Args:
        text: what came.
        where: its origin, with which every message begins.
        error_class: class of the errors raised.
        first_line: the number of the text's first line in its origin.
        limits: bounds on depth, items and digits.

    Raises:
        error_class: no JSON, beyond a bound, a key twice in one object, a text that no
            file's name or line can have (a lone surrogate, NUL), or no object.
    """
    items = text.count("[") + text.count("{") + text.count(":")
    if items > limits.json_items:
        raise error_class(f"{where}: expected at most {limits.json_items} lists, objects and keys, got {items}")

    def whole(digits: str) -> int:
        if len(digits) > limits.json_digits:
            raise ValueError(f"a number of {len(digits)} digits, above the {limits.json_digits} that are read")
        return int(digits)

    try:
        value = json.loads(text, object_pairs_hook=_unique_keys, parse_int=whole)
        _check_nesting(value, limits.json_depth, texts=_UNWRITABLE.search(text) is not None)
    except json.JSONDecodeError as error:
        place = f"{where}: line {first_line + error.lineno - 1}, column {error.colno}"
        raise error_class(f"{place}: expected JSON, got {error.msg.lower()}") from None
    except ValueError as error:
        raise error_class(f"{where}: line {first_line}: expected JSON that can be read, got {error}") from None
    except RecursionError:
        expected = f"JSON of at most {limits.json_depth} lists or objects within each other"
        raise error_class(f"{where}: line {first_line}: expected {expected}, got more") from None
    if not isinstance(value, dict):
        raise error_class(f"{where}: line {first_line}: expected a JSON object, got {reprlib.repr(value)}")
    return value


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        twice = next(key for key, count in Counter(key for key, _ in pairs).items() if count > 1)
        raise ValueError(f"the key {reprlib.repr(twice)} twice")
    return value


def _check_nesting(value: object, max_depth: int, *, texts: bool) -> None:
    """Raise ValueError for a value of more than `max_depth` levels or, if `texts`, text that can't be written."""
    level: list[Any] = [value]
    for _ in range(max_depth):
        inner = []
        for each in level:
            if texts and isinstance(each, dict):
                _check_texts(each)
            for item in each.values() if isinstance(each, dict) else each if isinstance(each, list) else ():
                if isinstance(item, dict | list):
                    inner.append(item)
                elif texts:
                    _check_texts((item,))
        if not inner:
            return
        level = inner
    raise ValueError(f"more than {max_depth} lists or objects within each other")


def _check_texts(values: Iterable[object]) -> None:
    for value in values:
        if isinstance(value, str) and ("\0" in value or _SURROGATE.search(value)):
            raise ValueError(f"a text with NUL or half a character: {value[:80]!a}")


def file_sha256(path: Path, error_class: type[TerraError]) -> str:
    """The SHA-256 of a file's bytes, in hexadecimal. Raises `error_class` if it can't be read."""
    with open_regular(path, error_class) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # pyright: ignore[reportArgumentType]


def _kind(mode: int) -> str:
    kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
    return kinds.get(stat.S_IFMT(mode), "a device")


def _reason(error: OSError) -> str:
    return error.strerror or str(error) or type(error).__name__
