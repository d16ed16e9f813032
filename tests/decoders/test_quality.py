"""Quality measures against values known beforehand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from decoders.quality import (
    clip_psnr,
    decoder_quality,
    flicker,
    frame_psnrs,
    ms_ssim,
    psnr,
    reconstruction_quality,
    seam_ratio,
    ssim,
)
from rtgen.errors import ShapeError


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


def clips(seed: int = 0, frames: int = 9, size: int = 32) -> Tensor:
    """[2, F, 3, H, W] of smooth pictures that change by small steps."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(2 * frames, 3, 8, 8, generator=generator)
    smooth = torch.nn.functional.interpolate(coarse, size=(size, size), mode="bicubic")
    steps = 0.1 * smooth.reshape(2, frames, 3, size, size)
    return steps.cumsum(1).clamp(-1, 1)


def test_psnr_is_taken_per_clip_and_then_averaged() -> None:
    target = torch.zeros(2, 3, 3, 8, 8)
    out = target.clone()
    out[0] += 0.02
    out[1, 1] += 0.2
    expected = [-10 * math.log10(0.02**2 / 4), -10 * math.log10(0.2**2 / 3 / 4)]
    assert clip_psnr(out, target) == pytest.approx(sum(expected) / 2, abs=1e-3)
    assert psnr(out, target) != pytest.approx(sum(expected) / 2, abs=1)
    assert float(frame_psnrs(out, target)[1].min()) == pytest.approx(20, abs=1e-3)


def slow_ssim(x: Tensor, y: Tensor) -> tuple[float, float]:
    """SSIM of two pictures [H, W], window by window, in float64; and without luminance."""
    bell = [math.exp(-((i - 5) ** 2) / (2 * 1.5**2)) for i in range(11)]
    weights = torch.tensor([[a * b for a in bell] for b in bell], dtype=torch.float64)
    weights /= weights.sum()
    c1, c2 = (0.01 * 2) ** 2, (0.03 * 2) ** 2
    wholes, structures = [], []
    for row in range(x.shape[0] - 10):
        for column in range(x.shape[1] - 10):
            a = x[row : row + 11, column : column + 11].double()
            b = y[row : row + 11, column : column + 11].double()
            mean_a, mean_b = (weights * a).sum(), (weights * b).sum()
            var_a, var_b = (weights * (a - mean_a) ** 2).sum(), (weights * (b - mean_b) ** 2).sum()
            covariance = (weights * (a - mean_a) * (b - mean_b)).sum()
            structure = float((2 * covariance + c2) / (var_a + var_b + c2))
            luminance = float((2 * mean_a * mean_b + c1) / (mean_a**2 + mean_b**2 + c1))
            wholes.append(structure * luminance)
            structures.append(structure)
    return sum(wholes) / len(wholes), sum(structures) / len(structures)


def test_ssim_equals_the_definition_window_by_window() -> None:
    x, y = clips(1, size=16)[0, -1], clips(2, size=16)[0, -1]
    expected = sum(slow_ssim(a, b)[0] for a, b in zip(x, y, strict=True)) / 3
    assert ssim(x, y) == pytest.approx(expected, abs=1e-5)
    assert ssim(x, x) == pytest.approx(1, abs=1e-6)


