"""Draws a prepared track from the driver's place, over hills, through the same windowless OpenGL as the town."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float, Int, UInt8

from decoder.camera import Camera
from terra.recording.canvas import (
    SKY_VERTEX,
    Canvas,
    assign,
    camera_axes,
    camera_place,
    set_view,
    sky_rays,
    view_projection,
)
from terra.recording.cars import CAR_SHAPES, build_car
from terra.recording.mesh import VERTEX_FLOATS
from terra.recording.torcs.assets import Geometry, Looks, Picture
from terra.recording.torcs.batches import Batches, sort_batches
from terra.recording.torcs.drives import TrackDrive
from terra.recording.torcs.shaders import (
    CAR_FRAGMENT,
    CAR_VERTEX,
    HEADER,
    SHADOW_FRAGMENT,
    SKY_FRAGMENT,
    TRACK_FRAGMENT,
    TRACK_VERTEX,
)
from terra.recording.town import CAR_COLORS
from terra.recording.weather import WEATHERS, Weather

if TYPE_CHECKING:
    import moderngl

# Metres; beyond it tracks show little but their panorama.
FARTHEST_SIGHT = 900.0
CAR_SIGHT = 300.0
MAX_CARS = 64
# Half its length and width, and how far it lies above the ground, in metres.
SHADOW_SIZE, SHADOW_LIFT = (3.0, 1.5), 0.05
# OpenGL's name for it: the samples of a pixel that a half-transparent texel covers.
SAMPLE_ALPHA_TO_COVERAGE = 0x809E
TRACK_LAYOUT = "3f 3f 4f 1f 1f", "in_position", "in_normal", "in_uv", "in_layer", "in_shaded"
# As built: position, normal, surface (unused here), color, material.
CAR_LAYOUT = "3f 3f 16x 3f 1f", "in_position", "in_normal", "in_color", "in_material"
PLACE_LAYOUT = "4f 2f 3f/i", "in_pose", "in_tilt", "in_paint"
PLACE_FLOATS = 9
DAYLIGHT = WEATHERS["day"]


def tilted(camera: Camera, pitch: float) -> Camera:
    """The camera of a car that is pitched up by `pitch` (rad), as one over flat ground below the car's origin."""
    forward, height = camera.x_forward_metres, camera.height_metres
    return replace(
        camera,
        pitch_radians=camera.pitch_radians + pitch,
        height_metres=forward * math.sin(pitch) + height * math.cos(pitch),
        x_forward_metres=forward * math.cos(pitch) - height * math.sin(pitch),
    )


@dataclass(frozen=True, eq=False)
class _Loaded:
    """A track on the device."""

    folder: Path
    batches: Batches
    textures: "list[moderngl.TextureArray]"
    shading: "moderngl.Texture"
    panorama: "moderngl.Texture"
    vertices: "moderngl.Buffer"
    indices: "moderngl.Buffer"
    array: "moderngl.VertexArray"

    def release(self) -> None:
        for thing in (*self.textures, self.shading, self.panorama, self.array, self.vertices, self.indices):
            thing.release()


