"""Bounds on what is read from files and requests of others, so that a few bytes can't take gigabytes or minutes."""

from typing import Annotated

from pydantic import Field

from tokenizer.settings import Settings

Bound = Annotated[int, Field(ge=1, le=1 << 40)]

MAP_METERS = 1e7
"""Bound on coordinates of a map, m; farther out, poses lose their last millimeters."""


class Limits(Settings):
    """Bounds on what is read from files and requests of others; the settings `limits.NAME=` of the commands.

    What is larger is refused before memory is taken for it.

    Attributes:
        json_bytes: size of a JSON file, and of one line of JSON lines.
        json_depth: depth of lists and objects in JSON.
        json_items: lists, objects and keys in JSON together; an upper bound of their number is counted.
        json_digits: digits of a whole number in JSON.
        table_bytes: size of a CSV file.
        table_lines: lines of a CSV file.
        line_chars: characters of one line of a CSV file.
        manifest_lines: lines of a manifest, or of ACT-Bench's JSONL.
        npz_bytes: unpacked size of an NPZ archive.
        npz_members: arrays in an NPZ archive.
        trajectory_numbers: numbers in a trajectory: 2 for each point of each frame's path, 4 for each pose; in a JSON
            of actions one for each column of each action.
        rollout_frames: frames of one rollout, context included.
        manifest_bytes: size of a manifest, or of ACT-Bench's JSONL.
        picture_pixels: pixels of a picture.
        jpeg_scans: scans of a progressive JPEG, each of which is decoded over the whole picture.
        video_pixels: pixels of a video's frame.
        video_frames: frames of a video.
        video_fps: frames a second of a video.
        map_frames: frames of a map.
        bag_record_bytes: a chunk of an MCAP file, packed or unpacked, a message of any bag, and the access units from
            one key frame of its video to the next.
        context_seconds: how long the frames of a context may take to be read from a video.
    """

    json_bytes: Bound = 64 << 20
    json_depth: Annotated[int, Field(ge=1, le=1000)] = 64
    json_items: Bound = 4 << 20
    json_digits: Bound = 300  # a longer number is no float64
    table_bytes: Bound = 64 << 20
    table_lines: Bound = 1_000_000
    line_chars: Bound = 1000
    manifest_lines: Bound = 1_000_000
    npz_bytes: Bound = 256 << 20  # four hours of paths at 10 frames a second take 140 MB
    npz_members: Bound = 64
    trajectory_numbers: Bound = 4_000_000
    rollout_frames: Bound = 36_000  # an hour at 10 frames a second
    manifest_bytes: Bound = 1 << 30  # is refused for what its last line holds in less than 20 s
    picture_pixels: Bound = 64_000_000
    jpeg_scans: Bound = 100
    video_pixels: Bound = 1 << 24
    video_frames: Bound = 1_000_000
    video_fps: Annotated[float, Field(gt=0, le=1e6)] = 1000.0
    map_frames: Bound = 1000  # in 8 bits, as they are held, 110 MB of the shipped model's size
    bag_record_bytes: Bound = 256 << 20
    context_seconds: Annotated[float, Field(gt=0, le=86_400)] = 15.0


LIMITS = Limits()
"""The bounds where none are given."""
