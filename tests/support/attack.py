"""Tries each case of the corpus with the real commands, each in a process of its own, and judges what happened.

    PYTHONPATH=tests/support:. python tests/support/attack.py --json table.json [--sample 60] [--only REGEX] [--seed 0]

A case is right if the command ends with 0, or with 2 and one line on stderr (warnings apart), a refusal takes at most
20 s and 2 GB, and nothing is left behind. The modules are imported once; each case is forked from there.
"""

import argparse
import atexit
import collections
import contextlib
import json
import multiprocessing
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

from corpus import FRAMES, Case, Place, corpus, make_common

REFUSAL_SECONDS = 20.0
ACCEPTED_SECONDS = 45.0
MOST_BYTES = 2 * 10**9
KILL_BYTES = 35 * 10**8
FORBIDDEN = frozenset({"os.system", "socket.connect", "socket.getaddrinfo", "pickle.find_class"})
"""Audit events that no input may cause."""

WARNING = re.compile(r"(warning|engine): ", re.IGNORECASE)


@dataclass
class Outcome:
    """What happened in one case; `problems` is empty if all is well."""

    group: str
    name: str
    code: int | None
    seconds: float
    bytes: int
    lines: list[str]
    traceback: bool
    problems: list[str] = field(default_factory=list)


def settings_of(case: Case, place: Place, given: "dict[str, object] | list[str]") -> list[str]:
    """The command's arguments: settings that work, with the case's own instead."""
    settings: dict[str, object] = {
        "tokenizer.pretrained": place.common / "tokenizer",
        "world_model.pretrained": place.common / "world_model",
        "engine": "persistence",
        "num_frames": FRAMES,
        "output": "out",
    }
    if case.command == "generate":
        settings |= {"context": place.common / "context", "trajectory": place.common / "drive.json"}
    else:
        settings |= {"manifest": place.common / "manifest.jsonl", "retry_seconds": 0.01, "at_once": 2}
    for name in case.remove:
        del settings[name]
    if isinstance(given, dict):
        settings |= given
        return [f"{key}={value}" for key, value in settings.items()]
    for argument in given:
        settings.pop(argument.partition("=")[0], None) if len(given) < 3 else None
    flags = any(argument.startswith("-") and "config-dir" not in argument for argument in given)
    return [*([] if flags else [f"{key}={value}" for key, value in settings.items()]), *given]


def run(case: Case, place: Place, folder: Path, forbidden: int) -> None:
    """Make the case's command the work of this process, which is the child, and end it."""
    os.setsid()
    for name, descriptor in (("stdout", 1), ("stderr", 2)):
        os.dup2(os.open(folder / name, os.O_WRONLY | os.O_CREAT), descriptor)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    sys.stdin = os.fdopen(0)
    sys.stdout = os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", errors="backslashreplace", closefd=False)
    code = 1
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (4 << 30, 4 << 30))
        os.chdir(place.work)
        arguments = json.loads((folder / "arguments").read_text())
        sys.argv = ["terra", case.command, *(os.fsdecode(bytes.fromhex(each)) for each in arguments)]
        sys.addaudithook(lambda event, _: os.write(forbidden, f"{event}\n".encode()) if event in FORBIDDEN else None)
        from terra.cli import main

        main()
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else 0 if error.code is None else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(BaseException):
            threading._shutdown()  # pyright: ignore[reportAttributeAccessIssue]
            atexit._run_exitfuncs()
        with contextlib.suppress(BaseException):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def session_bytes(session: int) -> tuple[int, list[int]]:
    """The resident bytes of a session's processes, and their ids.

    A process that was forked and has not begun its own program shares its pages with its parent, and counts as nothing.
    """
    total, members = 0, []
    own = Path(f"/proc/{session}/cmdline").read_bytes() if Path(f"/proc/{session}").exists() else b""
    for entry in (path.name for path in Path("/proc").iterdir()):
        if entry.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError):
                fields = Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == session and fields[0] != "Z":
                    members.append(int(entry))
                    if int(entry) == session or Path(f"/proc/{entry}/cmdline").read_bytes() != own:
                        total += int(fields[21]) * resource.getpagesize()
    return total, members


def snapshot(*folders: Path) -> dict[str, tuple[int, int, int]]:
    """Kind, size and time of everything below some folders; links are not followed."""
    found = {}
    for folder in folders:
        for root, directories, files in os.walk(os.fsencode(folder)):
            for name in (*directories, *files):
                path = os.path.join(root, name)  # noqa: PTH118
                with contextlib.suppress(FileNotFoundError):
                    status = os.lstat(path)
                    is_folder = name in directories
                    found[os.fsdecode(path)] = (
                        status.st_mode,
                        0 if is_folder else status.st_size,
                        0 if is_folder else status.st_mtime_ns,
                    )
    return found


