"""Labels to latents: a small network that stands in for the renderer (`rtgen train renderer`).

Rendering hours of pictures is slow, label tracks cost nothing. The autoencoder codes each pixel
frame alone, so a latent frame is a pure function of that frame's labels; a network learnt on the
rendered frames turns any label track into the latents that the denoiser is trained on.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from decoders.quality import psnr
from decoders.unit_conv import UnitConvConfig, UnitDecoder, UnitEncoder
from pipelines.base import to_pixels
from pipelines.train.loop import TrainConfig, Trainer, add_train_arguments, train_config
from pipelines.train.store import Clip, load_clips
from rtgen.errors import CheckpointError

DEFAULTS = TrainConfig(steps=6000, learning_rate=2e-3, warmup=100, flat=0.2, weight_decay=0.02)
BATCH = 256


class LatentRenderer(nn.Module):
    """Labels of one frame to its latent channels, through a principal basis of real latents.

    Args:
        num_labels: label channels.
        shape: latent of one pixel frame, (C, h, w).
        components: basis vectors.
        width: hidden width.
    """

    def __init__(
        self, num_labels: int, shape: tuple[int, int, int], components: int = 320, width: int = 768
    ) -> None:
        super().__init__()
        self.shape = shape
        size = int(np.prod(shape))
        self.skip = nn.Linear(num_labels, components)
        self.net = nn.Sequential(
            nn.Linear(num_labels, width),
            nn.SiLU(),
            nn.Linear(width, width),
            nn.SiLU(),
            nn.Linear(width, width),
            nn.SiLU(),
            nn.Linear(width, components),
        )
        self.label_mean: Tensor
        self.label_scale: Tensor
        self.latent_mean: Tensor
        self.basis: Tensor
        self.scale: Tensor
        self.register_buffer("label_mean", torch.zeros(num_labels))
        self.register_buffer("label_scale", torch.ones(num_labels))
        self.register_buffer("latent_mean", torch.zeros(size))
        self.register_buffer("basis", torch.zeros(components, size))
        self.register_buffer("scale", torch.ones(components))

    def fit_basis(self, labels: Tensor, latents: Tensor) -> Tensor:
        """Sets the standardisation and the basis from data.

        Args:
            labels: [n, num_labels].
            latents: [n, C, h, w].

        Returns:
            The coefficients of `latents`, standardised, [n, components].
        """
        flat = latents.flatten(1)
        self.label_mean.copy_(labels.mean(0))
        self.label_scale.copy_(labels.std(0).clamp_min(0.02))
        self.latent_mean.copy_(flat.mean(0))
        centred = flat - self.latent_mean
        _, vectors = torch.linalg.eigh(centred.T @ centred)
        self.basis.copy_(vectors.flip(1)[:, : self.basis.shape[0]].T)
        coefficients = centred @ self.basis.T
        self.scale.copy_(coefficients.std(0).clamp_min(1e-6))
        return coefficients / self.scale

    def coefficients(self, labels: Tensor) -> Tensor:
        """Standardised basis coefficients of labels [n, num_labels]."""
        x = (labels - self.label_mean) / self.label_scale
        return self.net(x) + self.skip(x)

    def forward(self, labels: Tensor) -> Tensor:
        """Latents [..., C, h, w] of labels [..., num_labels]."""
        flat = self.coefficients(labels) * self.scale @ self.basis + self.latent_mean
        return flat.reshape(*flat.shape[:-1], *self.shape)


def load_parts(directory: Path) -> tuple[UnitEncoder, UnitDecoder]:
    """The autoencoder that `rtgen train autoencoder` wrote, in fp32 for use."""
    encoder = UnitEncoder(UnitConvConfig())
    _load_part(encoder, directory / "encoder.safetensors")
    return encoder, load_decoder_part(directory)


def load_decoder_part(directory: Path) -> UnitDecoder:
    """The decoder that `rtgen train autoencoder` or `decoder` wrote, in fp32 for use."""
    decoder = UnitDecoder(UnitConvConfig())
    _load_part(decoder, directory / "decoder.safetensors")
    return decoder


def _load_part(part: nn.Module, path: Path) -> None:
    if not path.exists():
        raise CheckpointError(f"{path} is missing; run `rtgen train autoencoder` first")
    part.load_state_dict({k: v.float() for k, v in load_file(path).items()})
    part.requires_grad_(False).eval()
    part.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


@torch.no_grad()
def encode_frames(encoder: UnitEncoder, frames: npt.NDArray[np.uint8]) -> Tensor:
    """Latents of single pixel frames, fp32 [F, frame_channels, h, w]."""
    rows = []
    channels = encoder.config.frame_channels
    padded = np.concatenate([frames, frames[-1:].repeat(-len(frames) % 4, 0)])
    for start in range(0, len(padded), 32):
        units = encoder(to_pixels(padded[start : start + 32])[None])
        rows.append(units[0].float().unflatten(1, (-1, channels)).flatten(0, 1))
    return torch.cat(rows)[: len(frames)]


@dataclass
class RendererStage:
    """Sampling, loss and evaluation of the latent renderer."""

    model: LatentRenderer
    labels: Tensor
    coefficients: Tensor
    test_labels: Tensor
    test_latents: Tensor
    seed: int

    def loss(self, step: int) -> dict[str, Tensor]:
        """Squared error of coefficients, weighted by the share of the basis vector."""
        rng = np.random.default_rng((self.seed, step))
        index = torch.from_numpy(rng.integers(len(self.labels), size=BATCH))
        jitter = 0.01 * self.model.label_scale * torch.randn(BATCH, self.labels.shape[1])
        error = self.model.coefficients(self.labels[index] + jitter) - self.coefficients[index]
        weight = self.model.scale / self.model.scale.mean()
        return {"loss": (error.square() * weight).mean()}

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Share of held-out latent variance explained."""
        error = self.model(self.test_labels) - self.test_latents
        spread = self.test_latents.flatten(1) - self.model.latent_mean
        return {"r2": float(1 - error.square().mean() / spread.square().mean())}


