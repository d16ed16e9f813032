"""A convolutional autoencoder of units, factored by frame.

One 2-D network serves each pixel frame alone: a frame of 256x256 becomes 4 channels of 16x16, and
the four frames of a unit are stacked to one latent frame of 16 channels (the geometry of
Wan2.2's autoencoder). Because no channel is shared by two frames, motion inside a unit cannot be
averaged away. The decoder paints onto a learned canvas, so what never moves costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rtgen.errors import ConfigError, ShapeError


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitConvConfig:
    """Shape of a `UnitAutoencoder`.

    Attributes:
        size: pixel rows and columns, a multiple of 16.
        frame_channels: latent channels of one pixel frame.
        frames_per_unit: pixel frames of one unit.
        widths: channels at 1/4, 1/8 and 1/16 of the pixel size.
        encoder_blocks: residual blocks of the encoder at those sizes.
        decoder_blocks: residual blocks of the decoder at those sizes.
    """

    size: int = 256
    frame_channels: int = 4
    frames_per_unit: int = 4
    widths: tuple[int, int, int] = (64, 96, 160)
    encoder_blocks: tuple[int, int, int] = (1, 1, 2)
    decoder_blocks: tuple[int, int, int] = (1, 2, 3)

    def __post_init__(self) -> None:
        if self.size % 16 or self.size < 16:
            raise ConfigError(f"size must be a multiple of 16, got {self.size}")
        if any(width % 8 for width in self.widths):
            raise ConfigError(f"widths must be multiples of 8, got {self.widths}")

    @property
    def latent_channels(self) -> int:
        """Channels of one latent frame."""
        return self.frame_channels * self.frames_per_unit

    @property
    def latent_size(self) -> int:
        """Rows and columns of a latent frame."""
        return self.size // 16


class ResBlock(nn.Module):
    """Two 3x3 convolutions with group norm before each, added to the input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm1 = nn.GroupNorm(8, channels)
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1)
        self.norm2 = nn.GroupNorm(8, channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1)
        nn.init.zeros_(self.conv2.weight)
        nn.init.zeros_(self.conv2.bias)  # type: ignore[arg-type]

    def forward(self, x: Tensor) -> Tensor:
        h = self.conv1(F.silu(self.norm1(x)))
        return x + self.conv2(F.silu(self.norm2(h)))


def _blocks(channels: int, count: int) -> list[nn.Module]:
    return [ResBlock(channels) for _ in range(count)]


class UnitEncoder(nn.Module):
    """Pixel frames to latent frames, each pixel frame alone."""

    def __init__(self, config: UnitConvConfig) -> None:
        super().__init__()
        self.config = config
        high, mid, low = config.widths
        self.register_buffer("canvas", torch.zeros(3, config.size, config.size))
        self.canvas: Tensor
        self.layers = nn.Sequential(
            nn.Conv2d(48, high, 3, padding=1),
            *_blocks(high, config.encoder_blocks[0]),
            nn.PixelUnshuffle(2),
            nn.Conv2d(4 * high, mid, 1),
            *_blocks(mid, config.encoder_blocks[1]),
            nn.PixelUnshuffle(2),
            nn.Conv2d(4 * mid, low, 1),
            *_blocks(low, config.encoder_blocks[2]),
            nn.GroupNorm(8, low),
            nn.SiLU(),
            nn.Conv2d(low, config.frame_channels, 1),
        )

    def forward(self, pixels: Tensor) -> Tensor:
        """Encodes frames.

        Args:
            pixels: [B, F, 3, H, W] in [-1, 1]; F is a multiple of `frames_per_unit`.

        Returns:
            [B, F / frames_per_unit, latent_channels, H / 16, W / 16].
        """
        batch, frames = pixels.shape[:2]
        per_unit = self.config.frames_per_unit
        if frames % per_unit:
            raise ShapeError(f"frames must be a multiple of {per_unit}, got {frames}")
        x = F.pixel_unshuffle((pixels.flatten(0, 1) - self.canvas) * 2, 4)
        z = self.layers(x.contiguous(memory_format=torch.channels_last))
        return z.reshape(batch, frames // per_unit, -1, *z.shape[2:])


class UnitDecoder(nn.Module):
    """Latent frames to pixel frames, each pixel frame alone; keeps no memory."""

    def __init__(self, config: UnitConvConfig) -> None:
        super().__init__()
        self.config = config
        high, mid, low = config.widths
        self.register_buffer("canvas", torch.zeros(3, config.size, config.size))
        self.canvas: Tensor
        side = config.latent_size
        self.position = nn.Parameter(torch.randn(1, low, side, side) * 0.02)
        self.conv_in = nn.Conv2d(config.frame_channels, low, 3, padding=1)
        self.layers = nn.Sequential(
            *_blocks(low, config.decoder_blocks[2]),
            nn.Conv2d(low, 4 * mid, 1),
            nn.PixelShuffle(2),
            *_blocks(mid, config.decoder_blocks[1]),
            nn.Conv2d(mid, 4 * high, 1),
            nn.PixelShuffle(2),
            *_blocks(high, config.decoder_blocks[0]),
            nn.GroupNorm(8, high),
            nn.SiLU(),
            nn.Conv2d(high, 48, 3, padding=1),
        )

    def forward(self, latents: Tensor) -> Tensor:
        """Decodes latent frames.

        Args:
            latents: [B, T, latent_channels, h, w].

        Returns:
            fp32 [B, T * frames_per_unit, 3, 16 h, 16 w], about [-1, 1], not clamped.
        """
        config = self.config
        expected = (config.latent_channels, config.latent_size, config.latent_size)
        if latents.shape[2:] != expected:
            raise ShapeError(f"latents must be [B, T, {expected}], got {tuple(latents.shape)}")
        batch, units = latents.shape[:2]
        z = latents.reshape(-1, config.frame_channels, *latents.shape[3:])
        x = self.conv_in(z.contiguous(memory_format=torch.channels_last)) + self.position
        y = F.pixel_shuffle(self.layers(x), 4).float() * 0.5 + self.canvas
        return y.reshape(batch, units * config.frames_per_unit, *y.shape[1:])


class UnitAutoencoder(nn.Module):
    """Encoder and decoder that share a canvas, for training."""

    def __init__(self, config: UnitConvConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = UnitEncoder(config)
        self.decoder = UnitDecoder(config)

    def set_canvas(self, image: Tensor) -> None:
        """Sets the picture that latents are residuals to.

        Args:
            image: [3, H, W] in [-1, 1].
        """
        self.encoder.canvas.copy_(image)
        self.decoder.canvas.copy_(image)


def decoder_flops(config: UnitConvConfig) -> float:
    """Multiply-adds counted as two, of decoding one unit; convolutions alone."""
    high, mid, low = config.widths
    side = config.latent_size
    areas = side**2, (2 * side) ** 2, (4 * side) ** 2
    deep, middle, shallow = reversed(config.decoder_blocks)
    per_frame = areas[0] * (9 * config.frame_channels * low + deep * 18 * low**2 + 4 * low * mid)
    per_frame += areas[1] * (middle * 18 * mid**2 + 4 * mid * high)
    per_frame += areas[2] * (shallow * 18 * high**2 + 9 * 48 * high)
    return float(2 * config.frames_per_unit * per_frame)
