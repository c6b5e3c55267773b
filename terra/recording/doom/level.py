"""Plans levels for Doom from a seed: rooms and corridors on a grid of cells, their textures, light and things."""

import itertools
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int

CELL = 128  # map units, side of a cell; the player is 32 wide and 56 high
_CELLS = 20  # of a side of the grid
_ROOMS, _ATTEMPTS = 9, 60
_SOLID = -1
_SKY = "F_SKY1"

# Doom's numbers of things: what stands in rooms, and who does.
PLAYER_START = 1
_INDOOR = (2028, 48, 30, 34, 35, 70)  # lamp, pillars, candles, candelabra, burning barrel
_OUTDOOR = (43, 54, 47, 70)  # trees, stump, burning barrel
_MONSTERS = (3004, 3002)  # zombie, demon: neither throws anything


@dataclass(frozen=True)
class Theme:
    """Textures of Freedoom that go together: walls of a room and of its pillars, its floor and its ceiling."""

    wall: str
    pillar: str
    floor: str
    ceiling: str


THEMES = (
    Theme("STARTAN2", "SUPPORT2", "FLOOR4_8", "CEIL3_5"),
    Theme("STARG3", "METAL", "FLOOR0_1", "CEIL3_3"),
    Theme("BROWN1", "BROWNGRN", "FLOOR7_1", "CEIL5_1"),
    Theme("BRICK1", "BRICK6", "FLAT5_4", "FLAT5_5"),
    Theme("BIGBRIK1", "BRICK10", "FLAT8", "CEIL1_1"),
    Theme("STONE2", "STONE4", "FLAT5_7", "FLAT19"),
    Theme("GRAYBIG", "GRAY7", "FLAT1", "FLAT20"),
    Theme("MARBLE1", "MARBGRAY", "DEM1_5", "FLOOR7_2"),
    Theme("TEKGREN2", "TEKBRON1", "FLOOR1_1", "CEIL4_3"),
    Theme("CEMENT1", "CEMENT7", "SLIME13", "FLAT5_8"),
)
OUTDOOR_THEMES = (
    Theme("STONE3", "BRICK7", "GRASS1", _SKY),
    Theme("ROCK4", "ROCK1", "RROCK16", _SKY),
    Theme("BSTONE2", "ASHWALL2", "GRASS2", _SKY),
)


@dataclass(frozen=True)
class Room:
    """A sector: what it looks like, how bright (0 to 255), and where its floor and its ceiling are (map units)."""

    theme: Theme
    light: int
    floor: int
    ceiling: int


@dataclass(frozen=True)
class Thing:
    """What stands somewhere: position (map units), angle (degrees, 0 is east, 90 north), Doom's number of its kind."""

    x: float
    y: float
    angle: int
    kind: int


@dataclass(frozen=True, eq=False)
class Level:
    """One level.

    Attributes:
        cells: index of each cell's room, -1 for rock, by column (x) and row (y).
        rooms: the rooms that `cells` names.
        things: monsters and decoration.
    """

    cells: Int[np.ndarray, "columns rows"]
    rooms: tuple[Room, ...]
    things: tuple[Thing, ...]


