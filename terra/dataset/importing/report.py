"""What `terra inspect` says of a source: short aligned lines, and the command that imports it."""

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from terra.actions import ActionSpace, Choice, Keys, Vector
from terra.dataset.importing.outlook import Outlook
from terra.dataset.importing.proposal import command_line, propose_held_out, propose_size
from terra.dataset.importing.recognize.found import Camera, Found, counted, some
from terra.dataset.importing.settings import UNSET, SourceSettings
from terra.dataset.importing.survey import Survey, Timing, spans
from tokenizer.settings import Settings

_LABEL = 10  # characters
_SHOWN_NUMBERS = 12
_GAP = 2.5  # periods between two frames
_MOVED = 0.0005  # s
_LEAST_TUB = 200  # records of a lone tub that is worth cutting
_SECTIONS = 10
_Line = tuple[str, str]


def describe(seen: Survey, outlook: Outlook, sizes: Sequence[tuple[int, int]], found: Found | None) -> list[str]:
    """The lines on a source: what was found, cameras, drives, rates, gaps, actions, and what an import keeps.

    Args:
        seen: the look at its drives.
        outlook: what an import would keep.
        sizes: (height, width) of the pictures that were read.
        found: what the folder was recognized as; None leaves this out.
    """
    lines: list[_Line] = []
    if found is not None:
        lines = [("found", f"{found.title} (kind={found.kind})"), ("in", str(found.folder)), *found.facts]
    cameras = found.cameras if found is not None and found.cameras else (Camera("", None),)
    lines += _cameras(cameras, sizes)
    lines += _drives(seen)
    if seen.recordings:
        stated = [f"{name} ({counted(len(drives), 'drive')})" for name, drives in seen.recordings.items()]
        lines.append(("recordings", f"held_out= takes these as a whole, too: {some(stated, 3)}"))
    lines += [("rate", _rates(seen.timings)), ("gaps", _gaps(seen))]
    lines += [("clock", line) for line in dict.fromkeys(drive.clock for drive in seen.drives if drive.clock)]
    lines += _breaks(seen)
    lines += _actions(seen)
    lines += _kept(outlook)
    return aligned(lines)


def aligned(lines: Sequence[tuple[str, str]]) -> list[str]:
    """Lines of text behind their labels, of which the same one is said once."""
    labels = [label for label, _ in lines]
    return [
        f"{'' if at and labels[at - 1] == label else label:{_LABEL}} {text}".rstrip()
        for at, (label, text) in enumerate(lines)
    ]


def import_command(
    found: Found,
    settings: SourceSettings,
    seen: Survey,
    fps: float,
    sizes: Sequence[tuple[int, int]],
) -> str:
    """The command that imports a source, ready to be copied, after lines of comments on what else could be chosen."""
    comments = list(found.comments)
    arguments: dict[str, Any] = {"kind": found.kind, **_given(found, settings)}
    arguments |= {"input": found.folder, "output": Path("data") / _output_name(found.folder)}
    size = Counter(sizes).most_common(1)[0][0] if sizes else None
    arguments["fps"] = fps
    if size is not None:
        arguments["image_size"] = list(propose_size(size, _num_cameras(settings)))
    held_out = propose_held_out(seen.names, seen.recordings, found.held_out)
    if found.kind == "donkeycar" and len(seen.names) == 1 and seen.timings[0].num_frames >= _LEAST_TUB:
        arguments["sections"] = _SECTIONS
        held_out = [f"{seen.names[0]}_{_SECTIONS - 1:02d}"]
        comments.append("sections: one tub is cut into ten drives, so that the last one can be held out")
    elif not held_out:
        comments.append("held_out: there is one drive alone, so nothing is held out to measure with")
    if held_out:
        arguments["held_out"] = held_out
    return "\n".join(["to import it:", *(f"# {line}" for line in comments), command_line(arguments)])


def _given(found: Found, settings: SourceSettings) -> dict[str, Any]:
    """What a source was opened with, as the command line has it."""
    given = {name: getattr(settings, name) for name in SourceSettings.model_fields}
    given = {name: value for name, value in given.items() if value != getattr(UNSET, name)}
    columns = given.pop("lerobot", None)
    if columns is not None and columns == found.settings.get("lerobot"):
        given = {**found.arguments, **given}
    elif columns is not None and found.kind == "lerobot":
        base = "actions" if "action" in columns else "state"
        given = {"lerobot": base, **{f"lerobot.{name}": value for name, value in columns.items()}, **given}
    arguments: dict[str, Any] = {}
    for name, value in given.items():
        if isinstance(value, Settings):
            unset = type(value)()
            parts = {part: getattr(value, part) for part in type(value).model_fields}
            arguments |= {f"{name}.{part}": each for part, each in parts.items() if each != getattr(unset, part)}
        else:
            arguments[name] = value
    return arguments


def _num_cameras(settings: SourceSettings) -> int:
    """How many cameras share a picture."""
    video = (settings.lerobot or {}).get("video")
    return len(settings.views or (video if isinstance(video, list | tuple) else [video]))


def _output_name(folder: Path) -> str:
    return re.sub(r"[^\w.-]+", "_", folder.resolve().name).strip("_") or "recordings"


def _cameras(cameras: Sequence[Camera], sizes: Sequence[tuple[int, int]]) -> list[_Line]:
    read = Counter(sizes)
    shown = ", ".join(
        f"{width} x {height}" + (f" ({count} of {len(sizes)} drives)" if len(read) > 1 else "")
        for (height, width), count in read.most_common(3)
    )
    lines = []
    main = next((camera for camera in cameras if camera.is_taken), None)
    for camera in cameras:
        size = shown if camera is main and shown else f"{camera.size[1]} x {camera.size[0]}" if camera.size else ""
        words = [camera.name, size, camera.note, "not taken" if not camera.is_taken else ""]
        lines.append(
            ("camera" if len(cameras) == 1 else "cameras", ", ".join(word for word in words if word) or "unread")
        )
    return lines


