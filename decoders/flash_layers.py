"""Parts of the transformer decoder: rotary tables, windowed attention, the block.

Tokens stand on a grid of rows and columns; a latent frame has one or several sub-frames of them. A
frame sees its own sub-frames and the last few of the frame before, nothing else. Times are counted
within that window: remembered sub-frames have slots 0, 1, ..., the frame's own follow. Keys are
remembered with their rows and columns rotated in but not their time, because their slot is another
one at the next frame; so a stream has no largest position.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rtgen.models.attention import attention
from rtgen.models.layers import Linear, RMSNorm
from rtgen.models.rope import frame_rope, time_shift

KeysValues = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Grid:
    """Tokens of a frame and their rotations.

    Attributes:
        height: token rows.
        width: token columns.
        space: cosines and sines of every token's place, [2, N, 1, d / 2].
        slots: of time slots 0, 1, ..., [2, slots, 1, 1, d / 2].
    """

    height: int
    width: int
    space: Tensor
    slots: Tensor


@lru_cache(maxsize=64)
def make_grid(height: int, width: int, head_dim: int, slots: int, device: torch.device) -> Grid:
    """The grid of a frame size; kept, it is a constant."""
    with torch.inference_mode(False), torch.no_grad():
        space = torch.view_as_real(frame_rope((0,), height, width, head_dim, device))
        times = [torch.view_as_real(time_shift(slot, head_dim, device)) for slot in range(slots)]
        return Grid(
            height,
            width,
            space.permute(2, 0, 1)[:, :, None].contiguous(),
            torch.stack(times).permute(3, 0, 1, 2)[:, :, :, None].contiguous(),
        )


def rotate(x: Tensor, table: Tensor) -> Tensor:
    """Rotates pairs of `x` [..., d] by a table of cosines and sines; float32."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)  # type: ignore[no-untyped-call]
    cos, sin = table[0], table[1]
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)


def segments(length: int, window: int, shift: int) -> list[tuple[int, int, int]]:
    """How windows lie along a side: (start, stop, window) of runs of equal windows.

    Args:
        length: tokens of the side.
        window: tokens of a window.
        shift: tokens of the first window, 0 for a whole one.
    """
    if window >= length:
        return [(0, length, length)]
    runs = [(0, shift, shift)] if shift else []
    whole = shift + (length - shift) // window * window
    if whole > shift:
        runs.append((shift, whole, window))
    if whole < length:
        runs.append((whole, length, length - whole))
    return runs


