"""Quality measures against values known beforehand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from decoders.quality import psnr, reconstruction_quality


def video(seed: int = 0) -> Tensor:
    """[R, U, 4, 3, H, W] of pictures that change by small steps."""
    generator = torch.Generator().manual_seed(seed)
    steps = 0.02 * torch.randn(2 * 3 * 4, 3, 20, 20, generator=generator)
    return steps.cumsum(0).clamp(-1, 1).reshape(2, 3, 4, 3, 20, 20)


def test_psnr_of_a_known_error() -> None:
    target = torch.zeros(2, 3, 8, 8)
    assert psnr(target + 0.02, target) == pytest.approx(-10 * math.log10(0.02**2 / 4), abs=1e-3)


def test_a_perfect_copy() -> None:
    quality = reconstruction_quality(video() + 1e-6, video())
    assert quality["motion_gain"] == pytest.approx(1, abs=1e-3)
    assert quality["motion_error"] == pytest.approx(0, abs=1e-3)
    assert quality["join_ratio"] == pytest.approx(1, abs=1e-3)


def test_four_equal_frames_are_no_motion_inside_and_a_jump_at_joins() -> None:
    """What a unit code without time does: a good PSNR, and a picture at a quarter of the rate."""
    target = video()
    frozen = target.mean(2, keepdim=True).expand_as(target) + 1e-4 * torch.randn_like(target)
    quality = reconstruction_quality(frozen, target)
    assert quality["psnr"] > 30
    assert quality["motion_gain"] < 0.1
    assert quality["join_ratio"] > 5


def test_motion_out_of_phase_is_an_error_of_more_than_none() -> None:
    target = video()
    late = torch.roll(target, 1, 2)
    assert reconstruction_quality(late, target)["motion_error"] > 1
