"""The Triton kernels in Triton's interpreter, on a CPU, against torch."""

import os
import subprocess
import sys
from pathlib import Path

import torch

from terra.engine.graph.lanes import spread_argmax

PROGRAM = """
import itertools

import torch

from torch.nn import functional as F

from terra.engine.graph.attention import attend
from terra.engine.graph.kernels import attend_split, rotate_and_store
from terra.engine.graph.layers import project

cases = itertools.product([1, 5, 33], [(2, 1, 64), (8, 2, 16)], [(0,), (3, 130)], [1, 40])
for width, (heads, kv_heads, dim), start, programs in cases:
    lanes, length = len(start), 200 + width
    torch.manual_seed(width * 1000 + lanes)
    queries = torch.randn(lanes, width, heads, dim)
    keys, values = torch.randn(lanes, length, kv_heads, dim), torch.randn(lanes, length, kv_heads, dim)
    at = torch.tensor(start)
    expected = attend(queries, keys, values, at)
    # What stands behind the last row's own position must not matter.
    for lane, first in enumerate(start):
        keys[lane, first + width :], values[lane, first + width :] = torch.nan, torch.nan
    torch.testing.assert_close(attend_split(queries, keys, values, at, programs), expected, rtol=1e-5, atol=1e-5)
    values[-1, start[-1]] += 5.0
    assert not torch.allclose(attend_split(queries, keys, values, at, programs), expected, atol=1e-3)

for lanes, width, heads, kv_heads, dim in [(1, 1, 2, 1, 8), (3, 5, 8, 2, 16)]:
    length, hidden = 40, 24
    torch.manual_seed(lanes)
    positions = torch.randint(0, length - width, (lanes, 1)) + torch.arange(width)
    states, weight = torch.randn(lanes, width, hidden), torch.randn((heads + 2 * kv_heads) * dim, hidden)
    cosine, sine = torch.randn(length, dim), torch.randn(length, dim)
    caches = [torch.zeros(lanes, length, kv_heads, dim) for _ in range(4)]
    expected = project(states, weight, cosine, sine, positions, *caches[:2], heads)
    queries = rotate_and_store(F.linear(states, weight), cosine, sine, positions, *caches[2:])
    torch.testing.assert_close(queries, expected)
    torch.testing.assert_close(caches[2:], caches[:2])
    assert caches[0].abs().sum() > 0
print("all equal")
"""


def test_kernels_equal_torch(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(Path(__file__).parent.parent)}
    done = subprocess.run([sys.executable, program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "all equal"


def test_spread_argmax_is_argmax():
    generator = torch.Generator().manual_seed(0)
    for rows, length in [(1, 64), (3, 8192), (2, 96), (4, 7)]:
        values = torch.randn(rows, length, generator=generator)
        assert torch.equal(spread_argmax(values), values.argmax(-1))
