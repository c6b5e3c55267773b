"""Renders a town from the driver's view through EGL: one GPU (or Mesa software) context per process, no window."""

import math
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float, UInt8

from decoder.camera import Camera
from terra.recording.canvas import (
    SKY_VERTEX,
    Canvas,
    assign,
    camera_axes,
    camera_position,
    set_view,
    sky_rays,
    view_projection,
)
from terra.recording.cars import CAR_SHAPES, build_car
from terra.recording.drives import Moment
from terra.recording.falling import Falling
from terra.recording.figures import SWINGS, build_figure
from terra.recording.mesh import Material, Mesh, Vertices
from terra.recording.pedestrians import CLOTHES
from terra.recording.scene import DECAL_HEIGHT, CellMesh, build_scene, shadow, visible_cells
from terra.recording.shaders import DECAL_FRAGMENT, FRAGMENT, HEADER, SKY_FRAGMENT, VERTEX
from terra.recording.textures import cloud_texture, ground_texture
from terra.recording.town import CAR_COLORS, KERB_HEIGHT, Town
from terra.recording.weather import Ground, Weather

if TYPE_CHECKING:
    import moderngl

# Cars and street lamps are a pixel or two wide at this distance.
DETAIL_SIGHT = 200.0
DECAL_SIGHT = 150.0
# People are less than two pixels wide beyond this distance.
PEOPLE_SIGHT = 90.0
# Heights (m) of the road and of the sidewalk.
LEVELS = (0.0, KERB_HEIGHT)
FARTHEST_SIGHT = 3000.0
LAYOUT = "3f 3f 4f 3f 1f"
# What is defined for the shaders; a dry ground compiles nothing of snow and rain.
DEFINES: dict[Ground, str] = {"dry": "", "snow": "#define SNOW\n", "wet": "#define WET\n"}
ATTRIBUTES = ("in_position", "in_normal", "in_surface", "in_color", "in_material")


class _Cells:
    """A cell mesh on the GPU."""

    def __init__(self, context: "moderngl.Context", program: "moderngl.Program", mesh: CellMesh) -> None:
        self._mesh = mesh
        self._buffer = context.buffer(mesh.vertices.tobytes())
        self._array = context.vertex_array(program, [(self._buffer, LAYOUT, *ATTRIBUTES)], skip_errors=True)

    def draw(self, view: tuple[float, float, float, float], sight: float) -> None:
        """Draw the cells that `view` (x, y, heading, horizontal field of view) may see, nearest first."""
        for cell in visible_cells(self._mesh, view, sight):
            first, count = int(self._mesh.firsts[cell]), int(self._mesh.counts[cell])
            self._array.render(self._array.ctx.TRIANGLES, vertices=count, first=first)

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
            self._array.render(self._array.ctx.TRIANGLES, instances=min(len(places), self._room))


