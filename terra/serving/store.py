"""Video jobs on disk: a SQLite table with each job's request and status; killing the server at any moment loses none.

DATA/jobs.sqlite3      one row a job, inputs included (safetensors bytes)
DATA/results/ID/       a completed job's files, see `terra.rollout`; appears by renaming
"""

import asyncio
import json
import logging
import shutil
import sqlite3
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from terra.errors import OutputError
from tokenizer.files import make_folder

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

Status = Literal["queued", "in_progress", "completed", "failed", "cancelled"]
ENDED: tuple[Status, ...] = ("completed", "failed", "cancelled")

_SCHEMA = """
CREATE TABLE IF NOT EXISTS jobs (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    id TEXT UNIQUE NOT NULL,
    status TEXT NOT NULL,
    created_at REAL NOT NULL,
    completed_at REAL,
    expires_at REAL,
    request TEXT NOT NULL,
    inputs BLOB NOT NULL,
    error TEXT
);
CREATE INDEX IF NOT EXISTS jobs_by_status ON jobs (status, number);
"""
_ROOM_BYTES = 32 << 20
_FIELDS = "number, id, status, created_at, completed_at, expires_at, request, error"


@dataclass(frozen=True)
class Job:
    """A row without its inputs; times are in seconds since 1970, `request` is a JSON object."""

    number: int
    id: str
    status: Status
    created_at: float
    completed_at: float | None
    expires_at: float | None
    request: dict[str, Any]
    error: dict[str, str] | None


class StorageError(OutputError):
    """The table of jobs can't be read or written at present, as on a full disk."""


