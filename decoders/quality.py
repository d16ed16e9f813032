"""How good decoded frames are: picture quality and motion inside and between units."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rtgen.errors import ShapeError

_LUMA = (0.2126, 0.7152, 0.0722)  # ITU-R BT.709
# Wang, Simoncelli, Bovik 2003: weights of the five scales, finest first.
_SCALE_WEIGHTS = (0.0448, 0.2856, 0.3001, 0.2363, 0.1333)
_WINDOW, _SIGMA = 11, 1.5
_DATA_RANGE = 2.0  # pixels are in [-1, 1]


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


def clip_psnr(out: Tensor, target: Tensor) -> float:
    """PSNR in dB per clip, from the mean squared error of the whole clip, averaged over clips.

    Args:
        out: [R, F, 3, H, W] in [-1, 1].
        target: the same.
    """
    errors = (out - target).square().flatten(1).mean(1)
    return float((-10 * torch.log10(errors / 4)).mean())


def frame_psnrs(out: Tensor, target: Tensor) -> Tensor:
    """PSNR in dB of every frame [R, F] of clips [R, F, 3, H, W] in [-1, 1]."""
    return -10 * torch.log10((out - target).square().flatten(2).mean(2) / 4)


def ssim(out: Tensor, target: Tensor) -> float:
    """Structural similarity (Wang et al. 2004), Gaussian window of 11 pixels, sigma 1.5.

    Args:
        out: [..., C, H, W] in [-1, 1], rows and columns at least 11.
        target: the same.

    Returns:
        The mean over channels, places where the window fits, and frames; 1 for equal pictures.

    Raises:
        ShapeError: the pictures differ in shape or are smaller than the window.
    """
    return float(_ssim_parts(*_planes(out, target, _WINDOW))[0].mean())


def ms_ssim(out: Tensor, target: Tensor) -> float:
    """SSIM over five scales (Wang, Simoncelli, Bovik 2003), each half the size of the one before.

    Contrast and structure count at all scales, luminance at the coarsest. A scale that is
    anti-correlated counts as 0.

    Args:
        out: [..., C, H, W] in [-1, 1], rows and columns at least 176.
        target: the same.

    Raises:
        ShapeError: the pictures differ in shape, or the coarsest scale is smaller than the window.
    """
    scales = len(_SCALE_WEIGHTS)
    x, y = _planes(out, target, _WINDOW * 2 ** (scales - 1))
    product = torch.ones(len(x), device=x.device)
    for scale, weight in enumerate(_SCALE_WEIGHTS):
        whole, structure = _ssim_parts(x, y)
        part = whole if scale == scales - 1 else structure
        product = product * part.clamp_min(0) ** weight
        x, y = F.avg_pool2d(x, 2), F.avg_pool2d(y, 2)
    return float(product.mean())


def _planes(out: Tensor, target: Tensor, smallest: int) -> tuple[Tensor, Tensor]:
    """Both as [N, 1, H, W] float32."""
    if out.shape != target.shape or min(out.shape[-2:]) < smallest:
        raise ShapeError(
            f"two equal shapes [..., C, H, W] with H, W >= {smallest} are needed, got "
            f"{list(out.shape)} and {list(target.shape)}"
        )
    shape = -1, 1, *out.shape[-2:]
    return out.float().reshape(shape), target.float().reshape(shape)


def _ssim_parts(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Per plane [N]: SSIM, and its factor of contrast and structure alone."""
    offsets = torch.arange(_WINDOW, device=x.device, dtype=torch.float32) - _WINDOW // 2
    bell = torch.exp(-offsets.square() / (2 * _SIGMA**2))
    bell = bell / bell.sum()

    def blur(z: Tensor) -> Tensor:
        return F.conv2d(F.conv2d(z, bell.view(1, 1, -1, 1)), bell.view(1, 1, 1, -1))

    c1, c2 = (0.01 * _DATA_RANGE) ** 2, (0.03 * _DATA_RANGE) ** 2
    mean_x, mean_y = blur(x), blur(y)
    var_x, var_y = blur(x * x) - mean_x.square(), blur(y * y) - mean_y.square()
    covariance = blur(x * y) - mean_x * mean_y
    structure = (2 * covariance + c2) / (var_x + var_y + c2)
    luminance = (2 * mean_x * mean_y + c1) / (mean_x.square() + mean_y.square() + c1)
    return (luminance * structure).flatten(1).mean(1), structure.flatten(1).mean(1)


