"""Unpacks Debian's torcs-data and packs its good tracks small: what `scripts/torcs_prepare.py` does."""

import logging
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image

from terra.errors import ConfigError, DatasetError, OutputError
from terra.recording.torcs.ac3d import Part, read_model
from terra.recording.torcs.assets import FACTS, Geometry, Looks, Picture, write_track
from terra.recording.torcs.fitting import fit_road
from terra.recording.torcs.layout import read_layout, trace
from terra.recording.torcs.pictures import read_picture

PACKAGE = "torcs-data"
GAME = Path("usr/share/games/torcs")
COPYRIGHT = Path("usr/share/doc/torcs-data/copyright")
# By kind, as TORCS sorts them. The others are described in an older format, or are plain ovals.
TRACKS = {
    "road": (
        "aalborg", "alpine-1", "alpine-2", "brondehach", "corkscrew", "e-track-2", "e-track-3", "forza", "g-track-2",
        "ruudskogen", "spring", "wheel-1",
    ),
    "dirt": ("dirt-1", "dirt-3"),
}  # fmt: skip
CORNER = np.dtype([("position", "<f4", 3), ("normal", "i1", 3), ("uv", "<f4", 4), ("texture", "<u2"), ("shaded", "u1")])
LARGEST_TEXTURE, SMALLEST_TEXTURE = 512, 32
LARGEST_PANORAMA = (2048, 512)
NOTICE = """Tracks of TORCS, The Open Racing Car Simulator (https://torcs.sourceforge.net), from Debian's torcs-data.

The models, textures and descriptions were made by the people that COPYRIGHT and the readme files name. They are
under the Free Art License or the GNU GPL, version 2 or later: see COPYRIGHT for which is which. They were changed:
repacked into other formats, pictures scaled down.

They are no part of Terra and not under its license. Pictures and videos that show the tracks are derived works: pass
them on only under the same licenses and with this notice.
"""

logger = logging.getLogger(__name__)


def prepare_tracks(output: Path, deb: Path | None, tracks: Sequence[str] | None = None) -> None:
    """Pack `tracks` (None: all of `TRACKS`) under `output`; those that are there are kept.

    `deb` is the Debian package, None to download it.

    Raises:
        ConfigError: an unknown track; apt-get or dpkg is missing or fails.
        DatasetError: the package holds something else than expected.
        OutputError: `output` can't be written.
    """
    kinds = {name: kind for kind, names in TRACKS.items() for name in names}
    wanted = list(kinds) if tracks is None else list(tracks)
    if unknown := [name for name in wanted if name not in kinds]:
        raise ConfigError(f"tracks: expected some of {sorted(kinds)}, got {unknown}")
    missing = [name for name in wanted if not (output / name / FACTS).exists()]
    if not missing:
        logger.info("%s: all %d tracks are there", output, len(wanted))
        return
    try:
        output.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".unpacked-", dir=output) as scratch:
            root = unpack(_download(Path(scratch)) if deb is None else deb, Path(scratch))
            _write_notice(output, root)
            for name in missing:
                pack_track(root / GAME / "tracks" / kinds[name] / name, root / GAME / "data/textures", output / name)
    except OSError as error:
        raise OutputError(f"{output}: can't be written: {error}") from error


def _download(folder: Path) -> Path:
    _run("apt-get", "download", PACKAGE, folder=folder, purpose=f"download {PACKAGE} (or give deb=FILE)")
    found = list(folder.glob(f"{PACKAGE}_*.deb"))
    if not found:
        raise ConfigError(f"expected apt-get to download {PACKAGE}, got no file")
    return found[0]


def unpack(deb: Path, folder: Path) -> Path:
    """Unpack a Debian package below `folder`; its root there.

    Raises:
        ConfigError: `deb` doesn't exist or is no such package, or dpkg is missing.
    """
    if not deb.is_file():
        raise ConfigError(f"deb: expected a Debian package, got no file {deb}")
    root = folder / "root"
    _run("dpkg", "-x", str(deb.resolve()), str(root), folder=folder, purpose=f"unpack {deb}")
    return root


def _run(*command: str, folder: Path, purpose: str) -> None:
    if shutil.which(command[0]) is None:
        raise ConfigError(f"expected {command[0]} (a tool of Debian and Ubuntu) to {purpose}, got none on the PATH")
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        complaint = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
        raise ConfigError(f"expected {command[0]} to {purpose}, got exit code {done.returncode}: {complaint[-1]}")