def test_planted_range_of_one_is_another_ssim(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = clips(1, size=16)[0, -1], clips(2, size=16)[0, -1]
    expected = ssim(x, y)
    monkeypatch.setattr("decoders.quality._DATA_RANGE", 1.0)
    assert ssim(x, y) != pytest.approx(expected, abs=1e-4)


def test_ms_ssim_multiplies_the_scales(monkeypatch: pytest.MonkeyPatch) -> None:
    """With two scales, so that the slow definition ends."""
    monkeypatch.setattr("decoders.quality._SCALE_WEIGHTS", (0.4, 0.6))
    x = clips(1, size=24)[0, -1, 0]
    y = x + 0.1 * clips(2, size=24)[0, -1, 0]
    halves = [torch.nn.functional.avg_pool2d(z[None], 2)[0] for z in (x, y)]
    expected = slow_ssim(x, y)[1] ** 0.4 * slow_ssim(*halves)[0] ** 0.6
    assert ms_ssim(x[None], y[None]) == pytest.approx(expected, abs=1e-5)
    with pytest.raises(ShapeError, match="H, W >= 22"):
        ms_ssim(x[None, :21], y[None, :21])


def test_a_perfect_copy_has_no_flicker() -> None:
    target = clips()
    found = flicker(target + 0.01, target, first=1)
    assert found["temporal_error"] == pytest.approx(0, abs=1e-3)
    assert found["luma_drift"] == pytest.approx(0, abs=1e-3)
    assert math.isnan(found["static_deviation"])


@pytest.mark.parametrize("first", [1, 4])
def test_a_step_of_the_error_at_unit_joins_is_a_pulse(first: int) -> None:
    target = clips(frames=first + 8)
    units = torch.tensor([0 if f < first else 1 + (f - first) // 4 for f in range(first + 8)])
    noise = 1e-3 * torch.randn(target.shape, generator=torch.Generator().manual_seed(5))
    pulsing = target + 0.02 * (units % 2).view(1, -1, 1, 1, 1) + noise
    assert flicker(pulsing, target, first=first)["pulse"] > 5
    assert flicker(target + noise, target, first=first)["pulse"] == pytest.approx(1, abs=0.05)
    wrong_phase = flicker(pulsing, target, first=first + 1)["pulse"]
    assert wrong_phase < 1


def test_what_stands_still_is_measured_where_the_target_does() -> None:
    target = clips()
    target[..., :16] = target[:, :1, :, :, :16]
    out = target.clone()
    out[:, ::2, :, :, :16] += 2 / 255  # of a range of 2: one step of 255 up and down
    frames = torch.arange(9) % 2 == 0
    expected = float(frames.float().std(correction=0))
    assert flicker(out, target)["static_deviation"] == pytest.approx(expected, rel=1e-3)


def test_brightness_that_runs_away_is_a_drift() -> None:
    target = clips()
    ramp = torch.arange(9.0).view(1, -1, 1, 1, 1) * 2 / 255
    found = flicker(target + ramp, target)
    assert found["luma_drift"] == pytest.approx(6, rel=1e-3)  # frames 6..8 against 0..2
    assert found["temporal_error"] == pytest.approx(1, rel=1e-3)


def test_pieces_of_different_brightness_show_their_seams() -> None:
    target = clips(size=64)
    tiles = 0.1 * torch.randn(4, 4, generator=torch.Generator().manual_seed(1))
    pieces = tiles.repeat_interleave(16, 0).repeat_interleave(16, 1)
    assert seam_ratio(target, target) == pytest.approx(1)
    assert seam_ratio(target + pieces, target) > 2
    assert seam_ratio(torch.roll(target + pieces, 8, -1), target) < seam_ratio(
        target + pieces, target
    )
    with pytest.raises(ShapeError, match="more than one patch"):
        seam_ratio(target[..., :16, :16], target[..., :16, :16])


def test_everything_is_measured_at_once() -> None:
    target = clips(frames=9, size=176)
    out = target + 0.02 * torch.randn(target.shape, generator=torch.Generator().manual_seed(2))
    found = decoder_quality(out, target, first=1)
    assert found["psnr"] == pytest.approx(-10 * math.log10(0.02**2 / 4), abs=0.1)
    assert found["psnr_worst"] <= found["psnr_first"]
    assert 0 < found["ssim"] < 1
    assert 0 < found["ms_ssim"] < 1
    assert found["seam_ratio"] == pytest.approx(1, abs=0.15)
    assert "ms_ssim" not in decoder_quality(out[..., :32, :32], target[..., :32, :32])
    with pytest.raises(ShapeError, match="F >= 8"):
        flicker(out[:, :7], target[:, :7])