def attack(case: Case, common: Path, root: Path) -> Outcome:
    """Make a case's files, run its command, judge."""
    folder = Path(tempfile.mkdtemp(dir=root))
    place = Place(folder / "inputs", folder / "work", folder / "common")
    for path in (place.inputs, place.work, folder / "tmp", folder / "home"):
        path.mkdir()
    (folder / "home/letter.txt").write_text("mine")
    shutil.copytree(common, place.common)
    os.environ |= {"HOME": str(folder / "home"), "TMPDIR": str(folder / "tmp"), "TERRA_HOSTILE": "out"}
    tempfile.tempdir = None
    try:
        maker = os.fork()
        if maker == 0:
            made = 1
            try:
                arguments = settings_of(case, place, case.make(place))
                encoded = [each.encode("utf-8", "surrogateescape").hex() for each in arguments]
                (folder / "arguments").write_text(json.dumps(encoded))
                made = 0
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(made)
        if os.waitpid(maker, 0)[1]:
            return Outcome(case.group, case.name, None, 0, 0, [], False, ["the case could not be made"])
        before = snapshot(place.inputs, place.work, place.common, folder / "tmp", folder / "home")
        reading, writing = os.pipe()
        started = time.monotonic()
        child = os.fork()
        if child == 0:
            run(case, place, folder, writing)
        os.close(writing)
        outcome = watch(case, child, started)
        with os.fdopen(reading) as pipe:
            events = sorted(set(pipe.read().split()))
        judge(case, outcome, folder, place, before, events)
        return outcome
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def watch(case: Case, child: int, started: float) -> Outcome:
    """Wait for the child's end; end it when it takes too long or too much."""
    most, status, limit = 0, None, ""
    while True:
        done, status, usage = os.wait4(child, os.WNOHANG)
        seconds = time.monotonic() - started
        total, members = session_bytes(child)
        most = max(most, total)
        if done:
            most = max(most, usage.ru_maxrss * 1024)
            break
        if seconds > ACCEPTED_SECONDS or total > KILL_BYTES:
            limit = f"no end after {seconds:.0f} s" if seconds > ACCEPTED_SECONDS else f"ended at {total / 1e9:.1f} GB"
            for member in members:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(member, signal.SIGKILL)
            os.waitpid(child, 0)
            break
        time.sleep(0.02)
    code = None if limit else os.waitstatus_to_exitcode(status)
    outcome = Outcome(case.group, case.name, code, seconds, most, [], False, [limit] if limit else [])
    _, members = session_bytes(child)
    if members and not limit:
        outcome.problems.append(f"{len(members)} processes left")
        for member in members:
            with contextlib.suppress(ProcessLookupError):
                os.kill(member, signal.SIGKILL)
    return outcome


def judge(case: Case, outcome: Outcome, folder: Path, place: Place, before: dict[str, Any], events: list[str]) -> None:
    """Add what is wrong with an outcome."""
    problems = outcome.problems
    stderr = (folder / "stderr").read_text(errors="replace") if (folder / "stderr").exists() else ""
    stdout = (folder / "stdout").read_text(errors="replace") if (folder / "stdout").exists() else ""
    all_lines = [line for line in stderr.split("\n") if line.strip()]
    outcome.lines = [line[:300] for line in all_lines[-3:]]
    outcome.traceback = "Traceback (most recent call last)" in stderr or "Traceback (most recent call last)" in stdout
    good = (0, 2, 3) if case.command == "rollout" else (0, 2)
    if outcome.traceback:
        problems.append("traceback")
    if outcome.code is not None and outcome.code not in good:
        problems.append(f"exit code {outcome.code}")
    if outcome.code == 2:
        told = [line for line in all_lines if not WARNING.match(line)]
        if len(told) != 1:
            problems.append(f"{len(told)} lines")
        elif len(told[0]) > 2_000:
            problems.append(f"a line of {len(told[0])} characters")
        elif any(ord(character) < 32 for character in told[0].rstrip("\r")):
            problems.append("control characters")
        if outcome.seconds > REFUSAL_SECONDS:
            problems.append(f"refused after {outcome.seconds:.0f} s")
    if outcome.code == 0 and case.must == "refuse":
        problems.append("accepted")
    if outcome.code not in (0, None) and case.must == "accept":
        problems.append("refused")
    if outcome.bytes > MOST_BYTES:
        problems.append(f"{outcome.bytes / 1e9:.1f} GB")
    after = snapshot(place.inputs, place.work, place.common, folder / "tmp", folder / "home")
    # A rollout's folder may stay where some of its lines are done; a refused command leaves none.
    made_something = outcome.code in (0, 3)
    names = case.outputs if made_something else {"multirun"} & {*case.outputs}  # a sweep's own folder
    allowed = [str(place.work / name) for name in names]
    left = [path for path in after.keys() - before.keys() if not _is_allowed(path, allowed)]
    # A file that grows while its case runs is no fault of the command's.
    growing = (f"{place.inputs}/m", f"{place.inputs}/d.json")
    changed = [path for path in before if after.get(path) != before[path] and path not in growing]
    if left:
        problems.append(f"left {len(left)}: {_below(folder, min(left))}")
    if changed:
        problems.append(f"changed {len(changed)}: {_below(folder, min(changed))}")
    problems += [f"event {event}" for event in events]


