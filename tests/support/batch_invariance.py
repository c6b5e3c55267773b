"""Checks the batch invariance of the attention kernel: a query's output has the same bits in every batch."""

import torch

from terra.engine.graph.kernels.attention import cached_attention
from terra.engine.graph.kernels.launch import DeviceLimits
from terra.engine.graph.kv_cache import KVTarget, SharedKeys
from terra.engine.graph.reference import cached_attention as torch_attention

TYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float8_e4m3fn),
]  # of the queries and of the cache


def check_batch_invariance(device: str, dim: int, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    """Check that a query alone = beside other slots and tokens, for every number of CTAs that share the keys."""
    shared_memory, pdl, tma = _limits(device)
    if device == "cpu":  # in the interpreter, which takes its time for each head and each block of keys
        all_slots, many, heads, length = 2, 16, 4, 768
    else:
        all_slots, many, heads, length = 8, 40, 8, 4608  # keys of bundles of both sizes
    torch.manual_seed(0)
    queries = torch.randn(all_slots, many, heads, dim).to(device, dtype)
    keys = (2 * torch.randn(all_slots, 2, length, dim)).to(device, cache_dtype)
    values = torch.randn(all_slots, 2, dim, length).to(device, cache_dtype)

    def attended(first, slots, width, num_sms, tma=tma):
        start = torch.full((slots,), first, device=device)
        table = torch.zeros(length, dim, device=device, dtype=dtype)
        target = KVTarget(table, table, start, keys[:slots], values[:slots])
        limits = DeviceLimits(num_sms, shared_memory, pdl, tma)
        return cached_attention(queries[:slots, :width].contiguous(), target, limits)[0, 0]

    for first in (100, length - 136):
        alone = attended(first, 1, 1, 1000)  # one block of keys a CTA
        # Several blocks a CTA, and all of them; beside other slots, a few and many other tokens, and all of these.
        few = [(1, 1, 4), (1, 1, 1), (all_slots, 1, 1), (1, 5, 1000), (1, 5, 4), (all_slots, 5, 1)]
        for batch in [*few, (1, many, 1000), (1, many, 1), (1, many, 1, False), (all_slots, many, 1)]:
            assert torch.equal(attended(first, *batch), alone), (first, batch)


def check_shared_keys(device: str, dim: int, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    """Check that slots which share their first keys attend as if each had a copy.

    One shared prefix ends among the small bundles of keys, one where these end, one behind larger bundles. On a CPU the
    lengths are those for `_FINE_BUNDLE`, `_FINE_BLOCKS`, `_BUNDLE` = 1, 2, 2 (see `tests/interpreted/conftest.py`).
    """
    shared_memory, pdl, tma = _limits(device)
    if device == "cpu":
        heads, length, (short, middle, long) = 4, 768, (128, 256, 512)
    else:
        heads, length, (short, middle, long) = 16, 4608, (1024, 2048, 4096)
    limits = DeviceLimits(1, shared_memory, pdl, tma)
    torch.manual_seed(0)
    num_slots, batch = 8, 6
    queries = torch.randn(batch, 5, heads, dim).to(device, dtype)
    keys = (2 * torch.randn(num_slots, 2, length, dim)).to(device, cache_dtype)
    values = torch.randn(num_slots, 2, dim, length).to(device, cache_dtype)
    table = torch.zeros(length, dim, device=device, dtype=dtype)
    # All in one; two holders, one of them behind the batch; contexts of several lengths; one slot that shares nothing.
    for holder, shared in (
        ([0, 0, 0, 0, 0, 0], [long, long, long, long, long, long]),
        ([7, 7, 7, 7, 6, 6], [middle, middle, long, long, short, short]),
        ([2, 2, 2, 2, 2, 5], [short, short, short, short, short, 0]),
    ):
        copied, only = (keys.clone(), values.clone()), (keys.clone(), values.clone())
        for slot, (source, count) in enumerate(zip(holder, shared, strict=True)):
            copied[0][slot, :, :count] = keys[source, :, :count]
            copied[1][slot, ..., :count] = values[source, ..., :count]
            if slot != source:
                only[0][slot, :, :count] = torch.nan
                only[1][slot, ..., :count] = torch.nan
        sharing = torch.tensor(holder, device=device), torch.tensor(shared, device=device)
        for width in (1, 2, 5):
            start = long + torch.tensor([4, 44, 0, 127, 44, 14], device=device)
            given = queries[:, :width].contiguous()
            own = KVTarget(table, table, start, copied[0][:batch], copied[1][:batch])
            apart = KVTarget(table, table, start, only[0][:batch], only[1][:batch], SharedKeys(*sharing, *only))
            expected = cached_attention(given, own, limits)
            attended = cached_attention(given, apart, limits)
            if device != "cpu" or cache_dtype.itemsize > 1:
                assert torch.equal(attended, expected), (holder, width)
            else:  # the interpreter's sums follow the order in memory, which is another one here
                torch.testing.assert_close(attended, expected, rtol=0.01, atol=1e-3)
            if device != "cpu" or dtype == torch.float32:  # the interpreter's bfloat16 has whole numbers of its bits
                reference = torch_attention(given.float(), apart).to(expected.dtype)
                torch.testing.assert_close(expected, reference, rtol=0.02, atol=0.02)


def _limits(device: str) -> tuple[int, bool, bool]:
    """A CTA's shared memory, and whether there are PDL and TMA; the interpreter has TMA."""
    if device == "cpu":
        return 1 << 30, False, True
    from terra.engine.graph.kernels.launch import device_limits

    found = device_limits(torch.device(device))
    return found.shared_memory, found.pdl, found.tma
