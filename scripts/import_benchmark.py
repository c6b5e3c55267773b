"""Times an import beside ffmpeg alone, which decodes, crops, scales and encodes the same frames with the same settings.

    python scripts/import_benchmark.py data/g1 --episodes 24 --rounds 3

The folder is a LeRobot dataset of version 2, which has a video for each episode. `terra import` runs with
`--workers` processes. ffmpeg runs once for each episode, in as many processes at a time as there are workers, each with
one thread to decode and one to encode, as Terra's own: where there are as many cores, this is the fastest way. It runs
once with the scaling and the colors that Terra has, once with ffmpeg's quick scaling and the source's own colors. All
are measured in each round, one after the other. Where other processes use the cores, too, processor seconds tell more
than seconds. The memory is the most that all of Terra's processes have together, each page that they share counted
once. Linux only.
"""

import argparse
import ctypes
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

from rich.console import Console
from rich.table import Table

from decoder.ffmpeg import ffmpeg_program
from decoder.video import probe_video
from terra.dataset.importing import LeRobotActions, LeRobotSource
from terra.dataset.importing.fitting import crop_box
from terra.dataset.writing import CRF
from terra.tables import print_table

Spent = tuple[float, float]
"""Seconds, and those of processors."""

_CHILD_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of prctl(2)


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--episodes", type=int, help="the first of the dataset; all by default")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--size", type=int, nargs=2, default=(144, 256), metavar=("HEIGHT", "WIDTH"))
    arguments = parser.parse_args()
    source = LeRobotSource(arguments.folder, LeRobotActions())
    names = source.list_drives()[: arguments.episodes]
    videos = [next(arguments.folder.glob(f"videos/*/*/{name}.mp4")) for name in names]
    facts = [probe_video(video) for video in videos]
    fps, frames = round(facts[0].fps), sum(each.num_frames for each in facts)
    crops = scale_filters((facts[0].height, facts[0].width), tuple(arguments.size))
    spent: dict[str, list[Spent]] = {name: [] for name in ("terra import", *crops)}
    # Processes whose parent has ended become children of this one, so that their time is counted.
    ctypes.CDLL(None).prctl(_CHILD_SUBREAPER, 1, 0, 0, 0)
    most = 0.0
    for _ in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as folder:
            for name, crop in crops.items():
                with measured(spent[name]):
                    run_ffmpeg(videos, Path(folder), crop, arguments.workers)
            with measured(spent["terra import"]):
                most = max(most, run_terra(arguments, names, fps, Path(folder) / "dataset"))
    table = Table("", "s", "processor s", "frames/s", "terra import / this: s", "processor s")
    for name, each in spent.items():
        ratios = [
            [ours[kind] / theirs[kind] for ours, theirs in zip(spent["terra import"], each, strict=True)]
            for kind in (0, 1)
        ]
        seconds, processor = (statistics.median(one[kind] for one in each) for kind in (0, 1))
        spreads = [f"{statistics.median(one):.2f} ({min(one):.2f} to {max(one):.2f})" for one in ratios]
        table.add_row(name, f"{seconds:.1f}", f"{processor:.1f}", f"{frames / seconds:.0f}", *spreads)
    print_table(Console(), table)
    print(f"{frames} frames of {len(names)} episodes, {arguments.rounds} rounds, memory of terra import: {most:.0f} MB")


@contextmanager
def measured(spent: list[Spent]) -> Iterator[None]:
    """Add the seconds that the block takes, and those of processors in all processes that it starts."""
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    yield
    seconds = time.perf_counter() - start
    with suppress(ChildProcessError):
        while True:
            os.waitpid(-1, 0)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    spent.append((seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime))


def scale_filters(picture_size: tuple[int, int], size: tuple[int, int]) -> dict[str, str]:
    """ffmpeg's filters for the crop and the size that the import gives pictures: as Terra scales, and quick."""
    left, top, right, bottom = map(round, crop_box(picture_size, size, None))
    scale = f"crop={right - left}:{bottom - top}:{left}:{top},scale={size[1]}:{size[0]}:flags=bicubic"
    same = f"{scale}+accurate_rnd+full_chroma_int+full_chroma_inp:out_color_matrix=bt709:out_range=tv"
    return {"ffmpeg alone": same, "ffmpeg alone, quick scaling": scale}


def run_ffmpeg(videos: list[Path], folder: Path, scale: str, processes: int) -> None:
    """Let ffmpeg convert all videos."""

    def convert(video: Path) -> None:
        encoder = ("-c:v", "libx264", "-pix_fmt", "yuv420p", "-crf", str(CRF), "-preset", "medium", "-threads", "1")
        command = [ffmpeg_program(), "-v", "error", "-nostdin", "-filter_threads", "1", "-threads", "1", "-i", video]
        subprocess.run([*command, "-vf", scale, *encoder, "-an", "-y", folder / video.name], check=True)

    with ThreadPoolExecutor(processes) as pool:
        list(pool.map(convert, videos))


def run_terra(arguments: argparse.Namespace, names: tuple[str, ...], fps: int, output: Path) -> float:
    """Import the episodes; returns the most megabytes of memory."""
    given = {
        "kind": "lerobot",
        "lerobot": "actions",
        "input": arguments.folder,
        "output": output,
        "fps": fps,
        "image_size": f"[{arguments.size[0]},{arguments.size[1]}]",
        "drives": f"[{','.join(names)}]",
        "workers": arguments.workers,
    }
    command = [sys.executable, "-m", "terra", "import", *(f"{name}={value}" for name, value in given.items())]
    most = 0.0
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        while process.poll() is None:
            most = max(most, memory_of(process.pid))
            time.sleep(0.2)
    if process.returncode:
        raise SystemExit(f"terra import ended with {process.returncode}")
    return most


def memory_of(process: int) -> float:
    """Megabytes of a process and of those that it started (Linux): the proportional set sizes."""
    total, waiting = 0.0, [process]
    while waiting:
        each = waiting.pop()
        try:
            folder = Path("/proc") / str(each)
            lines = (folder / "smaps_rollup").read_text().splitlines()
            total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 1000
            waiting += [
                int(child) for task in (folder / "task").iterdir() for child in (task / "children").read_text().split()
            ]
        except OSError:  # it ended
            continue
    return total


if __name__ == "__main__":
    main()
