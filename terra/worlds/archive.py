"""What `terra pack` and `terra unpack` do: a world's folder as one ZIP file for a release page, and the folder again.

    NAME.zip
      world.json                      format, version, bits, element types of the unpacked weights
      tokenizer/ world_model/         config.json and what else is there; weights.safetensors, in 8 bits or as stored
      estimator/                      if the folder has one, as it is
      contexts/ README.md page.json   scenes, the card and what the page says, if the folder has them

A tokenizer that ships with Terra is not stored: world.json has its hash, and the unpacked world gets a copy of it. A
Terra with another tokenizer refuses such an archive.

With bits=8 the weights are rounded, once and for all: the unpacked world is another one than the packed one, if only
slightly, and is what should be evaluated. A tokenizer that was packed then has another hash, which the world model's
config names. An unpacked world has unpacked.json, with the SHA-256 of its archive.
"""

import json
import shutil
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

import torch
from safetensors.torch import load_file

from terra.engine.base import EngineSpec
from terra.errors import CheckpointError, ConfigError, OutputError
from terra.locations import DEMO, worlds_folder
from terra.output import check_output, output_folder
from terra.pairing import check_pairing
from terra.world_model import load_config
from terra.worlds.rounding import restored, rounded
from terra.worlds.settings import PackSettings, UnpackSettings, find_archives
from tokenizer.checkpoint import (
    CONFIG_NAME,
    INDEX_NAME,
    WEIGHTS_NAME,
    checkpoint_sha256,
    load_tensors,
    weight_files,
    write_tensors,
)
from tokenizer.files import file_sha256, read_json, replacing, write_json
from tokenizer.lineage import tokens_sha256

FORMAT, VERSION, MANIFEST = "terra-world", 1, "world.json"
UNPACKED = "unpacked.json"
"""The file in an unpacked world that has the SHA-256 of its archive."""
PACKED = "weights.safetensors"
_MODELS = ("tokenizer", "world_model")
_KEPT = ("estimator", "contexts")
_LOOSE = ("README.md", "page.json")
_SHIPPED = DEMO / "tokenizer"
_MOST_FILES, _MOST_BYTES = 10_000, 4 * 2**30  # of an archive that is unpacked
_DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def pack(settings: PackSettings) -> None:
    """Write a world's archive, and print its size.

    Raises:
        CheckpointError: no world, damaged weights, or a tokenizer and a world model that are no pair.
        OutputError: the archive is there already, or can't be written.
    """
    world, output = settings.world, settings.output
    if output.suffix != ".zip":
        raise ConfigError(f"output: expected a name that ends with .zip, got {output.name}")
    if output.exists() and not settings.overwrite:
        raise OutputError(f"output={output}: exists already: choose another, or overwrite=true")
    check_pairing(world / "tokenizer", EngineSpec.of(load_config(world / "world_model")))
    facts: dict[str, object] = {"format": FORMAT, "version": VERSION, "bits": settings.bits}
    models, sha256 = _MODELS, checkpoint_sha256(world / "tokenizer")
    if sha256 == checkpoint_sha256(_SHIPPED):
        models, facts["shipped_tokenizer"] = ("world_model",), sha256
    with replacing(output) as temporary, zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as archive:
        dtypes = {name: _pack_model(archive, world / name, settings.bits, temporary) for name in models}
        for path in _files(world):
            _add(archive, path, path.relative_to(world).as_posix())
        archive.writestr(_entry(MANIFEST), json.dumps(facts | {"dtypes": dtypes}, indent=2) + "\n")
    print(f"{output}: {output.stat().st_size / 1e6:.1f} MB, {settings.bits} bits a weight")


def unpack(settings: UnpackSettings) -> None:
    """Write the folders of archives, and print how each is named in other commands.

    A folder that was unpacked from the same archive before is left as it is.

    Raises:
        ConfigError: no such archive.
        CheckpointError: no archive of `terra pack`, or a damaged one.
        OutputError: a folder that is there and not from this archive, or one that can't be written.
    """
    for archive in find_archives(settings):
        output = settings.output or worlds_folder() / archive.stem
        model = output.name if settings.output is None else f"folder model.path={output}"
        if output.is_dir() and any(output.iterdir()):
            if not _is_of(output, archive):
                other = f"expected no folder, or one unpacked from {archive}, got another"
                raise OutputError(f"{output}: {other}: remove it first, or choose another place with output=")
            print(f"is there already: {output}: model={model}")
            continue
        _unpack(archive, output)
        print(f"{output}: model={model}")


def unpack_once(archive: Path, output: Path) -> None:
    """Write a world's folder, and say so on stderr; where another process is done first, its folder is left.

    Raises:
        CheckpointError, OutputError: see `unpack`.
    """
    size = archive.stat().st_size / 1e6
    print(f"unpacking {archive.stem} ({size:.0f} MB) to {output}, once", file=sys.stderr)
    try:
        _unpack(archive, output)
    except OutputError:
        if not _is_of(output, archive):
            raise


def _is_of(folder: Path, archive: Path) -> bool:
    """Whether a folder was unpacked from an archive, and still has weights in it."""
    try:
        for name in _MODELS:
            weight_files(folder / name)
        unpacked = read_json(folder / UNPACKED, CheckpointError)
    except CheckpointError:
        return False
    return unpacked == {"archive_sha256": file_sha256(archive, CheckpointError)}


