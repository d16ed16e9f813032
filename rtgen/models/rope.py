"""Rotary position embedding over (frame, row, column), as Wan uses it.

A head's `d` numbers are `d / 2` adjacent pairs, each read as one complex number. The pairs are
shared out among the three axes; every axis has its own ladder of frequencies theta^(-2i / dim).
Rotating a pair is one complex multiplication, so a rotation is a complex64 tensor of unit numbers.

Angles are computed on the host in float64 for the positions asked for. There is no table and so
no largest position: a stream may run for ever.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

THETA = 10000.0


def axis_dims(head_dim: int) -> tuple[int, int, int]:
    """Numbers of a head that encode the frame, the row and the column.

    diffusers' rule: rows and columns take 2 * (head_dim // 6) each, frames take the rest
    (44, 42, 42 of Wan's 128).
    """
    spatial = 2 * (head_dim // 6)
    return head_dim - 2 * spatial, spatial, spatial


def rope_table(positions: Sequence[int], dim: int, theta: float = THETA) -> tuple[Tensor, Tensor]:
    """Cosines and sines of one axis.

    Args:
        positions: any integers; T of them.
        dim: numbers of the head that belong to this axis, even.
        theta: base of the frequency ladder.

    Returns:
        cos, sin: [T, dim / 2] float64, on the CPU.
    """
    exponents = torch.arange(0, dim, 2, dtype=torch.float64) / dim
    angles = torch.outer(torch.tensor(positions, dtype=torch.float64), theta**-exponents)
    return angles.cos(), angles.sin()


def _rotation(positions: Sequence[int], dim: int) -> Tensor:
    return torch.complex(*rope_table(positions, dim)).to(torch.complex64)


@lru_cache(maxsize=32)
def _spatial_rotation(grid_h: int, grid_w: int, head_dim: int, device: torch.device) -> Tensor:
    """[grid_h * grid_w, pairs of rows and columns] complex64."""
    _, dim_h, dim_w = axis_dims(head_dim)
    rows = _rotation(range(grid_h), dim_h)[:, None].expand(grid_h, grid_w, -1)
    columns = _rotation(range(grid_w), dim_w)[None].expand(grid_h, grid_w, -1)
    return torch.cat((rows, columns), dim=-1).flatten(0, 1).to(device)


@lru_cache(maxsize=1024)
def _temporal_rotation(
    frame_positions: tuple[int, ...], head_dim: int, device: torch.device
) -> Tensor:
    """[T, pairs of the frame] complex64; small, so that many streams' passes find theirs again."""
    return _rotation(frame_positions, axis_dims(head_dim)[0]).to(device)


def frame_rope(
    frame_positions: Sequence[int],
    grid_h: int,
    grid_w: int,
    head_dim: int,
    device: torch.device | str = "cpu",
) -> Tensor:
    """The rotation of every token of some frames.

    Args:
        frame_positions: T positions along time, any integers.
        grid_h: token rows of a frame.
        grid_w: token columns of a frame.
        head_dim: width of one attention head.
        device: where the result is needed.

    Returns:
        [T * grid_h * grid_w, head_dim / 2] complex64.
    """
    device = torch.device(device)
    # The parts are kept, and one born in inference mode could not be used in training later.
    with torch.inference_mode(False), torch.no_grad():
        temporal = _temporal_rotation(tuple(frame_positions), head_dim, device)
        spatial = _spatial_rotation(grid_h, grid_w, head_dim, device)
        frames, tokens = len(temporal), len(spatial)
        parts = (
            temporal[:, None].expand(frames, tokens, -1),
            spatial[None].expand(frames, tokens, -1),
        )
        return torch.cat(parts, dim=-1).flatten(0, 1)


def time_shift(frames: int, head_dim: int, device: torch.device | str = "cpu") -> Tensor:
    """The rotation that moves already rotated keys by `frames` along time.

    Rotations add up: R(position + frames) = R(frames) R(position). Rows and columns stay.

    Returns:
        [1, head_dim / 2] complex64.
    """
    dim_t, dim_h, dim_w = axis_dims(head_dim)
    with torch.inference_mode(False), torch.no_grad():
        still = torch.ones(1, (dim_h + dim_w) // 2, dtype=torch.complex64)
        return torch.cat((_rotation((frames,), dim_t), still), dim=-1).to(device)


def apply_rope(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotates queries or keys.

    Args:
        x: [..., N, heads, d], any float dtype.
        rotation: [N, d / 2] or [..., N, d / 2] complex64.

    Returns:
        [..., N, heads, d] float32 (float64 for a float64 `x`).
    """
    wide = x if x.dtype == torch.float64 else x.float()
    pairs = torch.view_as_complex(wide.reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotation.unsqueeze(-2)).flatten(-2)
