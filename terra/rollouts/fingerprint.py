"""Which bytes a rollout starts from: the SHA-256 of its context and of its trajectory file."""

import glob
import hashlib
from functools import lru_cache
from pathlib import Path

from terra.context import is_picture, natural_key
from terra.errors import TerraError
from terra.rollouts.manifest import Job
from tokenizer.files import file_sha256

_REMEMBERED = 4096  # contexts and trajectories whose hash is kept, for the lines that share them


class Fingerprints:
    """Hashes files, each once as long as it is remembered."""

    def __init__(self) -> None:
        self._context = lru_cache(_REMEMBERED)(_hash_context)
        self._file = lru_cache(_REMEMBERED)(lambda path: _hash_files([path]))

    def of(self, job: Job) -> dict[str, str]:
        """`context_sha256` and `trajectory_sha256`; without those whose files are not to be read (any more)."""
        found = {
            "context_sha256": self._context(job.contexts, job.num_context),
            "trajectory_sha256": None if job.trajectory is None else self._file(job.trajectory),
        }
        return {name: value for name, value in found.items() if value is not None}


def _hash_context(contexts: tuple[str, ...], num_context: int) -> str | None:
    source, *others = contexts
    if others:
        return _hash_files([Path(each) for each in contexts[:num_context]])
    paths = context_files(source, num_context)
    are_too_few = len(paths) < num_context and not Path(source).is_file()
    return None if are_too_few else _hash_files(paths)


def context_files(source: str, num_frames: int) -> list[Path]:
    """The files that `terra.context.load_context` takes the first frames of a folder, glob, picture or video from."""
    path = Path(source)
    if path.is_file():
        return [path]
    entries = path.iterdir() if path.is_dir() else map(Path, glob.glob(source, recursive=True))  # noqa: PTH207
    return sorted(filter(is_picture, entries), key=natural_key)[:num_frames]


def _hash_files(paths: list[Path]) -> str | None:
    """The hash of the files' hashes; None if there is none, or one can't be read."""
    try:
        hashes = [file_sha256(path, TerraError) for path in paths]
    except TerraError:
        return None
    return hashlib.sha256("".join(hashes).encode()).hexdigest() if hashes else None
