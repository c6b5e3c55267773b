"""Sample data for the import: a folder of short videos with poses."""

import math
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Literal, TypeVar

import numpy as np
from jaxtyping import Float, UInt8

from decoder.camera import Camera
from decoder.video import VideoWriter
from terra.dataset.poses import Poses
from terra.errors import ConfigError
from terra.recording.drives import FPS, simulate_drive
from terra.recording.lanes import LaneGraph
from terra.recording.planning import plan_town
from terra.trajectory import save_poses
from tokenizer.files import make_folder

Scenery = Literal["town", "plane"]

_T = TypeVar("_T")

_CELL = 4.0  # m, side of the plane's squares
_HAZE = 50.0  # m, over which the squares fade to a third


def opengl_problem() -> str | None:
    """One line that says why no town can be rendered on this machine; None if it can."""
    return _apart(_try_opengl)


def write_samples(
    folder: Path, *, drives: int, num_frames: int, image_size: tuple[int, int], camera: Camera, scenery: Scenery
) -> None:
    """Write drive_00.mp4 and drive_00.json (poses), drive_01.mp4, ... at 10 frames a second, a town each, by day.

    Args:
        folder: output folder; it is made if missing.
        drives: number of drives.
        num_frames: frames of each drive; its poses continue for 3 s.
        image_size: (height, width), both even.
        camera: the camera that takes the frames.
        scenery: the car's surroundings; "plane", a plane of colored squares, needs no OpenGL.

    Raises:
        ConfigError: no town can be rendered on this machine.
        OutputError: a file can't be written.
    """
    make_folder(folder)
    arguments = (folder, drives, num_frames, image_size, camera, scenery)
    _apart(_write, *arguments) if scenery == "town" else _write(*arguments)


def _apart(work: Callable[..., _T], *arguments: object) -> _T:
    """Call a function that uses OpenGL in a new process: the LLVMs of Mesa and Triton crash each other in one."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def _try_opengl() -> str | None:
    try:
        from terra.recording.canvas import open_context

        open_context().release()
    except ConfigError as error:
        return str(error)
    return None


def _write(
    folder: Path, drives: int, num_frames: int, image_size: tuple[int, int], camera: Camera, scenery: Scenery
) -> None:
    for town in range(drives):
        drive = simulate_drive(LaneGraph(plan_town(town)), 0, num_frames)
        if scenery == "town":
            from terra.recording.town_source import town_source

            source = town_source(town, image_size, camera)
            frames = source.render(drive, "day")
        else:
            frames = draw_plane(drive.poses, num_frames, image_size, camera)
        path = folder / f"drive_{town:02d}.mp4"
        with VideoWriter(path, FPS, size=(image_size[1], image_size[0])) as writer:
            writer.extend(frames)
        poses = drive.poses
        positions = np.column_stack([poses.x, poses.y])
        save_poses(path.with_suffix(".json"), poses.time, positions, poses.heading, FPS)


def draw_plane(
    poses: Poses, num_frames: int, image_size: tuple[int, int], camera: Camera
) -> Iterator[UInt8[np.ndarray, "height width 3"]]:
    """The first `num_frames` frames of a drive over a plane of colored squares, whose colors fade with distance."""
    ahead, left = _ground(image_size, camera)
    on_ground = np.isfinite(ahead)
    haze = np.array([190.0, 200.0, 210.0])
    near = np.exp(-ahead[on_ground] / _HAZE)[:, None]
    for x, y, heading in zip(poses.x[:num_frames], poses.y[:num_frames], poses.heading[:num_frames], strict=True):
        cosine, sine = math.cos(heading), math.sin(heading)
        east = x + ahead[on_ground] * cosine - left[on_ground] * sine
        north = y + ahead[on_ground] * sine + left[on_ground] * cosine
        column, row = np.floor(east / _CELL), np.floor(north / _CELL)
        # Incommensurable frequencies give neighboring squares different colors.
        phases = np.stack([2.4 * column + 3.9 * row, 4.1 * column - 1.7 * row, 1.3 * column + 5.3 * row], axis=-1)
        frame = np.broadcast_to(haze, (*image_size, 3)).copy()
        frame[on_ground] = near * (120 + 90 * np.sin(phases)) + (1 - near) * haze
        yield frame.round().astype(np.uint8)


def _ground(
    image_size: tuple[int, int], camera: Camera
) -> tuple[Float[np.ndarray, "height width"], Float[np.ndarray, "height width"]]:
    """Meters ahead of and left of the car where each pixel's center sees the ground, NaN above the horizon.

    The function is the inverse of `decoder.camera.project`.
    """
    height, width = image_size
    focal = width / (2 * math.tan(math.radians(camera.fov_degrees) / 2))
    down, left = np.mgrid[:height, :width] + 0.5
    down, left = (down - height / 2) / focal, (width / 2 - left) / focal
    cosine, sine = math.cos(camera.pitch_radians), math.sin(camera.pitch_radians)
    slope = down * cosine - sine
    ahead = camera.height_meters * (down * sine + cosine) / np.where(slope > 0, slope, np.nan)
    depth = ahead * cosine - camera.height_meters * sine
    return ahead + camera.x_forward_meters, left * depth
