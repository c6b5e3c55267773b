"""Reads and writes the output folder of a batch, each of whose files is complete at any moment:

    rollouts/ID/     video.mp4, tokens.safetensors, rollout.json; appears by renaming, complete; made again when damaged
    failed/ID.json   why a rollout could not be made, the last time it was tried ("line+N": a line without an id)
    index.jsonl      one line a rollout in the manifest's order; derived from the folders whenever a run ends
    best.json        with `score=`: of each line the best future, and all scores; derived likewise
    grids/ID.mp4     with `grid=true`: a line's futures beside each other; derived likewise
    log.jsonl        one line for each rollout done or failed, appended at that moment
    run.json         weights and settings that the rollouts are made with; written anew when damaged
    claims/, partial/   rollouts in progress, see `terra.rollouts.locks`; empty and gone after a run

Several processes may work in one folder at the same time, with the same settings.
"""

import errno
import json
import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from terra.errors import ConfigError, OutputError
from terra.locations import with_locations
from terra.rollout_record import RECORD
from terra.rollouts.fingerprint import Fingerprints
from terra.rollouts.locks import Claim, Lock
from terra.rollouts.made import read_made
from terra.rollouts.manifest import Job
from terra.views import Views
from tokenizer.files import make_folder, read_json, replacing, write_json
from tokenizer.limits import LIMITS, Limits

logger = logging.getLogger(__name__)

FORMAT = "terra-rollouts"


def recorded_settings(path: Path) -> dict[str, Any] | None:
    """The settings of an earlier run's folder, see `RolloutFolder`; None for a new folder, or if they are damaged."""
    try:
        return _read_run(path / "run.json")
    except OutputError:
        return None


