"""Tracks of TORCS, a racing game, as textured places to drive in besides the town.

    torcs_prepare.py -> read_layout, read_model -> fit_road -> write_track      (once; needs Debian's torcs-data)
    torcs_source -> simulate_track_drive -> TrackRenderer.render -> frames

The tracks are not part of this project: GPL and Free Art License; see the notice that preparing them leaves.
"""

from terra.recording.torcs.assets import HELD_OUT_TRACKS, track_names
from terra.recording.torcs.source import TrackSource, torcs_source

__all__ = ["HELD_OUT_TRACKS", "TrackSource", "torcs_source", "track_names"]
