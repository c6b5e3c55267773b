"""Which bytes the rollouts of a batch start from; each file is hashed once for the lines that share it."""

from functools import lru_cache

from terra.rollout import context_sha256, files_sha256
from terra.rollouts.manifest import Job

_REMEMBERED = 4096  # contexts and trajectories whose hash is kept


class Fingerprints:
    """Hashes files, each once as long as it is remembered."""

    def __init__(self) -> None:
        self._context = lru_cache(_REMEMBERED)(context_sha256)
        self._file = lru_cache(_REMEMBERED)(lambda path: files_sha256([path]))

    def of(self, job: Job) -> dict[str, str]:
        """As `terra.rollout.inputs_sha256`: without the hashes of files that can't be read (any more)."""
        found = {
            "context_sha256": self._context(job.contexts, job.num_context),
            "trajectory_sha256": None if job.trajectory is None else self._file(job.trajectory),
        }
        return {name: value for name, value in found.items() if value is not None}
