"""The Triton kernels in Triton's interpreter, on a CPU, against torch."""

import os
import subprocess
import sys
from pathlib import Path

import torch

from terra.engine.graph.lanes import spread_argmax
from terra.engine.graph.matrix import Matrix, in_fp8, linear

PROGRAM = """
import itertools

import torch
import triton.language as tl
from triton.runtime import interpreter

from terra.engine.graph.attention import attend
from terra.engine.graph.kernels import attend_split, rotate_and_store
from terra.engine.graph.matrix import Matrix, in_fp8
from terra.engine.graph.layers import Layer, Place, mix, place_heads, project, rms_norm
from terra.engine.graph import one_row

cases = itertools.product([1, 5, 33], [(2, 1, 64), (8, 2, 16)], [(0,), (3, 130)], [1, 40])
for width, (heads, kv_heads, dim), start, programs in cases:
    lanes, length = len(start), 256
    torch.manual_seed(width * 1000 + lanes)
    queries = torch.randn(lanes, width, heads, dim)
    keys, values = torch.randn(lanes, kv_heads, length, dim), torch.randn(lanes, kv_heads, dim, length)
    at = torch.tensor(start)
    expected = attend(queries, keys, values, at)
    # What stands behind the last row's own position must not matter.
    for lane, first in enumerate(start):
        keys[lane, :, first + width :], values[lane, :, :, first + width :] = 1e4, 1e4
    torch.testing.assert_close(attend_split(queries, keys, values, at, programs), expected, rtol=1e-5, atol=1e-5)
    values[-1, :, :, start[-1]] += 5.0
    assert not torch.allclose(attend_split(queries, keys, values, at, programs), expected, atol=1e-3)

for lanes, width, heads, kv_heads, dim in [(1, 1, 2, 1, 8), (3, 5, 8, 2, 16)]:
    length = 40
    torch.manual_seed(lanes)
    positions = torch.randint(0, length - width, (lanes, 1)) + torch.arange(width)
    mixed = torch.randn(lanes, width, (heads + 2 * kv_heads) * dim)
    cosine, sine = torch.randn(length, dim), torch.randn(length, dim)
    caches = 2 * [torch.zeros(lanes, kv_heads, length, dim), torch.zeros(lanes, kv_heads, dim, length)]
    caches = [each.clone() for each in caches]
    expected = place_heads(mixed, Place(cosine, sine, positions, *caches[:2]))
    queries = rotate_and_store(mixed, Place(cosine, sine, positions, *caches[2:]))
    torch.testing.assert_close(queries, expected)
    torch.testing.assert_close(caches[2:], caches[:2])
    assert caches[0].abs().sum() > 0

hidden, inner, epsilon = 72, 100, 1e-5
heads, kv_heads, dim, length = 4, 2, 16, 40
states, norm, next_norm = torch.randn(1, 1, hidden), torch.randn(hidden), torch.randn(hidden)
attended = torch.randn(1, 1, 3, 16)
sizes = [((heads + 2 * kv_heads) * dim, hidden), (hidden, 48), (2 * inner, hidden), (hidden, inner)]
weights = [torch.randn(size) / size[1] ** 0.5 for size in sizes]
tables = torch.randn(length, dim), torch.randn(length, dim), torch.tensor([[7]])
convert = interpreter._convert_float


def rounded(values, kind, to, mode):
    # The interpreter's own rounding to 8 bits loses carries (triton 3.7).
    if kind != tl.float32 or to != tl.float8e4nv:
        return convert(values, kind, to, mode)
    return torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).numpy()


interpreter._convert_float = rounded
few, many = 512, 16384  # bytes a program, so rows
for one_row._BYTES, held in itertools.product((few, many), (Matrix, in_fp8)):
    matrices = [held(weight) for weight in weights]
    layer = Layer(matrices[0], matrices[1], norm, matrices[2], matrices[3])
    caches = 2 * [torch.zeros(1, kv_heads, length, dim), torch.zeros(1, kv_heads, dim, length)]
    caches = [each.clone() for each in caches]
    expected = project(rms_norm(states, norm, epsilon), norm, epsilon, layer, Place(*tables, *caches[:2]))
    queries = one_row.project(states, norm, epsilon, layer, Place(*tables, *caches[2:]))
    torch.testing.assert_close(queries, expected)
    torch.testing.assert_close(caches[2:], caches[:2])
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


def test_a_matrix_in_8_bits_is_nearly_itself():
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 64, generator=generator) * torch.logspace(-3, 3, 96)[:, None]
    states = torch.randn(2, 3, 64, generator=generator) * torch.logspace(-2, 2, 3)[None, :, None]
    matrix = in_fp8(weight)
    assert matrix.weight.dtype == torch.float8_e4m3fn
    expected, made = linear(states, Matrix(weight)), linear(states, matrix)
    torch.testing.assert_close(expected, states @ weight.T)
    # Each factor has 3 bits behind the point, so an error of 1/16 at most (and of a little where it is near 0).
    within = states.abs() @ weight.abs().T
    assert ((made - expected).abs() <= 0.14 * within).all()
    assert 0.0 < (made - expected).norm() < 0.05 * expected.norm()
    assert torch.equal(linear(torch.zeros(1, 64), matrix), torch.zeros(1, 96))


def test_spread_argmax_is_argmax():
    generator = torch.Generator().manual_seed(0)
    for rows, length in [(1, 64), (3, 8192), (2, 96), (4, 7)]:
        values = torch.randn(rows, length, generator=generator)
        assert torch.equal(spread_argmax(values), values.argmax(-1))
