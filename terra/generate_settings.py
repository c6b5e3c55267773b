"""The settings of `terra generate`; checked before torch is imported."""

from decoder.camera import Camera
from terra.config.groups import MapPose, PipelineSettings, Sampling
from tokenizer.limits import LIMITS, Limits
from tokenizer.settings import Count, FilePath, Seed, Text


class GenerateSettings(PipelineSettings):
    """The settings of conf/generate.yaml.

    Attributes:
        context: folder or glob of pictures, or a video.
        trajectory: the drive's path, where actions are waypoints; `sample_id` chooses a line of a .jsonl.
        actions: the file of the actions, where these are vectors, keys or choices.
        map: pictures of the place with their poses, which the rollout remembers, see `terra.place_map`; None for none.
        map_pose: where the first context frame is in the map's axes; None for [0, 0, 0].
        num_context: context frames taken from the start of `context`.
        num_frames: frames of the video, context included.
        seed: seed of the sampling.
        output: folder of the results; an existing one is replaced only with `overwrite`.
        png: whether each frame is written as a PNG, too.
        sampling: how tokens are chosen.
        camera: camera of the overlay.
        limits: bounds on what is read.
    """

    context: Text
    trajectory: FilePath | None
    actions: FilePath | None
    sample_id: int | str | None
    map: FilePath | None
    map_pose: MapPose | None
    num_context: Count
    num_frames: Count
    seed: Seed
    output: FilePath
    overwrite: bool
    png: bool
    sampling: Sampling
    camera: Camera
    limits: Limits = LIMITS
