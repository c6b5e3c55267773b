"""Compares ways to draft tokens: how many passes a frame of a world model takes with each, for some widths of a pass.

    python scripts/accepted_lengths.py                                      the shipped model and its contexts, on a CPU
    python scripts/accepted_lengths.py --widths 32 --temperature 0 --frames 8 --strategies plain "beyond the frame"
    python scripts/accepted_lengths.py --model outputs/mine --contexts drives/7 --trajectory drives/7/left.json
    python scripts/accepted_lengths.py --model outputs/mine --device cuda --widths 32 64 --seconds 200

A pass accepts its first sampled token and each further one whose draft was right, so that the tokens are those of
sequential decoding whatever the drafts are: one pass over each whole frame must sample the frame itself, and all ways
must give the same frames, or the script stops. So use float32 on a GPU: in bfloat16 transformers' passes of different
widths round differently. Sampling is keyed by position. Strategies whose names begin with "oracle" look at the right
tokens: they are upper bounds.
"""

import argparse
import heapq
import itertools
import json
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from rich.console import Console
from rich.table import Table
from torch import Tensor

from terra.device import torch_device, torch_dtype
from terra.engine.base import EngineSpec
from terra.errors import ConfigError, EngineError, TerraError
from terra.noise import vocabulary_noise
from terra.prompt import SLOT_FILLER, Prompt, pack_blocks
from terra.rollout import load_inputs
from terra.sampling import SamplingParams, sample_tokens
from terra.world_model import LlamaActionForCausalLM, LlamaActionV2ForCausalLM, load_world_model
from terra.world_model.window import WindowReader
from tokenizer import LFQTokenizer

DEMO = Path(__file__).resolve().parent.parent / "terra" / "demo"
CANDIDATES = 4
"""Best tokens of a place, by noisy score, that are kept for the next passes."""

WorldModel = LlamaActionForCausalLM | LlamaActionV2ForCausalLM


class Node(NamedTuple):
    """A drafted token; `parent` is the index, among the drafts, of the token before it, -1 for the last certain one."""

    parent: int
    position: int
    token: int


class Scored(NamedTuple):
    """What a pass found for a position: the best tokens, their noisy scores, and the draft that it had there."""

    tokens: list[int]
    scores: list[float]
    draft: int | None

    @property
    def kind(self) -> tuple[int, bool]:
        """How sure the best token is: a class of its lead over the next one, and whether the draft was the same."""
        lead = self.scores[0] - self.scores[1]
        return sum(lead > edge for edge in (0.1, 0.3, 0.6, 1.0, 1.5, 2.5, 4.0)), self.draft == self.tokens[0]


class TreeReader(WindowReader):
    """A `WindowReader` that reads trees of drafts."""

    @torch.inference_mode()
    def feed_tree(
        self, ids: Sequence[int], positions: Sequence[int], parents: Sequence[int], actions: Tensor | None
    ) -> Float[Tensor, "n vocab"]:
        """Logits behind each token; `parents` are indices into the tokens, -1 where the cache's last one comes before.

        Each token attends to the cache, to itself and to its ancestors.
        """
        device, total = self.model.device, self._length + len(ids)
        visible = torch.zeros(len(ids), total, dtype=torch.bool)
        visible[:, : self._length] = True
        for index, parent in enumerate(parents):
            if parent >= 0:
                visible[index] |= visible[parent]
            visible[index, self._length + index] = True
        at = torch.tensor(positions)
        embeds = self.model.embed(torch.tensor(ids, device=device)[None], actions, at)
        hidden = self.model.model(
            inputs_embeds=embeds,
            position_ids=at.to(device)[None],
            attention_mask=visible.to(device)[None, None],
            past_key_values=self._cache,
            use_cache=True,
        )
        self._length = total
        return self.model.image_logits(hidden.last_hidden_state[0])

    def keep(self, kept: Sequence[int], count: int) -> None:
        """Of the `count` tokens that were fed last, keep those with the indices `kept` in the cache."""
        start = self._length - count
        if list(kept) != list(range(len(kept))):
            index = torch.tensor(kept, device=self.model.device) + start
            for layer in self._cache.layers:
                for states in (layer.keys, layer.values):  # pyright: ignore[reportAttributeAccessIssue]
                    assert states is not None
                    states[:, :, start : start + len(kept)] = states[:, :, index]
        self.drop(count - len(kept))


