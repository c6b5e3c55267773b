"""Drawings over frames: the path on the road, a map of the path from above, and both beside the plain video.

A path is in meters in the ego frame of its video frame: x forward, y left, on the ground (z = 0). Pictures are 8-bit
RGB.
"""

import math
from collections.abc import Sequence
from functools import cache

import numpy as np
from jaxtyping import Float, UInt8
from PIL import Image, ImageDraw, ImageFont

from decoder.camera import Camera, project

__all__ = [
    "PATH_COLOR",
    "Camera",
    "Color",
    "compose_rollout",
    "compose_words",
    "draw_path",
    "project",
    "side_by_side",
    "top_down",
]

Color = tuple[int, int, int]
PATH_COLOR: Color = (45, 212, 191)
_BACKGROUND, _GRID, _TEXT, _MUTED = (16, 20, 27), (52, 62, 76), (236, 240, 245), (142, 154, 170)
_CAR_WIDTH, _CAR_LENGTH = 1.8, 4.4  # meters
_RIBBON_START = 2.0  # meters along the path; the hood hides nearer ground
_RIBBON_STEP = 0.25  # meters
_FADE_LENGTH = 25.0  # meters
_SUPERSAMPLING = 3
_PANEL_WIDTH = 512  # pixels, like _GAP and _BAR_HEIGHT
_GAP = 4
_BAR_HEIGHT = 40


def draw_path(
    frame: UInt8[np.ndarray, "height width 3"],
    path_xy: Float[np.ndarray, "points 2"],
    camera: Camera,
    color: Color = PATH_COLOR,
    scale: int = 1,
) -> UInt8[np.ndarray, "scaled_height scaled_width 3"]:
    """Enlarge the frame `scale` times and draw the path on the ground as a ribbon as wide as the car.

    The ribbon begins 2 m ahead and fades with distance; dots mark the waypoints unless they are too dense. Points that
    are NaN or not in front of the camera are left out.
    """
    picture = Image.fromarray(frame)
    size = (picture.width * scale, picture.height * scale)
    picture = picture.resize(size, Image.Resampling.BICUBIC) if scale > 1 else picture
    large = (size[0] * _SUPERSAMPLING, size[1] * _SUPERSAMPLING)
    waypoints = path_xy[np.isfinite(path_xy).all(axis=1)]
    center, normal, distance = _ribbon(waypoints)
    if not len(center):
        return np.asarray(picture)
    ribbon, marks = Image.new("L", large), Image.new("L", large)
    edges = [_visible(center + side * _CAR_WIDTH / 2 * normal, camera, large) for side in (1, -1)]
    # Pieces are drawn from far to near, so that the nearer part covers the farther part of a path that crosses itself.
    for index in range(len(center) - 2, -1, -1):
        corners = np.concatenate([edges[0][index : index + 2], edges[1][index : index + 2][::-1]])
        if np.isnan(corners).any():
            continue
        fade = math.exp(-distance[index] / 25)
        ImageDraw.Draw(ribbon).polygon(_flat(corners), fill=round(30 + 95 * fade))
        for first, last in (corners[:2], corners[2:]):
            width = max(1, round(large[1] * 0.008 * fade))
            ImageDraw.Draw(marks).line(_flat(np.stack([first, last])), fill=round(90 + 150 * fade), width=width)
    _draw_dots(ImageDraw.Draw(marks), waypoints, camera, large)
    picture.paste(color, (0, 0), ribbon.resize(size, Image.Resampling.BOX))
    picture.paste(_lighter(color), (0, 0), marks.resize(size, Image.Resampling.BOX))
    return np.asarray(picture)