def flicker(out: Tensor, target: Tensor, *, first: int = 4, per_unit: int = 4) -> dict[str, float]:
    """How a clip moves that should move like another.

    Args:
        out: [R, F, 3, H, W] in [-1, 1], clips from their first unit on.
        target: the same, the truth.
        first: pixel frames of the first unit: 1 where the latent space has a first-frame rule.
        per_unit: pixel frames of later units.

    Returns:
        temporal_error: mean |d_t out - d_t target|, of 255;
        pulse: frame difference of the error at unit joins over inside units; 1 without a pulse;
        static_deviation: deviation over time, of 255, where the target stands still; NaN if it
        moves everywhere;
        luma_drift: mean brightness of the error in the last third less that in the first, of 255.

    Raises:
        ShapeError: the clips differ in shape, or have fewer frames than two units.
    """
    if out.shape != target.shape or out.ndim != 5 or out.shape[1] < first + per_unit:
        raise ShapeError(
            f"two equal clips [R, F, 3, H, W] with F >= {first + per_unit} are needed, got "
            f"{list(out.shape)} and {list(target.shape)}"
        )
    frames = out.shape[1]
    error = out - target
    change = error.diff(dim=1).abs().mean((0, 2, 3, 4))  # [F - 1]
    at_join = torch.tensor([(index + 1 - first) % per_unit == 0 for index in range(frames - 1)])
    inside = change[~at_join]
    still = target.std(1, correction=0) < 0.5 / 255
    deviation = out.std(1, correction=0)[still]
    luma = (error * error.new_tensor(_LUMA).view(3, 1, 1)).sum(2).mean((0, 2, 3))
    third = max(1, frames // 3)
    return {
        "temporal_error": float(change.mean()) * 127.5,
        "pulse": float(change[at_join].mean() / inside.mean()) if len(inside) else float("nan"),
        "static_deviation": float(deviation.mean()) * 127.5,
        "luma_drift": float(luma[-third:].mean() - luma[:third].mean()) * 127.5,
    }


def seam_ratio(out: Tensor, target: Tensor, patch: int = 16) -> float:
    """Steps between neighbouring pixels at the joins of patches over those elsewhere.

    Args:
        out: [..., H, W].
        target: the same; its own ratio is divided out.
        patch: pixels per side of what a decoder paints as one piece.

    Returns:
        1 where joins do not show.

    Raises:
        ShapeError: the pictures differ in shape or have no join.
    """
    if out.shape != target.shape or max(out.shape[-2:]) <= patch:
        raise ShapeError(
            f"two equal shapes [..., H, W] of more than one patch of {patch} are needed, got "
            f"{list(out.shape)} and {list(target.shape)}"
        )

    def ratio(x: Tensor) -> Tensor:
        joins, others = [], []
        for dim in (-2, -1):
            step = x.diff(dim=dim).abs().mean(tuple(d for d in range(x.ndim) if d != x.ndim + dim))
            at_join = torch.arange(1, len(step) + 1, device=x.device) % patch == 0
            joins.append(step[at_join])
            others.append(step[~at_join])
        return torch.cat(joins).mean() / torch.cat(others).mean()

    return float(ratio(out) / ratio(target))


def decoder_quality(
    out: Tensor, target: Tensor, *, first: int = 4, per_unit: int = 4, patch: int = 16
) -> dict[str, float]:
    """Everything that is measured of decoded clips; MS-SSIM where pictures are large enough.

    Args:
        out: [R, F, 3, H, W] in [-1, 1].
        target: the same, the truth.
        first: pixel frames of the first unit.
        per_unit: pixel frames of later units.
        patch: see `seam_ratio`.

    Returns:
        psnr, psnr_first, psnr_worst (dB: of clips, of their first frames, of the worst frame),
        ssim, ms_ssim, seam_ratio, and what `flicker` gives.
    """
    frames = frame_psnrs(out, target)
    quality = {
        "psnr": clip_psnr(out, target),
        "psnr_first": float(frames[:, 0].mean()),
        "psnr_worst": float(frames.min()),
        "ssim": ssim(out, target),
        "seam_ratio": seam_ratio(out, target, patch),
        **flicker(out, target, first=first, per_unit=per_unit),
    }
    if min(out.shape[-2:]) >= _WINDOW * 2 ** (len(_SCALE_WEIGHTS) - 1):
        quality["ms_ssim"] = ms_ssim(out, target)
    return quality
