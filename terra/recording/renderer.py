"""Draws a town from the driver's place through EGL: one process, one GPU (or Mesa's software) context, no window."""

import math

import numpy as np
from jaxtyping import Float, UInt8

from decoder.camera import Camera
from terra.errors import ConfigError
from terra.recording.cars import CAR_SHAPES, build_car
from terra.recording.drives import Moment
from terra.recording.figures import SWINGS, build_figure
from terra.recording.mesh import Material, Mesh, Vertices
from terra.recording.pedestrians import CLOTHES
from terra.recording.scene import DECAL_HEIGHT, CellMesh, build_scene, shadow, visible_cells
from terra.recording.shaders import (
    DECAL_FRAGMENT,
    FRAGMENT,
    HEADER,
    SKY_FRAGMENT,
    SKY_VERTEX,
    VERTEX,
)
from terra.recording.textures import cloud_texture, ground_texture
from terra.recording.town import CAR_COLORS, KERB_HEIGHT, Town
from terra.recording.weather import Weather

try:
    import moderngl
except ImportError as error:
    raise ConfigError(f'recording needs moderngl ({error}): pip install "terra-world-model[record]"') from error

NEAR, FAR = 0.25, 3000.0
NUM_SAMPLES = 4
# Cars and street lamps are a pixel or two wide at this distance.
DETAIL_SIGHT = 200.0
DECAL_SIGHT = 150.0
# People are less than two pixels wide beyond this distance.
PEOPLE_SIGHT = 90.0
# The heights that people walk at: the road and the sidewalk.
LEVELS = (0.0, KERB_HEIGHT)
FARTHEST_SIGHT = 3000.0
LAYOUT = "3f 3f 4f 3f 1f"
ATTRIBUTES = ("in_position", "in_normal", "in_surface", "in_color", "in_material")


def camera_axes(camera: Camera, heading: float) -> Float[np.ndarray, "3 3"]:
    """Rows: the directions right, up and ahead of the camera in the world."""
    cosine, sine = math.cos(camera.pitch_radians), math.sin(camera.pitch_radians)
    ahead = np.array([math.cos(heading) * cosine, math.sin(heading) * cosine, sine])
    right = np.array([math.sin(heading), -math.cos(heading), 0.0])
    return np.stack([right, np.cross(right, ahead), ahead])


def camera_place(camera: Camera, x: float, y: float, heading: float) -> tuple[float, float, float]:
    """Where the camera of a car at x, y (m) is in the world."""
    forward = camera.x_forward_metres
    return x + forward * math.cos(heading), y + forward * math.sin(heading), camera.height_metres


def view_projection(
    camera: Camera, pose: tuple[float, float, float], size: tuple[int, int]
) -> Float[np.ndarray, "4 4"]:
    """World to clip space of OpenGL, column vectors, for the car's pose and a picture of `size` (height, width).

    The same picture as `decoder.overlay.project` describes.
    """
    axes = camera_axes(camera, pose[2])
    view = np.eye(4)
    view[:3, :3] = axes * [[1.0], [1.0], [-1.0]]
    view[:3, 3] = -view[:3, :3] @ camera_place(camera, *pose)
    scale = 1.0 / math.tan(math.radians(camera.fov_degrees) / 2)
    lens = np.zeros((4, 4))
    lens[0, 0], lens[1, 1] = scale, scale * size[1] / size[0]
    lens[2, 2:], lens[3, 2] = [-(FAR + NEAR) / (FAR - NEAR), -2 * FAR * NEAR / (FAR - NEAR)], -1.0
    return lens @ view


class _Cells:
    """A cell mesh on the GPU."""

    def __init__(self, context: "moderngl.Context", program: "moderngl.Program", mesh: CellMesh) -> None:
        self._mesh = mesh
        self._buffer = context.buffer(mesh.vertices.tobytes())
        self._array = context.vertex_array(program, [(self._buffer, LAYOUT, *ATTRIBUTES)], skip_errors=True)

    def draw(self, view: tuple[float, float, float, float], sight: float) -> None:
        """Draw what `view` (x, y, heading, horizontal field of view) may see, the nearest first."""
        for cell in visible_cells(self._mesh, view, sight):
            first, count = int(self._mesh.firsts[cell]), int(self._mesh.counts[cell])
            self._array.render(moderngl.TRIANGLES, vertices=count, first=first)

    def release(self) -> None:
        self._array.release()
        self._buffer.release()


class _Instances:
    """One mesh drawn at many poses."""

    def __init__(self, context: "moderngl.Context", program: "moderngl.Program", vertices: Vertices, room: int) -> None:
        self._buffer = context.buffer(np.ascontiguousarray(vertices, np.float32).tobytes())
        self._places = context.buffer(reserve=room * 7 * 4, dynamic=True)
        content = [(self._buffer, LAYOUT, *ATTRIBUTES), (self._places, "4f 3f/i", "in_pose", "in_paint")]
        self._array = context.vertex_array(program, content, skip_errors=True)
        self._room = room

    def draw(self, places: Float[np.ndarray, "cars 7"]) -> None:
        if len(places):
            self._places.write(places[: self._room].astype(np.float32).tobytes())
            self._array.render(moderngl.TRIANGLES, instances=min(len(places), self._room))