def top_down(
    path_xy: Float[np.ndarray, "points 2"],
    size: tuple[int, int],
    forward_meters: float,
    color: Color = PATH_COLOR,
) -> UInt8[np.ndarray, "height width 3"]:
    """Draw a map of the path, `size` (width, height) pixels: ahead is up, left is left, with a grid line every 10 m.

    The map shows `forward_meters` ahead of the car, and as much to the sides as fits. NaN points are left out.
    """
    width, height = (side * _SUPERSAMPLING for side in size)
    pixels_a_meter = height / (forward_meters + 1.5 * _CAR_LENGTH)
    origin = np.array([width / 2, forward_meters * pixels_a_meter])

    def place(points: np.ndarray) -> np.ndarray:
        return origin - points[:, ::-1] * pixels_a_meter

    picture = Image.new("RGB", (width, height), _BACKGROUND)
    draw = ImageDraw.Draw(picture)
    lines = np.arange(-10, math.ceil(max(forward_meters, width / pixels_a_meter) / 10) + 1) * 10.0
    for meters in lines:
        (column, row), line = place(np.array([[meters, meters]]))[0], _SUPERSAMPLING
        draw.line([(0, row), (width, row)], fill=_GRID, width=line)
        draw.line([(column, 0), (column, height)], fill=_GRID, width=line)
        if 0 < meters < forward_meters - 2:
            draw.text((2 * line, row), f"{meters:.0f} m", fill=_MUTED, font=_font(10 * line), anchor="lb")
    half = np.array([_CAR_LENGTH, _CAR_WIDTH]) / 2
    nose, tail = place(np.stack([half, -half]))
    waypoints = path_xy[np.isfinite(path_xy).all(axis=1)]
    if len(waypoints):
        line = place(np.concatenate([np.zeros((1, 2)), waypoints]))
        draw.line(
            _flat(line),
            fill=color,
            width=max(2 * _SUPERSAMPLING, round(_CAR_WIDTH * pixels_a_meter * 0.7)),
            joint="curve",
        )
    draw.rounded_rectangle([nose[0], nose[1], tail[0], tail[1]], radius=0.5 * pixels_a_meter, fill=_TEXT)
    return np.asarray(picture.resize(size, Image.Resampling.BOX))


def side_by_side(
    left: UInt8[np.ndarray, "frames height width 3"],
    right: UInt8[np.ndarray, "frames height width 3"],
    labels: tuple[str, str],
) -> UInt8[np.ndarray, "frames even_height both_widths 3"]:
    """Join two videos of one size side by side, each with its label in the top left corner.

    An odd height gets one more dark row, because H.264 needs even sides. Raises `ValueError` for different shapes.
    """
    if left.shape != right.shape:
        raise ValueError(f"expected two videos of one shape, got {left.shape} and {right.shape}")
    num_frames, height, width = left.shape[:3]
    both = np.empty((num_frames, height + height % 2, 2 * width + _GAP, 3), np.uint8)
    both[:] = _BACKGROUND
    for frames, label, column in ((left, labels[0], 0), (right, labels[1], width + _GAP)):
        panel = both[:, :height, column : column + width]
        panel[:] = frames
        _draw_label(panel, label)
    return both


def compose_rollout(
    generated: UInt8[np.ndarray, "frames height width 3"],
    paths: Float[np.ndarray, "frames points 2"],
    camera: Camera,
    num_context: int,
    fps: float,
) -> UInt8[np.ndarray, "frames composed_height composed_width 3"]:
    """Show a rollout, enlarged to a width of about 512 pixels, beside a copy with its path on the road and on a map.

    A bar below shows which frames are context, and the time of each generated frame after the context. `generated`
    begins with the `num_context` context frames. Width and height of the result are even, for H.264. Raises
    `ValueError` unless there is one path for each frame and `num_context` is between 1 and the number of frames.
    """
    num_frames, _, width = generated.shape[:3]
    if len(paths) != num_frames:
        raise ValueError(f"expected one path for each of {num_frames} frames, got {len(paths)}")
    if not 1 <= num_context <= num_frames:
        raise ValueError(f"expected 1 to {num_frames} context frames, got {num_context = }")
    scale = max(1, round(_PANEL_WIDTH / width))
    plain = np.stack([_enlarge(frame, scale) for frame in generated])
    drawn = np.stack(
        [draw_path(frame, path, camera, scale=scale) for frame, path in zip(generated, paths, strict=True)]
    )
    _draw_maps(drawn, paths)
    panels = side_by_side(plain, drawn, ("rollout", "its path on the road"))
    bars = np.stack([_bar(index, num_frames, num_context, fps, panels.shape[2]) for index in range(num_frames)])
    return np.concatenate([panels, bars], axis=1)


