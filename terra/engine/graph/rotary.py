"""What Triton kernels that make queries and keys share: rotation by position, and a head's two halves in memory."""

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
