"""Records driving: video with exact poses, varied drives, and several futures of one start.

    SceneSource.simulate -> Drive -> SceneSource.render -> frames -> a shard of a dataset
    (source.py; town_source.py)                                      (record.py, terra.dataset)

Rendering needs moderngl (the extra `record`); simulating does not.
"""
