"""Times an import beside ffmpeg alone, which decodes, crops, scales and encodes the same frames with the same settings.

    python scripts/import_benchmark.py data/g1 --episodes 24 --rounds 3

The folder is a LeRobot dataset of version 2, which has a video for each episode. `terra import` runs with
`--workers` processes. ffmpeg runs once for each episode, in as many processes at a time as there are workers, each with
one thread to decode and one to encode, as Terra's own: where there are as many cores, this is the fastest way.
Both are measured in each round, one after the other. The memory is the most that all of Terra's processes have
together, each page that they share counted once.
"""

import argparse
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.table import Table

from decoder.ffmpeg import ffmpeg_program
from decoder.video import probe_video
from terra.dataset.importing import LeRobotActions, LeRobotSource
from terra.dataset.importing.alignment import crop_box
from terra.dataset.writing import CRF
from terra.tables import print_table


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
    scale = scale_filter((facts[0].height, facts[0].width), tuple(arguments.size))
    ours: list[tuple[float, float]] = []
    alone: list[float] = []
    for _ in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as folder:
            alone.append(run_ffmpeg(videos, Path(folder), scale, arguments.workers))
            ours.append(run_terra(arguments, names, fps, Path(folder) / "dataset"))
    print_rows(frames, ours, alone)


def print_rows(frames: int, ours: list[tuple[float, float]], alone: list[float]) -> None:
    """Print the medians, and the ratio of each round."""
    ratios = [seconds / base for (seconds, _), base in zip(ours, alone, strict=True)]
    table = Table("", "s", "frames/s", "memory (MB)", "times ffmpeg alone")
    terra_seconds = statistics.median(seconds for seconds, _ in ours)
    spread = f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"
    memory = f"{max(megabytes for _, megabytes in ours):.0f}"
    table.add_row("terra import", f"{terra_seconds:.1f}", f"{frames / terra_seconds:.0f}", memory, spread)
    base = statistics.median(alone)
    table.add_row("ffmpeg alone", f"{base:.1f}", f"{frames / base:.0f}", "", "1")
    print_table(Console(), table)


def scale_filter(picture_size: tuple[int, int], size: tuple[int, int]) -> str:
    """ffmpeg's filters for the crop and the size that the import gives pictures."""
    left, top, right, bottom = map(round, crop_box(picture_size, size, None))
    return f"crop={right - left}:{bottom - top}:{left}:{top},scale={size[1]}:{size[0]}:flags=bicubic"


def run_ffmpeg(videos: list[Path], folder: Path, scale: str, processes: int) -> float:
    """Seconds that ffmpeg takes for all videos."""

    def convert(video: Path) -> None:
        encoder = ("-c:v", "libx264", "-pix_fmt", "yuv420p", "-crf", str(CRF), "-preset", "medium", "-threads", "1")
        command = [ffmpeg_program(), "-v", "error", "-nostdin", "-filter_threads", "1", "-threads", "1", "-i", video]
        subprocess.run([*command, "-vf", scale, *encoder, "-an", folder / video.name], check=True)

    start = time.perf_counter()
    with ThreadPoolExecutor(processes) as pool:
        list(pool.map(convert, videos))
    return time.perf_counter() - start


def run_terra(arguments: argparse.Namespace, names: tuple[str, ...], fps: int, output: Path) -> tuple[float, float]:
    """Seconds and megabytes that `terra import` takes."""
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
    most, ended = [0.0], threading.Event()
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    def watch() -> None:
        while not ended.wait(0.2):
            most[0] = max(most[0], memory_of(process.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    status = process.wait()
    seconds = time.perf_counter() - start
    ended.set()
    watcher.join()
    if status:
        raise SystemExit(f"terra import ended with {status}")
    shutil.rmtree(output)
    return seconds, most[0]


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
