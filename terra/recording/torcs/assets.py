"""A prepared track on disk: its road, its triangles and its pictures."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, Int8, UInt8, UInt16, UInt32
from PIL import Image, UnidentifiedImageError
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from terra.errors import DatasetError
from terra.recording.torcs.road import Road

# Never trained on: a town-like track, one with wide bends, and the one in snow.
HELD_OUT_TRACKS = ("aalborg", "alpine-2", "wheel-1")
FORMAT, VERSION = "terra-torcs-track", 1
FACTS, ARRAYS, PICTURES = "track.json", "track.safetensors", "textures"
BACKGROUND, SHADING = "background", "shading"
WEBP_QUALITY, WEBP_ALPHA_QUALITY = 80, 60


@dataclass(frozen=True, eq=False)
class Geometry:
    """A track's triangles, in the world's axes; `triangles` are indices of vertices.

    Vertices have `positions` (m), `normals` (127 is 1), `uvs` (u, v of the texture, then u, v of the shading),
    `textures` (which texture, counted from 0) and `shaded` (1 where the track's shading darkens it, else 0).
    """

    positions: Float32[np.ndarray, "vertices 3"]
    normals: Int8[np.ndarray, "vertices 3"]
    uvs: Float32[np.ndarray, "vertices 4"]
    textures: UInt16[np.ndarray, " vertices"]
    shaded: UInt8[np.ndarray, " vertices"]
    triangles: UInt32[np.ndarray, "triangles 3"]


Picture = UInt8[np.ndarray, "_ _ 4"]  # pictures of any height and width, RGBA


@dataclass(frozen=True, eq=False)
class Looks:
    """A track's pictures, RGBA with the top row first: `textures`, the panorama, and what shades the ground if any.

    The panorama goes `panorama_turns` times around, mirrored if negative, and shows `panorama_span` (lowest and
    highest, as tangents of the angle above the horizon).
    """

    textures: tuple[Picture, ...]
    panorama: Picture
    shading: Picture | None
    panorama_turns: int
    panorama_span: tuple[float, float]


def track_names(assets: Path) -> dict[str, tuple[str, ...]]:
    """The prepared tracks in `assets` by split ("train", "held_out"), in alphabetical order.

    Raises:
        DatasetError: there are none.
    """
    names = sorted(path.parent.name for path in assets.glob(f"*/{FACTS}") if not path.parent.name.startswith("."))
    if not names:
        raise DatasetError(f"{assets}: expected prepared tracks, got none: run scripts/torcs_prepare.py")
    return {
        "train": tuple(name for name in names if name not in HELD_OUT_TRACKS),
        "held_out": tuple(name for name in names if name in HELD_OUT_TRACKS),
    }


def write_track(folder: Path, road: Road, geometry: Geometry, looks: Looks, names: Sequence[str], about: str) -> None:
    """Write a track, complete or not at all, in place of what is there.

    For the record: `names` are the textures' own, `about` is what the track's makers say of it ("": nothing).

    Raises:
        OSError: the folder can't be written.
    """
    part = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(part, ignore_errors=True)
    (part / PICTURES).mkdir(parents=True)
    save_file(
        {
            "line": np.ascontiguousarray(road.line),
            "heights": np.ascontiguousarray(road.heights),
            **{field.name: getattr(geometry, field.name) for field in fields(geometry)},
        },
        part / ARRAYS,
    )
    for index, picture in enumerate(looks.textures):
        _write_picture(part / PICTURES / f"{index:03d}.webp", picture)
    _write_picture(part / PICTURES / f"{BACKGROUND}.webp", looks.panorama)
    if looks.shading is not None:
        _write_picture(part / PICTURES / f"{SHADING}.webp", looks.shading)
    facts = {
        "format": FORMAT,
        "version": VERSION,
        "track": folder.name,
        "length_m": round(road.length, 3),
        "width_m": road.width,
        "panorama_turns": looks.panorama_turns,
        "panorama_span": looks.panorama_span,
        "textures": list(names),
    }
    (part / FACTS).write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    if about:
        (part / "readme.txt").write_text(about, encoding="utf-8")
    shutil.rmtree(folder, ignore_errors=True)
    part.replace(folder)


def _write_picture(path: Path, picture: Picture) -> None:
    # `exact` keeps the colors of transparent pixels, which show at the rims of leaves.
    Image.fromarray(picture).save(path, "WEBP", quality=WEBP_QUALITY, alpha_quality=WEBP_ALPHA_QUALITY, exact=True)


def read_road(folder: Path) -> Road:
    """The road of a prepared track.

    Raises:
        DatasetError: no prepared track is there, or it is damaged.
    """
    facts, arrays = _read_facts(folder), _read_arrays(folder)
    return Road(arrays["line"], arrays["heights"], facts["width_m"])


def read_scene(folder: Path) -> tuple[Geometry, Looks]:
    """What a prepared track looks like.

    Raises:
        DatasetError: no prepared track is there, or it is damaged.
    """
    facts, arrays = _read_facts(folder), _read_arrays(folder)
    geometry = Geometry(**{field.name: arrays[field.name] for field in fields(Geometry)})
    shading = folder / PICTURES / f"{SHADING}.webp"
    looks = Looks(
        textures=tuple(
            _read_picture(folder / PICTURES / f"{index:03d}.webp") for index in range(len(facts["textures"]))
        ),
        panorama=_read_picture(folder / PICTURES / f"{BACKGROUND}.webp"),
        shading=_read_picture(shading) if shading.exists() else None,
        panorama_turns=facts["panorama_turns"],
        panorama_span=tuple(facts["panorama_span"]),
    )
    return geometry, looks


def _read_facts(folder: Path) -> dict[str, Any]:
    path = folder / FACTS
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DatasetError(
            f"{path}: expected a prepared track (scripts/torcs_prepare.py makes them), got {error}"
        ) from error
    if not isinstance(facts, dict) or (facts.get("format"), facts.get("version")) != (FORMAT, VERSION):
        raise DatasetError(f"{path}: expected {FORMAT} version {VERSION}, got another format: prepare it again")
    return facts


def _read_arrays(folder: Path) -> dict[str, np.ndarray]:
    path = folder / ARRAYS
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise DatasetError(f"{path}: expected a track's arrays, got {error}") from error


def _read_picture(path: Path) -> Picture:
    try:
        with Image.open(path) as picture:
            return np.array(picture.convert("RGBA"))
    except (OSError, UnidentifiedImageError) as error:
        raise DatasetError(f"{path}: expected a picture: {error}") from error
