"""Locks between processes, and claims: lock files, each with one holder until the holder releases it or dies.

The kernel holds the lock (flock) and drops it with the process, kill -9 included, so a dead holder's claim is free at
once, with no process ids or times to compare. On one host that is certain; across hosts it is as good as the file
system's flock (NFSv4 has it).
"""

import fcntl
import os
from contextlib import suppress
from pathlib import Path
from typing import Self

from terra.errors import OutputError


class Lock:
    """A lock on a file, which is created if missing and never removed. End the lock with `release`."""

    def __init__(self, path: Path, descriptor: int) -> None:
        self._path, self._descriptor = path, descriptor

    @classmethod
    def wait(cls, path: Path, *, shared: bool) -> Self:
        """Wait for the lock, shared or exclusive. Raises OutputError."""
        lock = cls(path, _open(path))
        fcntl.flock(lock._descriptor, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
        return lock

    @classmethod
    def alone(cls, path: Path) -> Self | None:
        """Take the exclusive lock; None if another process holds the lock. Raises OutputError."""
        descriptor = _open(path)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return None
        return cls(path, descriptor)

    def share(self) -> None:
        """Turn the exclusive lock into a shared one."""
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)

    def release(self) -> None:
        """Release the lock. Releasing twice does nothing."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1


class Claim(Lock):
    """A lock whose file is removed with the lock, so that a folder of claims lists the work in progress."""

    @classmethod
    def take(cls, path: Path) -> Self | None:
        """Take the claim on a file; None while another process holds it. Raises OutputError."""
        while True:
            lock = cls.alone(path)
            if lock is None:
                return None
            with suppress(FileNotFoundError):
                if os.path.samestat(os.fstat(lock._descriptor), path.stat()):
                    return lock
            Lock.release(lock)  # its holder removed the file between our opening and locking it

    def release(self) -> None:
        """Remove the file, then release the lock. Releasing twice does nothing."""
        if self._descriptor >= 0:
            self._path.unlink(missing_ok=True)
        super().release()


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise OutputError(f"{path}: expected a writable file, got: {error.strerror or error}") from None
