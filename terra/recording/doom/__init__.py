"""Doom (VizDoom with Freedoom's pictures) as a Gymnasium environment, `terra.recording.doom:Doom-v0`.

Levels are planned from a seed, so that there are as many as one likes, and those of the held-out split were never
trained on. `players` has policies for `terra record`.
"""

from terra.extras import extras_named

with extras_named("terra.recording.doom"):
    import gymnasium

gymnasium.register("Doom-v0", "terra.recording.doom.environment:Doom")
