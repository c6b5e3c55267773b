"""Checks the batch invariance of the attention kernel: a query's output has the same bits in every batch."""

import torch

from terra.engine.graph.kernels.attention import cached_attention
from terra.engine.graph.kernels.launch import DeviceLimits
from terra.engine.graph.kv_cache import KVTarget

TYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float8_e4m3fn),
]  # of the queries and of the cache


def check_batch_invariance(device: str, dim: int, dtype: torch.dtype, cache_dtype: torch.dtype) -> None:
    """Check that a query alone = beside other slots and tokens, for every number of CTAs that share the keys."""
    if device == "cpu":  # in the interpreter, which takes its time for each head and each block of keys
        shared_memory, pdl = 1 << 30, False
        all_slots, many, heads, length = 2, 9, 4, 768
    else:
        from terra.engine.graph.kernels.launch import device_limits

        found = device_limits(torch.device(device))
        shared_memory, pdl = found.shared_memory, found.pdl
        all_slots, many, heads, length = 4, 40, 8, 1536
    torch.manual_seed(0)
    queries = torch.randn(all_slots, many, heads, dim).to(device, dtype)
    keys = (2 * torch.randn(all_slots, 2, length, dim)).to(device, cache_dtype)
    values = torch.randn(all_slots, 2, dim, length).to(device, cache_dtype)

    def attended(first, slots, width, num_sms):
        start = torch.full((slots,), first, device=device)
        positions = start[:, None] + torch.arange(width, device=device)
        table = torch.zeros(length, dim, device=device, dtype=dtype)
        target = KVTarget(table, table, positions, start, keys[:slots], values[:slots])
        limits = DeviceLimits(num_sms, shared_memory, pdl)
        return cached_attention(queries[:slots, :width].contiguous(), target, limits)[0, 0]

    for first in (100, length - 136):
        alone = attended(first, 1, 1, 1000)  # one block of keys a CTA
        # Several blocks a CTA, and all of them; beside other slots, a few and many other tokens, and all of these.
        few = [(1, 1, 4), (1, 1, 1), (all_slots, 1, 1), (1, 5, 1000), (1, 5, 4), (all_slots, 5, 1)]
        for batch in [*few, (1, many, 1000), (1, many, 1), (all_slots, many, 1)]:
            assert torch.equal(attended(first, *batch), alone), (first, batch)
