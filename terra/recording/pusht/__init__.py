"""PushT as a Gymnasium environment to record, `terra.recording.pusht:PushT-v0`: a disc pushes a block of T's shape.

Physics and pictures are those of stable-worldmodel's `swm/PushT-v1`, on which planners are compared; `players` has
policies for `terra record`.
"""

from terra.extras import extras_named

with extras_named("terra.recording.pusht"):
    import gymnasium

gymnasium.register("PushT-v0", "terra.recording.pusht.environment:PushT")
