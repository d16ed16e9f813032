"""3x3x3 convolutions by Winograd's minimal filtering, for float32 on a CPU.

A tile of 4x4 outputs of a 3x3 kernel needs 36 products instead of 144 (Lavin and Gray, "Fast
Algorithms for Convolutional Neural Networks", 2016): y = A^T [(G g G^T) * (B^T d B)] A. Tiles are
transformed by one small matrix product, the 36 products over channels are 36 larger ones, and the
three temporal taps are added up before the way back. It rounds differently than a direct
convolution: which points the polynomials are interpolated at decides by how much.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor

TILE = 4  # output rows and columns of a tile
_SIDE = TILE + 2  # input rows and columns
# Of the sets that were tried the one with the smallest error: 1.5 to 2 times that of the direct
# convolution, a quarter of that of the usual (0, 1, -1, 2, -2).
_POINTS = (0.0, math.sqrt(0.5), -math.sqrt(0.5), math.sqrt(2.0), -math.sqrt(2.0))
_BLOCK = 1 << 20  # numbers of a transformed block: what the last-level cache holds


def _product(roots: list[float]) -> list[float]:
    """Coefficients, lowest first, of the polynomial with these roots."""
    coefficients = [1.0]
    for root in roots:
        shifted, scaled = [0.0, *coefficients], [*(root * c for c in coefficients), 0.0]
        coefficients = [a - b for a, b in zip(shifted, scaled, strict=True)]
    return coefficients


@lru_cache(maxsize=1)
def matrices() -> tuple[Tensor, Tensor, Tensor]:
    """A^T [4, 6], G [6, 3] and B^T [6, 6] of Cook and Toom, float64; the last point is infinity."""
    back, kernel, forth = (
        torch.zeros(shape, dtype=torch.float64)
        for shape in ((TILE, _SIDE), (_SIDE, 3), (_SIDE, _SIDE))
    )
    for index, point in enumerate(_POINTS):
        others = [p for p in _POINTS if p != point]
        scale = math.prod(point - other for other in others)
        powers = torch.tensor([point**power for power in range(TILE)], dtype=torch.float64)
        back[:, index] = powers
        kernel[index] = powers[:3] / scale
        forth[index, :-1] = torch.tensor(_product(others), dtype=torch.float64)
    back[-1, -1] = kernel[-1, -1] = 1
    forth[-1] = torch.tensor(_product(list(_POINTS)), dtype=torch.float64)
    return back, kernel, forth


def transform_kernels(weight: Tensor) -> Tensor:
    """Kernels [C_out, C_in, 3, 3, 3] to [3 (time), 36, C_in, C_out]; four times as large."""
    _, g, _ = matrices()
    g = g.to(weight.device)
    taps = [
        torch.einsum("ai,bj,ocij->abco", g, g, weight[:, :, tap].double()).flatten(0, 1)
        for tap in range(3)
    ]
    return torch.stack([tap.to(weight.dtype) for tap in taps])


def winograd_conv(buffer: Tensor, kernels: Tensor, bias: Tensor) -> Tensor:
    """Convolves frames with the two before them, zeros around each frame.

    Args:
        buffer: [2 + T, H, W, C_in] contiguous.
        kernels: of `transform_kernels`.
        bias: [C_out].

    Returns:
        [T, H, W, C_out].
    """
    length, height, width, channels = buffer.shape
    frames, out_channels = length - 2, kernels.shape[-1]
    a, _, b = (matrix.to(buffer) for matrix in matrices())
    forth, back = torch.kron(b, b), torch.kron(a, a)  # [36, 36], [16, 36]
    columns, rows = -(-width // TILE), -(-height // TILE)
    step = max(1, _BLOCK // (_SIDE**2 * length * columns * channels))
    out = buffer.new_empty(frames, height, width, out_channels)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        top, bottom = first * TILE - 1, (first + count) * TILE + 1
        block = F.pad(
            buffer[:, max(top, 0) : min(bottom, height)],
            (0, 0, 1, columns * TILE + 1 - width, max(-top, 0), max(bottom - height, 0)),
        )
        t, y, x, c = block.stride()
        tiles = block.as_strided(
            (_SIDE, _SIDE, length, count, columns, channels), (y, x, t, TILE * y, TILE * x, c)
        )
        inputs = (forth @ tiles.reshape(_SIDE**2, -1)).view(_SIDE**2, length, -1, channels)
        sums = torch.bmm(inputs[:, :frames].flatten(1, 2), kernels[0])
        for tap in (1, 2):
            sums.baddbmm_(inputs[:, tap : tap + frames].flatten(1, 2), kernels[tap])
        pixels = (back @ sums.view(_SIDE**2, -1)).view(
            TILE, TILE, frames, count, columns, out_channels
        )
        pixels = pixels.permute(2, 3, 0, 4, 1, 5).reshape(frames, count * TILE, -1, out_channels)
        end = min((first + count) * TILE, height)
        begin = first * TILE
        torch.add(pixels[:, : end - begin, :width], bias, out=out[:, begin:end])
    return out
