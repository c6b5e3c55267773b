"""What Triton kernels for one token and for several do alike, rounding as the separate steps of torch do."""

# pyright: reportIndexIssue=false

import triton
import triton.language as tl


@triton.jit
def rotation(cosine, sine, at, half):
    """Of elements of a head's first half and those of its second half; `at` is where the tables have the first."""
    return tl.load(cosine + at), tl.load(sine + at), tl.load(cosine + at + half), tl.load(sine + at + half)


@triton.jit
def rotated(first, second, angles):
    """Elements of a head's two halves, rotated. Rounded after each product, as torch does it in half precision."""
    cosine, sine, cosine_of_second, sine_of_second = angles
    return first * cosine - second * sine, second * cosine_of_second + first * sine_of_second


@triton.jit
def store_pair(target, first, second, apart, used=None):
    """Elements of a head's two halves, so far apart, in the target's type; all, or those that are `used`."""
    kind = target.dtype.element_ty
    tl.store(target, first.to(kind), mask=used)
    tl.store(target + apart, second.to(kind), mask=used)


@triton.jit
def activated(gate, by):
    """SiLU of what the gate's rows gave, times what the others gave, both rounded already."""
    wide = gate.to(tl.float32)
    return (wide / (1.0 + tl.exp(-wide))).to(gate.dtype) * by


@triton.jit
def scales_to_8_bits(largest):
    """Of values whose largest is this, the scale in 8 bits and what they are multiplied by (`matrix.round_rows`)."""
    largest = tl.maximum(largest, 1e-12)
    return tl.div_rn(largest, 448.0), tl.div_rn(448.0, largest)
