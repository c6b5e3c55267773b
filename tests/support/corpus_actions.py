"""Hostile files of actions, and hostile action spaces beside weights."""

import io
import json
import math
import random
from pathlib import Path
from typing import Any

import numpy as np
from corpus import Case, Place

SPACES: dict[str, dict[str, Any]] = {
    "keys": {"kind": "keys", "names": ["forward", "left", "fire"]},
    "vector": {"kind": "vector", "names": ["joint", "grip"], "units": ["rad", ""], "low": [-2, 0], "high": [2, 1]},
    "choice": {"kind": "choice", "names": ["noop", "jump", "duck"]},
}
COLUMNS = {"keys": 3, "vector": 2, "choice": 3}
GOOD: dict[str, Any] = {"keys": ["forward"], "vector": {"joint": 0.5, "grip": 1}, "choice": "jump"}


def cases(rng: random.Random) -> list[Case]:
    return [*json_cases(rng), *csv_cases(rng), *npz_cases(), *space_cases()]


def document(kind: str, count: int = 20, **changes: Any) -> dict[str, Any]:
    """Actions that a world of this kind takes; `changes` replace keys, None removes one."""
    made = {"format": "terra-actions", "version": 1, "fps": 10, "actions": [GOOD[kind]] * count} | changes
    return {key: value for key, value in made.items() if value is not None}


def _actions(
    group: str, kind: str, name: str, content: Any, suffix: str = ".json", must: str | None = "refuse"
) -> Case:
    def make(place: Place) -> dict[str, object]:
        value = content(place) if callable(content) else content
        if not isinstance(value, Path):
            value = place.write(f"a{suffix}", value if isinstance(value, str | bytes) else json.dumps(value))
        return {"actions": value, "world_model.pretrained": place.common / f"world_{kind}"}

    return Case(group, f"{kind}: {name}", make, must=must, remove=("trajectory",))