class RolloutFolder:
    """The output of a batch; use `open` before anything else.

    Args:
        path: the folder; new, empty, or of an earlier run.
        settings: what all rollouts are made with, as JSON has it: weights, engine, defaults.
        on_change: "refuse", "redo" or "keep" rollouts that were made with something else.
        verify: compare the hashes of finished rollouts' files, too, which reads all of them.
        limits: bounds on maps that are hashed.
        views: the cameras that share a picture of the world; None for one.
    """

    def __init__(
        self,
        path: Path,
        settings: dict[str, Any],
        on_change: str,
        *,
        verify: bool = False,
        limits: Limits = LIMITS,
        views: Views | None = None,
    ) -> None:
        self.path, self.settings, self._on_change, self._verify = path, settings, on_change, verify
        self._rollouts, self._failed = path / "rollouts", path / "failed"
        self._claims, self._partial = path / "claims", path / "partial"
        self._fingerprints = Fingerprints(limits, views)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Work in the folder, together with other processes of the same settings.

        Raises:
            OutputError: the folder can't be written, or holds something else.
            ConfigError: rollouts of other settings are in it and are not to be redone or kept, or a process that makes
                such is at work.
        """
        if self.path.is_dir() and any(self.path.iterdir()) and not (self.path / ".lock").exists():
            raise OutputError(f"output={self.path}: expected a new folder or one of terra-rollout, got another")
        make_folder(self.path)
        lock = Lock.alone(self.path / ".lock")
        is_alone = lock is not None
        lock = lock or Lock.wait(self.path / ".lock", shared=True)
        try:
            self._check_settings(is_alone)
            for folder in (self._rollouts, self._failed):
                make_folder(folder)
            lock.share()
            yield
        finally:
            lock.release()
            self._tidy()

    def is_done(self, job: Job, *, is_claimed: bool = False) -> bool:
        """Whether the rollout exists, undamaged, and is to be kept.

        Args:
            job: the rollout.
            is_claimed: whether the caller holds the claim, so that the rollout will be made now: the log names damage.

        Raises:
            ConfigError: on_change is "refuse", and the rollout was made from another line, other files or settings; or
                another version of Terra made it.
        """
        path = self.rollout(job.name)
        if not os.path.lexists(path):
            return False
        damage, changed = None, ""
        try:
            made = read_made(path)
        except OutputError as error:
            damage = str(error)
        except ConfigError:
            if self._on_change != "redo":
                raise
            return False
        else:
            # Files that are not there any more say nothing against what was made from them.
            inputs = self.fingerprint(job)
            before = {
                **made.inputs,
                "map_sha256": ((made.memory or {}).get("map") or {}).get("sha256"),
                "adapter_sha256": (made.adapter or {}).get("sha256"),
            }
            changed = _differences(
                {
                    "request": made.batch.request,
                    "made_with": made.batch.made_with,
                    "inputs": {name: before.get(name) for name in inputs},
                },
                with_locations(
                    {"request": job.request, "made_with": self.settings["made_with"], "inputs": inputs}, path
                ),
            )
            if changed and self._on_change == "redo":
                return False
            if changed and self._on_change == "refuse":
                raise ConfigError(f"{job.where}: {path} was made otherwise ({changed}): on_change=redo or keep")
            damage = made.damage(path, verify=self._verify)
        if damage is not None:
            if is_claimed:
                logger.warning("%s: is damaged and made again: %s", job.name, damage)
            return False
        self._failure_path(job.name).unlink(missing_ok=True)
        return True

    def rollout(self, name: str) -> Path:
        """The path of a rollout's folder."""
        return self._rollouts / name

    def has(self, name: str) -> bool:
        """Whether a rollout exists and counts as done."""
        return (self.rollout(name) / RECORD).exists() and not self._failure_path(name).exists()

    def fingerprint(self, job: Job) -> dict[str, str]:
        """See `terra.rollouts.fingerprint.Fingerprints.of`."""
        return self._fingerprints.of(job)

    def count_made(self) -> int:
        """Number of finished rollouts in the folder, of any manifest. Raises OutputError."""
        try:
            return sum(1 for _ in os.scandir(self._rollouts))
        except OSError as error:
            raise OutputError(f"{self._rollouts}: expected a readable folder, got: {error.strerror}") from None

    def claim(self, job: Job) -> Claim | None:
        """Claim the right to make a rollout; None while another process holds the claim. Raises OutputError."""
        make_folder(self._claims)
        return Claim.take(self._claims / f"{job.name}.claim")

    def publish(self, job: Job, write: Callable[[Path], None]) -> None:
        """Let `write` fill a temporary folder, then rename it to the rollout's. Only for the holder of the claim.

        Raises:
            OutputError: the disk is full, or a file can't be written.
        """
        # Names of their own: what a dead process left, or a worker given up for dead still writes, is in nobody's way.
        mine = f"{job.name}.{secrets.token_hex(4)}"
        partial, final, old = self._partial / mine, self._rollouts / job.name, self._partial / f"{mine}.old"
        try:
            partial.mkdir(parents=True)
            write(partial)
            _sync(partial)
            if os.path.lexists(final):
                final.rename(old)
            partial.rename(final)
            if old.is_dir() and not old.is_symlink():
                shutil.rmtree(old)
            else:  # nothing, or what is no folder
                old.unlink(missing_ok=True)
            self._failure_path(job.name).unlink(missing_ok=True)
        except OSError as error:
            raise OutputError(f"{final}: expected to write it, got: {error.strerror or error}") from error
        finally:
            shutil.rmtree(partial, ignore_errors=True)

    def fail(self, name: str, line: int, reason: str) -> None:
        """Record why a rollout could not be made. Raises OutputError."""
        record = {"id": name, "status": "failed", "line": line, "reason": reason}
        write_json(self._failure_path(name), record)
        self.log(record)

    def has_failed_since(self, name: str, moment: float) -> bool:
        """Whether any process failed to make a rollout after a time in seconds since 1970."""
        try:
            return self._failure_path(name).stat().st_mtime >= moment
        except FileNotFoundError:
            return False

    def log(self, event: dict[str, Any]) -> None:
        """Append a line to log.jsonl, in one write, with the time in seconds since 1970. Raises OutputError."""
        path = self.path / "log.jsonl"
        line = json.dumps({"time": round(time.time(), 3), **event}) + "\n"
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
            try:
                size = os.fstat(descriptor).st_size
                if size and os.pread(descriptor, 1, size - 1) != b"\n":  # a full disk cut the last line
                    line = "\n" + line
                os.write(descriptor, line.encode())
            finally:
                os.close(descriptor)
        except OSError as error:
            raise OutputError(f"{path}: expected a writable file, got: {error.strerror or error}") from None

    def write_index(self, rollouts: Iterable[tuple[str, int]]) -> dict[str, int]:
        """Write index.jsonl for (name, line) of all rollouts; returns the counts by status: done, failed, pending.

        Raises:
            OutputError: a file can't be written or read.
        """
        counts = {"done": 0, "failed": 0, "pending": 0}
        lock = Lock.wait(self.path / ".index.lock", shared=False)
        try:
            with replacing(self.path / "index.jsonl") as temporary, temporary.open("w") as file:
                for name, line in rollouts:
                    entry = self._entry(name, line)
                    counts[entry["status"]] += 1
                    file.write(json.dumps(entry) + "\n")
        finally:
            lock.release()
        return counts

    def _entry(self, name: str, line: int) -> dict[str, Any]:
        # A failure first: of a rollout that is there, it says why that one does not count.
        failure = self._failure_path(name)
        if failure.exists():
            try:
                return read_json(failure, OutputError)
            except (OutputError, RecursionError, ValueError):
                return {"id": name, "status": "failed", "line": line, "reason": f"unknown: {failure} is damaged"}
        try:
            made = read_made(self.rollout(name))
        except (ConfigError, OutputError):
            return {"id": name, "status": "pending", "line": line}
        kept = {"sample": made.batch.sample, "seed": made.seed, "num_frames": made.num_frames, "seconds": made.seconds}
        if made.score is not None:
            kept["score"] = made.score.value
        return {"id": name, "status": "done", "line": line, "folder": f"rollouts/{name}", **kept}

    def _failure_path(self, name: str) -> Path:
        return self._failed / f"{name}.json"

    def _check_settings(self, is_alone: bool) -> None:
        path = self.path / "run.json"
        content = {"format": FORMAT, **self.settings}
        try:
            before = _read_run(path)
        except OutputError as error:  # each rollout still says what it was made with
            logger.warning("%s; it is written anew", error)
            before = None
        if before is not None:
            changed = _differences(before, content)
            if not changed:
                return
            if self._on_change == "refuse":
                raise ConfigError(f"output={self.path}: was made otherwise ({changed}): on_change=redo or keep")
            if not is_alone:
                raise ConfigError(f"output={self.path}: another process is at work in it with others ({changed})")
        write_json(path, content)

    def _tidy(self) -> None:
        """Remove claims and partial rollouts of dead processes, unless another process is at work."""
        lock = Lock.alone(self.path / ".lock")
        if lock is not None:
            for folder in (self._claims, self._partial):
                shutil.rmtree(folder, ignore_errors=True)
            for folder in (self.path, self._failed, self.path / "grids"):
                for temporary in folder.glob(".*.tmp"):  # see `tokenizer.files.temporary_name`
                    with suppress(OSError):
                        temporary.unlink()
            lock.release()


