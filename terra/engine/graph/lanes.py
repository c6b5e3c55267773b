"""Windows of several rollouts side by side on the device: their tokens, actions, how far they are, and their passes.

A pass reads, in each lane, the same number of tokens from the first one on that is not in the lane's KV cache: one or
more that are certain, and drafts, which are what the pass before picked at their places, else the previous frame's
tokens (Jacobi decoding, see `terra.engine.jacobi`). Every pass over so many lanes has the same shape, and where a lane
stands is known to the device alone, so that passes are captured as CUDA graphs and replayed without the host.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from terra.engine.graph.attention import CACHE_STEP, attend, attend_causally
from terra.engine.graph.capture import captured
from terra.engine.graph.layers import PLAIN, Layers, gpu_steps
from terra.engine.graph.matrix import linear
from terra.prompt import Action, Prompt
from terra.sampling import SamplingParams, sample_tokens
from terra.world_model.model import LlamaActionForCausalLM, LlamaActionV2ForCausalLM

_TOKENS = 128
"""Of a pass over all its lanes: with more, a GPU computes longer than it reads the weights."""


@dataclass(frozen=True)
class Aim:
    """A frame to be made: its number in the window of a lane, the action that leads to it, and how to sample."""

    lane: int
    frame: int
    action: Action
    sampling: SamplingParams


@dataclass(frozen=True)
class Snapshot:
    """What is kept of a window while another one has its lane."""

    length: int
    tensors: tuple[Tensor, ...]


class Lanes:
    """Windows that passes are computed on; lanes are numbered from 0.

    Args:
        model: loses its layers to the lanes, see `Layers`.
        num_lanes: windows held at once.
        drafts: tokens a pass reads in a lane beyond the first, at most; passes over many lanes read fewer.
        fp8_weights, fp8_cache: see `Layers`.
        batch_invariant: see `terra.engine.graph.engine.GraphEngine`.

    On a GPU passes are captured at their first use.
    """

    def __init__(
        self,
        model: LlamaActionForCausalLM | LlamaActionV2ForCausalLM,
        num_lanes: int,
        drafts: int,
        *,
        fp8_weights: bool = False,
        fp8_cache: bool = False,
        batch_invariant: bool = False,
    ) -> None:
        self._model, self._drafts, self._layout = model, drafts, model.config.layout
        self._invariant = batch_invariant
        self.num_lanes = num_lanes
        device, length = model.device, -(-(self._layout.max_length + drafts + 1) // CACHE_STEP) * CACHE_STEP
        self._layers = Layers(model, num_lanes, length, fp8_weights=fp8_weights, fp8_cache=fp8_cache)
        slots = self._layout.max_frames * self._layout.action_slots
        self._slot_rows = torch.zeros(num_lanes, slots, model.config.hidden_size, dtype=model.dtype, device=device)
        # Tokens by position: certain up to `_start`, drafts behind it.
        self._ids = torch.zeros(num_lanes, length, dtype=torch.int64, device=device)
        # Positions: of the first token that is not in the KV cache; of the last image token of the frame in the making.
        self._start = torch.zeros(num_lanes, dtype=torch.int64, device=device)
        self._last = torch.zeros(num_lanes, dtype=torch.int64, device=device)
        self._seed = torch.zeros(num_lanes, dtype=torch.int64, device=device)
        self._temperature = torch.zeros(num_lanes, dtype=torch.float32, device=device)
        # How each lane samples, and which lanes sample so.
        self._samplings: list[SamplingParams | None] = [None] * num_lanes
        self._sampled: dict[SamplingParams, Bool[Tensor, " lanes"]] = {}
        self._on_gpu = device.type == "cuda"
        self._under_way: torch.cuda.Event | None = None
        # Over the first so many lanes: passes by picks; and passes up to the logits, which these are.
        self._passes: dict[int, Callable[[], None]] = {}
        self._readings: dict[int, tuple[Callable[[], None], Float[Tensor, "rows vocab"]]] = {}

    @property
    def frame_length(self) -> int:
        """Tokens that a lane lacks when it is aimed: the slots and the frame."""
        return self._layout.block

    @torch.no_grad()
    def begin(self, lane: int, prompt: Prompt, seed: int) -> None:
        """Read a context, all but its last token, into a lane's KV cache."""
        layout, device = self._layout, self._ids.device
        ids = prompt.ids(layout.action_slots)
        self._ids[lane, : len(ids)] = ids.to(device)
        self._slot_rows[lane] = 0
        if len(prompt.actions):
            frames = torch.arange(len(prompt.actions), device=device)
            self._write_actions(torch.full_like(frames, lane), frames, prompt.actions)
        self._seed[lane] = seed
        length = len(ids) - 1
        self._rest(lane, length)
        if not length:
            return
        positions = torch.arange(length, device=device)[None]

        def attention(queries: Tensor, keys: Tensor, values: Tensor, round_by: float | None) -> Tensor:
            return attend_causally(queries, keys[:, :, :length], values[..., :length], round_by=round_by)

        taken = slice(lane, lane + 1)
        self._layers(self._embed(taken, positions), taken, positions, attention, PLAIN)

    @torch.no_grad()
    def aim(self, aims: Sequence[Aim]) -> None:
        """Let the next passes make a frame in each of some lanes, after the action of the one before.

        All at once: what is asked of a GPU one by one takes it longer than the passes do.
        """
        layout, device = self._layout, self._ids.device
        lane = torch.tensor([aim.lane for aim in aims], device=device)
        frame = torch.tensor([aim.frame for aim in aims], device=device)
        self._write_actions(lane, frame - 1, torch.stack([aim.action for aim in aims]))
        within = torch.arange(layout.image_tokens, device=device)
        begin = (frame * layout.block)[:, None]
        self._ids[lane[:, None], begin + within] = self._ids[lane[:, None], begin - layout.block + within]
        self._start[lane] = begin[:, 0] - layout.action_slots - 1
        self._last[lane] = begin[:, 0] + layout.image_tokens - 1
        self._temperature[lane] = torch.tensor([aim.sampling.temperature for aim in aims], device=device)
        for aim in aims:
            self._samplings[aim.lane] = aim.sampling
        self._sampled = {
            sampling: torch.tensor([sampling == other for other in self._samplings], device=device)
            for sampling in set(self._samplings)
            if sampling is not None
        }

    def passes_needed(self, lanes: list[int], lacking: dict[int, int]) -> int:
        """How many passes at least until one of these lanes has its frame, if they lack so many tokens."""
        return min(-(-lacking[lane] // self.width(max(lanes) + 1)) for lane in lanes)

    def width(self, count: int) -> int:
        """Tokens that a pass over the first `count` lanes reads in each."""
        return max(1, min(self._drafts + 1, _TOKENS // self._bucket(count)))

    @torch.no_grad()
    def advance(self, lanes: list[int], samplings: frozenset[SamplingParams], passes: int) -> None:
        """Make some passes over lanes that were aimed.

        On a GPU they are under way then, and those of the call before are done: so it is never out of work, and what
        is asked for in between waits no longer than for two calls.
        """
        make = self._pass(samplings, self._bucket(max(lanes) + 1))
        for _ in range(passes):
            make()
        if self._on_gpu:
            before, self._under_way = self._under_way, torch.cuda.Event()
            self._under_way.record()
            if before:
                before.synchronize()

    def lacking(self, lanes: list[int]) -> dict[int, int]:
        """How many tokens each of these lanes lacks after the passes so far; 0: its frame is done."""
        left = (self._last - self._start).tolist()
        return {lane: left[lane] for lane in lanes}

    def frames(self, made: Sequence[tuple[int, int]]) -> Callable[[], Int[Tensor, "frames image_tokens"]]:
        """Begin to copy the tokens of frames, each a lane and its number in the lane's window, to the CPU.

        What is returned waits for the copy, which what lanes are asked for later does not change.
        """
        lane, frame = torch.tensor(made, device=self._ids.device).T[..., None]
        within = torch.arange(self._layout.image_tokens, device=self._ids.device)
        tokens = self._ids[lane, frame * self._layout.block + within].to("cpu", non_blocking=True)
        there = torch.cuda.Event() if self._on_gpu else None
        if there:
            there.record()

        def wait() -> Int[Tensor, "frames image_tokens"]:
            if there:
                there.synchronize()
            return tokens

        return wait

    def save(self, lane: int, frame: int) -> Snapshot:
        """What `load` needs to go on behind frame number `frame`."""
        length = frame * self._layout.block + self._layout.image_tokens
        return Snapshot(length, tuple(part.clone() for part in self._parts(lane, length)))

    def load(self, lane: int, snapshot: Snapshot) -> None:
        """Go on, in any lane, with the window that was saved."""
        for part, tensor in zip(self._parts(lane, snapshot.length), snapshot.tensors, strict=True):
            part.copy_(tensor)
        self._rest(lane, snapshot.length - 1)

    def _rest(self, lane: int, position: int) -> None:
        """Nothing is to be made in a lane whose last certain token stands here, and nothing of another window is left.

        What attention does not see it multiplies by 0, so that it must be finite.
        """
        self._start[lane] = self._last[lane] = position
        self._layers.keys[:, lane, :, position:] = 0
        self._layers.values[:, lane, ..., position:] = 0

    def _bucket(self, count: int) -> int:
        """Passes go over 1, 4, 16, ... or all lanes, so that few of them have to be captured."""
        size = 1
        while size < count:
            size *= 4
        return min(size, self.num_lanes)

    def _parts(self, lane: int, length: int) -> tuple[Tensor, ...]:
        cached = self._layers.keys[:, lane, :, :length], self._layers.values[:, lane, ..., :length]
        one = slice(lane, lane + 1)
        return (*cached, self._ids[lane, :length], self._slot_rows[lane], self._seed[one])

    def _write_actions(
        self, lanes: Int[Tensor, " n"], frames: Int[Tensor, " n"], actions: Float[Tensor, "n slots dim"]
    ) -> None:
        model, slots = self._model, self._layout.action_slots
        given = actions.to(self._ids.device, model.action_projection_dtype)
        if self._invariant:  # a library's product of more rows may sum otherwise
            rows = torch.cat([model.action_projection(action) for action in given.split(1)])
        else:
            rows = model.action_projection(given)
        slot = frames[:, None] * slots + torch.arange(slots, device=self._ids.device)
        self._slot_rows[lanes[:, None], slot] = rows.to(self._slot_rows.dtype)

    def _embed(self, lanes: slice, positions: Int[Tensor, "lanes n"]) -> Float[Tensor, "lanes n hidden"]:
        layout, model = self._layout, self._model
        within = positions % layout.block - layout.image_tokens
        slot = positions // layout.block * layout.action_slots + within.clamp(min=0)
        slot_rows, ids = self._slot_rows[lanes], self._ids[lanes]
        lane = torch.arange(len(ids), device=ids.device)[:, None]
        rows = slot_rows[lane, slot.clamp(max=slot_rows.shape[1] - 1)]
        embeds = torch.where((within >= 0)[..., None], rows, model.model.embed_tokens(ids[lane, positions]))
        return embeds + model.pos_embedding_spatio_temporal(positions)

    def _pass(self, samplings: frozenset[SamplingParams], count: int) -> Callable[[], None]:
        """A pass over the first `count` lanes, which sample in these ways."""
        # Filters look at the numbers to decide what to do next, which a graph can't hold.
        if self._on_gpu and not any(sampling.filters for sampling in samplings):
            if count not in self._passes:
                self._passes[count] = captured(self._pass_by_picks(count), [self._ids, self._start])
            return self._passes[count]
        if count not in self._readings:
            self._readings[count] = self._reading(count)
        return partial(self._pass_by_logits, *self._readings[count], samplings, count)

    def _pass_by_picks(self, count: int) -> Callable[[], None]:
        """Kernels take each lane's tokens to the best of what follows, in one go."""
        from terra.engine.graph import many_rows, one_row, tokens

        width = self.width(count)
        lanes, rows, layout, model = slice(count), count * width, self._layout, self._model
        ids, start, last = self._ids[lanes], self._start[lanes], self._last[lanes]
        draws = tokens.Draws(self._temperature[lanes], self._seed[lanes], start)
        best = torch.full((rows,), tokens.NOTHING, dtype=torch.int64, device=ids.device)
        single = rows == 1 and not self._invariant
        steps, finish = gpu_steps(single=single), (one_row if single else many_rows).product_and_pick
        table, places = model.model.embed_tokens.weight, model.pos_embedding_spatio_temporal

        def make() -> None:
            positions, embedded = tokens.embed(
                ids, start, self._slot_rows[lanes], table, places, layout.image_tokens, width
            )
            states = self._layers(embedded, lanes, positions, self._attention(start), steps)
            finish(states, self._layers.head, draws, best)
            tokens.accept(best, ids, start, last, layout.block, layout.image_tokens)

        return make

    def _reading(self, count: int) -> tuple[Callable[[], None], Float[Tensor, "rows vocab"]]:
        """What fills these logits, each lane's tokens read."""
        width, lanes = self.width(count), slice(count)
        start, rows = self._start[lanes], count * width
        logits = torch.zeros(rows, self._model.config.image_vocab_size, dtype=self._model.dtype, device=start.device)
        steps, head = PLAIN, linear
        if self._on_gpu:
            from terra.engine.graph.many_rows import product as head

            steps = gpu_steps(single=rows == 1 and not self._invariant)
        behind = torch.arange(width, device=start.device)

        def read() -> None:
            positions = start[:, None] + behind
            embedded = self._embed(lanes, positions)
            states = self._layers(embedded, lanes, positions, self._attention(start), steps)
            logits.copy_(head(states, self._layers.head).flatten(0, 1))

        return captured(read, []) if self._on_gpu else read, logits

    def _pass_by_logits(
        self,
        read: Callable[[], None],
        logits: Float[Tensor, "rows vocab"],
        samplings: frozenset[SamplingParams],
        count: int,
    ) -> None:
        """The same as by picks with sampling of any kind, of which torch does what is not the layers'."""
        width, lanes, layout = self.width(count), slice(count), self._layout
        ids, start, last, seed = self._ids[lanes], self._start[lanes], self._last[lanes], self._seed[lanes]
        read()
        positions = (start[:, None] + torch.arange(width, device=start.device)).flatten()
        seeds = seed.repeat_interleave(width)
        for sampling in samplings:
            if self._on_gpu and not sampling.filters:  # as without others that filter
                from terra.engine.graph import tokens

                picks = tokens.picked(logits, tokens.Draws(self._temperature[lanes], seed, start))
            else:
                picks = sample_tokens(logits, sampling, seeds, positions)
            concerned = self._sampled[sampling][lanes]
            accept(ids, start, last, concerned, picks.view(count, width), layout.block, layout.image_tokens)

    def _attention(self, start: Int[Tensor, " lanes"]) -> Callable[..., Tensor]:
        return partial(attend, start=start, invariant=self._invariant)


def accept(
    ids: Int[Tensor, "lanes length"],
    start: Int[Tensor, " lanes"],
    last: Int[Tensor, " lanes"],
    concerned: Bool[Tensor, " lanes"],
    picks: Int[Tensor, "lanes width"],
    block: int,
    image_tokens: int,
) -> None:
    """Keep a pass's picks: as tokens as far as the drafts before them were right, as drafts behind that.

    `picks` follow the tokens at `start` and the positions behind it. `ids` gets them, `start` moves on to the last
    token that is certain now, at most to `last`; both only in lanes that are `concerned`. What stands in action slots
    is right whatever is picked there.
    """
    following = start[:, None] + 1 + torch.arange(picks.shape[1], device=ids.device)
    lane = torch.arange(len(ids), device=ids.device)[:, None]
    drafts = ids[lane, following]
    at_image = following % block < image_tokens
    right = ~at_image | (drafts == picks)
    certain = right[:, :-1].long().cumprod(1).sum(1)
    kept = concerned[:, None] & at_image & (following <= last[:, None])
    ids[lane, following] = torch.where(kept, picks, drafts)
    start.copy_(torch.where(concerned, torch.minimum(start + certain + 1, last), start))