def _write_notice(output: Path, root: Path) -> None:
    source = root / COPYRIGHT
    if not source.is_file():
        raise DatasetError(f"expected {PACKAGE} with its {COPYRIGHT}, got a package without it")
    shutil.copyfile(source, output / "COPYRIGHT")
    (output / "LICENCE").write_text(NOTICE, encoding="utf-8")


def pack_track(folder: Path, shared_textures: Path, output: Path) -> None:
    """Pack one track of TORCS; textures that are not in its own folder are looked for in `shared_textures`.

    Raises:
        DatasetError: a file is missing or not as expected.
    """
    layout = read_layout(folder / f"{folder.name}.xml")
    parts = [part for part in read_model(folder / f"{folder.name}.acc") if part.texture]
    road = fit_road(trace(layout.segments), layout.width, parts, where=str(folder))
    names = sorted({part.texture for part in parts})
    shading = _shading_of(parts)

    def find(name: str) -> Path:
        return next((path for place in (folder, shared_textures) if (path := place / name).exists()), folder / name)

    once = layout.wrap == "turn"
    looks = Looks(
        textures=tuple(_texture(read_picture(find(name))) for name in names),
        panorama=_panorama(read_picture(find(layout.background))),
        shading=None if shading is None else _texture(read_picture(find(shading))),
        # How TORCS winds its backgrounds around the horizon.
        panorama_turns=-1 if once else 4,
        panorama_span=(-1.0, 1.0) if once else (-0.5, 1.0),
    )
    readme = folder / "readme.txt"
    about = readme.read_text(encoding="latin-1") if readme.exists() else ""
    write_track(output, road, _geometry(parts, names, shading), looks, names, about)
    logger.info("%s: %.0f m of road, %d textures", output.name, road.length, len(names))


def _shading_of(parts: Sequence[Part]) -> str | None:
    """The picture that most parts have as their shadows; tracks have others only for some boxes in the pits."""
    counts = Counter(part.shading for part in parts if part.shading.startswith("shadow"))
    return counts.most_common(1)[0][0] if counts else None


def _geometry(parts: Sequence[Part], names: Sequence[str], shading: str | None) -> Geometry:
    corners = np.zeros(sum(3 * len(part.positions) for part in parts), CORNER)
    first = 0
    for part in parts:
        rows = corners[first : first + 3 * len(part.positions)]
        # Adding 0 turns -0.0 into 0.0: what is equal has equal bytes.
        rows["position"] = part.positions.reshape(-1, 3) + 0.0
        rows["normal"] = np.round(127 * part.normals).reshape(-1, 3)
        rows["uv"] = np.concatenate([part.uvs, part.shading_uvs], axis=-1).reshape(-1, 4) + 0.0
        rows["texture"], rows["shaded"] = names.index(part.texture), shading is not None and part.shading == shading
        first += len(rows)
    _, which, triangles = np.unique(corners.view(f"V{CORNER.itemsize}"), return_index=True, return_inverse=True)
    unique = corners[which]
    position, normal, uv, texture, shaded = (np.ascontiguousarray(unique[name]) for name in CORNER.names or ())
    return Geometry(position, normal, uv, texture, shaded, triangles.reshape(-1, 3).astype(np.uint32))


def _texture(picture: Image.Image) -> Picture:
    """With sides that are powers of two, and transparent pixels in the color of the others, which bleed into rims."""
    width, height = (min(LARGEST_TEXTURE, max(SMALLEST_TEXTURE, 1 << (side - 1).bit_length())) for side in picture.size)
    pixels = np.array(picture)
    solid = pixels[..., 3] >= 128
    if solid.any() and not solid.all():
        pixels[~solid, :3] = pixels[solid, :3].mean(axis=0).round().astype(np.uint8)
    return np.array(Image.fromarray(pixels).resize((width, height), Image.Resampling.LANCZOS))


def _panorama(picture: Image.Image) -> Picture:
    width, height = (min(side, most) for side, most in zip(picture.size, LARGEST_PANORAMA, strict=True))
    return np.array(picture.convert("RGB").convert("RGBA").resize((width, height), Image.Resampling.LANCZOS))