def windowed_attention(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, shift: int, backend: str
) -> Tensor:
    """Attention of tokens within windows of the grid, over all frames given.

    Query heads share keys in groups: head `i` uses key head `i // (heads / groups)`.

    Args:
        q: [B, F, rows, columns, heads, d].
        k: [B, S, rows, columns, groups, d].
        v: likewise.
        window: rows and columns of a window; None for one over the whole grid.
        shift: rows and columns of the first window, 0 for a whole one.
        backend: one of `rtgen.models.attention.BACKENDS`.

    Returns:
        [B, F, rows, columns, heads, d].
    """
    _, frames, rows, columns, heads, _ = q.shape
    groups = k.shape[4]
    side = max(rows, columns) if window is None else window
    regions = [
        (top, left)
        for top in segments(rows, side, shift)
        for left in segments(columns, side, shift)
    ]
    out = q if len(regions) == 1 else torch.empty_like(q)
    for (top, bottom, height), (left, right, width) in regions:
        parts = [t[:, :, top:bottom, left:right] for t in (q, k, v)]
        tokens = [_to_windows(part, height, width) for part in parts]
        # Heads that share keys become more queries of one head.
        queries = tokens[0].unflatten(2, (groups, -1)).permute(0, 3, 1, 2, 4)  # type: ignore[no-untyped-call]
        found = attention(queries.flatten(1, 2), tokens[1], tokens[2], backend=backend)
        found = found.unflatten(1, (heads // groups, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)  # type: ignore[no-untyped-call]
        shape = frames, bottom - top, right - left
        region = _from_windows(found, shape, height, width)
        if len(regions) == 1:
            return region
        out[:, :, top:bottom, left:right] = region
    return out


def _to_windows(x: Tensor, height: int, width: int) -> Tensor:
    """[B, F, rows, columns, heads, d] to [B * windows, F * height * width, heads, d]."""
    b, f, rows, columns, heads, d = x.shape
    x = x.reshape(b, f, rows // height, height, columns // width, width, heads, d)
    return x.permute(0, 2, 4, 1, 3, 5, 6, 7).reshape(-1, f * height * width, heads, d)


def _from_windows(x: Tensor, shape: tuple[int, int, int], height: int, width: int) -> Tensor:
    f, rows, columns = shape
    x = x.reshape(-1, rows // height, columns // width, f, height, width, *x.shape[2:])
    return x.permute(0, 3, 1, 4, 2, 5, 6, 7).reshape(-1, f, rows, columns, *x.shape[-2:])


class SwiGLU(nn.Module):
    """down(silu(gate(x)) * up(x)), four times as wide inside, without biases."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gate = Linear(dim, 4 * dim, bias=False)
        self.up = Linear(dim, 4 * dim, bias=False)
        self.down = Linear(4 * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class FlashBlock(nn.Module):
    """Grouped-query attention with normalised keys and values, then a gated feed-forward layer.

    Args:
        dim: width.
        heads: query heads.
        groups: key and value heads.
        memory: sub-frames of the frame before that are seen.
        window: see `windowed_attention`.
        shift: likewise.
    """

    def __init__(
        self, dim: int, heads: int, groups: int, *, memory: int, window: int | None, shift: int
    ) -> None:
        super().__init__()
        self.heads, self.groups, self.memory = heads, groups, memory
        self.window, self.shift = window, shift
        head_dim = dim // heads
        self.norm1 = RMSNorm(dim, eps=1e-6)
        self.to_q = Linear(dim, dim, bias=False)
        self.to_k = Linear(dim, groups * head_dim, bias=False)
        self.to_v = Linear(dim, groups * head_dim, bias=False)
        self.norm_k = RMSNorm(head_dim, eps=1e-6)
        self.norm_v = RMSNorm(head_dim, eps=1e-6)
        self.to_out = Linear(dim, dim, bias=False)
        self.norm2 = RMSNorm(dim, eps=1e-6)
        self.ffn = SwiGLU(dim)

    def forward(
        self, x: Tensor, grid: Grid, remembered: KeysValues | None, backend: str
    ) -> tuple[Tensor, KeysValues]:
        """Runs consecutive latent frames.

        Args:
            x: [B, T, f, N, D] float32: T latent frames of f sub-frames.
            grid: of the N tokens.
            remembered: keys and values [B, memory, N, groups, d] that the frame before left; None
                at the beginning of a stream.
            backend: of attention.

        Returns:
            x, and what the last frame leaves.
        """
        dtype = self.to_q.weight.dtype
        h = self.norm1(x).to(dtype)
        q = rotate(self._heads(self.to_q(h), self.heads), grid.space)
        k = rotate(self.norm_k(self._heads(self.to_k(h), self.groups)), grid.space).to(dtype)
        v = self.norm_v(self._heads(self.to_v(h), self.groups)).to(dtype)
        start = 0 if remembered is not None else 1
        outs = []
        if start:
            outs.append(self._attend(q[:, :1], k[:, :1], v[:, :1], grid, None, backend))
        if x.shape[1] > start:
            tail = slice(x.shape[2] - self.memory, None)
            before = [t[:, :-1, tail] for t in (k, v)]
            if remembered is not None:
                before = [
                    torch.cat((old[:, None], new), 1)
                    for old, new in zip(remembered, before, strict=True)
                ]
            q, k, v = q[:, start:], k[:, start:], v[:, start:]
            outs.append(self._attend(q, k, v, grid, (before[0], before[1]), backend))
        x = x + self.to_out(torch.cat(outs, 1) if len(outs) > 1 else outs[0])
        left = [t[:, -1, t.shape[2] - self.memory :].clone() for t in (k, v)]
        return x + self.ffn(self.norm2(x)), (left[0], left[1])

    def _heads(self, x: Tensor, count: int) -> Tensor:
        return x.view(*x.shape[:-1], count, -1)

    def _attend(
        self, q: Tensor, k: Tensor, v: Tensor, grid: Grid, before: KeysValues | None, backend: str
    ) -> Tensor:
        """Attention of frames [B, T, f, N, heads, d], each over itself and what is before it."""
        b, t, f, n = q.shape[:4]
        own = grid.slots[:, self.memory : self.memory + f]
        q, k = rotate(q, own).to(v.dtype), rotate(k, own).to(v.dtype)
        if before is not None:
            earlier = rotate(before[0], grid.slots[:, : self.memory]).to(v.dtype)
            k, v = torch.cat((earlier, k), 2), torch.cat((before[1], v), 2)
        planes = [
            z.reshape(b * t, z.shape[2], grid.height, grid.width, *z.shape[4:]) for z in (q, k, v)
        ]
        out = windowed_attention(planes[0], planes[1], planes[2], self.window, self.shift, backend)
        return out.reshape(b, t, f, n, -1)