class TrackRenderer:
    """Renders frames of one track at a time; `load` changes the track.

    `size` is (height, width) in pixels. Frames are equal, byte for byte, whenever track, drive and weather are equal
    on the same machine.

    Raises:
        ConfigError: EGL can't give a context.
    """

    def __init__(self, size: tuple[int, int], camera: Camera, device_index: int = 0) -> None:
        self.camera = camera
        self._canvas = Canvas(size, device_index)
        self._context = context = self._canvas.context
        self._track_program = context.program(HEADER + TRACK_VERTEX, HEADER + TRACK_FRAGMENT)
        self._car_program = context.program(HEADER + CAR_VERTEX, HEADER + CAR_FRAGMENT)
        self._shadow_program = context.program(HEADER + CAR_VERTEX, HEADER + SHADOW_FRAGMENT)
        self._sky_program = context.program(HEADER + SKY_VERTEX, HEADER + SKY_FRAGMENT)
        self._sky_array = self._canvas.sky(self._sky_program)
        self._places = context.buffer(reserve=MAX_CARS * PLACE_FLOATS * 4, dynamic=True)
        self._cars = [self._instances(self._car_program, build_car(shape)) for shape in CAR_SHAPES]
        self._car_shadow = self._instances(self._shadow_program, _shadow_patch())
        self._track: _Loaded | None = None
        assign(self._track_program, textures=0, shading=1)
        assign(self._sky_program, panorama=2)

    @property
    def loaded(self) -> Path | None:
        """The folder of the track that is loaded, if any."""
        return None if self._track is None else self._track.folder

    def load(self, folder: Path, geometry: Geometry, looks: Looks) -> None:
        """Send the track that was read from `folder` to the device and forget the one before."""
        if self._track is not None:
            self._track.release()
        context, batches = self._context, sort_batches(geometry, looks)
        vertices, indices = (context.buffer(values.tobytes()) for values in (batches.vertices, batches.indices))
        shading = np.full((1, 1, 4), 255, np.uint8) if looks.shading is None else looks.shading
        self._track = _Loaded(
            folder=folder,
            batches=batches,
            textures=[self._texture_array(pictures) for pictures in batches.arrays],
            shading=self._texture(shading),
            panorama=self._texture(looks.panorama),
            vertices=vertices,
            indices=indices,
            array=context.vertex_array(self._track_program, [(vertices, *TRACK_LAYOUT)], indices),
        )
        self._track.panorama.repeat_y = False
        # How many of the panorama's texels a pixel covers.
        texels = looks.panorama.shape[1] * abs(looks.panorama_turns) / (2 * math.pi)
        focal = self._canvas.size[1] / 2 / math.tan(math.radians(self.camera.fov_degrees) / 2)
        detail = max(0.0, math.log2(texels / focal))
        assign(self._sky_program, turns=looks.panorama_turns, span=looks.panorama_span, detail=detail)

    def render(self, weather: Weather, drive: TrackDrive, index: int) -> UInt8[np.ndarray, "height width 3"]:
        """Frame `index` of a drive on the loaded track."""
        if self._track is None:
            raise RuntimeError("expected a track, got none: call load first")
        poses = drive.poses
        origin = np.array([poses.x[index], poses.y[index], poses.z[index]])
        heading = float(poses.heading[index])
        self._set_view(weather, tilted(self.camera, float(poses.pitch[index])), origin, heading)
        sight = min(FARTHEST_SIGHT, 6.0 / weather.fog_density)
        view = (*origin[:2], heading, math.radians(self.camera.fov_degrees))
        near = np.hypot(*(drive.cars[index, :, :2] - origin[:2]).T) < min(CAR_SIGHT, sight)
        places = np.concatenate([drive.cars[index], np.array(CAR_COLORS)[drive.colors]], axis=1)[near]
        self._canvas.clear()
        self._context.enable_only(self._context.DEPTH_TEST)
        self._draw_cars(places, drive.models[near])
        self._draw_track(self._track, view, sight)
        self._sky_array.render(self._context.TRIANGLE_STRIP)
        self._draw_shadows(places)
        return self._canvas.read()

    def _draw_track(self, track: _Loaded, view: tuple[float, float, float, float], sight: float) -> None:
        track.shading.use(1)
        track.panorama.use(2)
        bound = -1
        self._context.enable_direct(SAMPLE_ALPHA_TO_COVERAGE)
        batches = track.batches
        for batch in batches.visible(view, sight):
            if batches.sizes[batch] != bound:
                bound = int(batches.sizes[batch])
                track.textures[bound].use(0)
            count, first = int(batches.counts[batch]), int(batches.firsts[batch])
            track.array.render(self._context.TRIANGLES, count, first=first)
        self._context.disable_direct(SAMPLE_ALPHA_TO_COVERAGE)

    def _draw_cars(self, places: Float[np.ndarray, "cars 9"], models: Int[np.ndarray, " cars"]) -> None:
        for model, array in enumerate(self._cars):
            self._draw_instances(array, places[models == model])

    def _draw_shadows(self, places: Float[np.ndarray, "cars 9"]) -> None:
        context = self._context
        context.enable(context.BLEND)
        context.blend_func = context.SRC_ALPHA, context.ONE_MINUS_SRC_ALPHA
        self._canvas.target.depth_mask = False
        self._draw_instances(self._car_shadow, places)
        self._canvas.target.depth_mask = True

    def _draw_instances(self, array: "moderngl.VertexArray", places: Float[np.ndarray, "cars 9"]) -> None:
        if len(places):
            self._places.write(places[:MAX_CARS].astype(np.float32).tobytes())
            array.render(self._context.TRIANGLES, instances=min(len(places), MAX_CARS))

    def _instances(
        self, program: "moderngl.Program", vertices: Float[np.ndarray, "vertices 14"]
    ) -> "moderngl.VertexArray":
        buffer = self._context.buffer(np.ascontiguousarray(vertices, np.float32).tobytes())
        content = [(buffer, *CAR_LAYOUT), (self._places, *PLACE_LAYOUT)]
        return self._context.vertex_array(program, content, skip_errors=True)

    def _texture(self, picture: Picture) -> "moderngl.Texture":
        texture = self._context.texture(picture.shape[1::-1], 4, picture[::-1].tobytes())
        return self._canvas.filtered(texture)

    def _texture_array(self, pictures: UInt8[np.ndarray, "layers height width 4"]) -> "moderngl.TextureArray":
        layers, height, width, _ = pictures.shape
        return self._canvas.filtered(
            self._context.texture_array((width, height, layers), 4, pictures[:, ::-1].tobytes())
        )

    def _set_view(self, weather: Weather, camera: Camera, origin: Float[np.ndarray, " 3"], heading: float) -> None:
        size = self._canvas.size
        axes, eye = camera_axes(camera, heading), tuple(origin + camera_place(camera, 0.0, 0.0, heading))
        move = np.eye(4)
        move[:3, 3] = -origin
        programs = (self._track_program, self._car_program, self._shadow_program, self._sky_program)
        set_view(programs, weather, axes, eye, view_projection(camera, (0.0, 0.0, heading), size) @ move)
        assign(self._sky_program, **_sky(weather), rays=sky_rays(axes, camera, size))


def _sky(weather: Weather) -> Mapping[str, object]:
    """How weather changes a panorama, which was painted by daylight: `tint` is a factor, `veil` the clouds' share."""
    light, daylight = (np.array(one.sky_light) + 0.5 * np.array(one.sun_color) for one in (weather, DAYLIGHT))
    veil = max(0.0, weather.clouds - 0.6) * 2.0
    return {"tint": tuple(light / daylight), "veil": veil, "zenith": weather.zenith}


def _shadow_patch() -> Float[np.ndarray, "vertices 14"]:
    """The dark patch under a car; the place of the color holds where on the patch a corner is."""
    plan = np.array([[-1, -1], [1, -1], [1, 1], [-1, -1], [1, 1], [-1, 1]], float)
    vertices = np.zeros((6, VERTEX_FLOATS))
    vertices[:, 0:2], vertices[:, 2], vertices[:, 10:12] = plan * SHADOW_SIZE, SHADOW_LIFT, plan
    return vertices
