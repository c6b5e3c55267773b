"""Claims the missing rollouts one by one while the manifest is read, and counts what became of them."""

import threading
import time
from array import array
from collections.abc import Iterator
from dataclasses import dataclass, field

from terra.errors import OutputError, TerraError
from terra.rollouts.folder import RolloutFolder
from terra.rollouts.locks import Claim
from terra.rollouts.manifest import Job, Line, parse_line, read_line, read_lines, rollout_names
from terra.rollouts.settings import RolloutSettings

_POLL_SECONDS = 1.0


@dataclass
class Tally:
    """Progress of a run.

    Attributes:
        total: rollouts that the manifest requests.
        reused: rollouts that existed before, or that another process made meanwhile.
        done, failed: rollouts that this run finished or gave up.
        taken: rollouts that this process has claimed so far.
        frames: frames that this run has generated.
        frames_due: frames to generate for the claimed rollouts.
        seconds: seconds of each stage, summed over the rollouts done in this run.
        restarts: workers that died and were replaced.
        failures: the first few reasons.
    """

    total: int
    reused: int = 0
    done: int = 0
    failed: int = 0
    taken: int = 0
    frames: int = 0
    frames_due: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    restarts: int = 0
    failures: list[str] = field(default_factory=list)

    @property
    def ended(self) -> int:
        """Number of rollouts that are done, failed or reused."""
        return self.reused + self.done + self.failed


class ClaimedJobs:
    """Iterates over (job, claim) of the missing rollouts; reads the next line only when the next job is requested.

    Rollouts that another process is making are looked at again at the end, until they are made or that process is
    dead; each of them takes 24 bytes. `stop` ends the iteration, from any thread.
    """

    def __init__(self, settings: RolloutSettings, folder: RolloutFolder, tally: Tally) -> None:
        self._settings, self._folder, self._tally = settings, folder, tally
        self._stopped = threading.Event()
        self._started = time.time()
        self._held = array("Q")  # number, offset and sample of each rollout that another process has
        self._jobs = self._iterate()

    def stop(self) -> None:
        """Give no further job."""
        self._stopped.set()

    def __iter__(self) -> Iterator[tuple[Job, Claim]]:
        return self._jobs

    def __next__(self) -> tuple[Job, Claim]:
        return next(self._jobs)

    def _iterate(self) -> Iterator[tuple[Job, Claim]]:
        for line in read_lines(self._settings.manifest, self._settings.limits):
            if self._stopped.is_set():
                return
            yield from self._take_line(line)
        while self._held and not self._stopped.wait(_POLL_SECONDS):
            held, self._held = self._held, array("Q")
            for start in range(0, len(held), 3):
                if self._stopped.is_set():
                    return
                number, offset, sample = held[start : start + 3]
                line = read_line(self._settings.manifest, number, offset, self._settings.limits)
                yield from self._take_line(line, sample)

    def _take_line(self, line: Line, only: int | None = None) -> Iterator[tuple[Job, Claim]]:
        try:
            jobs = parse_line(line, self._settings)
        except TerraError as error:
            for name in rollout_names(line, self._settings):
                self._fail(name, line.number, str(error))
            return
        for job in jobs if only is None else jobs[only : only + 1]:
            if self._stopped.is_set():
                return
            try:
                claim = self._take(job, line.offset, again=only is not None)
            except OutputError:
                raise
            except TerraError as error:
                self._fail(job.name, job.line, str(error))
                continue
            if claim is not None:
                self._tally.taken += 1
                self._tally.frames_due += job.num_frames - job.num_context
                yield job, claim

    def _take(self, job: Job, offset: int, *, again: bool) -> Claim | None:
        if self._folder.is_done(job):
            self._tally.reused += 1
            return None
        claim = self._folder.claim(job)
        if claim is None:
            self._held.extend((job.line, offset, job.sample))
            return None
        # Between the look and the claim another process may have come to an end with it.
        try:
            if self._folder.is_done(job, is_claimed=True):
                self._tally.reused += 1
            elif again and self._folder.has_failed_since(job.name, self._started):
                self._tally.failed += 1
            else:
                taken, claim = claim, None
                return taken
        finally:
            if claim is not None:
                claim.release()
        return None

    def _fail(self, name: str, number: int, reason: str) -> None:
        note_failure(self._tally, self._folder, name, number, reason)


def note_done(tally: Tally, folder: RolloutFolder, job: Job, seconds: dict[str, float]) -> None:
    """Count and log a rollout that was made. Raises OutputError."""
    tally.done += 1
    for stage, taken in seconds.items():
        tally.seconds[stage] = tally.seconds.get(stage, 0.0) + taken
    folder.log({"id": job.name, "status": "done", "line": job.line, "seconds": seconds})


def note_failure(tally: Tally, folder: RolloutFolder, name: str, line: int, reason: str) -> None:
    """Count and record a failure. Raises OutputError."""
    folder.fail(name, line, reason)
    tally.failed += 1
    if len(tally.failures) < 3:
        tally.failures.append(f"{name}: {reason}")