def _unpack(archive: Path, output: Path) -> None:
    def check() -> None:
        check_output(output, needed_bytes=0, inputs=[archive])

    check_output(output, needed_bytes=4 * archive.stat().st_size, inputs=[archive])
    try:
        with zipfile.ZipFile(archive) as packed, output_folder(output, check) as folder:
            for entry in _checked(packed, archive):
                target = folder / entry.filename
                target.parent.mkdir(parents=True, exist_ok=True)
                with packed.open(entry) as source, target.open("wb") as file:
                    shutil.copyfileobj(source, file)
            _restore(folder, archive)
            write_json(folder / UNPACKED, {"archive_sha256": file_sha256(archive, CheckpointError)})
    except zipfile.BadZipFile as error:
        raise CheckpointError(f"{archive}: expected an archive of terra pack, got: {error}") from None


def _pack_model(archive: zipfile.ZipFile, folder: Path, bits: int, beside: Path) -> str:
    """Add a checkpoint's weights, and the files beside them; returns the element type of its weights."""
    tensors = load_tensors(folder)
    floats = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point() and tensor.ndim > 1}
    names = [name for name, dtype in _DTYPES.items() if dtype in floats]
    if len(names) != 1:
        got = ", ".join(sorted(map(str, floats)))
        raise CheckpointError(f"{folder}: expected weights of one of {', '.join(_DTYPES)}, got {got}")
    part = beside.with_name(f"{beside.name}.part")
    try:
        write_tensors(part, rounded(tensors) if bits == 8 else tensors)
        _add(archive, part, f"{folder.name}/{PACKED}")
    finally:
        part.unlink(missing_ok=True)
    for path in sorted(folder.glob("*.json")):
        if path.name != INDEX_NAME:
            _add(archive, path, f"{folder.name}/{path.name}")
    return names[0]


def _restore(folder: Path, where: Path) -> None:
    """Turn packed weights into checkpoints; the world model's config names the tokens of a packed tokenizer."""
    facts = read_json(folder / MANIFEST, CheckpointError, f"an archive of terra pack in {where}")
    if (facts.get("format"), facts.get("version")) != (FORMAT, VERSION):
        got = f"{facts.get('format')!r}, version {facts.get('version')!r}"
        raise CheckpointError(f"{where}: expected {FORMAT}, version {VERSION}, got {got}")
    dtypes, shipped = facts.get("dtypes"), facts.get("shipped_tokenizer")
    models = _MODELS
    if shipped is not None:
        models = ("world_model",)
        if shipped != (ours := checkpoint_sha256(_SHIPPED)):
            theirs = str(shipped)[:80]
            raise CheckpointError(f"{where}: expected a Terra with the tokenizer {theirs}, got one with {ours}")
        if (folder / "tokenizer").exists():
            raise CheckpointError(f"{where}: expected tokenizer/ or the hash of a shipped tokenizer, got both")
        shutil.copytree(_SHIPPED, folder / "tokenizer")
    for name in models:
        dtype = _DTYPES.get(str(dtypes.get(name))) if isinstance(dtypes, dict) else None
        if dtype is None or not (folder / name / PACKED).is_file():
            raise CheckpointError(f"{where}: expected {name}/{PACKED} and its element type, got none")
        write_tensors(folder / name / WEIGHTS_NAME, restored(load_file(folder / name / PACKED), dtype))
        (folder / name / PACKED).unlink()
    if shipped is None:
        _pair(folder, is_rounded=facts.get("bits") == 8)
    (folder / MANIFEST).unlink()


def _pair(folder: Path, *, is_rounded: bool) -> None:
    """Let the world model's config name the tokens of the tokenizer beside it, which has weights of its own now.

    A rounded encoder does not make quite the tokens of the one before, so that its config no longer says so.
    """
    tokenizer, config = folder / "tokenizer", folder / "world_model" / CONFIG_NAME
    facts = read_json(tokenizer / CONFIG_NAME, CheckpointError)
    if is_rounded and facts.pop("same_tokens_as", None) is not None:
        write_json(tokenizer / CONFIG_NAME, facts)
    known = read_json(config, CheckpointError)
    if known.get("tokenizer_sha256") is not None:
        write_json(config, known | {"tokenizer_sha256": tokens_sha256(tokenizer)})


def _files(world: Path) -> Iterator[Path]:
    """The card, what the page says, and the files of what is kept as it is."""
    yield from filter(Path.is_file, (world / name for name in _LOOSE))
    for name in _KEPT:
        yield from sorted(path for path in (world / name).rglob("*") if path.is_file())


def _add(archive: zipfile.ZipFile, path: Path, name: str) -> None:
    archive.writestr(_entry(name), path.read_bytes(), compresslevel=6)


def _entry(name: str) -> zipfile.ZipInfo:
    """An entry without the time of day, so that equal worlds make equal archives."""
    entry = zipfile.ZipInfo(name, (1980, 1, 1, 0, 0, 0))
    entry.compress_type, entry.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
    return entry


def _checked(archive: zipfile.ZipFile, where: Path) -> list[zipfile.ZipInfo]:
    """The entries of an archive that may be written. Raises CheckpointError."""
    entries = archive.infolist()
    if len(entries) > _MOST_FILES or sum(entry.file_size for entry in entries) > _MOST_BYTES:
        raise CheckpointError(f"{where}: expected at most {_MOST_FILES} files and {_MOST_BYTES} bytes, got more")
    for entry in entries:
        path = PurePosixPath(entry.filename)
        known = path.name == entry.filename or path.parts[0] in (*_MODELS, *_KEPT)
        if path.is_absolute() or ".." in path.parts or "\\" in entry.filename or entry.is_dir() or not known:
            raise CheckpointError(f"{where}: expected files of a world, got {entry.filename[:80]!r}")
    return entries