def compose_words(
    generated: UInt8[np.ndarray, "frames height width 3"], words: Sequence[str], num_context: int, fps: float
) -> UInt8[np.ndarray, "frames composed_height composed_width 3"]:
    """Show a rollout, enlarged to a width of about 512 pixels, over a line of words for each frame and a bar as above.

    Raises `ValueError` unless there is a line for each frame and `num_context` is between 1 and the number of frames.
    """
    num_frames, _, width = generated.shape[:3]
    if len(words) != num_frames:
        raise ValueError(f"expected one line of words for each of {num_frames} frames, got {len(words)}")
    if not 1 <= num_context <= num_frames:
        raise ValueError(f"expected 1 to {num_frames} context frames, got {num_context = }")
    scale = max(1, round(_PANEL_WIDTH / width))
    composed = []
    for index, (frame, text) in enumerate(zip(generated, words, strict=True)):
        picture = _enlarge(frame, scale)
        line = Image.new("RGB", (picture.shape[1], _BAR_HEIGHT), _BACKGROUND)
        ImageDraw.Draw(line).text((12, _BAR_HEIGHT // 2), text, fill=_TEXT, font=_font(18), anchor="lm")
        bar = _bar(index, num_frames, num_context, fps, picture.shape[1])
        composed.append(np.concatenate([picture, np.asarray(line), bar]))
    stacked = np.stack(composed)
    odd = [(0, stacked.shape[1] % 2), (0, stacked.shape[2] % 2)]  # H.264 needs even sides
    return np.pad(stacked, [(0, 0), *odd, (0, 0)], mode="edge")


def _enlarge(frame: np.ndarray, scale: int) -> np.ndarray:
    height, width = frame.shape[:2]
    return np.asarray(Image.fromarray(frame).resize((width * scale, height * scale), Image.Resampling.BICUBIC))


def _ribbon(waypoints: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Points every 0.25 m along the path, their unit normals to the left and distances along the path; may be empty."""
    line = np.concatenate([np.zeros((1, 2)), waypoints])
    along = _distances(line)
    moving = np.concatenate([[True], np.diff(along) > 1e-6])
    line, along = line[moving], along[moving]
    distance = np.arange(_RIBBON_START, along[-1], _RIBBON_STEP)
    if len(distance) < 2:
        return np.empty((0, 2)), np.empty((0, 2)), np.empty(0)
    center = np.stack([np.interp(distance, along, line[:, axis]) for axis in (0, 1)], axis=-1)
    tangent = np.gradient(center, axis=0)
    tangent /= np.maximum(np.linalg.norm(tangent, axis=1, keepdims=True), 1e-9)
    return center, np.stack([-tangent[:, 1], tangent[:, 0]], axis=-1), distance


def _distances(line: np.ndarray) -> np.ndarray:
    return np.concatenate([[0.0], np.cumsum(np.linalg.norm(np.diff(line, axis=0), axis=1))])


def _visible(points: np.ndarray, camera: Camera, size: tuple[int, int]) -> np.ndarray:
    """Call `project` and replace points too far outside the picture to be drawn (ground below the camera) by NaN."""
    pixels = project(points, camera, size)
    return np.where((np.abs(pixels) < 8 * max(size)).all(axis=1, keepdims=True), pixels, np.nan)


def _draw_dots(draw: ImageDraw.ImageDraw, waypoints: np.ndarray, camera: Camera, size: tuple[int, int]) -> None:
    ahead = _distances(np.concatenate([np.zeros((1, 2)), waypoints]))[1:] >= _RIBBON_START
    last = np.array([np.inf, np.inf])
    for pixel in _visible(waypoints[ahead], camera, size):
        radius = max(0.006 * size[1], 0.028 * (pixel[1] - size[1] / 2)) if np.isfinite(pixel).all() else 0.0
        if radius and np.linalg.norm(pixel - last) > 4 * radius:
            box = [pixel[0] - radius, pixel[1] - radius / 2, pixel[0] + radius, pixel[1] + radius / 2]
            draw.ellipse(box, fill=255)
            last = pixel


def _draw_label(panel: np.ndarray, label: str) -> None:
    """Draw the label on a small dark plate on every frame of `panel`, in place."""
    font = _font(14)
    box = font.getbbox(label)
    margin, height, width = 8, round(box[3]) + 8, round(box[2] - box[0]) + 16
    plate = Image.new("RGB", (width, height), _BACKGROUND)
    ImageDraw.Draw(plate).text((8, height // 2), label, fill=_TEXT, font=font, anchor="lm")
    mask = Image.new("L", (width, height))
    ImageDraw.Draw(mask).rounded_rectangle([0, 0, width - 1, height - 1], radius=5, fill=190)
    area = panel[:, margin : margin + height, margin : margin + width]
    rows, columns = area.shape[1:3]
    alpha = np.asarray(mask)[:rows, :columns, None] / 255
    area[:] = (area * (1 - alpha) + np.asarray(plate)[:rows, :columns] * alpha).round().astype(np.uint8)


def _draw_maps(frames: np.ndarray, paths: np.ndarray) -> None:
    """Draw a framed map in the top right corner of each frame, in place; all maps have one scale."""
    height, width = frames.shape[1:3]
    size = (round(width * 0.24), round(height * 0.42))
    reach = np.abs(np.nan_to_num(paths)).reshape(-1, 2).max(axis=0, initial=0.0)
    forward = max(reach[0], 2 * reach[1] * size[1] / size[0], 15.0)
    forward = 10.0 * math.ceil((forward + 2) / 10)
    top, right = 8, width - 8
    for frame, path in zip(frames, paths, strict=True):
        frame[top - 1 : top + size[1] + 1, right - size[0] - 1 : right + 1] = _MUTED
        frame[top : top + size[1], right - size[0] : right] = top_down(path, size, forward)


def _bar(index: int, num_frames: int, num_context: int, fps: float, width: int) -> np.ndarray:
    """Draw the bar of frame `index`: its kind and time in words, and a line with one piece for each frame."""
    bar = Image.new("RGB", (width * _SUPERSAMPLING, _BAR_HEIGHT * _SUPERSAMPLING), _BACKGROUND)
    draw = ImageDraw.Draw(bar)
    for piece in range(num_frames):
        color = _MUTED if piece < num_context else PATH_COLOR
        ends = [round(bar.width * (piece + side) / num_frames) for side in (0, 1)]
        gap = min(_SUPERSAMPLING, (ends[1] - ends[0]) // 4)
        last = max(ends[0] + gap, ends[1] - gap - 1)
        draw.rectangle([ends[0] + gap, 0, last, 11], fill=color if piece <= index else _GRID)
    bar = bar.resize((width, _BAR_HEIGHT), Image.Resampling.BOX)
    draw, middle = ImageDraw.Draw(bar), _BAR_HEIGHT // 2 + 3
    if index < num_context:
        draw.text((12, middle), f"context {index + 1}/{num_context}", fill=_MUTED, font=_font(18), anchor="lm")
    else:
        made = index - num_context + 1
        text = f"generated {made}/{num_frames - num_context}"
        draw.text((12, middle), text, fill=_TEXT, font=_font(18), anchor="lm")
        draw.text((width - 12, middle), f"+{made / fps:.1f} s", fill=PATH_COLOR, font=_font(18), anchor="rm")
    return np.asarray(bar)


@cache
def _font(size: int) -> ImageFont.FreeTypeFont | ImageFont.ImageFont:
    return ImageFont.load_default(size)


def _flat(points: np.ndarray) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for x, y in points]


def _lighter(color: Color) -> Color:
    red, green, blue = ((channel + 2 * 255) // 3 for channel in color)
    return red, green, blue
