"""Trains the unit autoencoder on rendered frames (`rtgen train autoencoder`).

Frames are independent of each other here, so each step takes frames from everywhere. Losses are
weighted by where the picture moves: the backdrop is in the canvas already.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decoders.quality import reconstruction_quality
from decoders.unit_conv import UnitAutoencoder, UnitConvConfig
from pipelines.base import to_pixels
from pipelines.train.loop import (
    Precision,
    TrainConfig,
    Trainer,
    add_train_arguments,
    train_config,
)
from pipelines.train.store import load_clips
from rtgen.weights.loaders import save_weights

DEFAULTS = TrainConfig(steps=5000, learning_rate=1.5e-3, warmup=40, weight_decay=1e-4)
BATCH_UNITS = 2
LATENT_NOISE = 0.05


def by_units(frames: npt.NDArray[np.uint8]) -> Tensor:
    """Frames [4 * U, H, W, 3] as pixels [U, 4, 3, H, W]."""
    pixels = to_pixels(frames)
    return pixels.reshape(-1, 4, *pixels.shape[1:])


def canvas_and_weight(frames: npt.NDArray[np.uint8]) -> tuple[Tensor, Tensor]:
    """The mean picture [3, H, W], and the loss weight [1, 1, 1, H, W]: 0.5 at rest, 2 in motion."""
    pixels = to_pixels(frames[:: max(1, len(frames) // 600)])
    motion = pixels.std(0).mean(0)[None, None]
    smooth = F.avg_pool2d(motion, 9, 1, 4) / motion.quantile(0.95)
    return pixels.mean(0), (0.5 + 1.5 * smooth.clamp(0, 1))[None]


def picture_loss(out: Tensor, pixels: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """L1, half the L1 of gradients and twice L2, weighted by place.

    Args:
        out: [..., 3, H, W].
        pixels: the truth.
        weight: broadcastable to it.

    Returns:
        The loss, and its L1 part without gradient.
    """
    error = out - pixels
    l1 = (error.abs() * weight).mean()
    across = (error[..., 1:] - error[..., :-1]).abs() * weight[..., 1:]
    down = (error[..., 1:, :] - error[..., :-1, :]).abs() * weight[..., 1:, :]
    l2 = (error.square() * weight).mean()
    return l1 + 0.5 * (across.mean() + down.mean()) + 2 * l2, l1.detach()


@dataclass
class AutoencoderStage:
    """Sampling, losses and evaluation of the autoencoder."""

    model: UnitAutoencoder
    frames: npt.NDArray[np.uint8]
    held_out: npt.NDArray[np.uint8]
    seed: int
    precision: Precision

    def __post_init__(self) -> None:
        canvas, weight = canvas_and_weight(self.frames)
        self.model.set_canvas(canvas)
        self.weight = weight.to(self.precision.device)

    def batch(self, step: int) -> Tensor:
        """[B, 4, 3, H, W] of frames from everywhere; depends on (seed, step) alone."""
        rng = np.random.default_rng((self.seed, step))
        index = rng.integers(len(self.frames), size=4 * BATCH_UNITS)
        return self._pixels(self.frames[np.sort(index)])

    def _pixels(self, frames: npt.NDArray[np.uint8]) -> Tensor:
        return by_units(frames).to(self.precision.device)

    def loss(self, step: int) -> dict[str, Tensor]:
        """Picture loss through noisy latents, and a pull of latents to unit scale."""
        pixels = self.batch(step)
        with self.precision.autocast():
            mean = self.model.encoder(pixels)
            out = self.model.decoder(mean + LATENT_NOISE * torch.randn_like(mean))
        loss, l1 = picture_loss(out, pixels, self.weight)
        prior = mean.float().square().mean()
        return {"loss": loss + 2e-4 * prior, "l1": l1}

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Quality on the held-out clip: PSNR whole and face, motion gain, ratio at unit joins."""
        outs, wholes = [], []
        for start in range(0, len(self.held_out) - 15, 32):
            pixels = self._pixels(self.held_out[start : start + 16])
            with self.precision.autocast():
                outs.append(self.model.decoder(self.model.encoder(pixels)).clamp(-1, 1))
            wholes.append(pixels)
        return reconstruction_quality(torch.stack(outs), torch.stack(wholes))


def save_autoencoder(model: UnitAutoencoder, directory: Path, dtype: torch.dtype) -> None:
    """Writes encoder.safetensors and decoder.safetensors."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, part in (("encoder", model.encoder), ("decoder", model.decoder)):
        save_part(part, directory / f"{name}.safetensors", dtype)


def save_part(part: nn.Module, path: Path, dtype: torch.dtype) -> None:
    """Writes an encoder's or a decoder's weights; the canvas stays fp32, bfloat16 would band it."""
    weights = {
        key: value.contiguous() if key == "canvas" else value.to(dtype).contiguous()
        for key, value in part.state_dict().items()
    }
    save_weights(path, weights)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `rtgen train autoencoder`."""
    add_train_arguments(parser, DEFAULTS)


def run(args: argparse.Namespace) -> int:
    """Trains, and writes the weights with their metrics."""
    torch.manual_seed(args.seed)
    precision = Precision(args.precision, torch.device(args.device))
    clips = load_clips(args.data)
    model = UnitAutoencoder(UnitConvConfig()).to(precision.device)
    model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    frames = np.concatenate([clip.frames for clip in clips if not clip.held_out])
    held_out = np.concatenate([clip.frames for clip in clips if clip.held_out])
    stage = AutoencoderStage(model, frames, held_out, args.seed, precision)
    trainer = Trainer(model, train_config(args, DEFAULTS), args.out)
    trainer.run(stage.loss, stage.evaluate)
    with trainer.averaged_weights():
        metrics = stage.evaluate()
        save_autoencoder(model, args.out, torch.bfloat16)
    (args.out / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
    return 0
