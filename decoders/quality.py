"""How good decoded frames are: picture quality and motion inside and between units."""

from __future__ import annotations

import torch
from torch import Tensor


def psnr(out: Tensor, target: Tensor) -> float:
    """PSNR in dB of pixels in [-1, 1], from the mean squared error over all of them."""
    return float(-10 * torch.log10((out - target).square().mean() / 4))


def reconstruction_quality(out: Tensor, target: Tensor) -> dict[str, float]:
    """Picture and motion quality of decoded runs of units.

    Args:
        out: [R, U, 4, 3, H, W], R runs of U consecutive units.
        target: the same, the truth.

    Returns:
        psnr, psnr_face (dB); motion_gain: mean frame difference inside units over the truth's;
        motion_error: error of those differences over predicting none; join_ratio: frame
        difference at unit joins over inside units, divided by the truth's own ratio.
    """
    size = out.shape[-1]
    face = (slice(int(0.2 * size), int(0.85 * size)), slice(int(0.27 * size), int(0.74 * size)))

    def inside(x: Tensor) -> Tensor:
        return x[:, :, 1:] - x[:, :, :-1]

    def joins(x: Tensor) -> float:
        step = (x[:, 1:, 0] - x[:, :-1, -1]).abs().mean()
        return float(step / inside(x).abs().mean())

    true_motion = inside(target).abs().mean()
    return {
        "psnr": psnr(out, target),
        "psnr_face": psnr(out[..., face[0], face[1]], target[..., face[0], face[1]]),
        "motion_gain": float(inside(out).abs().mean() / true_motion),
        "motion_error": float(inside(out - target).abs().mean() / true_motion),
        "join_ratio": joins(out) / joins(target),
    }