@dataclass
class Truth:
    """What all strategies share on one context: its tokens and actions, how tokens are sampled, the noise."""

    model: WorldModel
    context: Int[Tensor, "frames rows cols"]
    actions: Float[Tensor, "actions slots action_dim"]
    sampling: SamplingParams
    noise: Float[Tensor, "positions vocab"] = field(init=False)
    right: list[int] | None = None

    def __post_init__(self) -> None:
        layout = self.model.config.layout
        self.first, self.end = len(self.context) * layout.block, (len(self.actions) + 1) * layout.block
        vocab, device = self.model.config.image_vocab_size, self.model.device
        self.noise = torch.zeros(self.end - self.first, vocab, device=device)
        if not self.sampling.greedy:
            for part in torch.arange(self.first, self.end, device=device).split(64):
                # The noise of a token is that of the position before it.
                noise = vocabulary_noise(torch.zeros_like(part), part - 1, vocab)
                self.noise[part - self.first] = noise
        self.scale = 1.0 if self.sampling.greedy else 1.0 / self.sampling.temperature

    @torch.inference_mode()
    def check(self, tokens: Int[Tensor, "frames image_tokens"]) -> None:
        """Refuse frames that are not those of sequential decoding: one pass over a frame must sample the frame."""
        reader, layout = WindowReader(self.model), self.model.config.layout
        ids = pack_blocks(torch.cat([self.context.flatten(1), tokens])[:, None], layout.action_slots)
        cut = self.first - layout.action_slots - 1
        reader.feed(ids[None, :cut], torch.arange(cut), self.actions[None, : len(self.context) - 1])
        for index, frame in enumerate(tokens):
            at = torch.arange(cut, cut + layout.block)
            number = len(self.context) + index - 1
            logits = reader.feed(ids[None, at], at, self.actions[None, number : number + 1])
            before = at[layout.action_slots :].to(logits.device)
            sampled = sample_tokens(logits[0, layout.action_slots :], self.sampling, torch.zeros_like(before), before)
            if not torch.equal(sampled.cpu(), frame):
                wrong = int((sampled.cpu() != frame).sum())
                raise EngineError(f"frame {index}: expected what one pass over it samples, got {wrong} other tokens")
            cut += layout.block


