"""Trains the decoder further for the latents it will be given (`rtgen train decoder`).

The encoder stays, so the latent space and the denoiser stay valid. Half of the latents come from
the encoder, half from labels: those carry the small faults of the latent renderer, which the
denoiser learns too, and the decoder learns to paint the true frame from them.
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
from decoders.unit_conv import UnitAutoencoder, UnitConvConfig
from pipelines.train.autoencoder import (
    LATENT_NOISE,
    by_units,
    canvas_and_weight,
    picture_loss,
    save_autoencoder,
)
from pipelines.train.latent_renderer import encode_frames, load_parts, load_renderer
from pipelines.train.loop import (
    Precision,
    TrainConfig,
    Trainer,
    add_train_arguments,
    train_config,
)
from pipelines.train.store import load_clips

DEFAULTS = TrainConfig(steps=2000, learning_rate=8e-4, warmup=40, weight_decay=1e-4)
BATCH_UNITS = 2


@dataclass
class DecoderStage:
    """Sampling, loss and evaluation.

    Attributes:
        model: its decoder is trained.
        frames: uint8 [F, H, W, 3].
        encoded: [F, C, h, w] latents of the encoder.
        drawn: [F, C, h, w] latents of the labels.
        weight: loss weight of places.
        test_frames: held-out frames, consecutive.
        test_encoded: their latents.
        seed: of sampling.
        precision: of products.
    """

    model: UnitAutoencoder
    frames: npt.NDArray[np.uint8]
    encoded: Tensor
    drawn: Tensor
    weight: Tensor
    test_frames: npt.NDArray[np.uint8]
    test_encoded: Tensor
    seed: int
    precision: Precision

    def loss(self, step: int) -> dict[str, Tensor]:
        """Picture loss on latents of either kind, with noise."""
        rng = np.random.default_rng((self.seed, step))
        index = np.sort(rng.integers(len(self.frames), size=4 * BATCH_UNITS))
        source = self.drawn if rng.random() < 0.5 else self.encoded
        rows = source[torch.from_numpy(index)].to(self.precision.device)
        latents = rows.reshape(BATCH_UNITS, 1, -1, *rows.shape[2:])
        with self.precision.autocast():
            out = self.model.decoder(latents + LATENT_NOISE * torch.randn_like(latents))
        pixels = by_units(self.frames[index]).to(self.precision.device)
        loss, l1 = picture_loss(out, pixels, self.weight)
        return {"loss": loss, "l1": l1}

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Quality on held-out frames, from the encoder's latents."""
        outs, wholes = [], []
        for start in range(0, len(self.test_frames) - 15, 32):
            part = self.test_encoded[start : start + 16].to(self.precision.device)
            latents = part.reshape(1, 4, -1, *part.shape[2:])
            pixels = by_units(self.test_frames[start : start + 16]).to(self.precision.device)
            outs.append(self.model.decoder(latents).clamp(-1, 1).reshape_as(pixels))
            wholes.append(pixels)
        return reconstruction_quality(torch.stack(outs), torch.stack(wholes))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `rtgen train decoder`."""
    add_train_arguments(parser, DEFAULTS)
    parser.add_argument("--autoencoder", type=Path, required=True, help="its folder")
    parser.add_argument("--renderer", type=Path, required=True, help="folder of the label renderer")


def run(args: argparse.Namespace) -> int:
    """Trains, and writes an autoencoder folder with the old encoder and the new decoder."""
    torch.manual_seed(args.seed)
    precision = Precision(args.precision, torch.device(args.device))
    encoder, decoder = load_parts(args.autoencoder)
    renderer = load_renderer(args.renderer)
    clips = load_clips(args.data)
    train = [clip for clip in clips if not clip.held_out]
    test = [clip for clip in clips if clip.held_out]
    frames = np.concatenate([clip.frames for clip in train])
    labels = np.concatenate([clip.labels for clip in train])
    with torch.no_grad():
        drawn = torch.cat([renderer(part) for part in torch.split(torch.from_numpy(labels), 2048)])
    model = UnitAutoencoder(UnitConvConfig())
    model.encoder.load_state_dict(encoder.state_dict())
    model.decoder.load_state_dict(decoder.state_dict())
    model.encoder.requires_grad_(False)
    model.to(precision.device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    stage = DecoderStage(
        model=model,
        frames=frames,
        encoded=torch.cat([encode_frames(encoder, clip.frames) for clip in train]),
        drawn=drawn,
        weight=canvas_and_weight(frames)[1].to(precision.device),
        test_frames=np.concatenate([clip.frames for clip in test]),
        test_encoded=torch.cat([encode_frames(encoder, clip.frames) for clip in test]),
        seed=args.seed,
        precision=precision,
    )
    trainer = Trainer(model, train_config(args, DEFAULTS), args.out)
    trainer.run(stage.loss, stage.evaluate)
    with trainer.averaged_weights():
        metrics = stage.evaluate()
        save_autoencoder(model, args.out, torch.bfloat16)
    (args.out / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
    return 0