class Renderer:
    """Renders frames of one town at a time; `load` changes the town.

    `size` is (height, width) in pixels. Frames are equal, byte for byte, whenever town and moment are equal on the
    same machine.

    Raises:
        ConfigError: EGL can't give a context.
    """

    def __init__(self, size: tuple[int, int], camera: Camera, device_index: int = 0) -> None:
        self.size, self.camera = size, camera
        self._context = open_context(device_index)
        self._programs()
        self._targets()
        self._cars = [_Instances(self._context, self._car_program, build_car(shape), 256) for shape in CAR_SHAPES]
        self._car_decals = _Instances(self._context, self._car_decal_program, _car_decals(), 256)
        self._people = [
            [_Instances(self._context, self._car_program, build_figure(phase, z), 256) for phase in range(len(SWINGS))]
            for z in LEVELS
        ]
        self._people_decals = [
            _Instances(self._context, self._car_decal_program, _person_decal(z), 256) for z in LEVELS
        ]
        self._scene: tuple[_Cells, _Cells, _Cells] | None = None
        self._town: Town | None = None

    @property
    def device(self) -> str:
        """What draws, in the driver's words."""
        return str(self._context.info["GL_RENDERER"])

    def load(self, town: Town) -> None:
        """Build `town`, unless it is the one that is loaded, and forget the one before."""
        if town is self._town:
            return
        for cells in self._scene or ():
            cells.release()
        scene, context = build_scene(town), self._context
        self._town = town
        self._scene = (
            _Cells(context, self._solid_program, scene.solid),
            _Cells(context, self._solid_program, scene.details),
            _Cells(context, self._decal_program, scene.decals),
        )

    def render(self, weather: Weather, moment: Moment) -> UInt8[np.ndarray, "height width 3"]:
        """The frame that shows `moment` in the loaded town."""
        if self._scene is None:
            raise RuntimeError("expected a town, got none: call load first")
        cars, models = moment.cars, moment.models
        x, y, heading = moment.pose
        self._set_view(weather, moment.pose)
        sight = min(FARTHEST_SIGHT, 6.0 / weather.fog_density)
        near = np.hypot(cars[:, 0] - x, cars[:, 1] - y) < min(DETAIL_SIGHT, sight)
        places = np.concatenate([cars, np.array(CAR_COLORS)[moment.colors]], axis=1)
        people = _people_places(moment, min(PEOPLE_SIGHT, sight))
        context, target = self._context, self._target
        solid, details, decals = self._scene
        view = (x, y, heading, math.radians(self.camera.fov_degrees))
        target.use()
        context.disable(moderngl.BLEND)
        context.enable(moderngl.DEPTH_TEST | moderngl.CULL_FACE)
        target.clear(0.0, 0.0, 0.0, 1.0)
        for model, instances in enumerate(self._cars):
            instances.draw(places[near & (models == model)])
        for level, figures in zip(people, self._people, strict=True):
            for phase, instances in enumerate(figures):
                instances.draw(level[level[:, 3] == phase])
        details.draw(view, min(DETAIL_SIGHT, sight))
        solid.draw(view, sight)
        self._sky_array.render(moderngl.TRIANGLE_STRIP)
        context.enable(moderngl.BLEND)
        context.blend_func = moderngl.DST_COLOR, moderngl.SRC_COLOR
        target.depth_mask = False
        decals.draw(view, min(DECAL_SIGHT, sight))
        self._car_decals.draw(places[near])
        for level, instances in zip(people, self._people_decals, strict=True):
            instances.draw(level)
        target.depth_mask = True
        context.copy_framebuffer(self._resolved, target)
        height, width = self.size
        pixels = np.frombuffer(self._resolved.read(components=3, alignment=1), np.uint8)
        return pixels.reshape(height, width, 3)[::-1]

    def _programs(self) -> None:
        def program(vertex: str, fragment: str, define: str = "") -> "moderngl.Program":
            return self._context.program(HEADER + define + vertex, HEADER + fragment)

        instanced = "#define INSTANCED\n"
        self._solid_program = program(VERTEX, FRAGMENT)
        self._car_program = program(VERTEX, FRAGMENT, instanced)
        self._decal_program = program(VERTEX, DECAL_FRAGMENT)
        self._car_decal_program = program(VERTEX, DECAL_FRAGMENT, instanced)
        self._sky_program = program(SKY_VERTEX, SKY_FRAGMENT)
        corners = self._context.buffer(np.array([-1, -1, 1, -1, -1, 1, 1, 1], np.float32).tobytes())
        self._sky_array = self._context.vertex_array(self._sky_program, [(corners, "2f", "in_corner")])
        self._textures = []
        for unit, pixels in enumerate((ground_texture(), cloud_texture())):
            texture = self._context.texture(pixels.shape[::-1], 1, pixels.tobytes())
            texture.build_mipmaps()
            texture.filter = (moderngl.LINEAR_MIPMAP_LINEAR, moderngl.LINEAR)
            # Anisotropic filtering costs software rendering far more than it gains.
            texture.anisotropy = 1.0 if "llvmpipe" in self.device else 8.0
            texture.use(unit)
            self._textures.append(texture)
        for one in (self._solid_program, self._car_program):
            _assign(one, noise_map=0)
        _assign(self._sky_program, clouds=1)

    def _targets(self) -> None:
        context, size = self._context, (self.size[1], self.size[0])
        samples = min(NUM_SAMPLES, context.max_samples)
        color, depth = context.renderbuffer(size, 4, samples=samples), context.depth_renderbuffer(size, samples=samples)
        self._target = context.framebuffer([color], depth)
        self._resolved = context.framebuffer([context.renderbuffer(size, 4)])

    def _set_view(self, weather: Weather, pose: tuple[float, float, float]) -> None:
        axes = camera_axes(self.camera, pose[2])
        light = {
            "eye": camera_place(self.camera, *pose),
            "ahead": tuple(axes[2]),
            "sun": tuple(np.array(weather.sun) / np.linalg.norm(weather.sun)),
            "sun_color": weather.sun_color,
            "sky_light": weather.sky_light,
            "ground_light": weather.ground_light,
            "horizon": weather.horizon,
            "fog_density": weather.fog_density,
            "lamps": weather.lamps,
        }
        view = view_projection(self.camera, pose, self.size).T.astype(np.float32).tobytes()
        for program in (self._solid_program, self._car_program, self._decal_program, self._car_decal_program):
            _assign(program, **light)
            program["view_projection"].write(view)  # pyright: ignore[reportAttributeAccessIssue]
        wide = math.tan(math.radians(self.camera.fov_degrees) / 2)
        spread = np.array([wide, wide * self.size[0] / self.size[1], 1.0])
        sky = {"zenith": weather.zenith, "cover": weather.clouds, "cloud_color": weather.cloud_color}
        _assign(self._sky_program, **light, **sky, rays=tuple((axes * spread[:, None]).reshape(-1)))


