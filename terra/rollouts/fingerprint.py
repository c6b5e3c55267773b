"""Hashes the input files of a batch's rollouts, each file once for all lines that share the file."""

from functools import lru_cache, partial
from pathlib import Path

from terra.errors import TerraError
from terra.place_map import map_sha256
from terra.rollout import context_sha256, files_sha256
from terra.rollouts.manifest import Job
from terra.views import Views
from terra.world_model.adapter import adapter_sha256
from tokenizer.limits import Limits

_REMEMBERED = 4096  # contexts, trajectories, maps and adapters whose hash is kept


class Fingerprints:
    """Hashes input files, of contexts with these views and within limits on maps, and remembers the last hashes."""

    def __init__(self, limits: Limits, views: Views | None) -> None:
        self._context = lru_cache(_REMEMBERED)(partial(context_sha256, views=views))
        self._file = lru_cache(_REMEMBERED)(lambda path: files_sha256([path]))
        self._map = lru_cache(_REMEMBERED)(lambda path: _map_sha256(path, limits))
        self._adapter = lru_cache(_REMEMBERED)(adapter_sha256)

    def of(self, job: Job) -> dict[str, str]:
        """The hashes of a job's inputs, as `terra.rollout.inputs_sha256`: without those of unreadable files.

        A job with a map has the map's hash, too, as `map_sha256`, and one with an adapter the adapter's, as
        `adapter_sha256`. Raises CheckpointError without the adapter.
        """
        found = {
            "context_sha256": self._context(job.contexts, job.num_context),
            "trajectory_sha256": None if job.trajectory is None else self._file(job.trajectory),
            "map_sha256": None if job.map is None else self._map(job.map),
            "adapter_sha256": None if job.adapter_folder is None else self._adapter(job.adapter_folder),
        }
        return {name: value for name, value in found.items() if value is not None}


def _map_sha256(path: Path, limits: Limits) -> str | None:
    try:
        return map_sha256(path, limits)
    except TerraError:
        return None
