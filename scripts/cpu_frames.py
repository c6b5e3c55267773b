"""Measures seconds a frame of the shipped model on a CPU, for element types and for an older checkout, in turns.

    python scripts/cpu_frames.py
    git worktree add outputs/older e76a3c2           the last commit that runs transformers' model
    python scripts/cpu_frames.py --older outputs/older
    OMP_NUM_THREADS=1 python scripts/cpu_frames.py --older outputs/older --parts start end

The types are float32, `dtype=bfloat16` (pixels, too) and `dtype=bfloat16 engine.int8_weights=true`; the older checkout
runs in float32. Each variant is a process that waits while the others work. Parts: `start` (tokens of the two frames
behind 3 context frames and one that is not measured), `end` (tokens of the window's last two frames), `window` (tokens
of 22 frames, prefill included), `rollout` (the same with pixels, as `terra generate`), `live` (one thread decodes each
frame's pixels while the next frame's tokens are made, as `terra serve`). Figures are medians over the rounds: seconds
of wall time a frame and, in parentheses, processor seconds of all threads.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as `import terra` does

HERE = Path(__file__).resolve().parent.parent
CONTEXT = HERE / "terra" / "demo" / "contexts" / "day"
FRAMES, GIVEN = 25, 3
PARTS = ("start", "end", "window", "rollout", "live")
TYPES: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": "bfloat16"},
    "8 bits": {"int8_weights": True, "dtype": "bfloat16"},
}


class Worker:
    """A process that measures one variant, when it is told to."""

    def __init__(self, checkout: Path, settings: dict[str, Any]) -> None:
        environment = {**os.environ, "PYTHONPATH": str(checkout)}
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", json.dumps(settings)]
        self._process = subprocess.Popen(
            command, env=environment, cwd=checkout, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )

    def ask(self, part: str) -> dict[str, float]:
        """Measure a part; returns `wall` and `processor` seconds a frame."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(part, file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def main() -> None:
    """Parse the command line, measure, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--older", type=Path, help="a checkout to compare with, in float32")
    parser.add_argument("--types", nargs="+", choices=list(TYPES), default=list(TYPES))
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--rounds", type=int, default=3, help="turns of each, after one that warms up")
    parser.add_argument("--output", type=Path, help="a JSON file")
    parser.add_argument("--worker", type=json.loads, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker is not None:
        return work(arguments.worker)
    older = {"older checkout": Worker(arguments.older.resolve(), {})} if arguments.older else {}
    workers = older | {name: Worker(HERE, TYPES[name]) for name in arguments.types}
    found: dict[str, dict[str, list[dict[str, float]]]] = {
        name: {part: [] for part in arguments.parts} for name in workers
    }
    for turn in range(arguments.rounds + 1):
        for part in arguments.parts:
            for name, worker in workers.items():
                seconds = worker.ask(part)
                if turn:
                    found[name][part].append(seconds)
    for worker in workers.values():
        worker.close()
    if arguments.output:
        arguments.output.write_text(json.dumps(found, indent=2) + "\n")
    show(found, arguments.parts)


def show(found: dict[str, dict[str, list[dict[str, float]]]], parts: Sequence[str]) -> None:
    """Print medians as a Markdown table."""
    print("| | " + " | ".join(parts) + " |\n|---" + "|---" * len(parts) + "|")
    for name, by_part in found.items():
        cells = []
        for part in parts:
            wall, processor = (statistics.median(one[kind] for one in by_part[part]) for kind in ("wall", "processor"))
            cells.append(f"{wall:.3f} ({processor:.3f})")
        print(f"| {name} | " + " | ".join(cells) + " |")


def work(settings: dict[str, Any]) -> None:
    """Answer the requests of `Worker.ask`. Imports nothing but what older checkouts have, too."""
    import torch

    from terra.pipeline import Pipeline, RolloutRequest
    from terra.rollout import load_inputs
    from terra.sampling import SamplingParams

    sampling = SamplingParams()
    with Pipeline.from_pretrained("demo", engine="jacobi", device="cpu", drafts=31, **settings) as pipeline:
        inputs = load_inputs(
            CONTEXT, CONTEXT / "left.json", num_frames=FRAMES, num_context=GIVEN,
            image_size=pipeline.tokenizer.image_size, spec=pipeline.engine.spec,
        )  # fmt: skip
        actions = inputs.actions
        context = pipeline.wait(pipeline.encode(inputs.context_frames))
        whole = pipeline.wait(pipeline.rollout_tokens(context, actions, sampling, 0))
        one_thread = ThreadPoolExecutor(1, "pixels", torch.set_num_threads, (1,))

        def tokens(
            given: int, then: Callable[[Any], Any] | None = None, unmeasured: int = 0, most: int = FRAMES
        ) -> int:
            session = pipeline.wait(pipeline.open(whole[:given], actions[: given - 1], sampling, 0))
            for action in actions[given - 1 : given - 1 + unmeasured]:
                pipeline.wait(session.step(action))
            begin()
            measured = actions[given - 1 + unmeasured :][:most]
            for action in measured:
                frame = pipeline.wait(session.step(action))
                if then is not None:
                    then(frame)
            return len(measured)

        begun: list[float] = []

        def begin() -> None:
            begun[:] = [time.perf_counter(), time.process_time()]

        def live() -> int:
            pictures: list[Future[Any]] = []
            made = tokens(GIVEN, lambda frame: pictures.append(one_thread.submit(pipeline.decoder.decode, frame[None])))
            for picture in pictures:
                picture.result()
            return made

        def rollout() -> int:
            begin()
            pipeline.generate([RolloutRequest(inputs.context_frames, actions, 0)], sampling)
            return FRAMES - GIVEN

        parts: dict[str, Callable[[], int]] = {
            "start": lambda: tokens(GIVEN, unmeasured=1, most=2),
            "end": lambda: tokens(FRAMES - 3, unmeasured=1),
            "window": lambda: tokens(GIVEN),
            "rollout": rollout,
            "live": live,
        }
        for line in sys.stdin:
            made = parts[line.strip()]()
            wall, processor = time.perf_counter() - begun[0], time.process_time() - begun[1]
            print(json.dumps({"wall": wall / made, "processor": processor / made}), flush=True)


if __name__ == "__main__":
    main()
