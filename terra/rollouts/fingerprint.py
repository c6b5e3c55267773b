"""Hashes the input files of a batch's rollouts, each file once for all lines that share the file."""

from functools import lru_cache

from terra.rollout import context_sha256, files_sha256
from terra.rollouts.manifest import Job

_REMEMBERED = 4096  # contexts and trajectories whose hash is kept


class Fingerprints:
    """Hashes input files and remembers the last hashes."""

    def __init__(self) -> None:
        self._context = lru_cache(_REMEMBERED)(context_sha256)
        self._file = lru_cache(_REMEMBERED)(lambda path: files_sha256([path]))

    def of(self, job: Job) -> dict[str, str]:
        """The hashes of a job's inputs, as `terra.rollout.inputs_sha256`: without those of unreadable files."""
        found = {
            "context_sha256": self._context(job.contexts, job.num_context),
            "trajectory_sha256": None if job.trajectory is None else self._file(job.trajectory),
        }
        return {name: value for name, value in found.items() if value is not None}
