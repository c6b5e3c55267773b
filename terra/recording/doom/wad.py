"""Writes a level as a WAD file with a map in UDMF, Doom's textual map format; Doom itself builds the BSP tree."""

import struct
from collections.abc import Iterable

from terra.recording.doom.level import CELL, Level, Thing

MAP = "MAP01"


def level_wad(level: Level, start: Thing) -> bytes:
    """The bytes of a WAD with one map.

    The formats are those of the Doom Wiki's "WAD" and of "UDMF 1.1" with the namespace zdoom.

    Args:
        level: what the map shows.
        start: where the player begins.
    """
    lumps = ((MAP, b""), ("TEXTMAP", _textmap(level, start).encode()), ("ENDMAP", b""))
    data, directory = b"", b""
    for name, content in lumps:
        directory += struct.pack("<ii8s", 12 + len(data), len(content), name.encode())
        data += content
    return struct.pack("<4sii", b"PWAD", len(lumps), 12 + len(data)) + data + directory


def _textmap(level: Level, start: Thing) -> str:
    """A sector for each room, a line for each side of a cell where it meets rock or another room."""
    columns, rows = level.cells.shape
    blocks = ['namespace = "zdoom";']
    vertices: dict[tuple[int, int], int] = {}
    num_sides = 0

    def vertex(at: tuple[int, int]) -> int:
        if at not in vertices:
            vertices[at] = len(vertices)
            blocks.append(_block("vertex", x=float(at[0] * CELL), y=float(at[1] * CELL)))
        return vertices[at]

    for room in level.rooms:
        blocks.append(
            _block(
                "sector",
                heightfloor=room.floor,
                heightceiling=room.ceiling,
                texturefloor=room.theme.floor,
                textureceiling=room.theme.ceiling,
                lightlevel=room.light,
            )
        )
    for x in range(columns):
        for y in range(rows):
            here = int(level.cells[x, y])
            # Doom's front side is at the right of a line. Each inner border is drawn once, from its lower room.
            sides = (
                ((x, y), (x, y + 1), (x - 1, y)),
                ((x, y + 1), (x + 1, y + 1), (x, y + 1)),
                ((x + 1, y + 1), (x + 1, y), (x + 1, y)),
                ((x + 1, y), (x, y), (x, y - 1)),
            )
            for begin, end, beyond in sides if here >= 0 else ():
                there = int(level.cells[beyond])
                if there == here or 0 <= there < here:
                    continue
                facing = [here] if there < 0 else [here, there]
                for sector in facing:
                    theme = level.rooms[sector].theme
                    wall = theme.pillar if there < 0 and _is_pillar(level, beyond) else theme.wall
                    textures = {"texturemiddle": wall} if there < 0 else {"texturetop": wall, "texturebottom": wall}
                    blocks.append(_block("sidedef", sector=sector, **textures))
                line: dict[str, int | bool] = {"v1": vertex(begin), "v2": vertex(end), "sidefront": num_sides}
                line |= {"blocking": True} if there < 0 else {"twosided": True, "sideback": num_sides + 1}
                blocks.append(_block("linedef", **line))
                num_sides += len(facing)
    skills: dict[str, bool] = {f"skill{number}": True for number in range(1, 6)}
    for thing in (start, *level.things):
        place = {"x": float(thing.x), "y": float(thing.y), "angle": thing.angle, "type": thing.kind}
        blocks.append(_block("thing", **place, **skills, single=True))
    return "\n".join(blocks)


def _is_pillar(level: Level, cell: tuple[int, int]) -> bool:
    """Whether a cell of rock stands alone."""
    x, y = cell
    around = level.cells[max(x - 1, 0) : x + 2, max(y - 1, 0) : y + 2]
    return around.size == 9 and (around >= 0).sum() == 8


def _block(kind: str, **fields: str | float | bool) -> str:
    return f"{kind} {{ {' '.join(_assigned(fields.items()))} }}"


def _assigned(fields: Iterable[tuple[str, str | float | bool]]) -> Iterable[str]:
    for name, value in fields:
        written = f'"{value}"' if isinstance(value, str) else str(value).lower()
        yield f"{name} = {written};"