def _is_allowed(path: str, allowed: Sequence[str]) -> bool:
    return any(path == name or path.startswith(f"{name}/") or name.endswith("*") for name in allowed)


def _below(folder: Path, path: str) -> str:
    return path.removeprefix(f"{folder}/").encode("utf-8", "replace").decode()


def attack_all(cases: Sequence[Case], jobs: int = 2, *, progress: bool = False) -> list[Outcome]:
    """Try cases, some at a time; their outcomes in the cases' order."""
    import_all()
    root = Path(tempfile.mkdtemp(prefix="terra-hostile-"))
    try:
        common = root / "common"
        maker = os.fork()  # transformers starts threads when it saves
        if maker == 0:
            made = 1
            try:
                make_common(common)
                made = 0
            finally:
                os._exit(made)
        assert os.waitpid(maker, 0)[1] == 0
        outcomes = {}
        context = multiprocessing.get_context("fork")
        with context.Pool(jobs, _worker, (cases, common, root)) as pool:
            for number, outcome in pool.imap_unordered(_attack_number, range(len(cases))):
                outcomes[number] = outcome
                if progress and outcome.problems:
                    place, problems = f"{len(outcomes)} of {len(cases)}", "; ".join(outcome.problems)
                    print(f"{place}: {outcome.group}/{outcome.name[:60]!r}: {problems}", flush=True)
        return [outcomes[number] for number in range(len(cases))]
    finally:
        shutil.rmtree(root, ignore_errors=True)


_SHARED: list[Any] = []


def _worker(*shared: Any) -> None:
    _SHARED[:] = shared


def _attack_number(number: int) -> tuple[int, Outcome]:
    cases, common, root = _SHARED
    return number, attack(cases[number], common, root)


def import_all() -> None:
    """Import what the commands import, so that a forked child has it."""
    import hydra  # noqa: F401
    import imageio.v3  # noqa: F401
    import torch

    import terra.engine.hf
    import terra.engine.jacobi
    import terra.engine.persistence
    import terra.generate
    import terra.rollouts.batch  # noqa: F401

    torch.set_num_threads(1)


PATTERNS = {
    "traceback": "^traceback",
    "no end, > 2 GB or > 20 s": "^no end|^ended at|GB$|^refused after",
    "accepted": "^accepted",
    "left or changed": "^left|^changed",
}


def table(outcomes: Sequence[Outcome]) -> str:
    """Counts by class, as lines of Markdown."""
    heads = ["class", "cases", "right", "exit 0", "exit 2", *PATTERNS, "longest refusal s", "most GB"]
    rows = ["| " + " | ".join(heads) + " |", "|---|" + "--:|" * (len(heads) - 1)]
    groups: dict[str, list[Outcome]] = collections.defaultdict(list)
    for outcome in outcomes:
        groups[outcome.group].append(outcome)
    for name, members in (*groups.items(), ("**all**", list(outcomes))):
        cells: list[object] = [name, len(members), sum(not one.problems for one in members)]
        cells += [sum(one.code == code for one in members) for code in (0, 2)]
        for pattern in PATTERNS.values():
            cells.append(sum(any(re.search(pattern, each) for each in one.problems) for one in members))
        cells.append(f"{max((one.seconds for one in members if one.code == 2), default=0):.1f}")
        cells.append(f"{max((one.bytes for one in members), default=0) / 1e9:.1f}")
        rows.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(rows)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--sample", type=int)
    parser.add_argument("--only")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    cases = corpus(options.seed)
    if options.only:
        cases = [case for case in cases if re.search(options.only, case.title)]
    if options.sample:
        cases = random.Random(options.seed).sample(cases, options.sample)
    outcomes = attack_all(cases, options.jobs, progress=True)
    print(table(outcomes))
    if options.json:
        options.json.write_text(json.dumps([asdict(each) for each in outcomes], indent=1))
    sys.exit(any(each.problems for each in outcomes))


if __name__ == "__main__":
    main()
