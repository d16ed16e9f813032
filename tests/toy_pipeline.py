"""A real avatar pipeline at toy size: random weights, written to a folder and loaded from it."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from decoders.unit_conv import UnitConvConfig, UnitDecoder
from pipelines.audio import MelConfig
from pipelines.avatar import AvatarPipeline, save_avatar_model
from pipelines.avatar_model import AvatarConfig
from pipelines.lips import MOUTH_NAMES, LipConfig, LipNet
from pipelines.motion import CONTROL_NAMES
from rtgen.config import CacheConfig, DenoiserConfig, SamplingConfig
from rtgen.models.denoiser import CausalDenoiser
from rtgen.types import SessionSpec
from tests.toy import randomise

OFFLINE = SessionSpec(service_class="offline", seed=3)
LIVE = SessionSpec(service_class="live", seed=3)


def toy_config(*, merge_clean_pass: bool = False, frames_per_chunk: int = 1) -> AvatarConfig:
    """32x32 pixels, 2x2 latents, one token a unit."""
    mel = MelConfig()
    return AvatarConfig(
        name="toy",
        latent_space="toy-32",
        fps=25,
        denoiser=DenoiserConfig(
            num_attention_heads=2,
            attention_head_dim=8,
            in_channels=16,
            out_channels=16,
            ffn_dim=32,
            num_layers=2,
            freq_dim=16,
            audio_dim=mel.audio_dim,
            audio_tokens=mel.num_tokens,
            num_states=4,
            num_events=7,
            control_dim=4 * (len(CONTROL_NAMES) + len(MOUTH_NAMES)),
            position_grid=(1, 1),
            condition_map=2,
            frames_per_latent=4,
            prediction_type="sample",
        ),
        cache=CacheConfig(
            window=7,
            sink=1,
            frames_per_chunk=frames_per_chunk,
            lead=2,
            merge_clean_pass=merge_clean_pass,
            position_mode="relative",
        ),
        samplings=(
            SamplingConfig(timesteps=(1000.0, 600.0), shift=3.0),
            SamplingConfig(timesteps=(1000.0,), shift=3.0),
        ),
        default_steps=2,
        decoder=UnitConvConfig(
            size=32, widths=(8, 8, 8), encoder_blocks=(1, 1, 1), decoder_blocks=(1, 1, 1)
        ),
        latent_mean=tuple(0.1 * i for i in range(16)),
        latent_std=tuple(0.5 + 0.1 * i for i in range(16)),
        mel=mel,
        lips=LipConfig(width=8, hidden=8),
        avatars=("ada", "bo"),
    )


def write_toy_model(folder: Path, config: AvatarConfig | None = None) -> Path:
    """Writes a model folder whose output depends on every input."""
    config = toy_config() if config is None else config
    lips, denoiser = LipNet(config.lips), CausalDenoiser(config.denoiser)
    randomise(denoiser, 1)
    randomise(lips, 4)
    decoders = {name: UnitDecoder(config.decoder) for name in config.avatars}
    for seed, decoder in enumerate(decoders.values(), 5):
        randomise(decoder, seed)
    generator = torch.Generator().manual_seed(3)
    references = {
        name: torch.randn(1, *config.latent_shape, generator=generator) for name in config.avatars
    }
    save_avatar_model(folder, config, lips, denoiser, decoders, references, dtype=torch.float32)
    return folder


@cache
def toy_pipeline(*, merge_clean_pass: bool = False, frames_per_chunk: int = 1) -> AvatarPipeline:
    """A pipeline loaded from a toy folder, float32; shared, for pipelines hold no session state."""
    config = toy_config(merge_clean_pass=merge_clean_pass, frames_per_chunk=frames_per_chunk)
    with TemporaryDirectory() as folder:
        write_toy_model(Path(folder), config)
        return AvatarPipeline.from_directory(folder, dtype="float32")
