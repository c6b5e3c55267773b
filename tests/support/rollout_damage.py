"""Ways in which the files of a finished rollout can be damaged."""

import json
from collections.abc import Callable
from pathlib import Path

FILES = ("video.mp4", "tokens.safetensors")


def overwrite(path: Path, at: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(content)


def zero(path: Path) -> None:
    path.write_bytes(bytes(path.stat().st_size))


def zero_second_half(path: Path) -> None:
    half = path.stat().st_size // 2
    overwrite(path, half, bytes(path.stat().st_size - half))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])


def replace_by_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def edit(change: Callable[[dict], object]) -> Callable[[Path], object]:
    def write(path: Path) -> None:
        record = json.loads(path.read_text())
        change(record)
        path.write_text(json.dumps(record))

    return write


ANY = {
    "removed": Path.unlink,
    "empty": lambda path: path.write_bytes(b""),
    "cut": cut,
    "zeroed": zero,
    "longer": lambda path: path.write_bytes(path.read_bytes() + bytes(9)),
    "a folder": replace_by_folder,
    "a dangling link": lambda path: (path.unlink(), path.symlink_to("nowhere")),
}
RECORDS = {
    "not an object": lambda path: path.write_text("[1]"),
    "deep": lambda path: path.write_text('{"a":' + "[" * 200_000 + "]" * 200_000 + "}"),
    "a long number": lambda path: path.write_text('{"seed": ' + "1" * 6000 + "}"),
    "no UTF-8": lambda path: path.write_bytes(b'{"seed": "\xff"}'),
    **{
        f"without {key}": edit(lambda record, key=key: record.pop(key))
        for key in ("seed", "num_frames", "batch", "files")
    },
    "without made_with": edit(lambda record: record["batch"].pop("made_with")),
    "another seed": edit(lambda record: record.update(seed=17)),
    "text for seconds": edit(lambda record: record.update(seconds="all")),
    "a file outside": edit(lambda record: record["files"].update({"../../run.json": {"bytes": 1, "sha256": ""}})),
    "a file too many": edit(lambda record: record["files"].update({"more.mp4": {"bytes": 1, "sha256": ""}})),
    "files as text": edit(lambda record: record.update(files="all")),
}
DAMAGE = [
    *((file, how, damage) for file in (*FILES, "rollout.json") for how, damage in ANY.items()),
    ("tokens.safetensors", "second half zeroed", zero_second_half),
    *(("rollout.json", how, damage) for how, damage in RECORDS.items()),
]
