"""Tiny real models and inputs shared by the tests; nothing in them is zero by initialisation."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from rtgen.config import DenoiserConfig
from rtgen.models.conditioning import Conditioning
from rtgen.models.denoiser import CausalDenoiser
from rtgen.models.invariance import random_conditioning

CHANNELS, HEIGHT, WIDTH = 4, 4, 4
TOKENS = 4  # per frame, with patches of 2x2


def toy_config(**changes: Any) -> DenoiserConfig:
    """2 layers, width 48 = 2 heads of 24, latents of 4 channels at 4x4; no conditioning at all."""
    values: dict[str, Any] = {
        "num_attention_heads": 2,
        "attention_head_dim": 24,
        "in_channels": CHANNELS,
        "out_channels": CHANNELS,
        "ffn_dim": 96,
        "num_layers": 2,
    }
    return DenoiserConfig(**{**values, **changes})


def text_config(**changes: Any) -> DenoiserConfig:
    """The toy as a Wan-family model: text, nothing else."""
    return toy_config(text_dim=32, **changes)


def avatar_config(**changes: Any) -> DenoiserConfig:
    """The toy with every part that an avatar has, and text."""
    values: dict[str, Any] = {
        "text_dim": 32,
        "audio_dim": 12,
        "audio_tokens": 3,
        "num_states": 3,
        "num_events": 4,
        "control_dim": 2,
        "position_grid": (2, 2),
        "condition_map": 3,
        "frames_per_latent": 2,
        "activation_fn": "gelu",
    }
    return toy_config(**{**values, **changes})


def randomise(module: nn.Module, seed: int = 0) -> None:
    """Draws every parameter anew so that signals keep a size of about 1 through the layers."""
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            noise = torch.randn(parameter.shape, generator=random)
            if "norm" in name and name.endswith("weight"):
                parameter.copy_(1 + 0.2 * noise)
            elif parameter.ndim >= 2 and "table" not in name and "position" not in name:
                parameter.copy_(noise / parameter.flatten(1).shape[1] ** 0.5)
            else:
                parameter.copy_(0.3 * noise)


def toy_denoiser(
    config: DenoiserConfig | None = None, seed: int = 0, requires_grad: bool = False
) -> CausalDenoiser:
    """A denoiser with random weights everywhere, float32, on the CPU."""
    denoiser = CausalDenoiser(toy_config() if config is None else config)
    randomise(denoiser, seed)
    return denoiser.requires_grad_(requires_grad)


def toy_latents(frames: int, batch: int = 1, seed: int = 1) -> Tensor:
    """[B, T, 4, 4, 4] float32, variance 1."""
    random = torch.Generator().manual_seed(seed)
    return torch.randn(batch, frames, CHANNELS, HEIGHT, WIDTH, generator=random)


def toy_timesteps(frames: int, batch: int = 1, seed: int = 2) -> Tensor:
    """[B, T] float32 in 0..1000."""
    return 1000 * torch.rand(batch, frames, generator=torch.Generator().manual_seed(seed))


def toy_conditioning(
    config: DenoiserConfig, frames: int, batch: int = 1, seed: int = 3
) -> Conditioning:
    """Random values for the parts that the model has; prompts of 6 rows."""
    random = torch.Generator().manual_seed(seed)
    return random_conditioning(config, batch, frames, random, prompt_rows=6)


def frames_of(conditioning: Conditioning, start: int, stop: int) -> Conditioning:
    """The conditioning of frames start..stop-1."""

    def cut(value: Tensor | None) -> Tensor | None:
        return None if value is None else value[:, start:stop]

    return Conditioning(
        prompt_embeds=conditioning.prompt_embeds,
        audio=cut(conditioning.audio),
        state=cut(conditioning.state),
        event=cut(conditioning.event),
        control=cut(conditioning.control),
    )
