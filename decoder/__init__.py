"""From tokens to frames to files: decoding, reading and writing of videos, and drawings over frames.

Names are imported on first use, so that a command's `--help` does not pay for importing torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from decoder.framewise import Decoder, FramewiseDecoder
    from decoder.overlay import Camera, compose_rollout, draw_path, project, side_by_side, top_down
    from decoder.video import (
        VideoInfo,
        VideoWriter,
        probe_video,
        read_video,
        to_frames,
        to_uint8,
        write_png_sequence,
        write_video,
    )

__all__ = [
    "Camera",
    "Decoder",
    "FramewiseDecoder",
    "VideoInfo",
    "VideoWriter",
    "compose_rollout",
    "draw_path",
    "probe_video",
    "project",
    "read_video",
    "side_by_side",
    "to_frames",
    "to_uint8",
    "top_down",
    "write_png_sequence",
    "write_video",
]

_MODULES = {
    "decoder.framewise": ("Decoder", "FramewiseDecoder"),
    "decoder.overlay": ("Camera", "compose_rollout", "draw_path", "project", "side_by_side", "top_down"),
    "decoder.video": (
        *("VideoInfo", "VideoWriter", "probe_video", "read_video"),
        *("to_frames", "to_uint8", "write_png_sequence", "write_video"),
    ),
}


def __getattr__(name: str) -> object:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'decoder' has no attribute {name!r}")
