"""A row's bits of attention, whatever is beside it."""

import torch

from terra.engine.graph.attention_kernel import attend_split

TYPES = [
    (torch.float32, torch.float32),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float8_e4m3fn),
]  # of the queries and of the cache


def check_company(device: str, dim: int) -> None:
    """Alone = beside other lanes and rows, however many programs share the keys."""
    torch.manual_seed(0)
    all_queries = torch.randn(4, 5, 8, dim)
    all_keys, all_values = 2 * torch.randn(4, 2, 1536, dim), torch.randn(4, 2, dim, 1536)
    for kind, cached in TYPES:
        queries = all_queries.to(device, kind)
        keys, values = all_keys.to(device, cached), all_values.to(device, cached)

        def attended(first, lanes, width, processors, *, invariant=True):
            start = torch.full((lanes,), first, device=device)
            taken = queries[:lanes, :width].contiguous(), keys[:lanes], values[:lanes], start  # noqa: B023
            return attend_split(*taken, processors, invariant=invariant)[0, 0]

        for first in (100, 1400):
            alone = attended(first, 1, 1, 1000)  # a block of keys a program
            # Several blocks, all of them; with other lanes, with other rows, with both.
            for company in [(1, 1, 4), (1, 1, 1), (4, 1, 1), (1, 5, 1000), (1, 5, 4), (4, 5, 1)]:
                assert torch.equal(attended(first, *company), alone), (kind, cached, first, company)
        if kind == torch.float32:  # what is summed in another order rounds otherwise
            other = attended(1400, 1, 1, 4, invariant=False)
            assert not torch.equal(other, attended(1400, 1, 1, 1, invariant=False))
