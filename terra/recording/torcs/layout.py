"""Reads a TORCS track description (XML) and lays its segments end to end: the line in the middle of the road."""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from xml.etree import ElementTree

import numpy as np
from jaxtyping import Float

from terra.errors import DatasetError

# The units that angles and lengths come in, as radians and metres.
UNITS = {"": 1.0, "m": 1.0, "rad": 1.0, "deg": math.pi / 180, "ft": 0.304801, "feet": 0.304801}
TURNS = {"str": 0, "lft": 1, "rgt": -1}
EQUAL_RADII = 1e-6


@dataclass(frozen=True)
class Segment:
    """A piece of road: `turn` is 1 to the left, -1 to the right, 0 straight ahead for `length` metres.

    A turn goes round by `arc` radians while its radius goes from `radius` to `end_radius` metres in `steps` steps.
    """

    turn: int
    length: float = 0.0
    arc: float = 0.0
    radius: float = 0.0
    end_radius: float = 0.0
    steps: int = 1


@dataclass(frozen=True)
class Layout:
    """A track's road, `width` metres wide, and how its panorama is wound around it.

    `wrap` is "turn" (once around, mirrored) or "quarters" (four times around).
    """

    width: float
    segments: tuple[Segment, ...]
    background: str
    wrap: Literal["turn", "quarters"]


def read_layout(path: Path) -> Layout:
    """The road of a track description of TORCS.

    Raises:
        DatasetError: the file can't be read, is no XML, or describes no road of the newer format (version 4).
    """
    try:
        # Some descriptions declare UTF-8 and hold Latin-1; nothing read here is beyond ASCII.
        text = path.read_text(encoding="latin-1")
    except OSError as error:
        raise DatasetError(f"{path}: expected a track description: {error}") from error
    parser = ElementTree.XMLParser()
    # Surfaces and objects come from other files, which say nothing about the road.
    parser.entity.update(dict.fromkeys(re.findall(r"<!ENTITY\s+([\w-]+)", text), ""))
    try:
        parser.feed(text)
        root = parser.close()
    except ElementTree.ParseError as error:
        raise DatasetError(f"{path}: expected XML: {error}") from error
    graphic, road = root.find("section[@name='Graphic']"), root.find("section[@name='Main Track']")
    parts = None if road is None else road.find("section[@name='Track Segments']")
    if graphic is None or road is None or parts is None:
        raise DatasetError(f"{path}: expected sections Graphic and Main Track with Track Segments, got another format")
    common = _Values(path, road)
    step_length = common.number("profil steps length", 0.0)
    segments = tuple(_segment(_Values(path, part), step_length) for part in parts.findall("section"))
    looks = _Values(path, graphic)
    # Type 4 goes around once, 0 (and nothing) four times; the prepared tracks have no other.
    wrap = "turn" if looks.number("background type", 0.0) == 4 else "quarters"
    return Layout(common.number("width"), segments, looks.text("background image"), wrap)


class _Values:
    """The attributes of one section."""

    def __init__(self, path: Path, section: ElementTree.Element) -> None:
        self.where = f"{path}: section {section.get('name')!r}"
        self._values = {
            str(item.get("name")): (str(item.get("val")), item.get("unit", ""))
            for item in section
            if item.tag in ("attnum", "attstr")
        }

    def number(self, name: str, default: float | None = None) -> float:
        """The value in metres or radians."""
        if name not in self._values and default is not None:
            return default
        value = self.text(name)
        unit = self._values[name][1]
        try:
            return float(value) * UNITS[unit]
        except (ValueError, KeyError):
            raise DatasetError(
                f"{self.where}: {name}: expected a number in {sorted(UNITS)}, got {value!r} {unit}"
            ) from None

    def text(self, name: str) -> str:
        if name not in self._values:
            raise DatasetError(f"{self.where}: expected {name}, got {sorted(self._values)}")
        return self._values[name][0]


def _segment(values: _Values, step_length: float) -> Segment:
    kind = values.text("type")
    if kind not in TURNS:
        raise DatasetError(f"{values.where}: type: expected one of {sorted(TURNS)}, got {kind!r}")
    if kind == "str":
        return Segment(0, length=values.number("lg"))
    arc, radius = values.number("arc"), values.number("radius")
    end_radius = values.number("end radius", radius)
    length = (radius + end_radius) / 2 * arc
    step_length = values.number("profil steps length", step_length)
    steps = int(values.number("profil steps", 0.0)) or (int(length / step_length) + 1 if step_length > 0 else 1)
    return Segment(TURNS[kind], 0.0, arc, radius, end_radius, steps if abs(end_radius - radius) > EQUAL_RADII else 1)


def trace(segments: tuple[Segment, ...], spacing: float = 1.0) -> Float[np.ndarray, "points 3"]:
    """[x, y, heading] about every `spacing` metres from (0, 0, 0) to where the last segment ends.

    Straights and circle arcs; a turn whose radius changes is arcs of equal lengths with evenly spaced radii, as
    TORCS builds them.
    """
    x = y = heading = 0.0
    points = [(x, y, heading)]
    for segment in segments:
        for length, curvature in _arcs(segment):
            count = max(1, round(length / spacing))
            for k in range(1, count + 1):
                # The chord of an arc points half way between the headings at its ends.
                half = curvature * length * k / count / 2
                chord = length * k / count * (math.sin(half) / half if half else 1.0)
                points.append(
                    (x + chord * math.cos(heading + half), y + chord * math.sin(heading + half), heading + 2 * half)
                )
            x, y, heading = points[-1]
    return np.array(points)


def _arcs(segment: Segment) -> list[tuple[float, float]]:
    """(length, curvature) of the pieces of constant curvature."""
    if not segment.turn:
        return [(segment.length, 0.0)]
    radii = np.linspace(segment.radius, segment.end_radius, segment.steps)
    length = segment.arc / float((1 / radii).sum())
    return [(length, segment.turn / float(radius)) for radius in radii]
