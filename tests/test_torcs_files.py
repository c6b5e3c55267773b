import math
import struct
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, strategies as st
from PIL import Image

from terra.errors import DatasetError
from terra.recording.torcs.ac3d import POLYGON, STRIP, read_model, triangles_of
from terra.recording.torcs.layout import Segment, read_layout, trace
from terra.recording.torcs.pictures import read_picture, read_sgi

TRACK = """<?xml version="1.0" encoding="UTF-8"?>
<!DOCTYPE params SYSTEM "params.dtd" [ <!ENTITY default-surfaces SYSTEM "surfaces.xml"> ]>
<params name="mini" type="param">
 <section name="Surfaces">&default-surfaces;</section>
 <section name="Graphic">
  <attstr name="background image" val="background.png"/>
  <attnum name="background type" val="4"/>
 </section>
 <!-- <section name="Main Track"/> caf\u00e9 -->
 <section name="Main Track">
  <attnum name="width" unit="ft" val="32.8083"/>
  <attnum name="profil steps length" unit="m" val="4"/>
  <section name="Track Segments">
   <section name="s1"><attstr name="type" val="str"/><attnum name="lg" unit="m" val="80"/>
    <section name="Right Side"><attnum name="width" val="3"/></section></section>
   <section name="t1"><attstr name="type" val="rgt"/><attnum name="arc" unit="deg" val="90"/>
    <attnum name="radius" val="20"/><attnum name="end radius" val="40"/></section>
   <section name="t2"><attstr name="type" val="lft"/><attnum name="arc" unit="rad" val="0.5"/>
    <attnum name="radius" val="20"/></section>
  </section>
 </section>
</params>
"""

MODEL = """AC3Db
MATERIAL "" rgb 0.5 0.25 0.75 amb 0 0 0 emis 0 0 0 spec 0 0 0 shi 0 trans 0
OBJECT world
kids 1
OBJECT group
name "TKMN1_g"
kids 2
OBJECT poly
name "TKMN1"
texture "road.png" base
texture "shadow2.rgb" tiled
texture empty_texture_no_mapping skids
numvert 4
0 1 0 0 1 0
0 1 -4 0 1 0
5 1 0 0 1 0
5 1 -4 0 1 0
numsurf 1
SURF 0x34
mat 0
refs 6
0 0 0 0.5 0.5
1 0 1 0.5 1
2 1 0 1 0.5
3 1 1 1 1
3 1 1 1 1
3 1 1 1 1
kids 0
OBJECT poly
name "wall"
numvert 4
0 0 0
2 0 0
2 3 0
0 3 0
numsurf 1
SURF 0x10
refs 4
0 0 0
1 1 0
2 1 1
3 0 1
kids 0
"""


def write(folder: Path, text: str, name: str = "file") -> Path:
    path = folder / name
    path.write_text(text, encoding="latin-1")
    return path


def test_a_description_is_read_in_metres_and_radians(tmp_path: Path) -> None:
    layout = read_layout(write(tmp_path, TRACK))
    straight, right, left = layout.segments
    assert layout.width == pytest.approx(10.0, abs=1e-4)
    assert (layout.background, layout.wrap) == ("background.png", "turn")
    assert straight == Segment(0, length=80.0)
    # 47.1 m on average, in steps of at most 4 m.
    assert right == Segment(-1, arc=90 * (math.pi / 180), radius=20.0, end_radius=40.0, steps=12)
    assert left == Segment(1, arc=0.5, radius=20.0, end_radius=20.0, steps=1)


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ('val="80"', 'val="far"', r"section 's1': lg: expected a number .* got 'far'"),
        ('unit="m" val="80"', 'unit="mile" val="80"', r"section 's1': lg: .* got '80' mile"),
        ('val="str"', 'val="loop"', r"section 's1': type: expected one of .* got 'loop'"),
        ('name="radius" val="20"/><attnum', 'name="bend" val="20"/><attnum', r"section 't1': expected radius"),
        ('section name="Main Track">\n', 'section name="Tracks">\n', "expected sections Graphic and Main Track"),
        ("</params>", "", "expected XML"),
    ],
)
def test_a_wrong_description_is_refused(tmp_path: Path, old: str, new: str, complaint: str) -> None:
    assert old in TRACK
    with pytest.raises(DatasetError, match=complaint):
        read_layout(write(tmp_path, TRACK.replace(old, new)))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    for read in (read_layout, read_model, read_picture):
        with pytest.raises(DatasetError, match="nothing"):
            read(tmp_path / "nothing")


segments = st.one_of(
    st.builds(Segment, st.just(0), length=st.floats(1, 500)),
    st.builds(
        Segment,
        st.sampled_from([-1, 1]),
        arc=st.floats(0.05, 3.0),
        radius=st.floats(8, 300),
        end_radius=st.floats(8, 300),
        steps=st.integers(1, 12),
    ),
)


@given(st.lists(segments, min_size=1, max_size=5))
def test_a_trace_is_smooth_and_turns_as_described(parts: list[Segment]) -> None:
    points = trace(tuple(parts))
    steps = np.diff(points, axis=0)
    assert points[-1, 2] == pytest.approx(sum(part.turn * part.arc for part in parts))
    lengths = np.hypot(steps[:, 0], steps[:, 1])
    # At least one point a piece; each chord points half way between the headings at its ends.
    assert lengths.max() < 2.0
    middle = points[:-1, 2] + steps[:, 2] / 2
    np.testing.assert_allclose(
        steps[:, :2], lengths[:, None] * np.stack([np.cos(middle), np.sin(middle)], 1), atol=1e-6
    )


