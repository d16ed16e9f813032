"""The stock decoder beside diffusers' `AutoencoderKLWan` with the same random weights."""

from __future__ import annotations

from typing import Any

import torch
from diffusers import AutoencoderKLWan
from torch import Tensor

from decoders.base import StreamingDecoder
from decoders.stock_layers import Algorithm
from decoders.stock_vae import StockVae, config_from_json
from tests.toy import randomise

SMALL: dict[str, Any] = {"base_dim": 8, "z_dim": 4}
RESIDUAL: dict[str, Any] = SMALL | {
    "decoder_base_dim": 16,
    "is_residual": True,
    "out_channels": 12,
    "patch_size": 2,
}
# Neither Wan2.1 nor 2.2: other stages, 8 frames per latent, a patch on plain stages.
OTHER: dict[str, Any] = {
    "base_dim": 8,
    "decoder_base_dim": 4,
    "z_dim": 6,
    "dim_mult": [1, 2, 2, 4, 4],
    "num_res_blocks": 1,
    "temperal_downsample": [True, False, True, True],
    "out_channels": 12,
    "patch_size": 2,
}
# Wan2.2's stages, one of which doubles frames and halves channels: there the repeated ones differ.
OTHER_RESIDUAL = RESIDUAL | {"num_res_blocks": 0, "temperal_downsample": [True, False, True]}
CONFIGS = {
    "wan2.1": SMALL,
    "wan2.2": RESIDUAL,
    "other": OTHER,
    "other residual": OTHER_RESIDUAL,
}


def theirs(values: dict[str, Any], seed: int = 0) -> Any:
    """diffusers' autoencoder with random weights of a useful size."""
    moments = {name: [0.0] * values["z_dim"] for name in ("latents_mean", "latents_std")}
    pixels = {"in_channels": values.get("out_channels", 3)}
    model: Any = AutoencoderKLWan(**values, **moments, **pixels)  # type: ignore[no-untyped-call]
    randomise(model, seed)
    model.decoder.conv_out.weight.data *= 0.5  # few pixels shall be clipped
    return model.eval().requires_grad_(False)


def decoding(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {k: v for k, v in state.items() if k.startswith(("decoder.", "post_quant_conv."))}


def ours(model: Any, values: dict[str, Any], algorithm: Algorithm | None = None) -> Any:
    """Our decoder with the weights of theirs."""
    network = StockVae(config_from_json(values))
    network.load_state_dict(decoding(model.state_dict()), strict=True)
    network.eval().requires_grad_(False).prepare(algorithm)
    return StreamingDecoder(network, latent_space="toy", lead=0)


def stream(decoder: Any, latents: Tensor) -> Tensor:
    """All frames of latents [T, C, h, w], one latent frame at a time."""
    state = decoder.new_state(*latents.shape[2:], decoder.dtype, "cpu")
    return torch.cat([decoder.step([state], row[None, None])[0] for row in latents])


@torch.inference_mode()
def whole(model: Any, latents: Tensor) -> Tensor:
    """diffusers' decoding of the whole clip."""
    return model.decode(latents.transpose(0, 1)[None]).sample[0].transpose(0, 1)


def noise(values: dict[str, Any], frames: int, size: tuple[int, int] = (3, 2)) -> Tensor:
    random = torch.Generator().manual_seed(3)
    return torch.randn(frames, values["z_dim"], *size, generator=random)


def check(out: Tensor, expected: Tensor) -> None:
    """The gate: at most 1e-5 apart on a picture that is neither flat nor clipped."""
    assert out.shape == expected.shape
    rms, clipped = expected.square().mean().sqrt(), (expected.abs() == 1).float().mean()
    assert rms > 0.15, f"the comparison says nothing at an output rms of {rms}"
    assert clipped < 0.05, f"the comparison says nothing where {clipped:.0%} is clipped"
    assert (out - expected).abs().max() <= 1e-5
