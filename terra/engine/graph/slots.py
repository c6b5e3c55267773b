"""The slots of a batch: what the device knows of each sequence, and what changes it: prefill, begin, copy, swap.

A slot holds one window's tokens, action embeddings, KV cache and progress. How far a slot is stands on the device
alone: so decode steps of a batch have one shape each, are captured as CUDA graphs, and are replayed without the host.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Float32, Int64
from torch import Tensor

from terra.engine.graph import reference
from terra.engine.graph.kv_cache import SHARED_MULTIPLE, KVCache, padded_length
from terra.engine.graph.quantization import FP8
from terra.engine.graph.transfers import fill, to_device, to_host
from terra.engine.graph.weights import DecoderWeights
from terra.prompt import Action, Prompt
from terra.sampling import SamplingParams
from terra.world_model.model import LlamaActionForCausalLM, LlamaActionV2ForCausalLM

Capture = Callable[[Callable[[], None], Sequence[Tensor]], Callable[[], None]]
"""How repeated work is kept, see `terra.engine.graph.cuda_graph.capture`."""

NO_TOKEN = torch.iinfo(torch.int64).min
"""The value of `Slots.best` where nothing has been sampled."""


@dataclass(frozen=True)
class FrameRequest:
    """A frame for a slot to make: its number in the slot's window, the action that leads to it, and how to sample.

    `goes_on`: the frame before need not be complete; the slot's decode steps go on from it into this one.
    """

    slot: int
    frame: int
    action: Action
    sampling: SamplingParams
    goes_on: bool = False


@dataclass(frozen=True)
class Snapshot:
    """What is kept of a window while another one has its slot."""

    length: int
    tensors: tuple[Tensor, ...]


@dataclass(frozen=True)
class Batch:
    """The first slots, as views of the tensors of `Slots`, and how many tokens of each a decode step reads."""

    slots: slice
    width: int
    ids: Int64[Tensor, "slots length"]
    start: Int64[Tensor, " slots"]
    last: Int64[Tensor, " slots"]
    seed: Int64[Tensor, " slots"]
    temperature: Float32[Tensor, " slots"]
    action_embeddings: Float[Tensor, "slots action_slots hidden"]
    best: Int64[Tensor, " tokens"]
    passes: Int64[Tensor, " counts"]

    @property
    def positions(self) -> Int64[Tensor, "slots width"]:
        """Positions of the tokens that a decode step reads."""
        return self.start[:, None] + torch.arange(self.width, device=self.start.device)


class Slots:
    """The device state of all slots, numbered from 0. Tensors keep their addresses, since CUDA graphs hold them.

    Args:
        model: its layers are taken out of it, see `DecoderWeights`.
        num_slots: windows held at once.
        drafts: tokens that a decode step reads in a slot beyond the first, at most.
        step_tokens: tokens that a decode step reads over all slots, at most; but one of each slot in any case.
        fp8_weights: hold layers and lm head in 8 bits, see `terra.engine.graph.quantization`.
        fp8_cache: hold keys and values in 8 bits (E4M3), unscaled.

    Attributes:
        weights: what all slots share.
        cache: the KV cache.
        ids: tokens by position: certain up to `start`, drafts behind it, also those of the next frame.
        start: position of the first token that is not in the KV cache yet. Only the end of a decode step and the host
            between two steps write it: the attention kernel reads it before it waits for the kernels ahead of it.
        last: position of the last image token of the frame in the making.
        action_embeddings: what action slots hold instead of tokens.
        best: scratch of the sampling kernels, `NO_TOKEN` between decode steps.
        holder, shared: which slot holds the first keys and values of each slot, and how many; see
            `terra.engine.graph.kv_cache.SharedKeys`.
        passes: see `terra.engine.base.EngineCounters.passes`. A decode step counts in each slot that lacks tokens.
        sampled_with: for each kind of sampling in use, which slots sample so.
    """

    def __init__(
        self,
        model: LlamaActionForCausalLM | LlamaActionV2ForCausalLM,
        num_slots: int,
        drafts: int,
        *,
        step_tokens: int = 512,
        fp8_weights: bool = False,
        fp8_cache: bool = False,
    ) -> None:
        self.num_slots, self.drafts, self.step_tokens = num_slots, drafts, step_tokens
        self.layout = layout = model.config.layout
        dtype, device = model.dtype, model.device
        length = padded_length(layout.max_length + drafts + 1)
        self.weights = DecoderWeights(model, length, fp8=fp8_weights)
        num_layers, kv_heads, dim = self.weights.kv_shape
        cache_dtype = FP8 if fp8_cache else dtype
        self.cache = KVCache(num_layers, num_slots, kv_heads, length, dim, dtype=cache_dtype, device=device)
        action_slots = layout.max_frames * layout.action_slots
        self.action_embeddings = torch.zeros(
            num_slots, action_slots, self.weights.hidden_size, dtype=dtype, device=device
        )
        # A window's last frame has a next one, too, as far as its drafts go.
        self.ids = torch.zeros(num_slots, length + layout.block, dtype=torch.int64, device=device)
        # Views by frame: its image tokens (of frames in the padding, too), and the embeddings of the action behind it.
        self._frame_images = self.ids.unfold(1, layout.image_tokens, layout.block)
        self._frame_actions = self.action_embeddings.unflatten(1, (layout.max_frames, layout.action_slots))
        self.start = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.last = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.seed = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self.temperature = torch.zeros(num_slots, dtype=torch.float32, device=device)
        self.best = torch.full((max(num_slots, step_tokens),), NO_TOKEN, dtype=torch.int64, device=device)
        self.holder = torch.arange(num_slots, device=device)
        self.shared = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._holders: dict[int, tuple[int, int]] = {}  # of slots without their first keys: `holder` and `shared`
        self._has_shared = False
        self.passes = torch.zeros(drafts + 2, dtype=torch.int64, device=device)
        self._prefills: dict[int, Callable[[int], None]] = {}  # those captured, by the length that they read
        self.sampled_with: dict[SamplingParams, Bool[Tensor, " slots"]] = {}
        self._samplings: list[SamplingParams | None] = [None] * num_slots

    def batch(self, count: int, width: int) -> Batch:
        """The first `count` slots, of which a decode step reads `width` tokens each."""
        first = slice(count)
        return Batch(
            first, width, self.ids[first], self.start[first], self.last[first], self.seed[first],
            self.temperature[first], self.action_embeddings[first], self.best[: count * width], self.passes,
        )  # fmt: skip

    @torch.no_grad()
    def prefill(self, slot: int, prompt: Prompt, seed: int) -> None:
        """Read a context, all but its last token, into a slot's KV cache."""
        self.release([slot])
        layout, device = self.layout, self.ids.device
        ids = prompt.ids(layout.action_slots)
        self.ids[slot, : len(ids)] = to_device(ids, device)
        self.action_embeddings[slot] = 0
        if given := len(prompt.actions):
            self._frame_actions[slot, :given] = self.weights.project_actions(prompt.actions)
        fill(self.seed, 0, slot, seed)
        length = len(ids) - 1
        self._rest(slot, length)
        if length in self._prefills:
            self._prefills[length](slot)
        elif length:
            only = slice(slot, slot + 1)
            self._read(self.ids[only], self.action_embeddings[only], self.cache, only, length)

    @torch.no_grad()
    def capture_prefill(self, num_frames: int, capture: Capture) -> None:
        """Let `prefill` of contexts of so many frames replay one graph, where the host launches some 700 kernels.

        Args:
            num_frames: of the context.
            capture: see `terra.engine.graph.step.Backend.capture`.
        """
        length = self.last_of(num_frames - 1)
        if not length:
            return
        num_layers, kv_heads, dim = self.weights.kv_shape
        options = {"dtype": self.cache.keys.dtype, "device": self.ids.device}
        one = KVCache(num_layers, 1, kv_heads, padded_length(length), dim, **options)
        index = torch.zeros(1, dtype=torch.int64, device=self.ids.device)

        def read() -> None:
            self._read(self.ids[index], self.action_embeddings[index], one, slice(1), length)
            self.cache.put(one, index, length)

        replay = capture(read, [])

        def prefill(slot: int) -> None:
            index.fill_(slot)
            replay()

        self._prefills[length] = prefill

    @torch.no_grad()
    def copy_context(self, source: int, slots: Sequence[int], num_frames: int, seeds: Sequence[int]) -> None:
        """Give slots the context of another slot, as `prefill` would; nothing is computed.

        Keys and values of the context are shared as far as they are whole multiples of `SHARED_MULTIPLE`, and the
        rest is copied.

        Args:
            source: a slot that was filled with this context. It may have made frames since, which stand behind it.
            slots: the slots to fill; `source` is not among them.
            num_frames: frames of the context.
            seeds: the seed of each of `slots`.
        """
        self.release(slots)
        to = self._numbers(slots)
        length = num_frames * self.layout.block - self.layout.action_slots
        given = (num_frames - 1) * self.layout.action_slots
        self.ids[to, :length] = self.ids[source, :length]
        self.action_embeddings[to, :given] = self.action_embeddings[source, :given]
        fill(self.action_embeddings[:, given:], 0, to, 0)
        self.seed[to] = self._numbers(seeds)
        length -= 1  # the first decode step reads the last token
        shared = self.shared_keys(num_frames)
        self.cache.copy(source, to, shared, length)
        self._rest(to, length)
        if shared:
            holder, _ = self._holders.get(source, (source, 0))
            self._share(slots, holder, shared)

    def shared_keys(self, num_frames: int) -> int:
        """How many keys of a context of so many frames slots share: whole multiples of `SHARED_MULTIPLE`."""
        length = num_frames * self.layout.block - self.layout.action_slots - 1  # the last token has no key yet
        return length // SHARED_MULTIPLE * SHARED_MULTIPLE

    def any_share(self, slots: Iterable[int]) -> bool:
        """Whether one of these slots has keys and values in another slot."""
        return any(slot in self._holders for slot in slots)

    @torch.no_grad()
    def release(self, slots: Iterable[int]) -> None:
        """Part these slots, which are about to be filled anew, from those that they share a context with.

        Where one of them holds a context for others, the first of the others gets a copy and is their holder then.
        """
        if not self._has_shared:
            return
        filled = set(slots)
        for slot in filled:
            self._holders.pop(slot, None)
        index = self._numbers(list(filled))
        self.holder[index] = index
        fill(self.shared, 0, index, 0)
        sharers: dict[int, list[int]] = defaultdict(list)
        for slot, (holder, _) in self._holders.items():
            if holder in filled:
                sharers[holder].append(slot)
        for holder, (heir, *others) in sharers.items():
            _, length = self._holders.pop(heir)
            self.cache.copy(holder, self._numbers([heir]), 0, length)
            self._share(others, heir, length)

    @torch.no_grad()
    def begin_frames(self, requests: Sequence[FrameRequest]) -> None:
        """Let the next decode steps make a frame in each of some slots; its first drafts are the frame before.

        All frames at once: a GPU takes longer for single writes than for decode steps.
        """
        slots, frames = [each.slot for each in requests], [each.frame for each in requests]
        lasts = [self.last_of(frame) for frame in frames]
        # Computed here: the host takes longer to launch an operation than to do such a sum.
        slot, before, last = self._numbers((slots, [number - 1 for number in frames], lasts))
        actions = torch.stack([each.action for each in requests])
        self._frame_actions[slot, before] = self.weights.project_actions(actions)
        self.last[slot] = last
        if anew := [(each.slot, self.last_of(each.frame - 1)) for each in requests if not each.goes_on]:
            slot, start = self._numbers(list(zip(*anew, strict=True)))
            self.start[slot] = start
        self._sample_with({each.slot: each.sampling for each in requests})

    def last_of(self, frame: int) -> int:
        """The position of a frame's last image token, from which the frame behind it starts."""
        return frame * self.layout.block + self.layout.image_tokens - 1

    def ask_start(self) -> Callable[[], list[int]]:
        """Ask for `start` of each slot after the decode steps so far: frames up to there are complete.

        The result waits until the device has made these steps; later steps do not change the answer.
        """
        answer = to_host(self.start)
        return lambda: answer()[0].tolist()

    def copy_frames(self, frames: Sequence[tuple[int, int]]) -> Callable[[], tuple[Tensor, ...]]:
        """Begin to copy the tokens of frames, each a slot and its number in the slot's window, and `passes` to the CPU.

        The result waits for the copies, (frames, image_tokens) and (counts,).
        """
        slot, frame = self._numbers(list(zip(*frames, strict=True)))
        return to_host(self._frame_images[slot, frame], self.passes)

    def swap_out(self, slot: int, frame: int) -> Snapshot:
        """What `swap_in` needs to go on behind frame number `frame`."""
        length = frame * self.layout.block + self.layout.image_tokens
        parts = tuple(part.clone() for part in self._parts(slot, length))
        if slot in self._holders:
            holder, shared = self._holders[slot]
            keys, values, *_ = self._parts(holder, shared)
            parts[0][:, :, :shared], parts[1][..., :shared] = keys, values
        return Snapshot(length, parts)

    def swap_in(self, slot: int, snapshot: Snapshot) -> None:
        """Go on, in any slot, with the window that was swapped out."""
        self.release([slot])
        for part, tensor in zip(self._parts(slot, snapshot.length), snapshot.tensors, strict=True):
            part.copy_(tensor)
        self._rest(slot, snapshot.length - 1)

    def _read(self, ids: Tensor, action_embeddings: Tensor, cache: KVCache, slot: slice, length: int) -> None:
        """Read so many tokens of a context, (1, length) and its embeddings, into one slot of a cache."""
        positions = torch.arange(length, device=ids.device)[None]
        states = reference.embed(self.weights, ids, action_embeddings, positions)
        self.weights.forward(states, cache, slot, positions[:, 0], reference.PrefillOps())

    def _share(self, slots: Sequence[int], holder: int, length: int) -> None:
        """Let slots have their first keys and values in `holder`, which shares with them, too."""
        self._has_shared = True
        self._holders |= dict.fromkeys(slots, (holder, length))
        index = self._numbers([holder, *slots])
        fill(self.holder, 0, index, holder)
        fill(self.shared, 0, index, length)

    def _rest(self, slots: int | Int64[Tensor, " n"], position: int) -> None:
        """Let slots make nothing behind a frame's end, and clear what other windows left in their cache.

        The next frame's first drafts are this frame's tokens. The cache must be finite also where attention masks it,
        see `KVCache`.
        """
        frame = position // self.layout.block
        self._frame_images[slots, frame + 1] = self._frame_images[slots, frame]
        for positions in (self.start, self.last):
            fill(positions, 0, slots, position)
        self.cache.clear(slots, position)

    def _parts(self, slot: int, length: int) -> tuple[Tensor, ...]:
        cached = self.cache.keys[:, slot, :, :length], self.cache.values[:, slot, ..., :length]
        return (*cached, self.ids[slot, :length], self.action_embeddings[slot], self.seed[slot : slot + 1])

    def _sample_with(self, samplings: Mapping[int, SamplingParams]) -> None:
        """Set how slots sample from now on. A frame that is sampled as the slot's frame before costs no transfer."""
        if all(self._samplings[slot] == sampling for slot, sampling in samplings.items()):
            return
        for slot, sampling in samplings.items():
            self._samplings[slot] = sampling
        device = self.ids.device
        temperatures = [0.0 if each is None else each.temperature for each in self._samplings]
        self.temperature.copy_(to_device(torch.tensor(temperatures, dtype=self.temperature.dtype), device))
        self.sampled_with = {
            sampling: to_device(torch.tensor([sampling == other for other in self._samplings]), device)
            for sampling in set(self._samplings)
            if sampling is not None
        }

    def _numbers(self, numbers: Sequence[int] | Sequence[Sequence[int]]) -> Int64[Tensor, "..."]:
        """Whole numbers on the slots' device, see `terra.engine.graph.transfers.to_device`."""
        return to_device(torch.tensor(numbers, dtype=torch.int64), self.ids.device)
