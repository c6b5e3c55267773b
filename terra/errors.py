"""The errors that users can cause; `tokenizer.errors` defines and draws the tree."""

from tokenizer.errors import (
    ActionError,
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
    "ActionError",
    "CheckpointError",
    "ConfigError",
    "ContextError",
    "DatasetError",
    "EngineError",
    "OutputError",
    "TerraError",
    "TrajectoryError",
    "VideoError",
    "first_error",
]


def first_error(error: BaseException) -> BaseException:
    """The first error in a nested exception group."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
