"""Bounded reading of NPZ archives: every size is checked, in the archive's own lists, before an array is unpacked."""

import math
import reprlib
import struct
import tokenize
import zipfile
import zlib
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np

from terra.errors import TrajectoryError
from tokenizer.files import open_regular
from tokenizer.limits import LIMITS, Limits

_END, _END_BYTES, _MAX_COMMENT = b"PK\x05\x06", 22, 1 << 16
_LIST_BYTES_A_MEMBER = 1 << 10  # of the archive's list of members: 46 and the name, generously
_MAX_HEADER = 10_000
_DAMAGE = (
    *(ValueError, TypeError, OverflowError, EOFError, RuntimeError, MemoryError),
    *(SyntaxError, tokenize.TokenError, zipfile.BadZipFile, zlib.error),
)


def read_arrays(path: Path, limits: Limits = LIMITS) -> dict[str, object]:
    """Read all arrays of an NPZ archive: arrays of numbers, and of 0-d arrays the number or text in them.

    Raises:
        TrajectoryError: no archive, pickled objects, or more members or bytes than `limits` allow.
    """
    try:
        with open_regular(path, TrajectoryError) as file:
            _check_list(file, limits)
            with zipfile.ZipFile(file) as archive:
                members = archive.infolist()
                _check_members(members, limits)
                return {member.filename.removesuffix(".npy"): _read_array(archive, member) for member in members}
    except _DAMAGE as error:
        reason = str(error).partition("\n")[0][:200] or type(error).__name__
        raise TrajectoryError(f"{path}: expected an NPZ archive of plain arrays, got: {reason}") from None


def _check_list(file: BinaryIO, limits: Limits) -> None:
    """Raise ValueError for a file, or a list of members, that is too long; `zipfile` would read the list whole."""
    size = file.seek(0, 2)
    # A zip may begin anywhere before its end, and the whole file is hashed later.
    if size > limits.npz_bytes:
        raise ValueError(f"a file of {size} bytes, above the {limits.npz_bytes} that are read")
    start = max(0, size - _END_BYTES - _MAX_COMMENT)
    file.seek(start)
    tail = file.read()
    end = tail.rfind(_END)
    if end < 0 or len(tail) - end < _END_BYTES:
        raise ValueError("no zip file, or a part of one")
    count, list_bytes = struct.unpack("<HI", tail[end + 10 : end + 16])
    if tail[max(0, end - 20) :].startswith(b"PK\x06\x07") or list_bytes > limits.npz_members * _LIST_BYTES_A_MEMBER:
        raise ValueError(f"a list of {count} or more members, above the {limits.npz_members} that are read")


def _check_members(members: list[zipfile.ZipInfo], limits: Limits) -> None:
    if len(members) > limits.npz_members:
        raise ValueError(f"{len(members)} members, above the {limits.npz_members} that are read")
    if len({member.filename for member in members}) < len(members):
        raise ValueError("two members of one name")
    if foreign := [member.filename for member in members if not member.filename.endswith(".npy")]:
        raise ValueError(f"another kind of file: {foreign[0][:80]!r}")
    if any(member.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) for member in members):
        raise ValueError("another compression than NumPy's")
    size = sum(member.file_size for member in members)
    if size > limits.npz_bytes:
        raise ValueError(f"{size} bytes unpacked, above the {limits.npz_bytes} that are read")


def _read_array(archive: zipfile.ZipFile, member: zipfile.ZipInfo) -> object:
    with archive.open(member) as file:
        shape, dtype = _read_header(file)
        if dtype.kind not in "fiubU":
            raise ValueError(f"{member.filename}: an array of {dtype.name[:40]}")
        if min(shape, default=0) < 0 or math.prod(shape) * dtype.itemsize > member.file_size:
            there = f"of which {member.file_size} bytes are there"
            raise ValueError(f"{member.filename}: an array of shape {reprlib.repr(shape)}, {there}")
    with archive.open(member) as file:
        array = np.lib.format.read_array(file, allow_pickle=False, max_header_size=_MAX_HEADER)  # pyright: ignore[reportCallIssue]
    return array.item() if array.ndim == 0 else array


def _read_header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    version = np.lib.format.read_magic(file)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"a version {version} of NumPy's format")
    shape, _, dtype = readers[version](file, max_header_size=_MAX_HEADER)  # pyright: ignore[reportCallIssue]
    return shape, dtype
