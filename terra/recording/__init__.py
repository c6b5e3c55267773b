"""Records driving: video with exact poses, varied drives, and several futures of one start.

    SceneSource.simulate -> Drive -> SceneSource.render -> frames -> a shard of a dataset
    (source.py; a town, a race track)                                (record.py, terra.dataset)

Only rendering needs moderngl (the extra `record`).
"""
