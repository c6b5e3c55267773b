"""Hostile trajectories, pictures and videos."""

import gzip
import io
import json
import os
import random
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from corpus import Case, Make, Place, ffmpeg, film, grow, paths_document, picture, poses_document
from PIL import Image


def cases(rng: random.Random) -> list[Case]:
    return [
        *json_cases(rng),
        *csv_cases(rng),
        *npz_cases(rng),
        *jsonl_cases(rng),
        *special_files(),
        *pictures(rng),
        *films(rng),
    ]


def _trajectory(
    group: str, name: str, content: Any, suffix: str = ".json", must: str | None = None, **more: Any
) -> Case:
    """A case of one trajectory file: bytes, text, an object that becomes JSON, or a function of these."""

    def make(place: Place) -> dict[str, object]:
        value = content(place) if callable(content) else content
        if isinstance(value, Path):
            return {"trajectory": value} | more
        text = value if isinstance(value, str | bytes) else json.dumps(value)
        return {"trajectory": place.write(f"drive{suffix}", text)} | more

    return Case(group, name, make, must=must)


def json_cases(rng: random.Random) -> list[Case]:
    group = "trajectory JSON"
    whole = json.dumps(poses_document())
    made: list[Case] = []

    def add(name: str, content: Any, must: str | None = None, **more: Any) -> None:
        made.append(_trajectory(group, name, content, must=must, **more))

    # Values in the place of each key.
    wrong = {
        "null": "null", "true": "true", "empty": '""', "text": '"ab"', "list": "[]", "object": "{}", "zero": "0",
        "minus": "-1", "minus_zero": "-0.0", "huge": "1e400", "minus_huge": "-1e400", "nan": "NaN", "inf": "Infinity",
        "int": "9" * 400, "long_int": "9" * 6000, "tiny": "1e-320", "digits": '"\u0661\u0660"', "nested": "[[[]]]",
        "surrogate": '"\\ud800"', "nul": '"\\u0000"',
    }  # fmt: skip
    for key in ("format", "frame", "axes", "units", "fps", "poses"):
        for word in sorted(rng.sample(sorted(wrong), 9)):
            text = json.dumps(poses_document(**{key: "@"})).replace('"@"', wrong[word])
            add(f"{key}={word}", text, must="refuse")
    for key in ("times", "paths", "fps"):
        for word in sorted(rng.sample(sorted(wrong), 7)):
            text = json.dumps(paths_document(**{key: "@"})).replace('"@"', wrong[word])
            add(f"ego {key}={word}", text, must="refuse")
    for key in poses_document():
        add(f"without {key}", poses_document(**{key: None}), must="refuse")
    # Rates that multiply frames.
    for fps in (1e-6, 1e-9, 1e-300, 5e-324, 0.01, 0.5, 99.999, 100, 100.0001):
        for frames in (2, 10, 500):
            add(f"ego fps {fps} frames {frames}", paths_document(frames, points=60, fps=fps))
    for fps in (1e-6, 0.1, 100):
        for gap in (3.0, 2.999, 0.001):
            add(f"parked {gap} s fps {fps:g}", lambda place, f=fps, g=gap: _parked(f, g, 20_000))
    add("parked for days", lambda place: _parked(100, 3.0, 300_000))
    add("ego many points", lambda place: paths_document(200, points=20_000, times=[i * 1e-4 for i in range(20_000)]))
    add("ego far times", paths_document(10, 2, times=[0.0, 1e300], paths=[[[0, 0], [5, 0]]] * 10))
    add("ego near times", paths_document(10, 3, times=[0.0, 5e-324, 3.0], paths=[[[0, 0], [0, 0], [5, 0]]] * 10))
    add("one frame", paths_document(1))
    add("200,000 poses", lambda place: poses_document(200_000))
    # Text that is no JSON, or JSON that few parsers like.
    add("empty", b"", must="refuse")
    add("spaces", " \n" * 1000, must="refuse")
    add("half", whole[: len(whole) // 2], must="refuse")
    add("comment", "// a drive\n" + whole, must="refuse")
    add("trailing comma", whole[:-1] + ",}", must="refuse")
    add("twice", whole + whole, must="refuse")
    add("single quotes", whole.replace('"', "'"), must="refuse")
    add("BOM", b"\xef\xbb\xbf" + whole.encode())
    add("two BOMs", b"\xef\xbb\xbf" * 2 + whole.encode(), must="refuse")
    for encoding in ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "cp037", "utf-7"):
        add(f"as {encoding}", whole.encode(encoding), must="refuse" if encoding != "utf-7" else None)
    add("latin-1", whole.replace("world", "w\xf6rld").encode("latin-1"), must="refuse")
    add("NULs", whole.encode() + b"\0" * 1000, must="refuse")
    add("gzip", gzip.compress(whole.encode()), must="refuse")
    add("carriage returns", json.dumps(poses_document(), indent=1).replace("\n", "\r"))
    add("a list", "[" + whole + "]", must="refuse")
    for deep in (50, 100, 990, 5_000, 100_000, 5_000_000):
        add(f"lists {deep} deep", lambda place, d=deep: "[" * d + "]" * d, must="refuse")
        add(f"objects {deep} deep", lambda place, d=deep: '{"a":' * d + "1" + "}" * d, must="refuse")
    add("open lists", lambda place: "[" * 10_000_000, must="refuse")
    add("deep poses", whole.replace("[[0.0", "[" * 900 + "[[0.0", 1), must="refuse")
    keys = ", ".join(f'"key{index}": 1' for index in range(60_000))
    add("60,000 keys one twice", "{" + keys + ', "key59999": 2}', must="refuse")
    add("60,000 keys all twice", "{" + keys + ", " + keys + "}", must="refuse")
    add(
        "a million keys",
        lambda place: "{" + ", ".join(f'"{index}":0' for index in range(1_000_000)) + "}",
        must="refuse",
    )
    add(
        "keys that collide",
        lambda place: "{" + ", ".join(f'"{"a" * index}":0' for index in range(5_000)) + "}",
        must="refuse",
    )
    add("key twice", whole[:-1] + ', "fps": 20}', must="refuse")
    add("key twice escaped", whole[:-1] + ', "\\u0066ps": 20}', must="refuse")
    add("unknown key", poses_document(extra=1), must="refuse")
    add("__proto__", poses_document(__proto__={}), must="refuse")
    add("long key", lambda place: poses_document(**{"k" * 5_000_000: 1}), must="refuse")
    add("long text", lambda place: poses_document(frame="w" * 50_000_000), must="refuse")
    add("long digits", lambda place: whole.replace('"fps": 10.0', '"fps": 10.' + "0" * 5_000_000))
    add("escapes", poses_document(frame="\n\x1b[31mred\x1b[0m\r\n"), must="refuse")
    add("format string", poses_document(frame="%s{0}{}%n${oc.env:HOME}"), must="refuse")
    add("markup", poses_document(frame="[bold]x[/wrong]"), must="refuse")
    # Numbers.
    for name, row in {
        "pose NaN": "[0.5, NaN, 0, 0]", "pose inf": "[0.5, Infinity, 0, 0]", "pose 1e400": "[0.5, 1e400, 0, 0]",
        "pose huge int": f"[0.5, {'9' * 400}, 0, 0]", "pose 5000 digits": f"[0.5, {'9' * 5000}, 0, 0]",
        "pose text": '[0.5, "2.5", 0, 0]', "pose true": "[0.5, true, 0, 0]", "pose null": "[0.5, null, 0, 0]",
        "pose 3": "[0.5, 2.5, 0]", "pose 5": "[0.5, 2.5, 0, 0, 0]", "pose list": "[[0.5], 2.5, 0, 0]",
        "pose back": "[0.1, 2.5, 0, 0]", "pose heading": "[0.5, 2.5, 0, 1e308]", "pose far": "[0.5, 1e308, 0, 0]",
    }.items():  # fmt: skip
        add(name, whole.replace("[0.5, 2.5, 0.0, 0.0]", row), must="refuse")
    add("times 1e300", poses_document(poses=[[1e300 + i * 1e299, 0, 0, 0] for i in range(9)]), must="refuse")
    add("unix times", poses_document(poses=[[1.7e9 + i / 10, i / 2, 0.0, 0.0] for i in range(60)]))
    add("int times", poses_document(poses=[[2**63 + i, 0, 0, 0] for i in range(60)]))
    add("minus zero", poses_document(poses=[[i / 10, -0.0, -0.0, -0.0] for i in range(60)]))
    add("spinning", poses_document(poses=[[i / 10, 0.0, 0.0, i * 1.5] for i in range(60)]))
    add("heading 1e15", poses_document(poses=[[i / 10, 0.0, 0.0, 1e15] for i in range(60)]))
    add("ms and deg", poses_document(units={"position": "m", "angle": "deg", "time": "ms"}), must="refuse")
    add("units twice", whole.replace('"angle"', '"time": "ms", "angle"'), must="refuse")
    add("200 MB", lambda place: place.sparse("drive.json", 200 << 20, b"{"), must="refuse")
    add(
        "200 MB of numbers",
        lambda place: _repeated(place, "drive.json", '{"poses": [', "[0.1,2,3,4],", 200),
        must="refuse",
    )
    add("60 MB of lists", lambda place: _repeated(place, "drive.json", '{"poses": [', "[],", 60), must="refuse")
    add("60 MB of keys", lambda place: _keys(place, 60), must="refuse")
    add("too short", poses_document(31), num_frames=40, must="refuse")
    for count in (0, 1, -1, 10**9, 10**18, 10**30, "1e9", "2.5", "nan"):
        add(f"num_frames {count}", poses_document(), num_frames=count, must="refuse")
    # Single bytes of a whole file, changed, cut out or put in.
    data = whole.encode()
    for number in range(25):
        place, byte = rng.randrange(len(data)), rng.randrange(256)
        changed = [
            data[:place] + bytes([byte]) + data[place + 1 :],
            data[:place] + data[place + 7 :],
            data[:place] + bytes([byte]) + data[place:],
        ]
        add(f"byte {number}", changed[number % 3])
    return made


def _parked(fps: float, gap: float, count: int) -> dict[str, Any]:
    return poses_document(fps=fps, poses=[[index * gap, 0.0, 0.0, 0.0] for index in range(count)])


def _repeated(place: Place, name: str, start: str, item: str, mebibytes: int) -> Path:
    path = place.write(name, start)
    chunk = item * ((1 << 20) // len(item))
    with path.open("a") as file:
        for _ in range(mebibytes):
            file.write(chunk)
        file.write(item.rstrip(",") + "]}")
    return path


def _keys(place: Place, mebibytes: int) -> Path:
    path = place.write("drive.json", "{")
    with path.open("a") as file:
        for index in range(mebibytes * (1 << 20) // 14):
            file.write(f'"{index:08d}":1,\n')
        file.write('"a":1}')
    return path


def csv_cases(rng: random.Random) -> list[Case]:
    group = "trajectory CSV"
    rows = [f"{i / 10},{i / 2},0,0" for i in range(60)]
    head = "# fps: 10\ntime_s,x_m,y_m,heading_rad\n"
    whole = head + "\n".join(rows) + "\n"
    made: list[Case] = []

    def add(name: str, content: Any, must: str | None = None) -> None:
        made.append(_trajectory(group, name, content, ".csv", must))

    add("whole", whole, must="accept")
    add("empty", b"", must="refuse")
    add("BOM", b"\xef\xbb\xbf" + whole.encode())
    for encoding in ("utf-16", "utf-16-le", "utf-32"):
        add(f"as {encoding}", whole.encode(encoding), must="refuse")
    add("NULs", whole.replace("0.5,", "0\x00.5,"), must="refuse")
    add("NUL end", whole + "\0" * 4096, must="refuse")
    add("CR", whole.replace("\n", "\r"))
    add("CRLF", whole.replace("\n", "\r\n"))
    add("mixed ends", whole.replace("\n", "\r\n", 20).replace("\r\n", "\r", 10))
    add("unicode ends", whole.replace("\n", "\u2028"))
    add("form feeds", whole.replace("\n", "\x0c"))
    add("semicolons", whole.replace(",", ";"), must="refuse")
    add("decimal commas", whole.replace(",", ";").replace(".", ","), must="refuse")
    add("tabs", whole.replace(",", "\t"), must="refuse")
    add("quoted", whole.replace("0.5,2.5", '"0.5","2.5"'))
    add("quotes unclosed", whole.replace("0.5,", '"0.5,'))
    add("quoted line end", whole.replace("0.5,2.5", '"0.5\n","2.5"'), must="refuse")
    for name, digits in {
        "arabic": "\u0660.\u0665", "fullwidth": "\uff10.\uff15", "underscore": "1_0", "hex": "0x1", "nan": "nan",
        "inf": "-inf", "1e400": "1e400", "long": "0." + "1" * 1_000_000, "int": "9" * 400, "spaces": " 0.5 ",
        "nbsp": "\xa00.5", "percent": "50%", "formula": "=1+1", "empty": "", "minus zero": "-0.0", "surrogate": "\ud800",
        "bell": "\a0.5", "ansi": "\x1b[31m0.5",
    }.items():  # fmt: skip
        add(f"cell {name}", whole.replace("0.5,2.5", f"0.5,{digits}"))
    for fps in (
        "0",
        "-1",
        "nan",
        "inf",
        "1e-300",
        "1e-6",
        "1e400",
        "100.1",
        "",
        "ten",
        "1_0",
        "\u0661\u0660",
        "10 fps",
        "9" * 5000,
    ):
        add(f"fps {fps[:9]}", whole.replace("# fps: 10", f"# fps: {fps}"))
    add("fps twice", "# fps: 10\n" + whole, must="refuse")
    add("fps last", whole.replace("# fps: 10\n", "") + "# fps: 10\n")
    add("no fps", whole.replace("# fps: 10\n", ""), must="refuse")
    add("header twice", whole.replace("0.5,2.5,0,0", "time_s,x_m,y_m,heading_rad"), must="refuse")
    add("columns twice", whole.replace("y_m", "x_m"), must="refuse")
    add("no units", whole.replace("x_m", "x"), must="refuse")
    add("feet", whole.replace("x_m", "x_ft"), must="refuse")
    add("a column more", whole.replace("0.5,2.5", "0.5,2.5,7"), must="refuse")
    add("100,000 columns", "# fps: 10\n" + ",".join(f"c{i}" for i in range(100_000)) + "\n", must="refuse")
    add("100,000 cells", head + ",".join("1" for _ in range(100_000)) + "\n", must="refuse")
    add("2,000,000 lines", lambda place: _lines(place, head, 2_000_000))
    add("5,000,000 blank lines", lambda place: head + "\n" * 5_000_000 + "\n".join(rows))
    add("5,000,000 comments", lambda place: head + "#\n" * 5_000_000 + "\n".join(rows))
    add("a line of 100 MB", lambda place: place.sparse("drive.csv", 100 << 20, head.encode()), must="refuse")
    add("a comment of 60 MB", lambda place: "#" * (60 << 20) + "\n" + whole)
    add("fps spaces", "# fps: " + " " * 200_000 + "x\n" + whole, must="refuse")
    add("fps spaces many", lambda place: ("#" + " " * 2_000 + "fps\n") * 2_000 + whole)
    add("html", "<!doctype html><html><body>404</body></html>", must="refuse")
    add("gzip", gzip.compress(whole.encode()), must="refuse")
    add("xlsx", b"PK\x03\x04" + os.urandom(2_000), must="refuse")
    add("binary", bytes(rng.randrange(256) for _ in range(4_000)), must="refuse")
    add("two rows", head + "\n".join(rows[:2]), must="refuse")
    add("one row", head + rows[0], must="refuse")
    data = whole.encode()
    for number in range(12):
        at, byte = rng.randrange(len(data)), rng.randrange(256)
        add(f"byte {number}", data[:at] + bytes([byte]) + data[at + 1 :])
    return made


def _lines(place: Place, head: str, count: int) -> Path:
    path = place.write("drive.csv", head)
    with path.open("a") as file:
        for start in range(0, count, 10_000):
            file.write("".join(f"{i / 10},{i / 2},0,0\n" for i in range(start, start + 10_000)))
    return path


def _npz(**arrays: Any) -> bytes:
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    return buffer.getvalue()


def _npz_document(**changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {
        "format": "terra-trajectory", "frame": "world", "axes": "x_y_heading_ccw", "fps": 10.0,
        "units_position": "m", "units_angle": "rad", "units_time": "s",
        "poses": np.array(poses_document()["poses"]),
    }  # fmt: skip
    return {key: value for key, value in (values | changes).items() if value is not None}


def _zipped(members: dict[str, bytes], compression: int = zipfile.ZIP_DEFLATED) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def _npy_header(shape: str, descr: str = "'<f8'", version: bytes = b"\x01\x00") -> bytes:
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}".encode()
    text += b" " * (64 - (len(text) + 11) % 64) + b"\n"
    size = struct.pack("<H" if version[0] == 1 else "<I", len(text))
    return b"\x93NUMPY" + version + size + text


def npz_cases(rng: random.Random) -> list[Case]:
    group = "trajectory NPZ"
    made: list[Case] = []

    def add(name: str, content: Any, must: str | None = None) -> None:
        made.append(_trajectory(group, name, content, ".npz", must))

    def member(name: str, body: bytes) -> bytes:
        buffer = io.BytesIO(_npz(**_npz_document(poses=None)))
        with zipfile.ZipFile(buffer, "a") as archive:
            archive.writestr(name, body)
        return buffer.getvalue()

    whole = _npz(**_npz_document())
    add("whole", whole, must="accept")
    add("empty", b"", must="refuse")
    add("half", whole[: len(whole) // 2], must="refuse")
    add("no zip", b"hello", must="refuse")
    add("a npy", _npy_header("(2, 4)") + b"\0" * 64, must="refuse")
    add("empty zip", _zipped({}), must="refuse")
    add("objects", _npz(**_npz_document(poses=np.array([{"a": 1}], dtype=object))), must="refuse")
    add(
        "pickle",
        b"\x80\x04\x95\x1d\x00\x00\x00\x00\x00\x00\x00\x8c\x05posix\x94\x8c\x06system\x94\x93\x94\x8c\x02id\x94\x85\x94R\x94.",
        must="refuse",
    )
    add("member pickle", member("poses.npy", b"\x80\x04\x8c\x05posix\x8c\x06system\x93\x8c\x02id\x85R."), must="refuse")
    add("big endian", _npz(**_npz_document(poses=np.array(poses_document()["poses"], dtype=">f8"))))
    for dtype in ("complex128", "float16", "int8", "bool", "U8", "datetime64[s]", "S8", "longdouble"):
        add(f"poses {dtype}", _npz(**_npz_document(poses=np.array(poses_document()["poses"]).astype(dtype))))
    add(
        "structured",
        _npz(**_npz_document(poses=np.zeros(60, dtype=[("t", "f8"), ("x", "f8"), ("y", "f8"), ("h", "f8")]))),
        must="refuse",
    )
    add("fortran", _npz(**_npz_document(poses=np.asfortranarray(poses_document()["poses"]))))
    add("no rows", lambda place: _npz(**_npz_document(poses=np.zeros((0, 4)))), must="refuse")
    add("no columns", _npz(**_npz_document(poses=np.zeros((60, 0)))), must="refuse")
    add("32 axes", _npz(**_npz_document(poses=np.zeros((1,) * 32))), must="refuse")
    add("fps list", _npz(**_npz_document(fps=np.array([10.0]))), must="refuse")
    add("fps complex", _npz(**_npz_document(fps=10 + 1j)), must="refuse")
    add("fps text", _npz(**_npz_document(fps="10")), must="refuse")
    add("fps NaT", _npz(**_npz_document(fps=np.datetime64("NaT"))), must="refuse")
    add("fps nan", _npz(**_npz_document(fps=np.nan)), must="refuse")
    add("fps 1e-300", _npz(**_npz_document(fps=1e-300)))
    add(
        "fps 1e-6 ego",
        _npz(
            format="terra-trajectory",
            frame="ego",
            axes="x_forward_y_left",
            fps=1e-6,
            units_position="m",
            units_time="s",
            times=np.arange(60) / 20,
            paths=np.zeros((50, 60, 2)),
        ),
    )
    for shape in (
        "(100000000000, 4)",
        "(1000000000, 4)",
        "(-1, 4)",
        "(2**70, 4)",
        f"({2**62}, {2**62})",
        "(60, 4, )" * 2,
        "'a'",
        "(True, 4)",
    ):
        add(f"header {shape[:20]}", member("poses.npy", _npy_header(shape) + b"\0" * 1920), must="refuse")
    for descr in (
        "'O'",
        "'|O8'",
        "'<f1024'",
        "[('a', 'O')]",
        "'V2000000000'",
        "'U500000000'",
        "__import__('os')",
        "'<f8' * 9999999",
        "[" * 500 + "]" * 500,
    ):
        add(f"descr {descr[:20]}", member("poses.npy", _npy_header("(60, 4)", descr) + b"\0" * 1920), must="refuse")
    add(
        "header of 60 MB",
        lambda place: member("poses.npy", b"\x93NUMPY\x02\x00" + struct.pack("<I", 60 << 20) + b" " * (60 << 20)),
        must="refuse",
    )
    add(
        "header of 4 GB",
        member("poses.npy", b"\x93NUMPY\x02\x00" + struct.pack("<I", 2**32 - 1) + b" " * 1000),
        must="refuse",
    )
    add("a bomb", lambda place: member("poses.npy", _npy_header("(20000000, 4)") + b"\0" * (640 << 20)), must="refuse")
    add(
        "a bomb that lies",
        lambda place: _lying(place, member("poses.npy", _npy_header("(20000000, 4)") + b"\0" * (640 << 20))),
        must="refuse",
    )
    add(
        "a bomb beside",
        lambda place: member("other.npy", _npy_header("(900, 1000000)", "'|i1'") + b"\0" * (900 << 20)),
        must="refuse",
    )
    add("members twice", _twice(), must=None)
    add("20,000 members", _zipped({f"m{i}.npy": b"" for i in range(20_000)}), must="refuse")
    add("names that climb", _zipped({"../../poses.npy": _npy_header("(2, 4)") + b"\0" * 64}), must="refuse")
    add("no npy", _zipped({"format": b"terra-trajectory", "poses.txt": b"1"}), must="refuse")
    add("nested zips", _zipped({"a.zip": _zipped({"b.zip": _zipped({"c.npy": b"\0" * 10_000_000})})}), must="refuse")
    add("encrypted flag", whole.replace(b"PK\x01\x02\x14\x03\x14\x00\x00\x00", b"PK\x01\x02\x14\x03\x14\x00\x01\x00"))
    add("lzma", _zipped({"poses.npy": _npy_header("(2, 4)") + b"\0" * 64}, zipfile.ZIP_LZMA), must="refuse")
    add("unknown method", whole.replace(b"PK\x03\x04-\x00\x00\x00\x00\x00", b"PK\x03\x04-\x00\x00\x00\x63\x00"))
    add("before a zip", b"#!/bin/sh\n" * 100 + whole)
    add("1 TB", lambda place: place.sparse("drive.npz", 1 << 40, whole), must="refuse")
    add("1 TB end", lambda place: place.sparse("drive.npz", 1 << 40, b"", whole))
    for number in range(12):
        at, byte = rng.randrange(len(whole)), rng.randrange(256)
        add(f"byte {number}", whole[:at] + bytes([byte]) + whole[at + 1 :])
    return made


def _lying(place: Place, data: bytes) -> Path:
    """An archive whose directory says that its large member has 2,000 bytes."""
    size = struct.pack("<I", zipfile.ZipFile(io.BytesIO(data)).getinfo("poses.npy").file_size)
    return place.write("drive.npz", data.replace(size, struct.pack("<I", 2000)))


def _twice() -> bytes:
    import warnings

    buffer = io.BytesIO(_npz(**_npz_document()))
    with warnings.catch_warnings(), zipfile.ZipFile(buffer, "a") as archive:
        warnings.simplefilter("ignore")
        archive.writestr("fps.npy", _npy_header("()") + struct.pack("<d", 1e-9))
    return buffer.getvalue()


def jsonl_cases(rng: random.Random) -> list[Case]:
    group = "trajectory JSONL"
    line = json.dumps({"sample_id": 1, "instruction_trajs": [[[t / 4, 0.0, 0.0] for t in range(60)]] * 8})
    made: list[Case] = []

    def add(name: str, content: Any, must: str | None = None, **more: Any) -> None:
        made.append(_trajectory(group, name, content, ".jsonl", must, **more))

    add("whole", line, must="accept")
    add("empty", b"", must="refuse")
    add("blank", lambda place: "\n" * 1_000_000, must="refuse")
    add("two without id", line + "\n" + line.replace('"sample_id": 1', '"sample_id": 2'), must="refuse")
    add("id twice", line + "\n" + line, must="refuse")
    add("id null", line.replace('"sample_id": 1', '"sample_id": null'), must="refuse")
    add("id list", line.replace('"sample_id": 1', '"sample_id": [1]'), must="refuse")
    add("id nested", line.replace('"sample_id": 1', '"a": {"sample_id": 7}, "sample_id": 1'))
    add("id 5000 digits", line.replace('"sample_id": 1', f'"sample_id": {"1" * 5000}'))
    add("id twice in a line", line[:-1] + ', "sample_id": 2}', must="refuse")
    add("id surrogate", line.replace('"sample_id": 1', '"sample_id": "\\ud800"'))
    add("id escapes", line.replace('"sample_id": 1', '"sample_id": "\\u001b[31m\\n"'))
    add("id backslashes", lambda place: '{"sample_id": "' + "\\\\" * 2_000_000, must="refuse")
    add("id unclosed", lambda place: '{"sample_id": "' + "a" * 20_000_000, must="refuse")
    add("sample_id spaces", lambda place: '{"sample_id"' + " " * 1_000_000 + "\n", must="refuse")
    add("many sample_id", lambda place: '{"sample_id"' * 500_000, must="refuse")
    for name, value in {
        "empty": "",
        "null": "null",
        "digits": "9" * 5000,
        "list": "[1]",
        "object": "{a:1}",
        "true": "true",
        "float": "1.0",
        "negative": "-0",
        "plus": "+1",
        "quote": "'1'",
        "other": "7",
    }.items():
        add(f"asked {name}", line, sample_id=value)
    add(
        "500,000 lines",
        lambda place: "\n".join(f'{{"sample_id": {i}}}' for i in range(500_000)),
        sample_id=499_999,
        must="refuse",
    )
    add("3,000,000 lines", lambda place: _samples(place, 3_000_000), sample_id=7, must="refuse")
    add("17 long lines", lambda place: _long_lines(place, 17), sample_id=3, must="refuse")
    add("1,700 long lines", lambda place: _long_lines(place, 1700), sample_id=3, must="refuse")
    add("1 TB", lambda place: place.sparse("drive.jsonl", 1 << 40, b'{"sample_id": 3, '), sample_id=3, must="refuse")
    add("no trajs", '{"sample_id": 1}', must="refuse")
    add("ragged", '{"sample_id": 1, "instruction_trajs": [[[0,0,0]]]}', must="refuse")
    add("text", line.replace("0.0", '"x"', 1), must="refuse")
    add("invalid UTF-8", line.encode().replace(b"sample_id", b"sample_id\xff"), must="refuse")
    add("UTF-16", line.encode("utf-16"), must="refuse")
    add("BOM", b"\xef\xbb\xbf" + line.encode())
    add("deep", '{"sample_id": 1, "instruction_trajs": ' + "[" * 100_000, must="refuse")
    add("a line of 300 MB", lambda place: place.sparse("drive.jsonl", 300 << 20, b'{"sample_id": 1, '), must="refuse")
    add(
        "100 MB of lists",
        lambda place: _repeated(place, "drive.jsonl", '{"sample_id": 1, "instruction_trajs": [', "[],", 100),
        must="refuse",
    )
    data = line.encode()
    for number in range(6):
        at, byte = rng.randrange(len(data)), rng.randrange(256)
        add(f"byte {number}", data[:at] + bytes([byte]) + data[at + 1 :])
    return made


def _long_lines(place: Place, count: int) -> Path:
    """Lines of 60 MB that take no room on the disk, each with its id at its end."""
    path, length = place.write("drive.jsonl", b""), 60 << 20
    with path.open("r+b") as file:
        for index in range(count):
            file.seek(index * length)
            file.write(b"{")
            file.seek((index + 1) * length - 40)
            file.write(f'"sample_id": {index}}}'.encode().ljust(39) + b"\n")
    return path


def _samples(place: Place, count: int) -> Path:
    path = place.write("drive.jsonl", b"")
    with path.open("w") as file:
        for index in range(count):
            file.write(f'{{"sample_id":{index}}}\n')
    return path


def special_files() -> list[Case]:
    """Names behind which there is no ordinary file."""
    made: list[Case] = []

    def add(name: str, key: str, make: Make, must: str | None = "refuse") -> None:
        made.append(Case("special files", f"{key} {name}", make, must=must))

    def fifo(path: Path) -> Path:
        os.mkfifo(path)
        return path

    def link(path: Path, target: str | Path) -> Path:
        path.symlink_to(target)
        return path

    for suffix in (".json", ".csv", ".npz", ".jsonl"):
        add(f"FIFO{suffix}", "trajectory", lambda place, s=suffix: {"trajectory": fifo(place.inputs / f"d{s}")})
        add(
            f"/dev/zero{suffix}",
            "trajectory",
            lambda place, s=suffix: {"trajectory": link(place.inputs / f"d{s}", "/dev/zero")},
        )
        add(
            f"sparse 1 TB{suffix}", "trajectory", lambda place, s=suffix: {"trajectory": place.sparse(f"d{s}", 1 << 40)}
        )
    for suffix in (".png", ".jpg", ".mp4", ".gif", ".mov"):
        add(f"FIFO{suffix}", "context", lambda place, s=suffix: {"context": fifo(place.inputs / f"d{s}")})
        add(
            f"/dev/zero{suffix}",
            "context",
            lambda place, s=suffix: {"context": link(place.inputs / f"d{s}", "/dev/zero")},
        )
        add(f"sparse 1 TB{suffix}", "context", lambda place, s=suffix: {"context": place.sparse(f"d{s}", 1 << 40)})
        add(
            f"/dev/stdin{suffix}",
            "context",
            lambda place, s=suffix: {"context": link(place.inputs / f"d{s}", "/dev/stdin")},
        )
    add("urandom", "trajectory", lambda place: {"trajectory": link(place.inputs / "d.json", "/dev/urandom")})
    add("/dev/full", "trajectory", lambda place: {"trajectory": link(place.inputs / "d.json", "/dev/full")})
    add("/dev/tty", "trajectory", lambda place: {"trajectory": link(place.inputs / "d.csv", "/dev/tty")})
    add("/proc/self/mem", "trajectory", lambda place: {"trajectory": link(place.inputs / "d.json", "/proc/self/mem")})
    add("/proc/kmsg", "trajectory", lambda place: {"trajectory": link(place.inputs / "d.json", "/proc/kmsg")})
    add(
        "/proc/self/environ",
        "trajectory",
        lambda place: {"trajectory": link(place.inputs / "d.json", "/proc/self/environ")},
    )
    add("loop", "trajectory", lambda place: {"trajectory": link(place.inputs / "d.json", "d.json")})
    add("loop", "context", lambda place: {"context": link(place.inputs / "d", "d")})
    add("dangling", "trajectory", lambda place: {"trajectory": link(place.inputs / "d.json", "nothing")})
    add("dangling", "context", lambda place: {"context": link(place.inputs / "d.png", "nothing")})
    add("a folder", "trajectory", lambda place: {"trajectory": place.write("d.json/x", b"").parent})
    add("a folder.mp4", "context", lambda place: {"context": place.write("d.mp4/x", b"").parent})
    add("a socket", "trajectory", lambda place: {"trajectory": _socket(place.inputs / "d.json")})
    add("a socket", "context", lambda place: {"context": _socket(place.inputs / "d.png")})
    add("a file that grows", "trajectory", _growing)
    # What is no file in a folder of pictures is left out.
    add(
        "FIFO in the folder",
        "context",
        lambda place: {"context": _folder_with(place, lambda p: fifo(p / "1.png"))},
        None,
    )
    add(
        "zero in the folder",
        "context",
        lambda place: {"context": _folder_with(place, lambda p: link(p / "1.png", "/dev/zero"))},
        None,
    )
    add(
        "loop in the folder",
        "context",
        lambda place: {"context": _folder_with(place, lambda p: link(p / "1.png", "1.png"))},
        None,
    )
    for name, path in {
        "long name": "a" * 300 + ".json", "long path": "a/" * 3000 + "b.json", "empty": "", "space": " ", "newline": "a\nb.json",
        "ansi": "\x1b[31mred.json", "surrogate": "a\udcff.json", "dash": "-.json", "tilde": "~root/x.json", "home": "~/x.json",
        "null": "null", "star": "*", "question": "?.json", "bracket": "[", "url": "http://127.0.0.1:9/x.json",
        "file url": "file:///etc/passwd", "data url": "data:,x.json", "s3": "s3://a/b.json", "unc": "\\\\host\\share\\x.json",
        "dots": "../" * 200 + "etc/passwd", "root": "/", "etc": "/etc/passwd", "pipe": "| id", "zip": "x.zip/y.json",
    }.items():  # fmt: skip
        for key in ("trajectory", "context"):
            add(f"path {name}", key, lambda place, k=key, p=path: [f"{k}={_quoted(p)}"])
    return made


def _quoted(text: str) -> str:
    """A value as Hydra takes it whatever is in it."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _socket(path: Path) -> Path:
    import socket

    before = Path.cwd()
    os.chdir(path.parent)  # a socket's path has at most 107 bytes
    socket.socket(socket.AF_UNIX).bind(path.name)
    os.chdir(before)
    return path


def _growing(place: Place) -> dict[str, object]:
    path = place.write("d.json", json.dumps(poses_document())[:-1])
    grow(path)
    return {"trajectory": path}


def _folder_with(place: Place, add: Callable[[Path], object]) -> Path:
    folder = place.inputs / "folder"
    folder.mkdir()
    for name in ("0.png", "2.png", "3.png"):
        picture(24, 32).save(folder / name)
    add(folder)
    return folder


def _chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png(
    width: int,
    height: int,
    *,
    depth: int = 8,
    color: int = 2,
    interlace: int = 0,
    extra: bytes = b"",
    data: bytes | None = None,
) -> bytes:
    """A PNG by hand: its header may say what its data do not hold."""
    if data is None:
        compressor = zlib.compressobj(9)
        channels = {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}.get(color, 3)
        row = bytes(1 + width * channels * max(depth, 8) // 8)
        data = b"".join(compressor.compress(row) for _ in range(min(height, 4000))) + compressor.flush()
    header = struct.pack(">IIBBBBB", width, height, depth, color, 0, 0, interlace)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + extra + _chunk(b"IDAT", data) + _chunk(b"IEND", b"")


def _saved(kind: str, image: Image.Image | None = None, **options: Any) -> bytes:
    buffer = io.BytesIO()
    (image or picture(24, 32)).save(buffer, kind, **options)
    return buffer.getvalue()


def _zeros(mebibytes: int) -> bytes:
    compressor = zlib.compressobj(9)
    return b"".join(compressor.compress(b"\0" * (1 << 20)) for _ in range(mebibytes)) + compressor.flush()


def pictures(rng: random.Random) -> list[Case]:
    made: list[Case] = []

    def add(name: str, content: Any, must: str | None = None, suffix: str = ".png", count: int = 3) -> None:
        def make(place: Place) -> dict[str, object]:
            data = content() if callable(content) else content
            for index in range(count):
                place.write(f"frames/{index}{suffix}", data)
            return {"context": place.inputs / "frames"}

        made.append(Case("pictures", name, make, must=must))

    add("whole", _saved("PNG"), must="accept")
    add("empty", b"", must="refuse")
    add("text", b"hello", must="refuse")
    for width, height in (
        (65535, 65535),
        (2**31 - 1, 2**31 - 1),
        (100_000, 75_000),
        (10_000, 7_500),
        (1, 1),
        (0, 0),
        (32, 2**31 - 1),
        (12_000, 9_000),
    ):
        add(f"header {width}x{height}", png(width, height, data=zlib.compress(b"\0" * 1000)), must="refuse")
    add("8000x6000 whole", lambda: png(8000, 4000, data=None)[:-12] + _chunk(b"IEND", b""), must="refuse")
    add("47 megapixels", lambda: _saved("PNG", Image.new("RGB", (7920, 5940))))
    for size in ((33, 24), (24, 32), (16, 12), (15, 12), (8, 6), (7, 6), (3200, 2400)):
        add(f"size {size[0]}x{size[1]}", lambda s=size: _saved("PNG", Image.new("RGB", s)))
    for mode in ("L", "LA", "P", "RGBA", "1", "I;16"):
        add(f"mode {mode}", lambda m=mode: _saved("PNG", Image.new(m, (32, 24))), must="refuse")
    for mode in ("L", "CMYK", "YCbCr"):
        add(f"jpeg mode {mode}", lambda m=mode: _saved("JPEG", Image.new(m, (32, 24))), suffix=".jpg")
    add("text bomb", lambda: png(32, 24, extra=_chunk(b"zTXt", b"a\0\0" + _zeros(100))))
    add("text bombs", lambda: png(32, 24, extra=_chunk(b"zTXt", b"a\0\0" + _zeros(60)) * 40))
    add("iTXt bomb", lambda: png(32, 24, extra=_chunk(b"iTXt", b"a\0\1\0\0\0" + _zeros(100))))
    add("iCCP bomb", lambda: png(32, 24, extra=_chunk(b"iCCP", b"a\0\0" + _zeros(100))))
    add("IDAT bomb", lambda: png(32, 24, data=_zeros(200)))
    add("interlaced", png(32, 24, interlace=1))
    add("depth 3", png(32, 24, depth=3), must="refuse")
    add("color 5", png(32, 24, color=5), must="refuse")
    add("no IEND", png(32, 24)[:-12])
    add("half", _saved("PNG")[:800], must="refuse")
    add("bad CRC", _saved("PNG").replace(b"IHDR", b"IHDR", 1)[:29] + b"\0\0\0\0" + _saved("PNG")[33:], must="refuse")
    add("IHDR twice", png(32, 24, extra=_chunk(b"IHDR", struct.pack(">IIBBBBB", 9999, 9999, 8, 2, 0, 0, 0))))
    add("IHDR short", b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", b"\0\0"), must="refuse")
    add("chunk of 2 GB", b"\x89PNG\r\n\x1a\n" + struct.pack(">I", 2**31 - 1) + b"IHDR" + b"\0" * 100, must="refuse")
    add("chunk of -1", png(32, 24)[:33] + struct.pack(">I", 2**32 - 1) + b"tEXt", must="refuse")
    add("eXIf wild", png(32, 24, extra=_chunk(b"eXIf", b"MM\0*\0\0\0\x08" + b"\xff" * 2000)))
    add(
        "eXIf loop",
        png(32, 24, extra=_chunk(b"eXIf", b"II*\0\x08\0\0\0\x01\0\x69\x87\x04\0\x01\0\0\0\x08\0\0\0\x08\0\0\0")),
    )
    add("100,000 chunks", lambda: png(32, 24, extra=_chunk(b"tEXt", b"k\0v") * 100_000))
    add("APNG", lambda: _saved("PNG", save_all=True, append_images=[picture(24, 32, i) for i in range(50)]))
    add("APNG lies", png(32, 24, extra=_chunk(b"acTL", struct.pack(">II", 2**31 - 1, 0))))
    add("jpeg", _saved("JPEG"), suffix=".jpg", must="accept")
    add("jpeg as png", _saved("JPEG"))
    add("gif as png", _saved("GIF"), must="refuse")
    add("webp as png", _saved("WEBP"), must="refuse")
    add("tiff as png", _saved("TIFF"), must="refuse")
    add("bmp as png", _saved("BMP"), must="refuse")
    add("eps as png", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 32 24\n(%pipe%id) (r) file\n", must="refuse")
    add(
        "svg as png", b'<svg xmlns="http://www.w3.org/2000/svg"><image href="file:///etc/passwd"/></svg>', must="refuse"
    )
    add("mp4 as png", b"\0\0\0\x18ftypmp42\0\0\0\0", must="refuse")
    add("xpm as png", b"/* XPM */" + b"a" * 1000, must="refuse")
    add("jpeg half", _saved("JPEG", picture(240, 320))[:3000], must="refuse", suffix=".jpg")
    add("jpeg header alone", b"\xff\xd8\xff\xe0\x00\x10JFIF", must="refuse", suffix=".jpg")
    huge = _saved("JPEG", Image.new("RGB", (32, 24)))
    at = huge.index(b"\xff\xc0") + 5
    add("jpeg says 65535", huge[:at] + b"\xff\xff\xff\xff" + huge[at + 4 :], must="refuse", suffix=".jpg")
    add("jpeg says 9000x6750", huge[:at] + struct.pack(">HH", 6750, 9000) + huge[at + 4 :], suffix=".jpg")
    add("jpeg says 0", huge[:at] + b"\0\0\0\0" + huge[at + 4 :], must="refuse", suffix=".jpg")
    add("jpeg of 5,000 scans", _scans, suffix=".jpg")
    for orientation in (0, 3, 6, 8, 9, 65535):
        exif = Image.Exif()
        exif[0x0112] = orientation
        add(f"orientation {orientation}", _saved("JPEG", exif=exif), suffix=".jpg")
        add(f"orientation {orientation} upright", _saved("JPEG", picture(32, 24), exif=exif), suffix=".jpg")
    add(
        "exif wild",
        b"\xff\xd8\xff\xe1\x08\x00Exif\0\0MM\0*\0\0\0\x08" + b"\xff" * 2034 + _saved("JPEG")[2:],
        suffix=".jpg",
    )
    add(
        "XMP wild",
        b"\xff\xd8\xff\xe1\x08\x00http://ns.adobe.com/xap/1.0/\0"
        + b"<!DOCTYPE x [<!ENTITY a SYSTEM 'file:///etc/passwd'>]>".ljust(2017)
        + _saved("JPEG")[2:],
        suffix=".jpg",
    )
    add("MPO", _saved("MPO", save_all=True, append_images=[picture(24, 32, 1)]), suffix=".jpg")
    add("two pictures", _saved("PNG"), count=2, must="refuse")
    add("20,000 pictures", _saved("PNG"), count=20_000)
    for number in range(10):
        kind, suffix = ("PNG", ".png") if number % 2 else ("JPEG", ".jpg")
        data = _saved(kind)
        at = rng.randrange(len(data))
        add(f"byte {number}", data[:at] + bytes([rng.randrange(256)]) + data[at + 1 :], suffix=suffix)

    def other(name: str, make: Make, must: str | None = None) -> None:
        made.append(Case("pictures", name, make, must=must))

    other("empty folder", lambda place: {"context": place.write("f/x.txt", b"").parent}, "refuse")
    other("one picture", lambda place: {"context": place.write("a.png", _saved("PNG"))}, "refuse")
    other("names not UTF-8", lambda place: _names(place, ["a\udcff.png", "b\udcfe.png", "c\udcfd.png"]))
    other("names of lines", lambda place: _names(place, ["a\n.png", "b\r.png", "\x1b[31mc.png"]))
    other("names of digits", lambda place: _names(place, ["1" * 240 + ".png", "2" * 240 + ".png", "\u0663.png"]))
    other("names with ~", lambda place: _names(place, ["~.png", "a.zip~.png", "-.png"]))
    other("other sizes", lambda place: _sizes(place), "refuse")
    for number, pattern in enumerate(
        (
            "/**/*.png",
            "/proc/**/*.png",
            "**",
            "[",
            "[!",
            "*/" * 50 + "*.png",
            "**/" * 12 + "*.png",
            "{a,b}*.png",
            "/dev/*",
            "*\0*",
        )
    ):
        other(f"glob {number}", lambda place, p=pattern: [f"context={_quoted(p)}"], "refuse" if number else None)
    other("glob of a wide tree", _wide, None)
    other("glob of links", _links, None)
    return made


def _scans() -> bytes:
    """A progressive JPEG of 7.7 megapixels whose last scan is there 5,000 times."""
    data = _saved("JPEG", Image.new("RGB", (3200, 2400)), progressive=True)
    return data[:-2] + data[data.rindex(b"\xff\xda") : -2] * 5000 + b"\xff\xd9"


def _names(place: Place, names: list[str]) -> dict[str, object]:
    folder = place.inputs / "frames"
    folder.mkdir()
    for name in names:
        (folder / name).write_bytes(_saved("PNG"))
    return {"context": folder}


def _sizes(place: Place) -> dict[str, object]:
    for index, size in enumerate(((32, 24), (64, 48), (32, 24))):
        place.write(f"f/{index}.png", _saved("PNG", Image.new("RGB", size)))
    return {"context": place.inputs / "f"}


def _wide(place: Place) -> dict[str, object]:
    for outer in range(30):
        for inner in range(30):
            (place.inputs / f"w/{outer}/{inner}").mkdir(parents=True)
    for index in range(3):
        place.write(f"w/{index}.png", _saved("PNG"))
    return {"context": f"{place.inputs}/w/**/*.png"}


def _links(place: Place) -> dict[str, object]:
    """Links to the folder above: `**` would follow each of them in each of them."""
    folder = place.inputs / "l"
    folder.mkdir()
    for index in range(3):
        (folder / f"{index}.png").write_bytes(_saved("PNG"))
        (folder / f"up{index}").symlink_to(folder)
    return {"context": f"{folder}/**/*.png"}


def gif(
    width: int,
    height: int,
    frames: int,
    *,
    frame: tuple[int, int] = (1, 1),
    delay: int = 10,
    disposal: int = 0,
    cut: bool = False,
) -> bytes:
    """A GIF by hand: small frames on a canvas of any size."""
    data = b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + b"\0\0\0\xff\xff\xff"
    control = b"\x21\xf9\x04" + struct.pack("<BHB", disposal << 2, delay, 0) + b"\0"
    picture_ = b"\x2c" + struct.pack("<HHHHB", 0, 0, *frame, 0) + b"\x02\x02\x44\x01\x00"
    return data + (control + picture_) * frames + (b"" if cut else b";")


def films(rng: random.Random) -> list[Case]:
    made: list[Case] = []

    def add(name: str, make: Callable[[Place], Path], must: str | None = None, **more: Any) -> None:
        made.append(Case("videos", name, lambda place: {"context": make(place)} | more, must=must))

    def data(name: str, content: bytes | Callable[[], bytes], suffix: str, must: str | None = None) -> None:
        add(name, lambda place: place.write(f"film{suffix}", content() if callable(content) else content), must)

    def made_of(
        name: str, size: str, rate: str, frames: int, *options: str, must: str | None = None, suffix: str = ".mp4"
    ) -> None:
        add(name, lambda place: film(place.inputs / f"film{suffix}", size, rate, frames, *options), must)

    made_of("whole", "64x48", "10", 12, must="accept")
    made_of("1440x1080 at 1,000", "1440x1080", "1000", 300)
    made_of("64x48 at 1,000", "64x48", "1000", 400)
    made_of("64x48 at 100,000", "64x48", "100000", 400)
    made_of("8192x6144", "8192x6144", "10", 4)
    made_of("8000x6000 at 60", "8000x6000", "60", 14)
    made_of("16384x64", "16384x64", "10", 4, must="refuse")
    made_of("slow", "64x48", "1", 4, must="refuse")
    made_of("one frame", "64x48", "10", 1, must="refuse")
    made_of("portrait", "48x64", "10", 12, must="refuse")
    made_of("rotated", "48x64", "10", 12, "-metadata:s:v:0", "rotate=90")
    made_of("wide pixels", "32x48", "10", 12, "-aspect", "4:3")
    made_of("fragmented", "64x48", "10", 12, "-movflags", "frag_keyframe+empty_moov")
    made_of("long", "64x48", "10", 30_000)
    made_of("yuv444", "64x48", "10", 12, "-pix_fmt", "yuv444p")
    made_of("as mov", "64x48", "10", 12, suffix=".mov")

    def cut(name: str, change: Callable[[bytes], bytes], must: str | None = None) -> None:
        def make(place: Place) -> Path:
            path = film(place.inputs / "film.mp4")
            path.write_bytes(change(path.read_bytes()))
            return path

        add(name, make, must)

    cut("half", lambda b: b[: len(b) // 2], "refuse")
    cut("no moov", lambda b: b.replace(b"moov", b"free"), "refuse")
    cut(
        "mdat zeroed",
        lambda b: (
            b[: b.index(b"mdat") + 4] + b"\0" * (b.index(b"moov") - b.index(b"mdat") - 8) + b[b.index(b"moov") - 4 :]
        ),
    )
    cut("timescale 0", lambda b: _boxed(b, b"mvhd", 12, b"\0\0\0\0"))
    cut("media timescale 0", lambda b: _boxed(b, b"mdhd", 12, b"\0\0\0\0"))
    cut("media timescale 1", lambda b: _boxed(b, b"mdhd", 12, b"\0\0\0\1"))
    cut("media timescale huge", lambda b: _boxed(b, b"mdhd", 12, b"\xff\xff\xff\xff"))
    cut("duration huge", lambda b: _boxed(b, b"mdhd", 16, b"\xff\xff\xff\xff"))
    cut("size of 65535", lambda b: _boxed(b, b"avc1", 24, b"\xff\xff\xff\xff"))
    cut("samples 2**31", lambda b: _boxed(b, b"stsz", 8, b"\x7f\xff\xff\xff"))
    cut("stts 2**31", lambda b: _boxed(b, b"stts", 8, b"\x7f\xff\xff\xff"))
    cut("dref to a file", lambda b: b.replace(b"url \0\0\0\1", b"url \0\0\0\0"))
    for number in range(12):
        seed = rng.randrange(10**6)
        cut(f"byte {number}", lambda b, s=seed: _noisy(b, s))
    for name, text in {
        "playlist": "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\n{film}\n#EXT-X-ENDLIST\n",
        "concat": "ffconcat version 1.0\nfile {film}\n", "concat etc": "ffconcat version 1.0\nfile /etc/passwd\n",
        "playlist etc": "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n",
        "playlist http": "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nhttp://127.0.0.1:9/a.ts\n#EXT-X-ENDLIST\n",
        "dash": "<?xml version='1.0'?><MPD><Period><AdaptationSet><BaseURL>{film}</BaseURL></AdaptationSet></Period></MPD>",
        "sdp": "v=0\no=- 0 0 IN IP4 127.0.0.1\nm=video 5004 RTP/AVP 96\na=rtpmap:96 H264/90000\n",
        "ffmetadata": ";FFMETADATA1\ntitle=x\n", "subtitles": "1\n00:00:00,000 --> 00:00:09,000\nhello\n", "ascii": "hello " * 10_000,
    }.items():  # fmt: skip

        def playlist(place: Place, text: str = text) -> Path:
            inner = film(place.inputs / "other.mp4")
            return place.write("film.mp4", text.format(film=inner))

        add(name, playlist, "refuse")
    for kind, options in {
        "avi": ("-f", "avi"),
        "mkv": ("-f", "matroska"),
        "mpegts": ("-f", "mpegts"),
        "raw h264": ("-f", "h264"),
        "yuv4mpeg": ("-pix_fmt", "yuv420p", "-c:v", "rawvideo", "-f", "yuv4mpegpipe"),
    }.items():
        made_of(f"{kind} as mp4", "64x48", "10", 12, *options)

    def sound(place: Place) -> Path:
        path = place.inputs / "film.mp4"
        ffmpeg("-f", "lavfi", "-i", "sine=duration=2", "-c:a", "aac", str(path))
        return path

    add("sound alone", sound, "refuse")

    def variable(place: Place) -> Path:
        path = place.inputs / "film.mp4"
        source = "color=c=teal:s=64x48:r=10,setpts='if(lt(N,6),N*0.0001/TB,N*1000/TB)'"
        ffmpeg("-f", "lavfi", "-i", source, "-frames:v", "12", "-fps_mode", "vfr", "-c:v", "libx264", str(path))
        return path

    add("variable rate", variable)

    def two(place: Place) -> Path:
        path = place.inputs / "film.mp4"
        ffmpeg(
            "-f",
            "lavfi",
            "-i",
            "color=s=64x48:r=10",
            "-f",
            "lavfi",
            "-i",
            "color=s=640x480:r=10",
            "-map",
            "0",
            "-map",
            "1",
            "-frames:v",
            "12",
            "-c:v",
            "libx264",
            str(path),
        )
        return path

    add("two streams", two)
    frames = [picture(24, 32, index) for index in range(12)]
    data("gif whole", _saved("GIF", frames[0], save_all=True, append_images=frames[1:], duration=100), ".gif", "accept")
    data("gif of 65535", gif(65535, 65535, 12), ".gif", "refuse")
    data("gif of 4000x3000, 300 frames", gif(4000, 3000, 300), ".gif")
    data("gif of 4000x3000, 300 frames, disposed", gif(4000, 3000, 300, disposal=3), ".gif")
    data("gif of 8000x6000, 40 frames", gif(8000, 6000, 40, disposal=2), ".gif")
    data("gif of 100,000 frames", gif(32, 24, 100_000), ".gif")
    data("gif of 3,000,000 frames", lambda: gif(32, 24, 3_000_000), ".gif")
    data("gif without delay", gif(32, 24, 20, delay=0), ".gif")
    data("gif of long delays", gif(32, 24, 20, delay=65535), ".gif")
    data("gif of delay 1", gif(32, 24, 200, delay=1), ".gif")
    data("gif cut", gif(32, 24, 12, cut=True), ".gif")
    data("gif without frames", gif(32, 24, 0), ".gif", "refuse")
    data("gif of no size", gif(0, 0, 12), ".gif", "refuse")
    data("gif frame outside", gif(32, 24, 12, frame=(60000, 60000)), ".gif")
    data("gif header", b"GIF89a", ".gif", "refuse")
    data(
        "gif comments",
        lambda: gif(32, 24, 1, cut=True) + b"\x21\xfe" + (b"\xff" + b"a" * 255) * 200_000 + b"\0;",
        ".gif",
    )
    data("png as gif", _saved("PNG"), ".gif", "refuse")
    data("png as mp4", _saved("PNG", picture(48, 64)), ".mp4")
    data("gif as mp4", gif(32, 24, 12, frame=(32, 24)), ".mp4")
    data("empty mp4", b"", ".mp4", "refuse")
    data("zeros mp4", b"\0" * 100_000, ".mp4", "refuse")
    data("noise mp4", rng.randbytes(100_000), ".mp4", "refuse")
    data("boxes in boxes", _boxes(20_000), ".mp4", "refuse")
    data("box of 2**63", struct.pack(">I4sQ", 1, b"ftyp", 2**63) + b"isom", ".mp4", "refuse")
    for count in (0, -1, 10**9, 10**30, 5):
        add(f"num_context {count}", lambda place: film(place.inputs / "film.mp4"), "refuse", num_context=count)
    return made


def _boxed(data: bytes, box: bytes, offset: int, value: bytes) -> bytes:
    """Overwrite bytes of an MP4's box, counted from the end of its name."""
    at = data.index(box) + 4 + offset
    return data[:at] + value + data[at + len(value) :]


def _noisy(data: bytes, seed: int) -> bytes:
    rng, noisy = random.Random(seed), bytearray(data)
    for _ in range(8):
        noisy[rng.randrange(len(noisy))] = rng.randrange(256)
    return bytes(noisy)


def _boxes(depth: int) -> bytes:
    return b"\0\0\0\x10ftypisom\0\0\0\0" + b"".join(struct.pack(">I4s", 8 * (depth - i), b"moov") for i in range(depth))
