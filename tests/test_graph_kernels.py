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

from terra.engine.graph.attention import attend
from terra.engine.graph.kernels import attend_split, rotate_and_store
from terra.engine.graph.layers import Layer, mix, project, rms_norm, store
from terra.engine.graph import one_row

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
    length = 40
    torch.manual_seed(lanes)
    positions = torch.randint(0, length - width, (lanes, 1)) + torch.arange(width)
    mixed = torch.randn(lanes, width, (heads + 2 * kv_heads) * dim)
    cosine, sine = torch.randn(length, dim), torch.randn(length, dim)
    caches = [torch.zeros(lanes, length, kv_heads, dim) for _ in range(4)]
    expected = store(mixed, cosine, sine, positions, *caches[:2])
    queries = rotate_and_store(mixed, cosine, sine, positions, *caches[2:])
    torch.testing.assert_close(queries, expected)
    torch.testing.assert_close(caches[2:], caches[:2])
    assert caches[0].abs().sum() > 0

one_row._product.configs = one_row._product.configs[:1]  # there is no clock to choose by
hidden, inner, epsilon = 72, 100, 1e-5
states, norm, next_norm = torch.randn(1, 1, hidden), torch.randn(hidden), torch.randn(hidden)
attended = torch.randn(1, 1, 3, 16)
sizes = [(80, hidden), (hidden, 48), (2 * inner, hidden), (hidden, inner)]
weights = [torch.randn(size) / size[1] ** 0.5 for size in sizes]
layer = Layer(weights[0], weights[1], norm, weights[2], weights[3])
expected = project(rms_norm(states, norm, epsilon), norm, epsilon, layer)
torch.testing.assert_close(one_row.product(states, weights[0], norm=norm, epsilon=epsilon), expected)
expected, _ = mix(attended, states, layer, next_norm, epsilon)
mixed = one_row.product(attended.flatten(2), layer.output, states=states)
inside = one_row.product(mixed, layer.gate_up, norm=norm, epsilon=epsilon, gated=True)
torch.testing.assert_close(one_row.product(inside, layer.down, states=mixed), expected)
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
