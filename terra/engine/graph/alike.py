"""What Triton kernels for one token and for several do alike, rounding as the separate steps of torch do."""

# pyright: reportGeneralTypeIssues=false, reportIndexIssue=false

import triton
import triton.language as tl


@triton.jit
def rotation(cosine, sine, at, half):
    """Of elements of a head's first half and those of its second half; `at` is where the tables have the first."""
    return tl.load(cosine + at), tl.load(sine + at), tl.load(cosine + at + half), tl.load(sine + at + half)


@triton.jit
def rotated(first, second, angles):
    """Elements of a head's two halves, rotated."""
    cosine, sine, cosine_of_second, sine_of_second = angles
    return turned(first, -second, cosine, sine), turned(second, first, cosine_of_second, sine_of_second)


@triton.jit
def turned(element, other, cosine, sine):
    """An element, rotated with that of the head's other half, rounded once less than by torch's steps.

    By name, since a compiler may fuse either product of such a sum, and not the same one in each kernel.
    """
    return tl.math.fma(element, cosine, other * sine)


@triton.jit
def summed(parts, token, row, used, tokens, rows, SPLITS: tl.constexpr):
    """Of a token, these rows of a product in parts."""
    made = tl.load(parts + token * rows + row, mask=used, other=0.0)
    for split in tl.static_range(1, SPLITS):
        made += tl.load(parts + (split * tokens + token) * rows + row, mask=used, other=0.0)
    return made


@triton.jit
def store_pair(target, first, second, apart, used=None):
    """Elements of a head's two halves, so far apart, in the target's type; all, or those that are `used`."""
    kind = target.dtype.element_ty
    tl.store(target, first.to(kind), mask=used)
    tl.store(target + apart, second.to(kind), mask=used)


@triton.jit
def activated(gate, by):
    """SiLU of what the gate's rows gave, times what the others gave, both rounded already if they are to be."""
    wide = gate.to(tl.float32)
    return (wide / (1.0 + tl.exp(-wide))).to(gate.dtype) * by