def _drives(seen: Survey) -> list[_Line]:
    frames = [timing.num_frames for timing in seen.timings]
    seconds = sum(timing.seconds for timing in seen.timings)
    hours = f"{seconds / 3600:.2f} h" if seconds >= 360 else f"{seconds:.1f} s"
    each = f", {min(frames):,} to {max(frames):,} each" if min(frames) < max(frames) else ""
    words = f"{counted(sum(frames), 'frame')}, {hours}{each}"
    total, readable = len(seen.names), f"{len(seen.drives):,} of {counted(seen.num_tried, 'drive')} can be read"
    if seen.num_tried < total:
        words += f" in {seen.num_tried:,} of them, evenly spread: there was no more time (max_seconds=)"
        words = f"{readable}; {words}" if seen.problems else words
    first = readable if seen.problems and seen.num_tried == total else counted(total, "drive")
    return [("drives", f"{first}: {some(seen.names, 3)}"), ("drives", words)]


def _rates(timings: Sequence[Timing]) -> str:
    timed = [timing for timing in timings if timing.rate > 0]
    if not timed:
        return "unknown: no drive has two frames"
    means = [timing.mean_rate for timing in timed]
    low, high = min(means), max(means)
    text = f"{_short(low)} frames a second in the mean" if high - low < 0.01 * high else ""
    text = text or f"{_short(low)} to {_short(high)} frames a second in the mean of a drive"
    variable = sum(timing.is_variable for timing in timed)
    return f"{text}, {f'variable in {variable} of {len(timed)} drives' if variable else 'even'}"


def _gaps(seen: Survey) -> str:
    found = []
    for drive, timing in zip(seen.drives, seen.timings, strict=True):
        steps = np.diff(drive.frame_times)
        steps = np.delete(steps, [each.frame - 1 for each in drive.breaks if 0 < each.frame <= len(steps)])
        if timing.rate > 0 and (wide := steps[steps > _GAP / timing.rate]).size:
            found.append((drive.name, len(wide), float(wide.max())))
    if not found:
        return "none"
    name, _, longest = max(found, key=lambda each: each[2])
    count = sum(each[1] for each in found)
    return f"{count:,} in {counted(len(found), 'drive')}, the longest {longest:.2f} s in {name}"


def _breaks(seen: Survey) -> list[_Line]:
    breaks = Counter(each.reason for drive in seen.drives for each in drive.breaks)
    return [("breaks", f"{count:,} by {reason}") for reason, count in breaks.items()]


def _actions(seen: Survey) -> list[_Line]:
    played = [track for _, track in seen.played]
    if not played:
        return [("actions", "the path of a vehicle: poses")] if seen.driven else []
    space: ActionSpace = played[0].space
    low, high = spans([track.values for track in played])
    if isinstance(space, Vector):
        rows = [
            (name, f"{least:.3g} to {most:.3g}{f' {unit}' if unit else ''}")
            for name, unit, least, most in zip(space.names, space.units, low, high, strict=True)
        ]
        head = [("actions", f"{counted(len(rows), 'number')} ({_units(space)})")]
        width = max(len(name) for name, _ in rows[:_SHOWN_NUMBERS])
        lines = [("actions", f"  {name:{width}}  {text}") for name, text in rows[:_SHOWN_NUMBERS]]
        more = len(rows) - _SHOWN_NUMBERS
        return [*head, *lines, *([("actions", f"  and {more} more")] if more > 0 else [])]
    values = np.concatenate([track.values for track in played])
    shares = space.rows(values)[:, 0].mean(axis=0)
    what = {Keys: "keys, and how often each is pressed", Choice: "choices, and how often each is made"}[type(space)]
    text = some([f"{name} {share:.0%}" for name, share in zip(space.names, shares, strict=True)], _SHOWN_NUMBERS)
    return [("actions", f"{len(space.names)} {what}: {text}")]


def _units(space: Vector) -> str:
    units = list(dict.fromkeys(unit for unit in space.units if unit))
    return f"units: {some(units)}" if units else "no units are told"


def _kept(outlook: Outlook) -> list[_Line]:
    lines = []
    if (losses := outlook.losses) is not None:
        kept = f"{losses.kept:,} of {counted(losses.read, 'frame')} of {counted(outlook.num_drives, 'drive')}"
        lines.append(f"at {outlook.fps:g} frames a second keeps {kept}: {losses.seconds:.1f} s")
        if losses.parts > outlook.num_drives:
            lines.append(f"cuts these into {losses.parts:,} stretches without interruption")
        if losses.gaps:
            lines.append(f"cuts out {counted(losses.gaps, 'gap')}, the longest of {losses.longest_gap:.2f} s")
        if losses.repeated:
            lines.append(f"shows {counted(losses.repeated, 'frame')} twice")
        if losses.moved_seconds >= _MOVED:
            lines.append(f"moves frames by at most {1000 * losses.moved_seconds:.0f} ms")
        lines += [f"leaves out {count:,}: {reason}" for reason, count in losses.left_out.items()]
    if outlook.failed:
        lines.append(f"fails for {counted(len(outlook.failed), 'drive')}: see the doubts")
    return [("import", line) for line in lines]


def _short(rate: float) -> str:
    return f"{rate:.2f}".rstrip("0").rstrip(".")
