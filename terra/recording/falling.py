"""Snowflakes and raindrops in the air around the camera, which stay where they are in the world from frame to frame."""

import math

import numpy as np

from decoder.camera import Camera
from terra.recording.canvas import Canvas, assign, camera_axes, camera_position, view_projection
from terra.recording.drives import Moment
from terra.recording.shaders import FALLING_FRAGMENT, FALLING_VERTEX, HEADER
from terra.recording.weather import Weather

# m, the side of the cube of flakes that repeats throughout the world; one lies around the camera, most of it ahead.
BOX = 20.0
AHEAD = 8.0
EXPOSURE = 1 / 40  # s, for which the shutter is open: a flake's streak is how far it moves past the camera meanwhile
MOST = 20_000


class Falling:
    """Draws what falls over a finished picture, hidden by what stands before it."""

    def __init__(self, canvas: Canvas) -> None:
        self._canvas, context = canvas, canvas.context
        self._program = context.program(HEADER + FALLING_VERTEX, HEADER + FALLING_FRAGMENT)
        corners = context.buffer(np.array([0, -1, 0, 1, 1, -1, 1, 1], np.float32).tobytes())
        seeds = context.buffer(np.random.default_rng(3).random((MOST, 4), np.float32).tobytes())
        content = [(corners, "2f", "in_corner"), (seeds, "4f/i", "in_seed")]
        self._array = context.vertex_array(self._program, content)

    def draw(self, weather: Weather, moment: Moment, camera: Camera) -> None:
        """Draw what falls in `weather`; the depth of the scene must be in the canvas."""
        fall, (height, width) = weather.fall, self._canvas.size
        if fall is None:
            return
        heading = moment.pose[2]
        eye, ahead = np.array(camera_position(camera, *moment.pose)), camera_axes(camera, heading)[2]
        drift = (fall.gust * moment.wind[0], fall.gust * moment.wind[1], -fall.speed)
        assign(
            self._program,
            middle=tuple(eye + AHEAD * ahead),
            eye=tuple(eye),
            motion=(moment.speed * math.cos(heading), moment.speed * math.sin(heading), 0.0),
            drift=drift,
            time=moment.time,
            exposure=EXPOSURE,
            box=BOX,
            sway=fall.sway,
            radius=fall.width / 2,
            focal=width / (2 * math.tan(math.radians(camera.fov_degrees) / 2)),
            pixels=(float(width), float(height)),
            shade=(*fall.color, fall.opacity),
        )
        view = view_projection(camera, moment.pose, self._canvas.size)
        self._program["view_projection"].write(view.T.astype(np.float32).tobytes())  # pyright: ignore[reportAttributeAccessIssue]
        context = self._canvas.context
        context.disable(context.CULL_FACE)
        context.blend_func = context.SRC_ALPHA, context.ONE_MINUS_SRC_ALPHA
        self._array.render(context.TRIANGLE_STRIP, instances=fall.number)
