"""Sizes of the transformer decoder, their cost, and folders that hold one."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, Literal

import torch

from decoders.base import StreamingDecoder
from decoders.flash import PATCH, FlashConfig, FlashNetwork
from decoders.flash_layers import segments
from rtgen.errors import CheckpointError, ConfigError
from rtgen.weights.loaders import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    load_checkpoint,
    load_strict,
    save_weights,
)

Size = Literal["S", "B", "L", "XL"]

# (dim, layers, heads, key-value heads); FlashDecoder's table of sizes.
_SIZES: dict[str, tuple[int, int, int, int]] = {
    "S": (512, 12, 8, 2),
    "B": (768, 16, 12, 3),
    "L": (1024, 20, 16, 4),
    "XL": (1536, 20, 24, 3),
}
_WINDOW = 16

# 16x16 latents of four pixel frames with four channels each: 256x256 at a camera that stands still.
AVATAR_FLASH = FlashConfig(
    latent_channels=16,
    dim=256,
    num_layers=6,
    num_heads=4,
    num_kv_heads=2,
    refine_dim=128,
    refine_memory=1,
    first_frames=4,
    window=8,
    global_layers=(2, 5),
    is_factored=True,
    position_grid=(16, 16),
)


def flash_config(size: Size, latent_space: str, *, windowed: bool = False) -> FlashConfig:
    """A decoder for Wan's latents.

    Args:
        size: S, B, L or XL.
        latent_space: "wan2.1" (8x8 pixels per latent pixel) or "wan2.2" (16x16).
        windowed: attention in windows of 16x16 tokens (256x256 pixels) with every sixth block
            global, and a refinement that looks back one pixel frame instead of four.

    Raises:
        ConfigError: there is no such size or latent space.
    """
    if size not in _SIZES or latent_space not in ("wan2.1", "wan2.2"):
        raise ConfigError(
            f"sizes are {', '.join(_SIZES)}, latent spaces wan2.1 and wan2.2; got {size!r}, "
            f"{latent_space!r}"
        )
    dim, layers, heads, groups = _SIZES[size]
    is_fine = latent_space == "wan2.1"
    return FlashConfig(
        latent_channels=16 if is_fine else 48,
        fold=2 if is_fine else 1,
        dim=dim,
        num_layers=layers,
        num_heads=heads,
        num_kv_heads=groups,
        # The paper's Wan2.1 model is its Wan2.2 model less this layer, to the parameter.
        has_mlp=not is_fine,
        window=_WINDOW if windowed else None,
        global_layers=tuple(range(5, layers, 6)) if windowed else (),
        refine_memory=1 if windowed else 4,
    )


def flash_flops(config: FlashConfig, height: int, width: int) -> float:
    """Multiply-adds counted as two, of one steady latent frame; norms and rotations left out.

    Args:
        config: shape of the decoder.
        height: latent rows.
        width: latent columns.
    """
    rows, columns = height // config.fold, width // config.fold
    tokens, frames, head = rows * columns, config.frames_per_latent, config.head_dim

    def blocks(dim: int, windows: list[tuple[int | None, int]], own: int, memory: int) -> float:
        queries, total = own * tokens, 0.0
        for window, shift in windows:
            pairs = sum(
                (bottom - top) * (right - left) * high * wide
                for top, bottom, high in segments(rows, window or max(rows, columns), shift)
                for left, right, wide in segments(columns, window or max(rows, columns), shift)
            )
            total += 2 * queries * (14 * dim**2 + 2 * dim * config.num_kv_heads * head)
            total += 4 * own * (own + memory) * pairs * dim
        return total

    def layout(count: int, is_backbone: bool) -> list[tuple[int | None, int]]:
        half = 0 if config.window is None else config.window // 2
        return [
            (None, 0)
            if is_backbone and layer in config.global_layers
            else (config.window, half * (layer % 2))
            for layer in range(count)
        ]

    refined = config.refined
    total = 2.0 * tokens * config.latent_channels * config.fold**2 * config.dim
    total += blocks(config.dim, layout(config.num_layers, True), 1, 1)
    total += 2 * tokens * config.dim * frames * refined
    total += blocks(refined, layout(config.refine_layers, False), frames, config.refine_memory)
    total += 2 * tokens * frames * refined * 3 * PATCH**2
    if config.is_factored:
        total += 2 * tokens * config.latent_channels * refined
    if config.has_mlp:
        total += 2 * tokens * frames * 8 * refined**2
    if config.seam_conv:
        total += 2 * 16 * tokens * frames * 9 * 48**2
    return total


def save_flash(network: FlashNetwork, folder: Path | str, latent_space: str) -> None:
    """Writes configuration and weights into a folder in diffusers' layout.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    folder = Path(folder)
    save_weights(folder / WEIGHTS_NAME, network.state_dict())
    values = {
        "_class_name": "FlashNetwork",
        "latent_space": latent_space,
        **dataclasses.asdict(network.config),
    }
    try:
        (folder / CONFIG_NAME).write_text(json.dumps(values, indent=2) + "\n")
    except OSError as error:
        raise CheckpointError(f"cannot write {folder / CONFIG_NAME}: {error}") from error


def load_flash_decoder(
    folder: Path | str,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    lead: int = 2,
) -> StreamingDecoder:
    """Reads a transformer decoder that `save_flash` wrote.

    Args:
        folder: holds `config.json` and `diffusion_pytorch_model.safetensors`.
        dtype: of the weights; a canvas stays float32.
        device: where to put them.
        lead: latent frames that a session can be rolled back.

    Raises:
        CheckpointError: a file is missing or damaged; or the weights do not fit, all are listed.
        ConfigError: the configuration is not one of this class.
    """
    folder = Path(folder)
    try:
        values: dict[str, Any] = dict(json.loads((folder / CONFIG_NAME).read_text()))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"cannot read {folder / CONFIG_NAME}: {error}") from error
    if values.pop("_class_name", None) != "FlashNetwork" or "latent_space" not in values:
        raise ConfigError(f"{folder / CONFIG_NAME} is not that of a FlashNetwork")
    latent_space = str(values.pop("latent_space"))
    fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in values.items()}
    try:
        config = FlashConfig(**fields)
    except TypeError as error:
        raise ConfigError(f"{folder / CONFIG_NAME}: {error}") from error
    with torch.device("meta"):
        network = FlashNetwork(config)
    state = load_checkpoint(folder / WEIGHTS_NAME)
    load_strict(network, state, str(folder), assign=True)
    for parameter in network.parameters():
        parameter.data = parameter.data.to(dtype)
    network.to(device).eval().requires_grad_(False)
    return StreamingDecoder(network, latent_space=latent_space, lead=lead)
