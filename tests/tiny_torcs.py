"""A small track as TORCS describes it: a rounded square of road on a tilted plane, with a meadow and trees."""

import math
from pathlib import Path

import numpy as np
from PIL import Image

from terra.recording.torcs.layout import Segment, trace

WIDTH, MOVE, SLOPE = 10.0, np.array([500.0, -120.0]), 0.05
STRAIGHT, CORNER = Segment(0, length=90.0), Segment(1, arc=math.pi / 2, radius=30.0, end_radius=30.0)
LAYOUT = (STRAIGHT, CORNER) * 4


def ground(x: float, y: float) -> float:
    """A plane that is tilted both ways."""
    return SLOPE * x - 0.02 * y


def model() -> str:
    """A road in the ground's plane, a meadow under it, and a tree whose leaves have holes."""
    text = ['AC3Db\nMATERIAL "" rgb 1 1 1 amb 1 1 1\nOBJECT world\nkids 99']

    def add(name: str, texture: str, corners: list[tuple[float, float, float]]) -> None:
        # AC3D: y up, z towards the viewer.
        vertices = "\n".join(f"{x:.4f} {z:.4f} {-y:.4f} 0 1 0" for x, y, z in corners)
        refs = "\n".join(f"{k} {k // 2} {k % 2} 0.5 0.5" for k in range(len(corners)))
        textures = f'texture "{texture}" base\ntexture "shadow2.rgb" tiled'
        text.append(
            f'OBJECT poly\nname "{name}"\n{textures}\nnumvert {len(corners)}\n{vertices}\n'
            f"numsurf 1\nSURF 0x34\nmat 0\nrefs {len(corners)}\n{refs}\nkids 0"
        )

    line = trace(LAYOUT, spacing=3.0)
    sides = []
    for x, y, heading in line:
        for side in (-0.5, 0.5):
            px, py = x - side * WIDTH * math.sin(heading) + MOVE[0], y + side * WIDTH * math.cos(heading) + MOVE[1]
            sides.append((px, py, ground(px, py)))
    for first in range(0, len(sides) - 2, 40):
        add(f"TKMN{first}", "road.png", sides[first : first + 42])
    box = [(MOVE[0] + x, MOVE[1] + y) for x in (-300, 400) for y in (-300, 400)]
    add("TERR1", "meadow.png", [(x, y, ground(x, y) - 0.5) for x, y in box])
    for k in range(12):
        x, y = MOVE[0] + 20.0 * k - 60, MOVE[1] + 60
        add(f"OBJ{k}", "tree_n.rgb", [(x + a, y, ground(x, y) + b) for a, b in ((0, 0), (0, 9), (8, 0), (8, 9))])
    return "\n".join(text) + "\n"


def description() -> str:
    parts = [
        f'<section name="s{k}"><attstr name="type" val="str"/><attnum name="lg" unit="m" val="90"/></section>'
        f'<section name="t{k}"><attstr name="type" val="lft"/><attnum name="arc" unit="deg" val="90"/>'
        '<attnum name="radius" unit="m" val="30"/></section>'
        for k in range(4)
    ]
    return (
        '<?xml version="1.0"?><params><section name="Graphic"><attstr name="background image" val="background.png"/>'
        f'</section><section name="Main Track"><attnum name="width" unit="m" val="{WIDTH}"/>'
        f'<section name="Track Segments">{"".join(parts)}</section></section></params>'
    )


def save_package(root: Path) -> None:
    """What the Debian package holds, with one track."""
    game = root / "usr/share/games/torcs"
    track, shared, notes = game / "tracks/road/aalborg", game / "data/textures", root / "usr/share/doc/torcs-data"
    for folder in (track, shared, notes):
        folder.mkdir(parents=True)
    (track / "aalborg.xml").write_text(description())
    (track / "aalborg.acc").write_text(model())
    (track / "readme.txt").write_bytes("Free Art License, G\u00fcnther".encode("latin-1"))
    (notes / "copyright").write_text("Free-Art-License")
    rng = np.random.default_rng(0)
    for name, color, side in (
        ("road", (90, 90, 95), 16),
        ("meadow", (60, 130, 50), 64),
        ("background", (90, 140, 220), 8),
    ):
        noise = rng.integers(-20, 20, (side, side, 1))
        Image.fromarray(np.clip(np.array(color) + noise, 0, 255).astype(np.uint8)).save(track / f"{name}.png")
    leaves = np.full((16, 16, 4), (20, 80, 20, 255), np.uint8)
    leaves[::2, ::2] = (255, 255, 255, 0)
    Image.fromarray(leaves).save(track / "tree_n.rgb", "PNG")
    Image.fromarray(np.full((4, 4, 3), 200, np.uint8)).save(shared / "shadow2.rgb", "PNG")
