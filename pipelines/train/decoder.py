"""Trains one identity's frame decoder (`rtgen train decoder`).

The latent space belongs to the labels: the latent renderer says which latent a face pose has, and
the denoiser speaks that language. A decoder turns it into one person's pictures. So a further
identity needs rendered frames with labels and this stage alone, and the first identity's decoder
gains from it too, for it learns to paint the true frame from what the denoiser was taught.

Training starts from the autoencoder's decoder; encoder, latent renderer and denoiser stay.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from decoders.quality import reconstruction_quality
from decoders.unit_conv import UnitDecoder
from pipelines.train.autoencoder import (
    LATENT_NOISE,
    by_units,
    canvas_and_weight,
    picture_loss,
    save_part,
)
from pipelines.train.latent_renderer import LatentRenderer, load_parts, load_renderer
from pipelines.train.loop import (
    Precision,
    TrainConfig,
    Trainer,
    add_train_arguments,
    train_config,
)
from pipelines.train.store import Clip, load_clips

DEFAULTS = TrainConfig(steps=2000, learning_rate=8e-4, warmup=40, weight_decay=1e-4)
BATCH_UNITS = 2


@dataclass
class DecoderStage:
    """Sampling, loss and evaluation.

    Attributes:
        model: trained.
        frames: uint8 [F, H, W, 3].
        latents: [F, C, h, w] of their labels.
        weight: loss weight of places.
        test_frames: held-out frames, consecutive.
        test_latents: of their labels.
        seed: of sampling.
        precision: of products.
    """

    model: UnitDecoder
    frames: npt.NDArray[np.uint8]
    latents: Tensor
    weight: Tensor
    test_frames: npt.NDArray[np.uint8]
    test_latents: Tensor
    seed: int
    precision: Precision

    def loss(self, step: int) -> dict[str, Tensor]:
        """Picture loss of frames from everywhere, their latents a little noisy."""
        rng = np.random.default_rng((self.seed, step))
        index = np.sort(rng.integers(len(self.frames), size=4 * BATCH_UNITS))
        rows = self.latents[torch.from_numpy(index)].to(self.precision.device)
        latents = rows.reshape(BATCH_UNITS, 1, -1, *rows.shape[2:])
        with self.precision.autocast():
            out = self.model(latents + LATENT_NOISE * torch.randn_like(latents))
        pixels = by_units(self.frames[index]).to(self.precision.device)
        loss, l1 = picture_loss(out, pixels, self.weight)
        return {"loss": loss, "l1": l1}

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Quality on held-out frames: PSNR whole and face, motion gain, ratio at unit joins."""
        outs, wholes = [], []
        for start in range(0, len(self.test_frames) - 15, 32):
            part = self.test_latents[start : start + 16].to(self.precision.device)
            pixels = by_units(self.test_frames[start : start + 16]).to(self.precision.device)
            out = self.model(part.reshape(1, 4, -1, *part.shape[2:]))
            outs.append(out.clamp(-1, 1).reshape_as(pixels))
            wholes.append(pixels)
        return reconstruction_quality(torch.stack(outs), torch.stack(wholes))


@torch.no_grad()
def draw_latents(renderer: LatentRenderer, clips: list[Clip]) -> Tensor:
    """Latents [F, C, h, w] of the labels of all frames."""
    labels = torch.from_numpy(np.concatenate([clip.labels for clip in clips]))
    return torch.cat([renderer(part) for part in torch.split(labels, 2048)])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `rtgen train decoder`."""
    add_train_arguments(parser, DEFAULTS)
    parser.add_argument("--autoencoder", type=Path, required=True, help="its folder")
    parser.add_argument("--renderer", type=Path, required=True, help="folder of the label renderer")


def run(args: argparse.Namespace) -> int:
    """Trains, and writes decoder.safetensors with its metrics."""
    torch.manual_seed(args.seed)
    precision = Precision(args.precision, torch.device(args.device))
    _, decoder = load_parts(args.autoencoder)
    renderer = load_renderer(args.renderer)
    clips = load_clips(args.data)
    train = [clip for clip in clips if not clip.held_out]
    test = [clip for clip in clips if clip.held_out]
    frames = np.concatenate([clip.frames for clip in train])
    canvas, weight = canvas_and_weight(frames)
    decoder.canvas.copy_(canvas)
    decoder.requires_grad_(True).to(precision.device)
    stage = DecoderStage(
        model=decoder,
        frames=frames,
        latents=draw_latents(renderer, train),
        weight=weight.to(precision.device),
        test_frames=np.concatenate([clip.frames for clip in test]),
        test_latents=draw_latents(renderer, test),
        seed=args.seed,
        precision=precision,
    )
    trainer = Trainer(decoder, train_config(args, DEFAULTS), args.out)
    trainer.run(stage.loss, stage.evaluate)
    with trainer.averaged_weights():
        metrics = stage.evaluate()
        save_part(decoder, args.out / "decoder.safetensors", torch.bfloat16)
    (args.out / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
    return 0
