"""Records driving in a procedural town: video with exact poses, varied drives, and several futures of one start.

    plan_town -> LaneGraph -> simulate_drive -> Renderer.render -> episodes on disk
    (town.py)   (lanes.py)   (drives.py)        (renderer.py)      (record.py, dataset.py)

Only `renderer` and `record` need moderngl (the extra `record`), so those are imported from their own modules.
"""

from terra.recording.dataset import Episode, list_episodes, load_episode

__all__ = ["Episode", "list_episodes", "load_episode"]
