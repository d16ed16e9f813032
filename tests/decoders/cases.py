"""Tiny real decoders of every kind, under the names that tests use."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

import torch

from decoders.base import MemorylessDecoder, StreamingDecoder
from decoders.flash import FlashConfig, FlashNetwork
from decoders.stock_vae import StockVae, StockVaeConfig
from decoders.unit_conv import UnitConvConfig, UnitDecoder
from tests.decoders.contract import Case
from tests.toy import randomise

WAN21 = StockVaeConfig(base_dim=4, z_dim=4, num_res_blocks=1)
WAN22 = StockVaeConfig(
    base_dim=4,
    decoder_base_dim=8,
    z_dim=4,
    num_res_blocks=1,
    is_residual=True,
    out_channels=12,
    patch_size=2,
)


def unit_conv() -> Case:
    network = UnitDecoder(UnitConvConfig(size=32, widths=(8, 16, 24))).eval()
    randomise(network)
    network.canvas.copy_(torch.rand_like(network.canvas) - 0.5)
    network.requires_grad_(False)
    decoder = MemorylessDecoder(network, latent_space="toy", latent_shape=(16, 2, 2))
    return Case(decoder, (2, 2), 16, first=4, frames=4, scale=16, has_memory=False)


def stock(config: StockVaeConfig = WAN21, size: tuple[int, int] = (3, 2)) -> Case:
    network = StockVae(config)
    randomise(network)
    network.eval().requires_grad_(False).prepare()
    return Case(
        StreamingDecoder(network, latent_space="toy", lead=2),
        size,
        config.z_dim,
        first=1,
        frames=config.frames_per_latent,
        scale=config.spatial_scale,
        has_memory=True,
    )


PAPER = FlashConfig(latent_channels=4, dim=24, num_layers=2, num_heads=4, num_kv_heads=2)
FLASH = {
    "paper": PAPER,
    "folded": dataclasses.replace(PAPER, fold=2, has_mlp=False),
    "windowed": dataclasses.replace(
        PAPER, num_layers=3, window=2, global_layers=(1,), refine_dim=12, refine_memory=1
    ),
    "avatar": dataclasses.replace(
        PAPER,
        window=2,
        refine_memory=2,
        first_frames=4,
        is_factored=True,
        position_grid=(3, 5),
    ),
}


def flash_network(config: FlashConfig, seed: int = 0) -> FlashNetwork:
    """Random weights everywhere, float32."""
    network = FlashNetwork(config)
    randomise(network, seed)
    if config.position_grid is not None:
        network.canvas.uniform_(-1, 1, generator=torch.Generator().manual_seed(seed))
    return network.eval().requires_grad_(False)


def flash(name: str) -> Case:
    config = FLASH[name]
    return Case(
        StreamingDecoder(flash_network(config), latent_space="toy", lead=2),
        (3 * config.fold, 5 * config.fold),
        config.latent_channels,
        first=config.first_frames,
        frames=config.frames_per_latent,
        scale=16 // config.fold,
        has_memory=True,
    )


CASES: dict[str, Callable[[], Case]] = {
    "unit_conv": unit_conv,
    "stock wan2.1": stock,
    "stock wan2.2": lambda: stock(WAN22),
    **{f"flash {name}": partial(flash, name) for name in FLASH},
}
