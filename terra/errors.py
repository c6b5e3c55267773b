"""The error tree, where users import it from (drawn in `tokenizer.errors`)."""

from tokenizer.errors import (
    CheckpointError,
    ConfigError,
    ContextError,
    DatasetError,
    EngineError,
    OutputError,
    TerraError,
    TrajectoryError,
    VideoError,
)

__all__ = [
    "CheckpointError",
    "ConfigError",
    "ContextError",
    "DatasetError",
    "EngineError",
    "OutputError",
    "TerraError",
    "TrajectoryError",
    "VideoError",
]