@torch.no_grad()
def picture_quality(model: LatentRenderer, decoder: UnitDecoder, clip: Clip) -> dict[str, float]:
    """PSNR of decoded label-made latents against the rendered frames of a held-out clip."""
    count = min(len(clip.frames), 128) // 4 * 4
    latents = model(torch.from_numpy(clip.labels[:count])).reshape(1, count // 4, -1, 16, 16)
    out = decoder(latents)[0].clamp(-1, 1)
    return {"labels_psnr": psnr(out, to_pixels(clip.frames[:count]))}


def load_renderer(directory: Path) -> LatentRenderer:
    """The network that `rtgen train renderer` wrote."""
    path = directory / "renderer.safetensors"
    if not path.exists():
        raise CheckpointError(f"{path} is missing; run `rtgen train renderer` first")
    weights = load_file(path)
    shape = (4, 16, 16)
    model = LatentRenderer(len(weights["label_mean"]), shape, len(weights["scale"]))
    model.load_state_dict(weights)
    return model.requires_grad_(False).eval()


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `rtgen train renderer`."""
    add_train_arguments(parser, DEFAULTS)
    parser.add_argument("--autoencoder", type=Path, required=True, help="its folder")


def run(args: argparse.Namespace) -> int:
    """Encodes the rendered frames, trains, and writes the network with its metrics."""
    torch.manual_seed(args.seed)
    encoder, decoder = load_parts(args.autoencoder)
    clips = load_clips(args.data)
    train = [clip for clip in clips if not clip.held_out]
    test = [clip for clip in clips if clip.held_out]
    labels = torch.from_numpy(np.concatenate([clip.labels for clip in train]))
    latents = torch.cat([encode_frames(encoder, clip.frames) for clip in train])
    test_labels = torch.from_numpy(np.concatenate([clip.labels for clip in test]))
    test_latents = torch.cat([encode_frames(encoder, clip.frames) for clip in test])
    channels, rows, columns = latents.shape[1:]
    model = LatentRenderer(labels.shape[1], (channels, rows, columns))
    coefficients = model.fit_basis(labels, latents)
    stage = RendererStage(
        model, labels, coefficients, test_labels, test_latents,
        args.seed,
    )  # fmt: skip
    trainer = Trainer(model, train_config(args, DEFAULTS), args.out)
    trainer.run(stage.loss, stage.evaluate, evaluate_every=1000)
    with trainer.averaged_weights():
        metrics = {**stage.evaluate(), **picture_quality(model, decoder, test[0])}
        save_file(model.state_dict(), args.out / "renderer.safetensors")
    (args.out / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
    return 0