@given(radius=st.floats(8, 300), arc=st.floats(0.05, 3.0), turn=st.sampled_from([-1, 1]))
def test_a_plain_turn_is_an_arc_of_its_radius(radius: float, arc: float, turn: int) -> None:
    points = trace((Segment(turn, arc=arc, radius=radius, end_radius=radius),))
    np.testing.assert_allclose(np.hypot(points[:, 0], points[:, 1] - turn * radius), radius)


def test_models_are_read_in_the_worlds_axes(tmp_path: Path) -> None:
    road, wall = read_model(write(tmp_path, MODEL))
    assert (road.name, road.texture, road.shading, road.color) == (
        "TKMN1",
        "road.png",
        "shadow2.rgb",
        (0.5, 0.25, 0.75),
    )
    assert (wall.name, wall.texture, wall.shading) == ("wall", "", "")
    np.testing.assert_array_equal(
        road.positions, [[[0, 0, 1], [0, 4, 1], [5, 0, 1]], [[5, 0, 1], [0, 4, 1], [5, 4, 1]]]
    )
    np.testing.assert_array_equal(road.normals, np.broadcast_to([0, 0, 1], (2, 3, 3)))
    np.testing.assert_array_equal(road.uvs[0], [[0, 0], [0, 1], [1, 0]])
    np.testing.assert_array_equal(road.shading_uvs[0], [[0.5, 0.5], [0.5, 1], [1, 0.5]])
    # No normals in the file: those of the faces, and the second picture lies as the first.
    np.testing.assert_allclose(np.abs(wall.normals), np.broadcast_to([0, 1, 0], (2, 3, 3)), atol=1e-12)
    np.testing.assert_array_equal(wall.shading_uvs, wall.uvs)


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("AC3Db", "PK", "starts with 'PK"),
        ("5 1 -4 0 1 0", "5 one -4 0 1 0", "line 17: expected AC3D .*, got '5 one"),
        ("refs 6", "refs 7", "line 28: .* got 'kids 0'"),
        (MODEL[-20:], "", "ends too early"),
        ("numsurf 1", "loc 1 0 0\nnumsurf 1", "got 'loc 1 0 0'"),
    ],
)
def test_a_wrong_model_is_refused(tmp_path: Path, old: str, new: str, complaint: str) -> None:
    with pytest.raises(DatasetError, match=complaint):
        read_model(write(tmp_path, MODEL.replace(old, new, 1)))


@given(st.integers(3, 30))
def test_strips_and_polygons_face_one_way(count: int) -> None:
    zigzag = np.array([(k // 2, k % 2) for k in range(count)], float)
    angles = 2 * np.pi * np.arange(count) / count
    for kind, corners in ((STRIP, zigzag), (POLYGON, np.stack([np.cos(angles), np.sin(angles)], 1))):
        a, b, c = (corners[np.array(triangles_of(kind, count))[:, k]] for k in range(3))
        areas = (b - a)[:, 0] * (c - a)[:, 1] - (b - a)[:, 1] * (c - a)[:, 0]
        assert len(areas) == count - 2
        assert (np.sign(areas) == np.sign(areas[0])).all()
        assert areas[0] != 0


def sgi(pixels: np.ndarray, coded: bool) -> bytes:
    height, width, channels = pixels.shape
    rows = [bytes(row) for plane in np.moveaxis(pixels, -1, 0) for row in plane[::-1]]
    header = struct.pack(">hBBHHHH", 0x01DA, coded, 1, 3, width, height, channels).ljust(512, b"\0")
    if not coded:
        return header + b"".join(rows)
    packed = [pack(row) for row in rows]
    starts = 512 + 8 * len(rows) + np.concatenate([[0], np.cumsum([len(row) for row in packed])[:-1]])
    return (
        header + starts.astype(">u4").tobytes() + np.array([len(r) for r in packed], ">u4").tobytes() + b"".join(packed)
    )


def pack(row: bytes) -> bytes:
    """Runs of one value, and single values as literals of one."""
    out = bytearray()
    for value, run in groupby(row):
        count = len(list(run))
        while count > 0:
            out += bytes([min(count, 127), value]) if count > 1 else bytes([0x81, value])
            count -= min(count, 127)
    return bytes(out) + b"\0"


@given(st.data(), st.integers(1, 4), st.integers(1, 5), st.integers(1, 300), st.booleans())
def test_sgi_pictures_are_read_as_written(
    data: st.DataObject, channels: int, height: int, width: int, coded: bool
) -> None:
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    pixels = np.repeat(rng.integers(0, 256, (height, width, channels), np.uint8), 3, axis=1)[:, :width]
    np.testing.assert_array_equal(read_sgi(sgi(pixels, coded)), pixels)


def test_grey_pictures_with_alpha_become_rgba(tmp_path: Path) -> None:
    path = tmp_path / "grey.rgb"
    path.write_bytes(sgi(np.array([[[10, 200], [20, 100]]], np.uint8), coded=True))
    np.testing.assert_array_equal(np.array(read_picture(path)), [[[10, 10, 10, 200], [20, 20, 20, 100]]])
    Image.fromarray(np.full((1, 2, 3), 7, np.uint8)).save(tmp_path / "color.png")
    np.testing.assert_array_equal(np.array(read_picture(tmp_path / "color.png")), [[[7, 7, 7, 255]] * 2])


def test_a_damaged_picture_is_refused(tmp_path: Path) -> None:
    whole = sgi(np.zeros((4, 4, 3), np.uint8), coded=False)
    for data in (b"no picture", whole[:530], whole[:3] + b"\2" + whole[4:]):
        (tmp_path / "x.rgb").write_bytes(data)
        with pytest.raises(DatasetError, match=r"x\.rgb: expected a PNG or SGI picture"):
            read_picture(tmp_path / "x.rgb")
