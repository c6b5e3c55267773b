"""The errors that users can cause; `tokenizer.errors` defines and draws the tree."""

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