class JobStore:
    """The table of jobs, which is used from a thread of its own.

    Args:
        folder: folder of the table and the results, made if missing; only one process at a time may use it.
        lifetime_seconds: seconds after its end at which a job is removed.

    Attributes:
        problem: why the latest change could not be written, in one line; None if it was.

    Raises:
        OutputError: the folder can't be written, is in use, or has a file of another kind under the table's name.

    All methods that read or write raise StorageError while the table can't be used.
    """

    def __init__(self, folder: Path, lifetime_seconds: float) -> None:
        self._results, self._lifetime = folder / "results", lifetime_seconds
        self.problem: str | None = None
        make_folder(self._results)
        path = folder / "jobs.sqlite3"
        self._thread = ThreadPoolExecutor(1, "terra-jobs")
        try:
            self._database = self._thread.submit(_connect, path).result()
        except sqlite3.Error as error:
            self._thread.shutdown()
            raise OutputError(f"{path}: expected a table of jobs that no other process uses, got: {error}") from None
        for partial in self._results.glob(".*"):  # of a process that was killed
            shutil.rmtree(partial, ignore_errors=True)

    def folder(self, job: Job) -> Path:
        """The folder of a job's results, which may not exist yet."""
        return self._results / job.id

    async def add(
        self, job_id: str, request: dict[str, Any], inputs: bytes, max_queued: int, max_of_client: int
    ) -> Job | None:
        """Queue a job and write it to disk.

        Returns:
            The job, or None if `max_queued` jobs wait already, or `max_of_client` of the client in `request`.
        """

        def work(database: sqlite3.Connection) -> Job | None:
            (queued,) = database.execute("SELECT COUNT(*) FROM jobs WHERE status = 'queued'").fetchone()
            (of_client,) = database.execute(
                "SELECT COUNT(*) FROM jobs WHERE status = 'queued' AND json_extract(request, '$.client') IS ?",
                (request.get("client"),),
            ).fetchone()
            if queued >= max_queued or of_client >= max_of_client:
                return None
            database.execute(
                "INSERT INTO jobs (id, status, created_at, request, inputs) VALUES (?, 'queued', ?, ?, ?)",
                (job_id, time.time(), json.dumps(request), inputs),
            )
            return _find(database, job_id)

        return await self._write(work)

    async def find(self, job_id: str) -> Job | None:
        """Find a job by its id; None if there is none."""
        return await self._read(lambda database: _find(database, job_id))

    async def list(self, limit: int, after: Job | None, *, newest_first: bool) -> list[Job]:
        """List up to `limit` jobs that follow `after`."""
        order, compare = ("DESC", "<") if newest_first else ("ASC", ">")
        where = "" if after is None else f"WHERE number {compare} {after.number}"
        query = f"SELECT {_FIELDS} FROM jobs {where} ORDER BY number {order} LIMIT ?"
        return await self._read(lambda database: [_job(row) for row in database.execute(query, (limit,))])

    async def num_queued(self) -> int:
        """Number of queued jobs."""
        query = "SELECT COUNT(*) FROM jobs WHERE status = 'queued'"
        return await self._read(lambda database: database.execute(query).fetchone()[0])

    async def counts(self) -> dict[str, int]:
        """Number of jobs by status."""
        query = "SELECT status, COUNT(*) FROM jobs GROUP BY status"
        found = await self._read(lambda database: dict(database.execute(query).fetchall()))
        return {status: found.get(status, 0) for status in ("queued", "in_progress", *ENDED)}

    async def take(self) -> tuple[Job, bytes] | None:
        """Mark the oldest queued job as in progress, and return it with its inputs; None if no job waits."""

        def work(database: sqlite3.Connection) -> tuple[Job, bytes] | None:
            rows = database.execute(
                "UPDATE jobs SET status = 'in_progress' WHERE number = "
                "(SELECT MIN(number) FROM jobs WHERE status = 'queued') RETURNING id, inputs"
            ).fetchall()
            for job_id, inputs in rows:
                job = _find(database, job_id)
                assert job is not None
                return job, inputs
            return None

        return await self._write(work)

    async def end(self, job: Job, status: Status, error: dict[str, str] | None = None) -> bool:
        """Mark a job as ended; return False if it has ended already or was deleted."""

        def work(database: sqlite3.Connection) -> bool:
            now = time.time()
            return (
                database.execute(
                    "UPDATE jobs SET status = ?, completed_at = ?, expires_at = ?, error = ? "
                    "WHERE id = ? AND status IN ('queued', 'in_progress')",
                    (status, now, now + self._lifetime, error and json.dumps(error), job.id),
                ).rowcount
            ) > 0

        return await self._write(work)

    async def requeue(self, job: Job | None = None) -> int:
        """Queue a job in progress (None: all of them) again; return the number of jobs queued."""
        query = "UPDATE jobs SET status = 'queued' WHERE status = 'in_progress'"
        values = () if job is None else (job.id,)
        query += "" if job is None else " AND id = ?"
        return await self._write(lambda database: database.execute(query, values).rowcount)

    async def delete(self, job: Job) -> bool:
        """Remove a job and its files; return whether it existed."""

        def work(database: sqlite3.Connection) -> bool:
            count = database.execute("DELETE FROM jobs WHERE id = ?", (job.id,)).rowcount
            shutil.rmtree(self.folder(job), ignore_errors=True)
            return count > 0

        return await self._write(work)

    async def drop_files(self, job: Job) -> None:
        """Remove a job's files, but keep its row."""
        await self._read(lambda _: shutil.rmtree(self.folder(job), ignore_errors=True))

    async def expire(self) -> None:
        """Remove jobs whose lifetime is over, and files that belong to no job."""

        def work(database: sqlite3.Connection) -> None:
            database.execute("DELETE FROM jobs WHERE expires_at <= ?", (time.time(),))
            known = {row[0] for row in database.execute("SELECT id FROM jobs")}
            for path in self._results.iterdir():
                if path.name not in known and not path.name.startswith("."):
                    shutil.rmtree(path, ignore_errors=True)

        await self._write(work)

    def close(self) -> None:
        """Close the table."""
        self._thread.submit(self._database.close).result()
        self._thread.shutdown()

    def has_room(self) -> bool:
        """Whether the disk has room for the results of some jobs."""
        return shutil.disk_usage(self._results).free >= _ROOM_BYTES

    async def _read(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        def read() -> _T:
            try:
                return work(self._database)
            except sqlite3.Error as error:
                raise StorageError(f"the table of jobs: expected to read it, got: {error}") from error

        return await asyncio.get_running_loop().run_in_executor(self._thread, read)

    async def _write(self, work: Callable[[sqlite3.Connection], _T]) -> _T:
        def committed() -> _T:
            try:
                with self._database:
                    result = work(self._database)
            except sqlite3.Error as error:
                self.problem = f"the table of jobs: expected to write it, got: {error}"
                raise StorageError(self.problem) from error
            self.problem = None
            return result

        return await asyncio.get_running_loop().run_in_executor(self._thread, committed)


def _connect(path: Path) -> sqlite3.Connection:
    database = sqlite3.connect(path, timeout=2)
    # The lock lasts until this process ends, however it ends, because two servers would run the same jobs.
    database.execute("PRAGMA locking_mode = EXCLUSIVE")
    database.execute("PRAGMA journal_mode = WAL")
    database.execute("PRAGMA synchronous = FULL")
    database.executescript(_SCHEMA)
    with database:
        database.execute("UPDATE jobs SET status = status WHERE 0")
    return database


def _find(database: sqlite3.Connection, job_id: str) -> Job | None:
    row = database.execute(f"SELECT {_FIELDS} FROM jobs WHERE id = ?", (job_id,)).fetchone()
    return None if row is None else _job(row)


def _job(row: tuple[Any, ...]) -> Job:
    *plain, request, error = row
    return Job(*plain, request=json.loads(request), error=error and json.loads(error))
