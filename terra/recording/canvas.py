"""An offscreen OpenGL context with a picture to render into, and the camera's view matrices."""

import math
from typing import TypeVar

import numpy as np
from jaxtyping import Float, UInt8

from decoder.camera import Camera
from terra.errors import ConfigError
from terra.extras import extras_named
from terra.recording.weather import Weather

with extras_named("terra.recording"):
    import moderngl

NEAR, FAR = 0.25, 3000.0
NUM_SAMPLES = 4

SKY_VERTEX = """
in vec2 in_corner; out vec2 corner;
void main() { corner = in_corner; gl_Position = vec4(in_corner, 0.999999, 1.0); }
"""

AnyTexture = TypeVar("AnyTexture", "moderngl.Texture", "moderngl.TextureArray")


def camera_axes(camera: Camera, heading: float) -> Float[np.ndarray, "3 3"]:
    """Rows: the directions right, up and ahead of the camera in the world."""
    cosine, sine = math.cos(camera.pitch_radians), math.sin(camera.pitch_radians)
    ahead = np.array([math.cos(heading) * cosine, math.sin(heading) * cosine, sine])
    right = np.array([math.sin(heading), -math.cos(heading), 0.0])
    return np.stack([right, np.cross(right, ahead), ahead])


def camera_position(camera: Camera, x: float, y: float, heading: float) -> tuple[float, float, float]:
    """The world position (m) of the camera of a car at x, y (m)."""
    forward = camera.x_forward_meters
    return x + forward * math.cos(heading), y + forward * math.sin(heading), camera.height_meters


def view_projection(
    camera: Camera, pose: tuple[float, float, float], size: tuple[int, int]
) -> Float[np.ndarray, "4 4"]:
    """World to clip space of OpenGL, column vectors, for the car's pose and a picture of `size` (height, width).

    The same picture as `decoder.overlay.project` describes.
    """
    axes = camera_axes(camera, pose[2])
    view = np.eye(4)
    view[:3, :3] = axes * [[1.0], [1.0], [-1.0]]
    view[:3, 3] = -view[:3, :3] @ camera_position(camera, *pose)
    scale = 1.0 / math.tan(math.radians(camera.fov_degrees) / 2)
    lens = np.zeros((4, 4))
    lens[0, 0], lens[1, 1] = scale, scale * size[1] / size[0]
    lens[2, 2:], lens[3, 2] = [-(FAR + NEAR) / (FAR - NEAR), -2 * FAR * NEAR / (FAR - NEAR)], -1.0
    return lens @ view


class Canvas:
    """A context on an EGL device, and a multisampled picture of `size` (height, width) pixels in it.

    Raises:
        ConfigError: EGL can't give a context.
    """

    def __init__(self, size: tuple[int, int], device_index: int = 0) -> None:
        self.size = size
        self.context = context = open_context(device_index)
        shape = (size[1], size[0])
        samples = min(NUM_SAMPLES, context.max_samples)
        color = context.renderbuffer(shape, 4, samples=samples)
        depth = context.depth_renderbuffer(shape, samples=samples)
        self.target = context.framebuffer([color], depth)
        self._resolved = context.framebuffer([context.renderbuffer(shape, 4)])

    @property
    def device(self) -> str:
        """The OpenGL driver's name for its renderer."""
        return str(self.context.info["GL_RENDERER"])

    def use(self) -> None:
        """Make this canvas's context the current one of the process, which may have several."""
        self.context.__enter__()

    def clear(self) -> None:
        """Bind the picture for drawing and clear it to black."""
        self.target.use()
        self.target.clear(0.0, 0.0, 0.0, 1.0)

    def read(self) -> UInt8[np.ndarray, "height width 3"]:
        """Read the picture, top row first."""
        self.context.copy_framebuffer(self._resolved, self.target)
        height, width = self.size
        pixels = np.frombuffer(self._resolved.read(components=3, alignment=1), np.uint8)
        return pixels.reshape(height, width, 3)[::-1]

    def sky(self, program: "moderngl.Program") -> "moderngl.VertexArray":
        """A full-screen quad behind everything, for a program whose vertex shader is `SKY_VERTEX`."""
        corners = self.context.buffer(np.array([-1, -1, 1, -1, -1, 1, 1, 1], np.float32).tobytes())
        return self.context.vertex_array(program, [(corners, "2f", "in_corner")])

    def filtered(self, texture: AnyTexture) -> AnyTexture:
        """Build mipmaps and enable filtering, so that the texture is smooth at any distance."""
        texture.build_mipmaps()
        texture.filter = (moderngl.LINEAR_MIPMAP_LINEAR, moderngl.LINEAR)
        # Anisotropic filtering costs software rendering far more than it gains.
        texture.anisotropy = 1.0 if "llvmpipe" in self.device else 8.0
        return texture


def set_view(
    programs: "tuple[moderngl.Program, ...]",
    weather: Weather,
    axes: Float[np.ndarray, "3 3"],
    eye: tuple[float, ...],
    view: Float[np.ndarray, "4 4"],
) -> None:
    """Set the programs' uniforms: light, the camera's position (`eye`) and axes, and the view-projection (`view`)."""
    light = {
        "eye": eye,
        "ahead": tuple(axes[2]),
        "sun": tuple(np.array(weather.sun) / np.linalg.norm(weather.sun)),
        "sun_color": weather.sun_color,
        "sky_light": weather.sky_light,
        "ground_light": weather.ground_light,
        "horizon": weather.horizon,
        "fog_density": weather.fog_density,
        "lamps": weather.lamps,
    }
    clip = view.T.astype(np.float32).tobytes()
    for program in programs:
        assign(program, **light)
        if "view_projection" in program:
            program["view_projection"].write(clip)  # pyright: ignore[reportAttributeAccessIssue]


def sky_rays(axes: Float[np.ndarray, "3 3"], camera: Camera, size: tuple[int, int]) -> tuple[float, ...]:
    """The uniform `rays` of a sky: the matrix, column by column, from clip coordinates to directions in the world."""
    wide = math.tan(math.radians(camera.fov_degrees) / 2)
    spread = np.array([wide, wide * size[0] / size[1], 1.0])
    return tuple((axes * spread[:, None]).reshape(-1))


def open_context(device_index: int = 0) -> "moderngl.Context":
    """A windowless OpenGL 3.3 context on an EGL device, counted from 0; ConfigError if there is none."""
    try:
        # The stub takes `**settings: Dict` for the type of each setting.
        return moderngl.create_standalone_context(backend="egl", require=330, device_index=device_index)  # pyright: ignore[reportArgumentType]
    except Exception as error:
        # glcontext raises the bare class Exception; any subclass is a bug in this package.
        if type(error) is not Exception:
            raise
        raise ConfigError(
            f"recording needs OpenGL 3.3 through EGL (Debian: libegl1 libgl1-mesa-dri): {error}"
        ) from error


def assign(program: "moderngl.Program", **values: object) -> None:
    """Set the uniforms that the program uses; the compiler drops the others."""
    for name, value in values.items():
        if name in program:
            program[name] = value