def open_context(device_index: int = 0) -> "moderngl.Context":
    """A windowless OpenGL 3.3 context on an EGL device, counted from 0; ConfigError if there is none."""
    try:
        # The stub takes `**settings: Dict` for the type of each setting.
        return moderngl.create_standalone_context(backend="egl", require=330, device_index=device_index)  # pyright: ignore[reportArgumentType]
    except Exception as error:
        # glcontext raises the bare class, so nothing narrower can be caught; anything else is a bug of ours.
        if type(error) is not Exception:
            raise
        raise ConfigError(
            f"recording needs OpenGL 3.3 through EGL (Debian: libegl1 libgl1-mesa-dri): {error}"
        ) from error


def _assign(program: "moderngl.Program", **values: object) -> None:
    """Set the uniforms that the program uses; the compiler drops the others."""
    for name, value in values.items():
        if name in program:
            program[name] = value


def _car_decals() -> Vertices:
    """A car's shadow and the pool of light before it."""
    decals = Mesh()
    shadow(decals, (0.0, 0.0), 5.0, 2.4, 0.0, DECAL_HEIGHT, strength=0.65)
    corners = np.array([[[2.0, -3.0, 0.025], [14.0, -3.0, 0.025], [14.0, 3.0, 0.025], [2.0, 3.0, 0.025]]])
    values = np.array([[[-1, -1, 0, 0], [1, -1, 0, 0], [1, 1, 0, 0], [-1, 1, 0, 0]]], float)
    decals.quads(corners, (1.0, 1.0, 1.0), Material.LIGHT_POOL, values)
    return decals.vertices


def _person_decal(ground: float) -> Vertices:
    """The shadow at a person's feet."""
    decals = Mesh()
    shadow(decals, (0.0, 0.0), 1.0, 0.9, 0.0, ground + DECAL_HEIGHT, roundness=1.0, strength=0.5)
    return decals.vertices


def _people_places(moment: Moment, sight: float) -> list[Float[np.ndarray, "pedestrians 7"]]:
    """For each of `LEVELS`, who is within `sight`: x, y, heading, which figure, color."""
    people, (x, y, _) = moment.pedestrians, moment.pose
    near = np.hypot(people[:, 0] - x, people[:, 1] - y) < sight
    figure = np.round(people[:, 3] * len(SWINGS)) % len(SWINGS)
    places = np.column_stack([people[:, :3], figure, np.array(CLOTHES)[moment.clothes]])
    return [places[near & (moment.raised == raised)] for raised in (False, True)]
