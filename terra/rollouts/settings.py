"""What rollouts to make, how many at once, and what to do when something is not as it was: conf/rollout.yaml."""

from dataclasses import dataclass
from pathlib import Path

from terra.errors import ConfigError
from terra.sampling import SamplingParams

ON_CHANGE = ("refuse", "redo", "keep")
_LEAST = {"num_frames": 1, "num_context": 1, "seed": 0, "num_samples": 1, "overlap": 1}
_LEAST |= {"at_once": 1, "workers": 1, "contexts": 1, "retries": 0}


@dataclass(frozen=True, kw_only=True)
class RolloutSettings:
    """The whole of conf/rollout.yaml but tokenizer, world model, engine and decoder.

    Attributes:
        manifest: see `terra.rollouts.manifest`.
        context_root: the folder that relative paths of contexts start from; the manifest's unless given.
        output: see `terra.rollouts.folder`.
        num_frames, num_context, seed, sampling, num_samples: of lines that don't say; as `terra-generate` has them.
        overlap: frames read again when the window slides.
        at_once: sessions open in the engine at once.
        workers: lines prepared, and rollouts written, at once.
        contexts: tokenized contexts remembered, for the lines that share them.
        retries: how often a line that failed is tried again.
        retry_seconds: how long to wait before that.
        on_change: what to do with rollouts made with other weights or settings: refuse, redo or keep them.
        grid: write a video of each line's futures beside each other.
        score: "package.module:function" that says which future is the best, see `terra.rollouts.best`; None for none.
        metrics: a file of counters for Prometheus; None for none.

    Raises:
        ConfigError: a value of another type or out of its range.
    """

    manifest: Path
    context_root: Path | None
    output: Path
    num_frames: int
    num_context: int
    seed: int
    sampling: SamplingParams
    num_samples: int
    overlap: int
    at_once: int
    workers: int
    contexts: int
    retries: int
    retry_seconds: float
    on_change: str
    grid: bool
    score: str | None
    metrics: Path | None

    def __post_init__(self) -> None:
        for name, least in _LEAST.items():
            check_whole(getattr(self, name), least, name)
        wait = self.retry_seconds
        if isinstance(wait, bool) or not isinstance(wait, int | float) or not 0 <= wait <= 3600:
            raise ConfigError(f"retry_seconds: expected 0 to 3600, got {wait!r}")
        if self.on_change not in ON_CHANGE:
            raise ConfigError(f"on_change: expected one of {', '.join(ON_CHANGE)}, got {self.on_change!r}")

        if not isinstance(self.grid, bool):
            raise ConfigError(f"grid: expected true or false, got {self.grid!r}")
        if self.score is not None and not isinstance(self.score, str):
            raise ConfigError(f"score: expected package.module:function, got {self.score!r}")

    @property
    def root(self) -> Path:
        """Where relative paths of contexts start from."""
        return self.manifest.parent if self.context_root is None else self.context_root


def check_whole(value: object, least: int, where: str) -> int:
    """The value, if it is a whole number of `least` or more; else ConfigError that begins with `where`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{where}: expected a whole number of {least} or more, got {value!r}")
    return value
