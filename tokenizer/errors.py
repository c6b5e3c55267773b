"""The errors that users can cause, as one tree.

    TerraError
    +-- CheckpointError   weights or their configuration: missing, corrupt, mismatched
    +-- VideoError        a picture or a video that can't be read or written
    +-- ContextError      context frames: missing, too few, of the wrong size or kind
    +-- ActionError       actions: columns, units, values, length, of another world
        +-- TrajectoryError   a trajectory file, which holds the actions of driving
    +-- DatasetError      recordings: missing, incomplete, damaged
    +-- ConfigError       a configuration value, an unknown engine, an extra that is not installed
    +-- EngineError       an engine was used out of order, or refused a request
    +-- OutputError       the output folder: exists, not writable, disk full

Every message is one line that says what was expected, what came, and where. The tree stands in the lowest package
so that all three can raise from it; `terra.errors` is where users import it from.
"""


class TerraError(Exception):
    """Base of every error that a user can cause; the command line prints it as one line and exits with 2."""


class CheckpointError(TerraError):
    """Weights or their configuration are missing, corrupt, or do not fit the architecture."""


class VideoError(TerraError):
    """A picture or a video can't be read or written."""


class ContextError(TerraError):
    """Context frames are missing, too few, or not of the kind the tokenizer takes."""


class ActionError(TerraError):
    """Actions are malformed, undeclared, out of their range, too few, or of another action space."""


class TrajectoryError(ActionError):
    """A trajectory file is malformed, undeclared, too short, or physically absurd."""


class DatasetError(TerraError):
    """Recorded driving is missing, incomplete or damaged."""


class ConfigError(TerraError):
    """A configuration value is not allowed, or a needed extra is not installed."""


class EngineError(TerraError):
    """An engine was used out of order, or refused a request."""


class OutputError(TerraError):
    """The output folder exists, can't be written, or the disk is full."""
