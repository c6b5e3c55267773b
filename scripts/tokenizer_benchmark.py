"""Measures a tokenizer's frames a second, encoding and decoding: by element type, eager or compiled, and batch size.

    python scripts/tokenizer_benchmark.py                                               the one that ships, on a CPU
    python scripts/tokenizer_benchmark.py --device cuda --compiled --frames 1 16
    python scripts/tokenizer_benchmark.py --tokenizer outputs/synthetic/lfq_tokenizer_B_256 --device cuda --compiled

Each figure is a median of some rounds, with its quartiles. The table also gives the cost of another element type: the
share of tokens equal to float32's, and the PSNR of the 8-bit frames to float32's. The frames are coarse noise, because
a network takes the same time for any picture.
"""

import argparse
import json
import time
from collections.abc import Callable
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch.nn import functional as F

from terra.benchmark.measure import spread
from terra.device import torch_device, torch_dtype
from terra.errors import TerraError
from terra.metrics.frames import psnr
from terra.tables import print_table
from tokenizer import LFQTokenizer

DEMO = Path(__file__).resolve().parent.parent / "terra" / "demo" / "tokenizer"


def main() -> None:
    """Parse the command line, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", default=str(DEMO), help="a checkpoint folder")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--frames", type=int, nargs="+", default=[1, 16], help="batch sizes")
    parser.add_argument("--compiled", action="store_true", help="also compiled, which takes a minute or two")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="a JSON file")
    arguments = parser.parse_args()
    if min(arguments.frames) < 1 or arguments.rounds < 1:
        parser.error("expected at least 1 frame and 1 round")
    try:
        rows = measure(arguments)
    except TerraError as error:
        parser.error(str(error))
    if arguments.output:
        arguments.output.write_text(json.dumps(rows, indent=2) + "\n")
    table = Table("type", "", "at once", "encoded/s", "same tokens", "decoded/s", "dB to float32")
    for row in rows:
        encoded, decoded = ("{median:.1f} ({low:.1f}-{high:.1f})".format(**row[way]) for way in ("encoded", "decoded"))
        kind = "compiled" if row["compiled"] else ""
        nearness = "equal" if row["db"] is None else f"{row['db']:.1f}"
        table.add_row(row["dtype"], kind, str(row["frames"]), encoded, f"{row['same']:.2%}", decoded, nearness)
    print_table(Console(), table)


@torch.no_grad()
def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each element type, eager or compiled, and batch size."""
    device = torch_device(arguments.device)
    whole = LFQTokenizer.from_pretrained(arguments.tokenizer).to(device)
    most = max(arguments.frames)
    generator = torch.Generator().manual_seed(0)
    coarse = torch.rand(most, 3, 9, 16, generator=generator) * 2 - 1
    pictures = F.interpolate(coarse, size=tuple(whole.image_size), mode="bilinear").to(device)
    tokens = whole.encode(pictures)
    frames = whole.decode(tokens)
    ways = [(dtype, compiled) for dtype in arguments.dtypes for compiled in (False, True)[: 1 + arguments.compiled]]
    rows = []
    for dtype, compiled in track(ways, "measuring"):
        tokenizer = deepcopy(whole).to(torch_dtype(dtype))
        if compiled:
            tokenizer.encoder.compile(dynamic=False)
            tokenizer.decoder.compile(dynamic=False)
        for count in arguments.frames:
            same = (tokenizer.encode(pictures[:count]) == tokens[:count]).float().mean().item()
            decoded = tokenizer.decode(tokens[:count])
            rows.append(
                {
                    "dtype": dtype,
                    "compiled": compiled,
                    "frames": count,
                    "encoded": rates(partial(tokenizer.encode, pictures[:count]), count, arguments.rounds, device),
                    "decoded": rates(partial(tokenizer.decode, tokens[:count]), count, arguments.rounds, device),
                    "same": same,
                    "db": None if torch.equal(decoded, frames[:count]) else psnr(decoded, frames[:count]).mean().item(),
                }
            )
    return rows


def rates(work: Callable[[], object], frames: int, rounds: int, device: torch.device) -> dict[str, Any]:
    """Frames a second of each round; on a GPU a round launches several calls, as a pipeline does."""
    calls = 10 if device.type == "cuda" else 1
    found = []
    for _ in range(rounds + 1):
        begun = time.perf_counter()
        for _ in range(calls):
            work()
        if device.type == "cuda":
            torch.cuda.synchronize()
        found.append(frames * calls / (time.perf_counter() - begun))
    return spread(found[1:])


if __name__ == "__main__":
    main()
