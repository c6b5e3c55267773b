"""The two array types that all three packages share: pictures and their tokens.

`Frames`: a stack of RGB images as floats in [-1, 1] (-1 black, 1 full intensity), channels first, in time order.
8-bit values exist at the disk and video borders only.

`TokenGrid`: for each frame a grid of token ids (int64) in [0, codebook_size), in which row 0 is the top of the image
and column 0 its left edge. Flattening a frame row by row gives the order in which its tokens stand in a prompt.
Every id in the range is a picture, 0 included.
"""

from jaxtyping import Float, Int
from torch import Tensor

Frames = Float[Tensor, "frames 3 height width"]
TokenGrid = Int[Tensor, "frames rows cols"]