class Rollout:
    """The frames of one context, decoded with drafts.

    Attributes:
        tokens: the certain tokens by position, those of the last context frame included.
        end: the first position whose token is not certain.
        found: what passes found at positions from `end` on, by position.
        lengths: tokens that each pass gave.
        num_read: tokens that all passes read.
        guessed: drafts for positions that no pass had scored, with their positions.
        behind: what passes found behind the place where they ended: the distance from it, the position, the token.
    """

    def __init__(self, truth: Truth) -> None:
        self.truth, self.layout = truth, truth.model.config.layout
        self.right = truth.right
        self._reader = TreeReader(truth.model)
        ids = Prompt(truth.context, truth.actions[: len(truth.context) - 1]).ids(self.layout.action_slots)
        self.tokens = dict(enumerate(ids.tolist()))
        cut, count = len(ids) - 1, self.layout.image_tokens
        before = truth.actions[None, : len(truth.context) - 1]
        logits = self._reader.feed(ids[None, :cut], torch.arange(cut), before, last=count)[0]
        self._scores = {len(truth.context) - 1: logits.float() * truth.scale}
        self.end = truth.first
        self.found: dict[int, Scored] = {}
        self.lengths: list[int] = []
        self.num_read = 0
        self.guesses: dict[Any, list[int]] = {}
        self.guessed: list[tuple[int, int]] = []
        self.behind: list[tuple[int, int, int]] = []

    @property
    def frame(self) -> int:
        """Number of the frame in the making."""
        return self.end // self.layout.block

    @property
    def num_certain(self) -> int:
        """Certain tokens that the cache lacks."""
        return self.end - self._reader.length

    def frames(self) -> Int[Tensor, "frames image_tokens"]:
        """The tokens of the complete frames."""
        block, count = self.layout.block, self.layout.image_tokens
        made = range(self.truth.first, self.end, block)
        return torch.tensor([[self.tokens[start + place] for place in range(count)] for start in made])

    def positions(self, *, beyond: bool = False) -> Iterator[int]:
        """Positions that a chain of drafts may have: to the frame's end, or beyond it to the last frame's end."""
        last = self.truth.end - self.layout.action_slots if beyond else self.layout.slot_start(self.frame)
        return iter(range(self.end, last - 1))

    def noisy_scores(self, moved_by: int | None = None) -> list[int]:
        """The picks of the previous frame's logits with this frame's noise; its places moved by an offset, or not."""
        if (key := (self.frame, moved_by)) not in self.guesses:
            start, count = self.frame * self.layout.block - self.truth.first, self.layout.image_tokens
            place = (torch.arange(count) + (moved_by or 0)).clamp(0, count - 1)
            scores = self._scores[self.frame - 1][place] + self.truth.noise[start : start + count]
            self.guesses[key] = scores.argmax(-1).tolist()
        return self.guesses[key]

    @torch.inference_mode()
    def run_pass(self, drafts: Sequence[Node]) -> None:
        """Read the certain tokens that the cache lacks, and drafts; accept what was right."""
        reader, layout, truth = self._reader, self.layout, self.truth
        certain = range(reader.length, self.end)
        positions = [*certain, *(node.position for node in drafts)]
        ids = [SLOT_FILLER if layout.is_slot(p) else self.tokens[p] for p in certain] + [node.token for node in drafts]
        parents = [index - 1 for index in range(len(certain))] + [node.parent + len(certain) for node in drafts]
        blocks = sorted({p // layout.block for p in positions if layout.is_slot(p)})
        actions = truth.actions[None, blocks] if blocks else None
        scores = reader.feed_tree(ids, positions, parents, actions).float() * truth.scale
        noise_at = torch.tensor(positions, device=scores.device) + 1 - truth.first
        best, best_tokens = (scores + truth.noise[noise_at.clamp(0, len(truth.noise) - 1)]).topk(CANDIDATES)
        best, best_tokens = best.tolist(), best_tokens.tolist()
        children: dict[int, list[int]] = defaultdict(list)
        for index, parent in enumerate(parents):
            children[parent].append(index)

        def descend(index: int) -> Iterator[int]:
            while index is not None:
                yield index
                index = next(iter(children[index]), None)  # pyright: ignore[reportAssignmentType]

        node, path, length = len(certain) - 1, list(range(len(certain))), 0
        while True:
            position = positions[node] + 1
            if not layout.is_slot(position):
                self.tokens[position] = best_tokens[node][0]
                self._keep_scores(position, scores[node])
                length += 1
            fitting = (
                child for child in children[node] if layout.is_slot(position) or ids[child] == self.tokens[position]
            )
            following = next(fitting, None)
            if following is None:
                break
            path.append(following)
            node = following
        self.end = position + (not layout.is_slot(position))
        while layout.is_slot(self.end):
            self.end += 1
        reader.keep(path, len(ids))
        found = {}
        for index in (*descend(0), *descend(node)):
            draft = next((ids[child] for child in children[index]), None)
            found[positions[index] + 1] = Scored(best_tokens[index], best[index], draft)
        self.found = {at: each for at, each in found.items() if at >= self.end and not layout.is_slot(at)}
        self.behind += [(at - self.end, at, each.tokens[0]) for at, each in self.found.items()]
        self.lengths.append(length)
        self.num_read += len(ids)

    def _keep_scores(self, position: int, scores: Float[Tensor, " vocab"]) -> None:
        frame, place = divmod(position, self.layout.block)
        if frame not in self._scores:
            self._scores = {frame - 1: self._scores[frame - 1], frame: torch.empty_like(self._scores[frame - 1])}
        self._scores[frame][place] = scores


Guess = Callable[[Rollout, int], int]
"""A token for a position that the last pass did not score."""


def previous_frame(rollout: Rollout, position: int) -> int:
    """The previous frame's token at the same place, or, if it is not certain, what the last pass found there."""
    before = position - rollout.layout.block
    return rollout.tokens[before] if before < rollout.end else best_or(previous_frame, rollout, before)


def previous_logits(rollout: Rollout, position: int) -> int:
    """The previous frame's logits, this frame's noise."""
    return rollout.noisy_scores()[position % rollout.layout.block]


def moved_frame(rollout: Rollout, position: int) -> int:
    """The previous frame's token at the place where the picture was, see `motion`."""
    count = rollout.layout.image_tokens
    start = (rollout.frame - 1) * rollout.layout.block
    return rollout.tokens[start + min(max(position % rollout.layout.block + motion(rollout), 0), count - 1)]


def moved_logits(rollout: Rollout, position: int) -> int:
    """The previous frame's logits at the place where the picture was, this frame's noise."""
    return rollout.noisy_scores(motion(rollout))[position % rollout.layout.block]


def sometimes_right(rollout: Rollout, position: int, *, percent: int) -> int:
    """The right token at so many of 100 positions, else the previous frame's."""
    right = position * 0x9E3779B1 % 2**32 < percent / 100 * 2**32
    return right_token(rollout, position) if right else previous_frame(rollout, position)


def right_token(rollout: Rollout, position: int) -> int:
    """The right token."""
    assert rollout.right is not None
    frame, place = divmod(position - rollout.truth.first, rollout.layout.block)
    return rollout.right[frame * rollout.layout.image_tokens + place]


def motion(rollout: Rollout) -> int:
    """The offset between places by which most tokens of the last rows are those of the frame before."""
    if (key := ("motion", rollout.end)) not in rollout.guesses:
        layout, columns = rollout.layout, rollout.truth.context.shape[2]
        offsets = [rows * columns + cols for rows in (0, -1, 1) for cols in (0, -1, 1, -2, 2)]
        first = max(rollout.end - 4 * columns, rollout.frame * layout.block)
        recent = range(first, rollout.end)
        if len(recent) < columns:
            recent = range((rollout.frame - 1) * layout.block, layout.slot_start(rollout.frame - 1))

        def agreement(offset: int) -> int:
            return sum(rollout.tokens[p] == rollout.tokens.get(p - layout.block + offset) for p in recent)

        rollout.guesses[key] = [max(offsets, key=agreement)]
    return rollout.guesses[key][0]


def best_or(guess: Guess, rollout: Rollout, position: int) -> int:
    """What the last pass found at a position, else a guess."""
    found = rollout.found.get(position)
    if found is not None:
        return found.tokens[0]
    token = guess(rollout, position)
    rollout.guessed.append((position, token))
    return token


def chain(rollout: Rollout, room: int, *, guess: Guess = previous_frame, beyond: bool = False) -> list[Node]:
    """One chain of drafts."""
    layout, nodes = rollout.layout, []
    for position in itertools.islice(rollout.positions(beyond=beyond), room):
        token = SLOT_FILLER if layout.is_slot(position) else best_or(guess, rollout, position)
        nodes.append(Node(len(nodes) - 1, position, token))
    while nodes and layout.is_slot(nodes[-1].position) and not layout.is_slot(rollout.end):
        if (nodes[-1].position + 1) % layout.block == 0:
            break  # all slots of an action are there
        nodes.pop()
    return nodes


def head(rollout: Rollout, room: int, *, count: int, guess: Guess = previous_frame) -> list[Node]:
    """Several candidates for the next token, each followed by the same chain."""
    found = rollout.found.get(rollout.end)
    main = chain(rollout, room, guess=guess)
    if found is None or not main:
        return main
    nodes: list[Node] = []
    for index, token in enumerate(found.tokens[:count]):
        own = main[: room // count + (index < room % count)]
        nodes += _branch(own, -1, token, len(nodes))
    return nodes


def branches(rollout: Rollout, room: int, *, count: int, share: float, guess: Guess = previous_frame) -> list[Node]:
    """A chain, and a branch with the runner-up at each of the places with the smallest leads, of equal lengths."""
    full = chain(rollout, room, guess=guess)
    main = full[: max(1, round(room * share))]
    leads = {
        index: found.scores[0] - found.scores[1]
        for index, node in enumerate(main)
        if (found := rollout.found.get(node.position)) is not None
    }
    places = heapq.nsmallest(count, leads, key=leads.__getitem__)
    if not places:
        return full
    nodes, each = list(main), (room - len(main)) // len(places)
    for place in places:
        own = full[place : place + each]
        if own:
            nodes += _branch(own, place - 1, rollout.found[main[place].position].tokens[1], len(nodes))
    return nodes


def _branch(own: Sequence[Node], parent: int, token: int, start: int) -> list[Node]:
    """The drafts `own` behind `parent`, the first replaced by `token`; `start` is the index of the first one."""
    first, *others = own
    return [
        Node(parent, first.position, token),
        *(Node(start + i, node.position, node.token) for i, node in enumerate(others)),
    ]


class BestTree:
    """A chain of `share` of the drafts, and around it the drafts that are likeliest to be accepted.

    A draft is accepted with the product of the probabilities along its path. They are counted in the passes before: how
    often the best token, the second, ... of a place was right, by how sure it was (`Scored.kind`), given that all
    tokens before it were right.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._counts: dict[Any, list[float]] = defaultdict(lambda: [2.7, 0.2, 0.04, 0.02, 0.04])
        self._asked: dict[int, Scored] = {}

    def __call__(self, rollout: Rollout, room: int) -> list[Node]:
        """Draft as many tokens as there is room for."""
        for position, found in self._asked.items():
            if position < rollout.end:
                token = rollout.tokens[position]
                rank = found.tokens.index(token) if token in found.tokens else CANDIDATES
                self._counts[found.kind][rank] += 1.0
        self._asked = dict(rollout.found)
        places = {node.position: node.token for node in chain(rollout, room)}
        in_chain = rollout.end + round(room * self._share)
        nodes: list[Node] = []
        heap: list[tuple[float, int, int, int, float]] = []

        def push(position: int, rank: int, parent: int, before: float) -> None:
            value = before * self._probability(rollout.found.get(position), rank)
            first = rank == 0 and position < in_chain and parent == position - rollout.end - 1
            heapq.heappush(heap, (-2.0 if first else -value, position, rank, parent, before))

        if places:
            push(rollout.end, 0, -1, 1.0)
        while heap and len(nodes) < room:
            _, position, rank, parent, before = heapq.heappop(heap)
            found = rollout.found.get(position)
            nodes.append(Node(parent, position, found.tokens[rank] if found else places[position]))
            if found and rank + 1 < CANDIDATES:
                push(position, rank + 1, parent, before)
            if position + 1 in places:
                push(position + 1, 0, len(nodes) - 1, before * self._probability(found, rank))
        return nodes

    def _probability(self, found: Scored | None, rank: int) -> float:
        if found is None:
            return 0.4
        counts = self._counts[found.kind]
        return counts[rank] / sum(counts)


def oracle_candidates(rollout: Rollout, room: int, *, count: int, places: int | None = None) -> list[Node]:
    """A chain with the right token where it is a candidate; at most `places` of its drafts are not the best one."""
    nodes = chain(rollout, room)
    changed = 0
    for index, node in enumerate(nodes):
        found, right = rollout.found.get(node.position), right_token(rollout, node.position)
        if found is not None and right != node.token and right in found.tokens[:count]:
            if changed == places:
                break
            nodes[index], changed = node._replace(token=right), changed + 1
    return nodes


@dataclass(frozen=True)
class Strategy:
    """A way to draft: what makes the drafts of a run, and how many tokens a pass reads."""

    drafter: Callable[[], Callable[[Rollout, int], list[Node]]]
    width: Callable[[Rollout, int], int] = lambda rollout, width: width


def _of(drafter: Callable[..., list[Node]], **options: Any) -> Callable[[], Callable[[Rollout, int], list[Node]]]:
    return lambda: partial(drafter, **options)


def _whole_first(rollout: Rollout, width: int) -> int:
    return rollout.layout.block if rollout.end % rollout.layout.block == 0 else width


def _by_last(rollout: Rollout, width: int) -> int:
    return min(width, 8 + 2 * max(rollout.lengths[-2:], default=width))


STRATEGIES = {
    "plain": Strategy(_of(chain)),
    "oracle: unscored right, 75 %": Strategy(_of(chain, guess=partial(sometimes_right, percent=75))),
    "oracle: unscored right, 50 %": Strategy(_of(chain, guess=partial(sometimes_right, percent=50))),
    "oracle: one second choice": Strategy(_of(oracle_candidates, count=2, places=1)),
    "oracle: second choices": Strategy(_of(oracle_candidates, count=2)),
    "oracle: 4 candidates": Strategy(_of(oracle_candidates, count=4)),
    "beyond the frame": Strategy(_of(chain, beyond=True)),
    "whole frame first": Strategy(_of(chain), _whole_first),
    "previous logits": Strategy(_of(chain, guess=previous_logits)),
    "moved frame": Strategy(_of(chain, guess=moved_frame)),
    "moved logits": Strategy(_of(chain, guess=moved_logits)),
    "2 candidates at the head": Strategy(_of(head, count=2)),
    "branch, 1/2 of the tokens": Strategy(_of(branches, count=1, share=0.5)),
    "branch, 1/4 of the tokens": Strategy(_of(branches, count=1, share=0.75)),
    "branch, 1/8 of the tokens": Strategy(_of(branches, count=1, share=0.875)),
    "2 branches where the frame ends": Strategy(_of(branches, count=2, share=1.0)),
    "likeliest tree": Strategy(partial(BestTree, 0.0)),
    "likeliest tree, 7/8 a chain": Strategy(partial(BestTree, 0.875)),
    "width by the last passes": Strategy(_of(chain), _by_last),
}


def main() -> None:
    """Parse the command line, measure, print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=DEMO, help="a folder with tokenizer/ and world_model/")
    parser.add_argument(
        "--contexts", type=Path, nargs="+", default=[DEMO / "contexts" / name for name in ("day", "city")]
    )
    parser.add_argument("--trajectory", default="straight.json", help="a file in each context's folder, or a path")
    parser.add_argument("--num-context", type=int, default=3)
    parser.add_argument("--frames", type=int, default=4, help="generated frames of each context")
    parser.add_argument("--widths", type=int, nargs="+", default=[16, 32, 64], help="tokens that a pass reads, at most")
    parser.add_argument("--strategies", nargs="+", choices=list(STRATEGIES), default=list(STRATEGIES), metavar="NAME")
    parser.add_argument("--temperature", type=float, default=0.9)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="begin no strategy after so many seconds")
    parser.add_argument("--output", type=Path, help="a JSON file, written again after each strategy")
    arguments = parser.parse_args()
    try:
        rows = []
        if arguments.output:
            arguments.output.touch()
        for row in measure(arguments):
            rows.append(row)
            print(f"{row['strategy']}, {row['width']}: {row['passes']:.2f} passes a frame", file=sys.stderr)
            if arguments.output:
                arguments.output.write_text(json.dumps(rows, indent=1) + "\n")
    except (TerraError, OSError) as error:
        parser.error(str(error))
    columns = "strategy", "width", "passes a frame", "of plain", "tokens read", "median length", "of length 1"
    table = Table(*columns, "guesses right")
    plain = {row["width"]: row["passes"] for row in rows if row["strategy"] == "plain"}
    for row in rows:
        share = f"{row['passes'] / plain[row['width']]:.0%}" if row["width"] in plain else ""
        median, single = f"{row['median']:g}", f"{row['single']:.0%}"
        guesses = "" if row["guesses_right"] is None else f"{row['guesses_right']:.0%}"
        name, passes, read = row["strategy"], f"{row['passes']:.2f}", f"{row['read']:.0f}"
        table.add_row(name, str(row["width"]), passes, share, read, median, single, guesses)
    Console(width=120).print(table)
    for row in rows:
        if row["strategy"] == "plain":
            shares = ", ".join(f"{k} {share:.0%}" for k, share in row["behind_right"].items() if share is not None)
            print(f"width {row['width']}, right behind a rejected place, by the least distance: {shares}")


def measure(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Figures of each strategy and width, over all contexts.

    Raises:
        EngineError: drafted tokens that are not those of sequential decoding.
        ConfigError: a number below 1, or frames that don't fit the window.
        TerraError: inputs or weights that can't be read.
    """
    least = min(*arguments.widths, arguments.num_context, arguments.frames)
    if least < 1:
        raise ConfigError(f"--widths, --num-context and --frames: expected 1 or more, got {least}")
    begun = time.monotonic()
    model = load_world_model(
        arguments.model / "world_model", dtype=torch_dtype(arguments.dtype), device=torch_device(arguments.device)
    )
    most, frames = model.config.layout.max_frames, arguments.num_context + arguments.frames
    if frames > most:
        raise ConfigError(f"--num-context and --frames: expected at most {most} frames in all, got {frames}")
    truths = list(load_contexts(arguments, model))
    for name in arguments.strategies:
        for width in arguments.widths:
            if time.monotonic() - begun > arguments.seconds:
                return
            drafter, rollouts = STRATEGIES[name].drafter(), []
            for truth in truths:
                rollouts.append(decode(truth, STRATEGIES[name], drafter, width))
                made = rollouts[-1].frames()
                if truth.right is None:
                    truth.check(made)
                    truth.right = made.flatten().tolist()
                elif made.flatten().tolist() != truth.right:
                    raise EngineError(f"{name}, width {width}: expected the tokens of sequential decoding, got others")
            lengths = [length for rollout in rollouts for length in rollout.lengths]
            frames = len(truths) * arguments.frames
            yield {
                "strategy": name,
                "width": width,
                "frames": frames,
                "passes": len(lengths) / frames,
                "read": sum(rollout.num_read for rollout in rollouts) / frames,
                "median": statistics.median(lengths),
                "single": lengths.count(1) / len(lengths),
                "guesses_right": share_right(rollouts, [r.guessed for r in rollouts]),
                "behind_right": {
                    1 << k: share_right(
                        rollouts,
                        [[each[1:] for each in r.behind if (each[0] + 1).bit_length() == k + 1] for r in rollouts],
                    )
                    for k in range(6)
                },
                "lengths": dict(sorted(Counter(lengths).items())),
            }


def share_right(rollouts: Sequence[Rollout], claims: Sequence[Sequence[tuple[int, int]]]) -> float | None:
    """The share of right ones among the positions and tokens claimed for each rollout; None if there are none."""
    found = [r.tokens[at] == token for r, own in zip(rollouts, claims, strict=True) for at, token in own]
    return statistics.fmean(found) if found else None


def load_contexts(arguments: argparse.Namespace, model: WorldModel) -> Iterator[Truth]:
    """The contexts as tokens, with the actions of the frames to make."""
    tokenizer = LFQTokenizer.from_pretrained(arguments.model / "tokenizer").to(model.device)
    for context in arguments.contexts:
        inputs = load_inputs(
            context,
            context / arguments.trajectory,
            num_frames=arguments.num_context + arguments.frames,
            num_context=arguments.num_context,
            image_size=tokenizer.image_size,
            spec=EngineSpec.of(model.config),
        )
        grid = tokenizer.encode(inputs.context_frames.to(model.device)).cpu()
        yield Truth(model, grid, inputs.actions, SamplingParams(temperature=arguments.temperature))


def decode(truth: Truth, strategy: Strategy, drafter: Callable[[Rollout, int], list[Node]], width: int) -> Rollout:
    """Decode a context's frames."""
    rollout = Rollout(truth)
    while rollout.end < truth.end:
        rollout.run_pass(drafter(rollout, max(0, strategy.width(rollout, width) - rollout.num_certain)))
    return rollout


if __name__ == "__main__":
    main()
