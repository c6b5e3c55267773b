"""Bounds on what is read from files and requests of others, so that a few bytes can't take gigabytes or minutes."""

from tokenizer.settings import Count, Positive, Settings


class Limits(Settings):
    """Bounds on what is read from files and requests of others; the settings `limits.NAME=` of the commands.

    What is larger is refused before memory is taken for it.

    Attributes:
        json_bytes: size of a JSON file.
        json_depth: depth of lists and objects in JSON.
        picture_pixels: pixels of a picture.
        video_pixels: pixels of a video's frame.
        video_frames: frames of a video.
        video_fps: frames a second of a video.
        context_seconds: how long the frames of a context may take to be read from a video.
    """

    json_bytes: Count = 64 << 20
    json_depth: Count = 64
    picture_pixels: Count = 64_000_000
    video_pixels: Count = 1 << 24
    video_frames: Count = 1_000_000
    video_fps: Positive = 1000.0
    context_seconds: Positive = 15.0


LIMITS = Limits()
"""The bounds where none are given."""