class Renderer:
    """Renders frames of one town at a time; `load` changes the town. All frames have the same `ground`.

    `size` is (height, width) in pixels. On one machine, equal towns and moments give equal frames, byte for byte.

    Raises:
        ConfigError: EGL can't give a context.
    """

    def __init__(self, size: tuple[int, int], camera: Camera, device_index: int = 0, ground: Ground = "dry") -> None:
        self.camera = camera
        self._ground: Ground = ground
        self._canvas = Canvas(size, device_index)
        self._context = self._canvas.context
        self._programs()
        self._cars = [_Instances(self._context, self._car_program, build_car(shape), 256) for shape in CAR_SHAPES]
        self._car_decals = _Instances(self._context, self._car_decal_program, _car_decals(), 256)
        self._people = [
            [_Instances(self._context, self._car_program, build_figure(phase, z), 256) for phase in range(len(SWINGS))]
            for z in LEVELS
        ]
        self._people_decals = [
            _Instances(self._context, self._car_decal_program, _person_decal(z), 256) for z in LEVELS
        ]
        self._falling = Falling(self._canvas) if ground != "dry" else None
        self._scene: tuple[_Cells, _Cells, _Cells] | None = None
        self._town: Town | None = None

    def load(self, town: Town) -> None:
        """Build `town` in place of the loaded town, unless it is loaded already."""
        if town is self._town:
            return
        self._canvas.use()
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
        """Render `moment` in the loaded town."""
        if self._scene is None:
            raise RuntimeError("expected a town, got none: call load first")
        if weather.ground != self._ground:
            raise ValueError(f"expected weather with {self._ground} ground, got {weather.ground}")
        self._canvas.use()
        cars, models = moment.cars, moment.models
        x, y, heading = moment.pose
        self._set_view(weather, moment.pose)
        sight = min(FARTHEST_SIGHT, 6.0 / weather.fog_density)
        near = np.hypot(cars[:, 0] - x, cars[:, 1] - y) < min(DETAIL_SIGHT, sight)
        places = np.concatenate([cars, np.array(CAR_COLORS)[moment.colors]], axis=1)
        people = _people_places(moment, min(PEOPLE_SIGHT, sight))
        context, canvas = self._context, self._canvas
        solid, details, decals = self._scene
        view = (x, y, heading, math.radians(self.camera.fov_degrees))
        canvas.clear()
        context.disable(context.BLEND)
        context.enable(context.DEPTH_TEST | context.CULL_FACE)
        for model, instances in enumerate(self._cars):
            instances.draw(places[near & (models == model)])
        for level, figures in zip(people, self._people, strict=True):
            for phase, instances in enumerate(figures):
                instances.draw(level[level[:, 3] == phase])
        details.draw(view, min(DETAIL_SIGHT, sight))
        solid.draw(view, sight)
        self._sky_array.render(context.TRIANGLE_STRIP)
        context.enable(context.BLEND)
        context.blend_func = context.DST_COLOR, context.SRC_COLOR
        canvas.target.depth_mask = False
        decals.draw(view, min(DECAL_SIGHT, sight))
        self._car_decals.draw(places[near])
        for level, instances in zip(people, self._people_decals, strict=True):
            instances.draw(level)
        if self._falling is not None and weather.fall is not None:
            self._falling.draw(weather, moment, self.camera)
        canvas.target.depth_mask = True
        return canvas.read()

    def _programs(self) -> None:
        def program(vertex: str, fragment: str, define: str = "") -> "moderngl.Program":
            return self._context.program(HEADER + define + vertex, HEADER + define + fragment)

        ground = DEFINES[self._ground]
        instanced = ground + "#define INSTANCED\n"
        self._solid_program = program(VERTEX, FRAGMENT, ground)
        self._car_program = program(VERTEX, FRAGMENT, instanced)
        self._decal_program = program(VERTEX, DECAL_FRAGMENT, ground)
        self._car_decal_program = program(VERTEX, DECAL_FRAGMENT, instanced)
        self._sky_program = program(SKY_VERTEX, SKY_FRAGMENT)
        self._sky_array = self._canvas.sky(self._sky_program)
        self._textures = []
        for unit, pixels in enumerate((ground_texture(), cloud_texture())):
            texture = self._canvas.filtered(self._context.texture(pixels.shape[::-1], 1, pixels.tobytes()))
            texture.use(unit)
            self._textures.append(texture)
        for one in (self._solid_program, self._car_program):
            assign(one, noise_map=0)
        assign(self._sky_program, clouds=1)

    def _set_view(self, weather: Weather, pose: tuple[float, float, float]) -> None:
        camera, size = self.camera, self._canvas.size
        axes = camera_axes(camera, pose[2])
        programs = (self._solid_program, self._car_program, self._decal_program, self._car_decal_program)
        view = view_projection(camera, pose, size)
        set_view((*programs, self._sky_program), weather, axes, camera_position(camera, *pose), view)
        sky = {"zenith": weather.zenith, "cover": weather.clouds, "cloud_color": weather.cloud_color}
        assign(self._sky_program, **sky, rays=sky_rays(axes, camera, size))


def _car_decals() -> Vertices:
    """A car's shadow and the pool of light of its headlights."""
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
    """For each of `LEVELS`, the pedestrians within `sight`: x, y, heading, index of the figure, color."""
    people, (x, y, _) = moment.pedestrians, moment.pose
    near = np.hypot(people[:, 0] - x, people[:, 1] - y) < sight
    figure = np.round(people[:, 3] * len(SWINGS)) % len(SWINGS)
    places = np.column_stack([people[:, :3], figure, np.array(CLOTHES)[moment.clothes]])
    return [places[near & (moment.raised == raised)] for raised in (False, True)]
