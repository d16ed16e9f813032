"""Small layers of the denoiser: linears that cast, float32 norms, embedders.

The residual stream, norms and modulation are float32; products run in the dtype of the weights,
or in autocast's.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rtgen.config import Activation


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """A linear layer in the dtype of its weights, or in autocast's."""
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        x = x.to(weight.dtype)
    return F.linear(x, weight, bias)


class Linear(nn.Linear):
    """`nn.Linear` that casts its input to the dtype of its weights."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


class PatchEmbedding(nn.Module):
    """Embeds patches of one frame; holds the parameters of the equivalent `nn.Conv3d`."""

    def __init__(self, in_channels: int, dim: int, patch_size: tuple[int, int, int]) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.weight = nn.Parameter(torch.empty(dim, in_channels, *patch_size))
        self.bias = nn.Parameter(torch.zeros(dim))
        nn.init.xavier_uniform_(self.weight.flatten(1))

    def forward(self, latents: Tensor) -> Tensor:
        """Cuts latents [B, T, C, h, w] into tokens [B, T, N, D], rows first."""
        _, p, q = self.patch_size
        b, t, c, h, w = latents.shape
        patches = latents.reshape(b, t, c, h // p, p, w // q, q).permute(0, 1, 3, 5, 2, 4, 6)
        patches = patches.reshape(b, t, (h // p) * (w // q), c * p * q)
        return linear(patches, self.weight.flatten(1), self.bias)


class LayerNorm(nn.LayerNorm):
    """Layer norm in float32 whatever the dtype of weights and input."""

    def forward(self, input: Tensor) -> Tensor:
        weight = None if self.weight is None else self.weight.float()
        bias = None if self.bias is None else self.bias.float()
        return F.layer_norm(input.float(), self.normalized_shape, weight, bias, self.eps)


class RMSNorm(nn.RMSNorm):
    """RMS norm in float32 whatever the dtype of weights and input."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.normalized_shape, self.weight.float(), self.eps)


class Mlp(nn.Module):
    """Linear, activation, linear, named as diffusers names its embedders."""

    def __init__(self, in_features: int, dim: int, activation: nn.Module) -> None:
        super().__init__()
        self.linear_1 = Linear(in_features, dim)
        self.act = activation
        self.linear_2 = Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear_2(self.act(self.linear_1(x)))


class _Projection(nn.Module):
    def __init__(self, dim: int, ffn_dim: int, approximate: str) -> None:
        super().__init__()
        self.proj = Linear(dim, ffn_dim)
        self.approximate = approximate

    def forward(self, x: Tensor) -> Tensor:
        return F.gelu(self.proj(x), approximate=self.approximate)


class FeedForward(nn.Module):
    """Linear, GELU, linear; parameters `net.0.proj` and `net.2` as in diffusers."""

    def __init__(self, dim: int, ffn_dim: int, activation_fn: Activation) -> None:
        super().__init__()
        approximate = "tanh" if activation_fn == "gelu-approximate" else "none"
        projection = _Projection(dim, ffn_dim, approximate)
        self.net = nn.ModuleList([projection, nn.Identity(), Linear(ffn_dim, dim)])

    def forward(self, x: Tensor) -> Tensor:
        return self.net[2](self.net[0](x))


def timestep_embedding(timestep: Tensor, dim: int) -> Tensor:
    """Sinusoidal embedding of timesteps, cosines first (Wan's order), computed in float64.

    Args:
        timestep: [...] float, 0..1000.
        dim: even.

    Returns:
        [..., dim] float32.
    """
    half = dim // 2
    steps = torch.arange(half, dtype=torch.float64, device=timestep.device)
    angles = timestep.double()[..., None] * torch.exp(steps * (-math.log(10000.0) / half))
    return torch.cat((angles.cos(), angles.sin()), dim=-1).float()
