"""Arithmetic of one denoiser pass, counted from the configuration."""

from __future__ import annotations

from rtgen.config import DenoiserConfig


def flops(config: DenoiserConfig, height: int, width: int, frames: int, window: int) -> float:
    """Multiply-adds counted as two, of one cached pass, without `prepare`.

    Args:
        config: shape of the denoiser.
        height: latent rows.
        width: latent columns.
        frames: latent frames in the pass.
        window: latent frames attended to.

    Returns:
        FLOP of linears and attention; norms and activations are left out.
    """
    dim, tokens = config.inner_dim, config.tokens_per_frame(height, width)
    n = frames * tokens
    patch = config.patch_size[1] * config.patch_size[2]
    per_token = 4 * dim * dim + 2 * dim * config.ffn_dim  # self-attention and feed-forward
    scores = window * tokens
    if config.text_dim is not None:
        per_token += 2 * dim * dim
        scores += 512
    if config.audio_dim is not None:
        per_token += 2 * dim * dim
        scores += config.audio_tokens
    layer = 2 * n * per_token + 4 * n * scores * dim
    ends = 2 * n * dim * patch * (config.in_channels + config.out_channels)
    time = 2 * frames * dim * (config.freq_dim + dim + 6 * dim)
    return float(config.num_layers * layer + ends + time)