def json_cases(rng: random.Random) -> list[Case]:
    made: list[Case] = []

    def add(kind: str, name: str, content: Any, must: str | None = "refuse") -> None:
        made.append(_actions("actions JSON", kind, name, content, must=must))

    wrong = {
        "null": "null", "true": "true", "text": '"ab"', "object": "{}", "huge": "1e400", "nan": "NaN", "minus": "-1",
        "long int": "9" * 6000, "nested": "[[[]]]", "surrogate": '"\\ud800"', "NUL": '"\\u0000"', "tiny": "5e-324",
    }  # fmt: skip
    for kind in SPACES:
        whole = json.dumps(document(kind))
        add(kind, "as it should be", whole, must="accept")
        for key in ("format", "version", "actions"):
            for word in sorted(rng.sample(sorted(wrong), 4)):
                text = json.dumps(document(kind, **{key: "@"})).replace('"@"', wrong[word])
                add(kind, f"{key}={word}", text)
        for word in sorted(wrong):
            text = json.dumps(document(kind, actions=[GOOD[kind], "@"] * 10)).replace('"@"', wrong[word])
            add(kind, f"an action={word}", text)
        for fps in (1e-300, 1e-6, 99.9, 1e6, 1e300):
            add(kind, f"fps {fps}", document(kind, fps=fps), must=None)
        add(kind, "fps and times", document(kind, times_s=list(range(20))))
        add(kind, "neither fps nor times", document(kind, fps=None))
        times = {"far": [0.0, 1e300], "back": [1.0, 0.0], "near": [0.0, 5e-324], "few": [0.0], "texts": ["0", "1"]}
        for name, value in times.items():
            must = None if name in ("far", "near") else "refuse"
            add(kind, f"times {name}", document(kind, 2, fps=None, times_s=value), must=must)
        add(kind, "one action", document(kind, 1), must=None)
        add(kind, "no actions", document(kind, 0))
        add(kind, "2,000,000 actions", lambda place, k=kind: document(k, 2_000_000), must=None)
        add(kind, "lists 100,000 deep", lambda place: '{"actions": ' + "[" * 100_000)
        add(kind, "unknown key", document(kind, extra=1))
        add(kind, "format twice", whole[:-1] + ', "format": "terra-actions"}')
        add(kind, "version 2", document(kind, version=2))
        add(kind, "half", whole[: len(whole) // 2])
        for other in SPACES:
            must = "accept" if other == kind else "refuse"
            add(kind, f"a file of {other}", document(other, space=SPACES[other]), must=must)
        add(kind, "space waypoints", document(kind, space={"kind": "waypoints"}))
        add(kind, "a trajectory", lambda place: (place.common / "drive.json").read_bytes())
    add("keys", "a key twice", document("keys", actions=[["left", "left"]] * 20))
    add("keys", "a million keys in one action", lambda place: document("keys", 1, actions=[["left"] * 1_000_000]))
    add("keys", "an unknown key", document("keys", actions=[["x" * 5_000_000]]))
    add("vector", "a number too many", document("vector", actions=[{"joint": 0, "grip": 0, "x": 0}] * 20))
    add("vector", "out of range", document("vector", actions=[{"joint": 2.1, "grip": 0}] * 20))
    add("vector", "control characters", document("vector", actions=[{"joint": 0, "\x1b[31m\n": 0}] * 20))
    add("choice", "a number", document("choice", actions=[1] * 20))
    return made


def csv_cases(rng: random.Random) -> list[Case]:
    made: list[Case] = []

    def add(kind: str, name: str, content: Any, must: str | None = "refuse") -> None:
        made.append(_actions("actions CSV", kind, name, content, suffix=".csv", must=must))

    heads = {"keys": "time_s,forward,left,fire", "vector": "time_s,joint,grip", "choice": "time_s,action"}
    cells = {"keys": "1,0,0", "vector": "0.5,1", "choice": "jump"}
    for kind, head in heads.items():
        lines = [head] + [f"{index / 10},{cells[kind]}" for index in range(20)]
        whole = "\n".join(lines) + "\n"
        add(kind, "as it should be", whole, must="accept")
        add(kind, "empty", b"")
        add(kind, "a header alone", head)
        add(kind, "no header", "\n".join(lines[1:]))
        add(kind, "semicolons", whole.replace(",", ";"))
        add(kind, "a column twice", whole.replace(head, head + "," + head.rpartition(",")[2]))
        add(kind, "256 columns more", whole.replace(head, head + "".join(f",c{index}" for index in range(256))))
        add(kind, "upper case", whole.replace(head, head.upper()))
        add(kind, "NULs", whole.encode() + b"\0" * 100)
        add(kind, "latin-1", whole.replace("time_s", "zeit_\xe4").encode("latin-1"))
        add(kind, "BOM", b"\xef\xbb\xbf" + whole.encode(), must=None)
        add(kind, "an open quote", whole.replace("0.5,", '0.5,"', 1))
        add(kind, "a line of 5 MB", head + "\n0," + "1" * 5_000_000)
        add(kind, "2,000,000 lines", lambda place, t=whole: _repeated(place, t, "\n# x", 2_000_000), must=None)
        add(kind, "300 MB of spaces", lambda place, t=whole: place.sparse("a.csv", 300 << 20, t.encode()), must=None)
        add(kind, "a form feed", whole.replace("\n", "\x0c"), must=None)
        for word in ("nan", "inf", "1e400", "", " ", "0x1", "1_0", "\u0661", "=1+1", "9" * 5000, "-1e-400", "true"):
            add(
                kind,
                f"cell {word[:12]!r}",
                whole.replace(f"0.7,{cells[kind]}", f"0.7,{word}" + "," * cells[kind].count(",")),
            )
            add(kind, f"time {word[:12]!r}", whole.replace(f"\n0.7,{cells[kind]}", f"\n{word},{cells[kind]}"))
        noise = list(whole.encode())
        for index in range(6):
            for _ in range(3):
                noise[rng.randrange(len(noise))] = rng.randrange(256)
            add(kind, f"noise {index}", bytes(noise), must=None)
    add("choice", "a formula", "time_s,action\n0,=cmd|' /C calc'!A0\n")
    add("vector", "out of range by a bit", "time_s,joint,grip\n0,2.0000001,0\n9,0,0\n")
    return made


def npz_cases() -> list[Case]:
    made: list[Case] = []

    def add(kind: str, name: str, must: str | None = "refuse", **arrays: Any) -> None:
        buffer = io.BytesIO()
        np.savez_compressed(buffer, **arrays)
        made.append(_actions("actions NPZ", kind, name, buffer.getvalue(), suffix=".npz", must=must))

    times = np.arange(20) / 10
    ones = np.ones(20)
    add("vector", "as it should be", "accept", time_s=times, joint=ones, grip=ones)
    add("vector", "without a column", time_s=times, joint=ones)
    add("vector", "a column more", time_s=times, joint=ones, grip=ones, x=ones)
    add("vector", "lengths", time_s=times, joint=ones, grip=ones[:5])
    add("vector", "2-D", time_s=times, joint=np.ones((20, 2)), grip=ones)
    add("vector", "0-D", time_s=np.float64(0), joint=np.float64(0), grip=np.float64(0))
    add("vector", "none", time_s=times[:0], joint=ones[:0], grip=ones[:0])
    add("vector", "complex", time_s=times, joint=ones * 1j, grip=ones)
    add("vector", "texts", time_s=times, joint=np.array(["1"] * 20), grip=ones)
    add("vector", "long texts", time_s=times, joint=np.array(["1" * 100_000] * 20), grip=ones)
    add("vector", "NaN", time_s=times, joint=ones * math.nan, grip=ones)
    add("vector", "times back", time_s=times[::-1], joint=ones, grip=ones)
    add("vector", "times infinite", time_s=times + math.inf, joint=ones, grip=ones)
    add("vector", "durations", time_s=times.astype("timedelta64[s]"), joint=ones, grip=ones)
    add("vector", "objects", time_s=times, joint=np.array([{}] * 20, dtype=object), grip=ones)
    add("vector", "many", time_s=np.arange(3_000_000.0), joint=np.ones(3_000_000), grip=np.ones(3_000_000))
    add("vector", "bombs", time_s=np.zeros(40_000_000), joint=np.zeros(40_000_000), grip=np.zeros(40_000_000))
    add("keys", "bytes", "accept", time_s=times, forward=np.ones(20, bool), left=np.zeros(20, np.int8), fire=ones)
    add("keys", "2", time_s=times, forward=ones * 2, left=ones, fire=ones)
    add("choice", "names", "accept", time_s=times, action=np.array(["duck"] * 20))
    add("choice", "an unknown name", time_s=times, action=np.array(["hop"] * 20))
    add("choice", "numbers", time_s=times, action=ones)
    add("choice", "bytes", time_s=times, action=np.array([b"duck"] * 20))
    add("choice", "long names", time_s=times, action=np.array(["n" * 500_000] * 20))
    return made


def space_cases() -> list[Case]:
    """An action space in a world model's config.json, and actions that are as they should be."""
    made: list[Case] = []

    def add(name: str, space: Any, must: str | None = "refuse") -> None:
        def make(place: Place) -> dict[str, object]:
            path = place.common / "world_keys/config.json"
            config = json.loads(path.read_text())
            text = space if isinstance(space, str) else json.dumps(space)
            path.write_text(json.dumps(config | {"action_space": "@"}).replace('"@"', text))
            actions = place.write("a.json", json.dumps(document("keys")))
            return {"actions": actions, "world_model.pretrained": path.parent}

        made.append(Case("action space", name, make, must=must, remove=("trajectory",)))

    keys = SPACES["keys"]
    add("as it should be", keys, must="accept")
    for name, value in {
        "null": "null", "text": '"keys"', "list": "[]", "number": "7", "empty": "{}", "NaN": "NaN",
        "deep": '{"kind": ' + "[" * 5_000 + "]" * 5_000 + "}",
    }.items():  # fmt: skip
        add(name, value)
    for name, changes in {
        "kind unknown": {"kind": "__import__"}, "kind list": {"kind": []}, "no names": {"names": []},
        "names text": {"names": "abc"}, "names twice": {"names": ["a", "a", "b"]}, "names null": {"names": None},
        "a name of a path": {"names": ["../a", "b", "c"]}, "a name with a comma": {"names": ["a,b", "b", "c"]},
        "a long name": {"names": ["a" * 1_000_000, "b", "c"]}, "a name with an escape": {"names": ["\x1b[31m", "b", "c"]},
        "257 names": {"names": [f"k{index}" for index in range(257)]},
        "a million names": {"names": [f"k{index}" for index in range(1_000_000)]},
        "another count": {"names": ["a", "b"]}, "other names": {"names": ["a", "b", "c"]}, "unknown key": {"x": 1},
    }.items():  # fmt: skip
        add(name, keys | changes)
    vector = SPACES["vector"]
    for name, changes in {
        "low above high": {"low": [3, 0]}, "low NaN": {"low": [math.nan, 0]}, "high infinite": {"high": [math.inf, 1]},
        "high text": {"high": "2"}, "units short": {"units": ["rad"]}, "units long": {"units": ["r" * 100_000, ""]},
        "low huge": {"low": [-1e308, 0], "high": [1e308, 1]}, "another shape": {},
    }.items():  # fmt: skip
        add(f"vector {name}", vector | changes)
    add("choice for keys", SPACES["choice"])
    add("waypoints", {"kind": "waypoints", "times": [0.5, 1.0]})
    add("waypoints back", {"kind": "waypoints", "times": [1.0, 0.5]})
    return made


def _repeated(place: Place, text: str, line: str, count: int) -> Path:
    return place.write("a.csv", text + line * count)