def plan_level(seed: int, monsters: int = 4) -> Level:
    """The level of a seed: the same one on every machine.

    Args:
        seed: 0 or more.
        monsters: how many.
    """
    random = np.random.default_rng((seed, 0))
    cells = np.full((_CELLS, _CELLS), _SOLID)
    themes = [THEMES[index] for index in random.choice(len(THEMES), 3, replace=False)]
    rooms: list[Room] = []
    centers: list[tuple[int, int]] = []
    for _ in range(_ATTEMPTS):
        if len(rooms) == _ROOMS:
            break
        width, height = random.integers(2, 7, 2)
        left, bottom = random.integers(1, _CELLS - 1 - width), random.integers(1, _CELLS - 1 - height)
        around = cells[left - 1 : left + width + 1, bottom - 1 : bottom + height + 1]
        if (around != _SOLID).any():
            continue
        cells[left : left + width, bottom : bottom + height] = len(rooms)
        rooms.append(_room(random, themes, outdoor=random.random() < 0.2))
        centers.append((left + width // 2, bottom + height // 2))
        _raise_pillars(random, cells, left, bottom, width, height)
    for (x, y), (to_x, to_y) in itertools.pairwise(centers):
        _dig(random, cells, len(rooms), (x, y), (to_x, to_y))
        rooms.append(_corridor(random, themes))
    return Level(cells, tuple(rooms), tuple(_things(random, cells, rooms, monsters)))


def free_spot(level: Level, random: np.random.Generator) -> Thing:
    """A start for the player: the middle of a cell without a thing, looking at a random angle that has room ahead."""
    taken = {(int(thing.x // CELL), int(thing.y // CELL)) for thing in level.things}
    spots = [spot for spot in np.argwhere(level.cells != _SOLID).tolist() if tuple(spot) not in taken]
    x, y = spots[random.integers(len(spots))]
    angles = [90 * turn for turn, (dx, dy) in enumerate(_AROUND) if level.cells[x + dx, y + dy] != _SOLID] or [0]
    angle = angles[random.integers(len(angles))] + int(random.integers(-30, 31))
    return Thing((x + 0.5) * CELL, (y + 0.5) * CELL, angle % 360, PLAYER_START)


_AROUND = ((1, 0), (0, 1), (-1, 0), (0, -1))


def _room(random: np.random.Generator, themes: list[Theme], outdoor: bool) -> Room:
    floor = int(random.choice((0, 0, 0, 16, 24)))
    if outdoor:
        theme = OUTDOOR_THEMES[random.integers(len(OUTDOOR_THEMES))]
        return Room(theme, int(random.integers(224, 256)), floor, 288)
    theme = themes[random.integers(len(themes))]
    return Room(theme, int(random.choice((176, 192, 208, 224, 240))), floor, floor + int(random.choice((128, 192))))


def _corridor(random: np.random.Generator, themes: list[Theme]) -> Room:
    return Room(themes[random.integers(len(themes))], int(random.choice((160, 176, 192))), 8, 8 + 112)


def _raise_pillars(
    random: np.random.Generator, cells: np.ndarray, left: int, bottom: int, width: int, height: int
) -> None:
    """Turn inner cells of a large room into rock, never two that touch."""
    if min(width, height) < 4 or random.random() < 0.4:
        return
    for x in range(left + 1, left + width - 1, 2):
        for y in range(bottom + 1, bottom + height - 1, 2):
            if random.random() < 0.5:
                cells[x, y] = _SOLID


def _dig(
    random: np.random.Generator, cells: np.ndarray, index: int, start: tuple[int, int], end: tuple[int, int]
) -> None:
    """Dig a corridor of one cell's width from a cell to another one, around one corner."""
    (x, y), (to_x, to_y) = start, end
    corner = (to_x, y) if random.random() < 0.5 else (x, to_y)
    for (a, b), (c, d) in ((start, corner), (corner, end)):
        for column in range(min(a, c), max(a, c) + 1):
            for row in range(min(b, d), max(b, d) + 1):
                if cells[column, row] == _SOLID:
                    cells[column, row] = index


def _things(random: np.random.Generator, cells: np.ndarray, rooms: list[Room], monsters: int) -> list[Thing]:
    spots = np.argwhere(cells != _SOLID)
    random.shuffle(spots)
    things = []
    for place, (column, row) in enumerate(spots[: monsters + len(spots) // 12].tolist()):
        outdoor = rooms[cells[column, row]].theme.ceiling == _SKY
        kinds = _MONSTERS if place < monsters else _OUTDOOR if outdoor else _INDOOR
        x, y = (np.array([column, row]) + random.uniform(0.3, 0.7, 2)) * CELL
        angle = 45 * int(random.integers(8))
        things.append(Thing(round(x), round(y), angle, kinds[random.integers(len(kinds))]))
    return things
