"""What `terra replay` does: the record is read first, because importing what makes a rollout takes seconds."""

from rich.console import Console

from terra.replay.settings import ReplaySettings
from terra.rollout_record import read_record


def run(settings: ReplaySettings, console: Console | None = None) -> int:
    """Make the rollout of conf/replay.yaml's `folder` again; 0 if its tokens came out the same, 1 if not.

    Raises:
        TerraError: no record that can be replayed, inputs or weights that are missing or have changed, or anything
            wrong with the engine.
    """
    record = read_record(settings.folder)
    from terra.replay.again import make_again

    return make_again(settings, record, console or Console())