def _read_run(path: Path) -> dict[str, Any] | None:
    """The content of run.json; None if there is none. Raises OutputError."""
    if not os.path.lexists(path):
        return None
    if not path.is_file():
        raise OutputError(f"{path}: expected a file, got something else")
    try:
        content = read_json(path, OutputError)
    except (RecursionError, ValueError) as error:
        raise OutputError(f"{path}: expected JSON, got: {error}") from None
    if not isinstance(content.get("made_with"), dict):
        raise OutputError(f"{path}: expected made_with as an object, got {_short(content.get('made_with'))}")
    return content


def _differences(before: dict[str, Any], after: dict[str, Any], prefix: str = "") -> str:
    """Names of the values that differ, with both values: "made_with.overlap: 3, now 2"; empty if there are none."""
    found = []
    for key in sorted(before.keys() | after.keys()):
        old, new = before.get(key), after.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            found.append(_differences(old, new, f"{prefix}{key}."))
        elif old != new:
            found.append(f"{prefix}{key}: {_short(old)}, now {_short(new)}")
    return "; ".join(text for text in found if text)


def _short(value: object) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:18]}...{text[-18:]}"


def _sync(folder: Path) -> None:
    """Flush the folder's files to disk before it is renamed: a power cut must not leave empty files."""
    for path in (*folder.iterdir(), folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # a file system that can't, for folders
                raise
        finally:
            os.close(descriptor)
