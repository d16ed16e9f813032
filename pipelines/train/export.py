"""Puts the trained parts together as a model folder (`rtgen train export`)."""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path

import torch

from decoders.unit_conv import UnitConvConfig
from pipelines.audio import MelConfig
from pipelines.avatar_model import AvatarConfig, save_avatar_model
from pipelines.lips import LipConfig, load_lips
from pipelines.motion import FPS
from pipelines.train.denoiser import CACHE, SHIFT, avatar_denoiser_config
from pipelines.train.latent_renderer import load_decoder_part
from rtgen.config import SamplingConfig
from rtgen.errors import CheckpointError
from rtgen.models.denoiser import CausalDenoiser
from rtgen.types import SpeechState

LATENT_SPACE = "rtgen-unit-conv-1"
CONTEXT_NOISE = 0.04
STEPS = (1, 2, 4)
DEFAULT_STEPS = 2


def sampling(steps: int) -> SamplingConfig:
    """Evenly spaced timesteps before the shift, down from pure noise."""
    timesteps = tuple(1000 * (1 - i / steps) for i in range(steps))
    return SamplingConfig(
        timesteps=timesteps, shift=SHIFT, renoise="ode", context_noise=CONTEXT_NOISE
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `rtgen train export`."""
    parser.add_argument("--autoencoder", type=Path, required=True, help="its folder")
    parser.add_argument("--lips", type=Path, required=True, help="folder of the lips")
    parser.add_argument("--denoiser", type=Path, required=True, help="its folder")
    parser.add_argument(
        "--decoder", action="append", required=True, metavar="AVATAR=FOLDER", type=_identity,
        help="an identity's name and the folder of its decoder; once for each, the default first",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, required=True, help="model folder to write")
    parser.add_argument("--name", default="avatar", help="of the model")


def _identity(text: str) -> tuple[str, Path]:
    name, separator, folder = text.partition("=")
    if not (name and separator and folder):
        raise argparse.ArgumentTypeError(f"must be AVATAR=FOLDER, got {text!r}")
    return name, Path(folder)


def run(args: argparse.Namespace) -> int:
    """Writes the model folder."""
    path = args.denoiser / "denoiser.pt"
    if not path.exists():
        raise CheckpointError(f"{path} is missing; run `rtgen train denoiser` first")
    trained = torch.load(path, weights_only=True)
    scale = trained["model"]["condition_embedder.frame_embedder.control_scale"]
    denoiser = CausalDenoiser(avatar_denoiser_config(len(scale), len(SpeechState)))
    denoiser.load_state_dict(trained["model"])
    mel, lips = MelConfig(), LipConfig()
    avatars = tuple(name for name, _ in args.decoder)
    config = AvatarConfig(
        name=args.name,
        latent_space=LATENT_SPACE,
        fps=FPS,
        denoiser=denoiser.config,
        cache=CACHE,
        samplings=tuple(sampling(steps) for steps in STEPS),
        default_steps=DEFAULT_STEPS,
        decoder=UnitConvConfig(),
        latent_mean=tuple(trained["latent_mean"].flatten().tolist()),
        latent_std=tuple(trained["latent_std"].flatten().tolist()),
        mel=mel,
        lips=lips,
        avatars=avatars,
    )
    save_avatar_model(
        args.out,
        config,
        load_lips(args.lips / "lips.safetensors", lips),
        denoiser,
        {name: load_decoder_part(folder) for name, folder in args.decoder},
        {avatar: trained["reference"].clone() for avatar in avatars},
    )
    shutil.copyfile(args.autoencoder / "encoder.safetensors", args.out / "encoder.safetensors")
    return 0
