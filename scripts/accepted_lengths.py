"""Measures how many drafts a world model accepts in a pass, for several numbers of drafts.

    python scripts/accepted_lengths.py                                      the shipped model and its contexts, on a CPU
    python scripts/accepted_lengths.py --drafts 4 16 64 --temperature 0 --frames 8
    python scripts/accepted_lengths.py --model outputs/mine --contexts drives/7 --trajectory left.json

A pass accepts its first sampled token and each further one whose draft was right, so that the tokens are those of
sequential decoding whatever the drafts are; the script stops if they are not. Sampling is keyed by position.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from jaxtyping import Float, Int
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor

from terra.device import torch_device
from terra.engine.base import EngineSpec
from terra.engine.drafts import decode_frame, draft_from_last_pass_or_previous_frame
from terra.errors import EngineError, TerraError
from terra.prompt import Prompt
from terra.rollout import load_inputs
from terra.sampling import SamplingParams, sample_tokens
from terra.tables import print_table
from terra.world_model import LlamaActionForCausalLM, LlamaActionV2ForCausalLM, load_world_model
from terra.world_model.window import FramePrefix, WindowReader
from tokenizer import LFQTokenizer

DEMO = Path(__file__).resolve().parent.parent / "terra" / "demo"


def main() -> None:
    """Parse the command line, measure, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO, help="a folder with tokenizer/ and world_model/")
    parser.add_argument(
        "--contexts", type=Path, nargs="+", default=[DEMO / "contexts" / name for name in ("day", "city")]
    )
    parser.add_argument(
        "--trajectory", default="straight.json", help="a file in each context's folder, or an absolute path"
    )
    parser.add_argument("--num-context", type=int, default=3)
    parser.add_argument("--frames", type=int, default=4, help="generated frames of each context")
    parser.add_argument("--drafts", type=int, nargs="+", default=[8, 16, 31, 63])
    parser.add_argument("--temperature", type=float, default=0.9)
    parser.add_argument(
        "--device", default="cpu", help="in float32; in bfloat16 passes of different widths need not agree"
    )
    arguments = parser.parse_args()
    try:
        lengths = measure(arguments)
    except TerraError as error:
        parser.error(str(error))
    table = Table(
        "drafts",
        "passes a frame",
        "of the worst context",
        "of the worst frame",
        "tokens a pass",
        "median",
        "passes of one token",
    )
    for drafts, contexts in lengths.items():
        frames = [frame for context in contexts for frame in context]
        passes = [length for frame in frames for length in frame]
        row = (
            len(passes) / len(frames),
            max(sum(map(len, context)) / len(context) for context in contexts),
            max(map(len, frames)),
            sum(passes) / len(passes),
            statistics.median(passes),
        )
        alone = f"{100 * passes.count(1) / len(passes):.0f} %"
        table.add_row(str(drafts), *(f"{number:.1f}" for number in row), alone)
    print_table(Console(), table)


def measure(arguments: argparse.Namespace) -> dict[int, list[list[list[int]]]]:
    """For each number of drafts, each context and each frame, the tokens that each pass gave.

    Raises:
        EngineError: drafted tokens that are not those of sequential decoding.
        TerraError: inputs or weights that can't be read.
    """
    model = load_world_model(arguments.model / "world_model", device=torch_device(arguments.device))
    tokenizer = LFQTokenizer.from_pretrained(arguments.model / "tokenizer")
    found: dict[int, list[list[list[int]]]] = {drafts: [] for drafts in arguments.drafts}
    for context in track(arguments.contexts, "contexts", console=Console(stderr=True), disable=not sys.stderr.isatty()):
        inputs = load_inputs(
            context,
            context / arguments.trajectory,
            num_frames=arguments.num_context + arguments.frames,
            num_context=arguments.num_context,
            image_size=tokenizer.image_size,
            spec=EngineSpec.of(model.config),
        )
        grid = tokenizer.encode(inputs.context_frames)
        sampling = SamplingParams(temperature=arguments.temperature)
        sequential = decode(model, grid, inputs.actions, sampling, 0)[0]
        for drafts, contexts in found.items():
            tokens, lengths = decode(model, grid, inputs.actions, sampling, drafts)
            if not torch.equal(tokens, sequential):
                raise EngineError(f"{context}, {drafts} drafts: expected the tokens of sequential decoding, got others")
            contexts.append(lengths)
    return found


def decode(
    model: LlamaActionForCausalLM | LlamaActionV2ForCausalLM,
    context: Int[Tensor, "frames rows cols"],
    actions: Float[Tensor, "actions slots action_dim"],
    sampling: SamplingParams,
    drafts: int,
) -> tuple[Int[Tensor, "generated image_tokens"], list[list[int]]]:
    """The tokens of the frames after `context`, and the tokens that each pass of each frame gave."""
    reader, layout, num_context = WindowReader(model), model.config.layout, len(context)
    ids = Prompt(context, actions[: num_context - 1]).ids(layout.action_slots)[:-1]
    reader.feed(ids[None], torch.arange(len(ids)), actions[None, : num_context - 1])
    frames, lengths = [context[-1].flatten()], []
    for frame in range(num_context, len(actions) + 1):

        def sample(logits: Float[Tensor, "1 n vocab"], places: Sequence[int], frame: int = frame) -> Int[Tensor, "1 n"]:
            positions = torch.tensor(places, device=logits.device) + frame * layout.block - 1
            return sample_tokens(logits[0], sampling, torch.zeros_like(positions), positions)[None].cpu()

        prefix = FramePrefix.after_frame(frames[-1][-1:], actions[None, frame - 1], frame - 1, layout)
        drafter = draft_from_last_pass_or_previous_frame(frames[-1].tolist())
        tokens, passes = decode_frame(reader, prefix, sample, drafter, drafts)
        frames.append(tokens)
        lengths.append(passes)
    return torch.stack(frames[1:]), lengths


if __name__ == "__main__":
    main()
