"""Timing of a workload: frames of simultaneous rollouts, frames of the baselines one by one, and memory bandwidth."""

import asyncio
import itertools
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any

import torch

from terra.benchmark.plan import NUM_WARMUP_FRAMES, Workload
from terra.benchmark.prompts import MakePrompt
from terra.device import torch_dtype
from terra.engine.base import Engine, EngineSpec, Session
from terra.prompt import Actions, pack_blocks
from terra.sampling import SamplingParams

SAMPLING = SamplingParams(temperature=0.9)


async def time_rollouts(engine: Engine, workload: Workload, seed: int, make_prompt: MakePrompt) -> dict[str, Any]:
    """Seconds for each frame of simultaneous rollouts.

    All rollouts first generate one frame and wait for one another, so that no prefill falls in the measured time. From
    there on frame k is finished when the last rollout has its frame k.

    Returns:
        "seconds": a number for each measured frame; "first": seconds from opening the sessions to the last first frame;
        "passes": those of the measured frames, see `terra.engine.base.EngineCounters.passes`.
    """
    num_generated = NUM_WARMUP_FRAMES + workload.num_frames
    prompts = [make_prompt(workload.num_context, num_generated, seed * 1000 + i) for i in range(workload.rollouts)]
    begun = perf_counter()
    sessions = [await engine.open(prompt, SAMPLING, seed * 1000 + i) for i, (prompt, _) in enumerate(prompts)]
    go_on = stepped if workload.way == "step" else ran
    together = list(zip(sessions, (actions for _, actions in prompts), strict=True))
    await asyncio.gather(*(go_on(session, actions[:1]) for session, actions in together))
    before = engine.counters.passes
    together_at = perf_counter()
    finished = await asyncio.gather(*(go_on(session, actions[1:]) for session, actions in together))
    for session in sessions:
        await session.close()
    ends = [together_at, *(max(times) for times in zip(*finished, strict=True))]
    return {
        "seconds": [later - earlier for earlier, later in itertools.pairwise(ends)],
        "first": together_at - begun,
        "passes": [now - then for now, then in itertools.zip_longest(engine.counters.passes, before, fillvalue=0)],
    }


async def stepped(session: Session, actions: Actions) -> list[float]:
    """The clock's reading at each frame of `session`; each action is sent after the frame before it has arrived."""
    times = []
    for action in actions:
        await session.step(action)
        times.append(perf_counter())
    return times


async def ran(session: Session, actions: Actions) -> list[float]:
    """The clock's reading at each frame of `session`; all actions are sent ahead."""
    return [perf_counter() async for _ in session.run(actions)]


async def time_requests(engine: Engine, workload: Workload, seed: int, make_prompt: MakePrompt) -> dict[str, Any]:
    """Seconds for each frame when every frame is a session of its own, which computes the whole history again.

    The history has as many frames as that of the same frame of a rollout.
    """
    seconds = []
    for index in range(workload.num_frames):
        num_context = workload.num_context + NUM_WARMUP_FRAMES + index
        prompt, actions = make_prompt(num_context, 1, seed * 1000 + index)
        begun = perf_counter()
        session = await engine.open(prompt, SAMPLING, seed)
        await ran(session, actions)
        seconds.append(perf_counter() - begun)
        await session.close()
    return {"seconds": seconds, "first": seconds[0]}


def time_generate(
    model: Any, workload: Workload, seed: int, make_prompt: MakePrompt, max_tokens: int | None
) -> dict[str, Any]:
    """Seconds for each frame by transformers' `generate`: sampling from the whole vocabulary, a KV cache in each call.

    With `max_tokens` below a frame's number of tokens, the time of the whole frame is extrapolated at the speed of
    those tokens; a call for one token measures the prefill.
    """
    spec = EngineSpec.of(model.config)
    layout = spec.layout
    model.prepare_inputs_for_generation = partial(_inputs, model.prepare_inputs_for_generation)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0

    def call(ids: torch.Tensor, actions: torch.Tensor, new_tokens: int) -> float:
        begun = perf_counter()
        made = model.generate(
            ids, actions=actions, max_new_tokens=new_tokens, do_sample=True, temperature=0.9, top_k=0, top_p=1.0
        )
        made.tolist()  # waits for the device
        if made.shape[1] != ids.shape[1] + new_tokens:
            raise RuntimeError(f"generate: expected {new_tokens} new tokens, got {made.shape[1] - ids.shape[1]}")
        return perf_counter() - begun

    seconds = []
    tokens = min(max_tokens or layout.image_tokens, layout.image_tokens)
    for index in range(workload.num_frames):
        prompt, action = make_prompt(workload.num_context + NUM_WARMUP_FRAMES + index, 1, seed * 1000 + index)
        ids = pack_blocks(prompt.tokens, layout.action_slots)[None]
        given = ids.to(model.device), torch.cat([prompt.actions, action])[None].to(model.device)
        if workload.way == "generate_again":
            call(*given, tokens)
        took = call(*given, tokens)
        if tokens < layout.image_tokens:
            start = call(*given, 1)
            took = start + (took - start) / (tokens - 1) * (layout.image_tokens - 1)
        seconds.append(took)
    del model.prepare_inputs_for_generation
    return {"seconds": seconds, "first": seconds[0], "timed_tokens": tokens}


def _inputs(prepare: Callable[..., dict[str, Any]], *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The inputs of a forward pass of `generate`: actions go with the prompt, later passes have the new token alone."""
    inputs = prepare(*args, **kwargs)
    cache = inputs.get("past_key_values")
    if cache is not None and cache.get_seq_length():
        inputs["actions"] = None
    kept = ("input_ids", "actions", "past_key_values", "use_cache", "logits_to_keep")
    return {name: inputs[name] for name in kept if name in inputs}


def time_bandwidth(device: str, num_bytes: int, repeats: int) -> dict[str, Any]:
    """Bytes a second that a matrix-vector product reads, and that a copy reads and writes; a list of `repeats` each."""
    dtype = torch_dtype(None, torch.device(device))
    columns = 1 << 14
    rows = num_bytes // columns // dtype.itemsize
    matrix = torch.ones(rows, columns, dtype=dtype, device=device)
    vector = torch.ones(columns, dtype=dtype, device=device)
    half = rows // 2

    def rates(work: Callable[[], object], moved: int) -> list[float]:
        found = []
        for _ in range(repeats + 1):
            _wait(device)
            begun = perf_counter()
            work()
            _wait(device)
            found.append(moved / (perf_counter() - begun))
        return found[1:]

    size = rows * columns * dtype.itemsize
    return {
        "read": rates(lambda: matrix.mv(vector), size),
        "copy": rates(lambda: matrix[:half].copy_(matrix[half : 2 * half]), half * columns * dtype.itemsize * 2),
    }


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def spread(values: Sequence[float]) -> dict[str, Any]:
    """Median, quartiles and number of the measurements `values`."""
    if len(values) < 2:
        return {"median": values[0], "low": values[0], "high": values[0], "count": len(values)}
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return {"median": median, "low": low, "high": high, "count": len(values)}
