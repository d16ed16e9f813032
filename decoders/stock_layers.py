"""Layers of Wan's video decoder for streaming, written for the memory traffic.

Activations are [T, H, W, C] contiguous: frames of a clip as channels-last images, so that a 2-D, a
3-D and a 1x1 convolution all read them without a copy. A causal convolution looks two frames back.
Its input is made in place, behind those two frames, in one buffer: there is no `cat`, no temporal
padding, and spatial padding is left to the kernel.

A 3x3x3 convolution runs as one 3-D kernel or as three 2-D kernels that are added up: the same sum
in another order; which is faster depends on shape and device. Winograd's way takes a quarter of the
products and four times the memory for kernels.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decoders.stock_winograd import transform_kernels, winograd_conv
from rtgen.errors import ConfigError
from rtgen.models.attention import attention

Algorithm = Literal["conv3d", "conv2d", "winograd"]

_NARROW = 16  # channels below which Winograd's transforms cost more than they save
TAIL = 2  # frames that a causal convolution of kernel 3 looks back
_BLOCK = 1 << 17  # elements of a pass over activations: what the second-level cache holds


@dataclass(slots=True)
class Tails:
    """What the causal convolutions remember: the last two frames of each one's input.

    Attributes:
        old: by slot, [2, H, W, C]; not written.
        new: by slot, filled while a step runs.
        is_first: whether this is the first latent frame of the stream.
    """

    old: tuple[Tensor, ...]
    is_first: bool
    new: dict[int, Tensor] = field(default_factory=dict)


class CausalConv3d(nn.Module):
    """A convolution of kernel (3, k, k) over frames, with the two frames before them at hand.

    Attributes:
        slot: place of its tail in the memory.
        algorithm: how a 3x3x3 kernel is run.
    """

    def __init__(self, in_channels: int, out_channels: int, size: int = 3) -> None:
        super().__init__()
        self.slot = -1
        self.algorithm: Algorithm = "conv3d"
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels, 3, size, size))
        self.bias = nn.Parameter(torch.zeros(out_channels))
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)
        self._transformed: Tensor | None = None

    @property
    def in_channels(self) -> int:
        """Channels of its input, and of its tail."""
        return self.weight.shape[1]

    def room(self, x: Tensor, tails: Tails) -> Tensor:
        """[2 + T, H, W, C]: the tail, then room for an input of as many frames as `x` has."""
        frames, height, width, _ = x.shape
        buffer = self.weight.new_empty(TAIL + frames, height, width, self.in_channels)
        buffer[:TAIL] = tails.old[self.slot]
        return buffer

    def forward(self, buffer: Tensor, tails: Tails) -> Tensor:
        """Convolves a filled buffer [2 + T, H, W, C] to [T, H, W, C_out], and keeps its tail."""
        tails.new[self.slot] = buffer[-TAIL:].clone()
        frames = len(buffer) - TAIL
        if self.weight.shape[-1] == 1:
            weight = self.weight[..., 0, 0]
            out = F.linear(buffer[:frames], weight[..., 0], self.bias)
            for step in (1, 2):
                out += F.linear(buffer[step : step + frames], weight[..., step])
            return out
        if self._transformed is not None:
            return winograd_conv(buffer, self._transformed, self.bias)
        if self.algorithm == "conv3d":
            x = buffer.permute(3, 0, 1, 2)[None]
            return F.conv3d(x, self.weight, self.bias, padding=(0, 1, 1))[0].permute(1, 2, 3, 0)
        images = buffer.permute(0, 3, 1, 2)
        out = F.conv2d(images[:frames], self.weight[:, :, 0], self.bias, padding=1)
        for step in (1, 2):
            out += F.conv2d(images[step : step + frames], self.weight[:, :, step], padding=1)
        return out.permute(0, 2, 3, 1)

    def prepare(self, algorithm: Algorithm) -> None:
        """Lays the weights out for an algorithm; values stay.

        Raises:
            ConfigError: Winograd's is asked for in another dtype than float32.
        """
        weight, self.algorithm, self._transformed = self.weight.data, algorithm, None
        if algorithm == "conv3d":
            self.weight.data = weight.contiguous(memory_format=torch.channels_last_3d)
            return
        # Each temporal slice becomes a channels-last kernel.
        self.weight.data = weight.permute(2, 0, 3, 4, 1).contiguous().permute(1, 4, 0, 2, 3)
        if algorithm == "conv2d":
            return
        if weight.dtype != torch.float32:
            raise ConfigError(
                f"Winograd's convolution needs float32 weights, these are {weight.dtype}; use "
                "'conv3d'"
            )
        if weight.shape[-1] == 3 and min(weight.shape[:2]) >= _NARROW:
            self._transformed = transform_kernels(weight)


class RMSNorm(nn.Module):
    """x / max(|x|, 1e-12) * sqrt(C) * gamma over channels, in float32, then SiLU if asked for."""

    def __init__(self, channels: int, *, axes: int = 3) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(channels, *(1,) * axes))

    def forward(self, x: Tensor, out: Tensor, *, silu: bool) -> None:
        """Writes the norm of `x` [..., C] into `out`, both contiguous, a cacheful at a time."""
        channels = x.shape[-1]
        gamma = self.gamma.flatten().float()
        rows = _BLOCK // channels if x.device.type == "cpu" else x.numel()
        source, target = x.view(-1, channels), out.view(-1, channels)
        pieces = torch.split(source, max(1, rows)), torch.split(target, max(1, rows))
        for a, b in zip(*pieces, strict=True):
            length = torch.linalg.vector_norm(a, dim=-1, keepdim=True, dtype=torch.float32)
            scale = length.clamp_min_(1e-12).reciprocal_().mul_(channels**0.5)
            y = torch.mul(a, scale, out=b) if b.dtype == torch.float32 else a * scale
            y *= gamma
            if silu:
                F.silu(y, inplace=True)
            if y is not b:
                b.copy_(y)


class ResidualBlock(nn.Module):
    """x + conv(silu(norm(conv(silu(norm(x)))))), with a 1x1 projection where channels change."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.norm1 = RMSNorm(in_channels)
        self.conv1 = CausalConv3d(in_channels, out_channels)
        self.norm2 = RMSNorm(out_channels)
        self.conv2 = CausalConv3d(out_channels, out_channels)
        self.conv_shortcut = (
            PointConv(in_channels, out_channels) if in_channels != out_channels else None
        )

    def forward(self, x: Tensor, tails: Tails) -> Tensor:
        h = x
        for norm, conv in ((self.norm1, self.conv1), (self.norm2, self.conv2)):
            h = norm_silu_conv(norm, conv, h, tails)
        h += x if self.conv_shortcut is None else self.conv_shortcut(x)
        return h


def norm_silu_conv(norm: RMSNorm, conv: CausalConv3d, x: Tensor, tails: Tails) -> Tensor:
    """conv(silu(norm(x))) of frames [T, H, W, C]."""
    buffer = conv.room(x, tails)
    norm(x, buffer[TAIL:], silu=True)
    return conv(buffer, tails)


class PointConv(nn.Module):
    """A 1x1(x1) convolution, run as a matrix product over channels."""

    def __init__(self, in_channels: int, out_channels: int, *, axes: int = 3) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels, *(1,) * axes))
        self.bias = nn.Parameter(torch.zeros(out_channels))
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.flatten(1), self.bias)


class SpatialAttention(nn.Module):
    """One head of attention among the pixels of each frame, added to the input."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = RMSNorm(channels, axes=2)
        self.to_qkv = PointConv(channels, 3 * channels, axes=2)
        self.proj = PointConv(channels, channels, axes=2)

    def forward(self, x: Tensor) -> Tensor:
        normed = torch.empty_like(x)
        self.norm(x, normed, silu=False)
        q, k, v = self.to_qkv(normed.flatten(1, 2))[:, :, None].chunk(3, dim=-1)  # [T, HW, 1, C]
        return x + self.proj(attention(q, k, v).reshape_as(x))


class Upsample(nn.Module):
    """Doubles rows and columns by repetition, then a 3x3 convolution.

    The repeated pixels make nine products of which only four differ: an output pixel of each of the
    four phases sees 2x2 pixels of the input, under sums of the kernel's weights. One 2x2 kernel
    with four times the outputs does it at 4/9 of the arithmetic.
    """

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_channels, in_channels, 3, 3))
        self.bias = nn.Parameter(torch.zeros(out_channels))
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)
        self._phases: tuple[Tensor, Tensor] | None = None

    def prepare(self) -> None:
        """Sums the weights of each phase; to be called whenever they have changed or moved."""
        w = self.weight.data.double()
        # Rows of the 2x2 kernel for an even and an odd output row; columns likewise.
        rows = (
            torch.stack((w[:, :, 0], w[:, :, 1] + w[:, :, 2])),
            torch.stack((w[:, :, 0] + w[:, :, 1], w[:, :, 2])),
        )
        kernels = []
        for row in rows:  # [2, C_out, C_in, 3]
            even = torch.stack((row[..., 0], row[..., 1] + row[..., 2]), -1)
            odd = torch.stack((row[..., 0] + row[..., 1], row[..., 2]), -1)
            kernels += [kernel.permute(1, 2, 0, 3) for kernel in (even, odd)]
        weight = torch.cat(kernels).to(self.weight.dtype)  # [4 C_out, C_in, 2, 2]
        self._phases = (
            weight.contiguous(memory_format=torch.channels_last),
            self.bias.data.repeat(4),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Frames [T, H, W, C] to [T, 2H, 2W, C_out]."""
        assert self._phases is not None  # the network refuses to run before `prepare`
        frames, height, width, _ = x.shape
        weight, bias = self._phases
        y = F.conv2d(x.permute(0, 3, 1, 2), weight, bias, padding=1).permute(0, 2, 3, 1)
        y = y.view(*y.shape[:3], 2, 2, -1)  # [T, H + 1, W + 1, phase of row, of column, C_out]
        out = x.new_empty(frames, height, 2, width, 2, y.shape[-1])
        for i in (0, 1):
            for j in (0, 1):
                out[:, :, i, :, j] = y[:, i : i + height, j : j + width, i, j]
        return out.reshape(frames, 2 * height, 2 * width, -1)


class Resample(nn.Module):
    """Doubles rows and columns, and frames where it has a `time_conv`."""

    def __init__(self, in_channels: int, out_channels: int, *, temporal: bool) -> None:
        super().__init__()
        self.time_conv = CausalConv3d(in_channels, 2 * in_channels, 1) if temporal else None
        self.resample = nn.ModuleDict({"1": Upsample(in_channels, out_channels)})

    def forward(self, x: Tensor, tails: Tails) -> Tensor:
        conv = self.time_conv
        if conv is not None and tails.is_first:
            # The first latent frame stands for one pixel frame, and is no history for the next.
            tails.new[conv.slot] = tails.old[conv.slot]
        elif conv is not None:
            buffer = conv.room(x, tails)
            buffer[TAIL:] = x
            y = conv(buffer, tails)
            y = y.view(*y.shape[:3], 2, -1)  # [T, H, W, 2, C]
            x = y.permute(0, 3, 1, 2, 4).flatten(0, 1)
        return self.resample["1"](x)


def add_repeated(y: Tensor, x: Tensor, *, temporal: bool, is_first: bool) -> Tensor:
    """Adds to `y` the input of a stage, repeated to its size: Wan2.2's parameter-free shortcut.

    Channels of `x` are repeated, then dealt out over (channel, frame, row, column) of the output.

    Args:
        y: [T_out, 2H, 2W, C_out]; written in place and returned.
        x: [T, H, W, C].
        temporal: whether the stage doubles frames.
        is_first: at the stream's beginning, where only the second of the doubled frames counts.
    """
    frames, height, width, channels = x.shape
    doubling, out_channels = 2 if temporal else 1, y.shape[-1]
    z = x.repeat_interleave(4 * doubling * out_channels // channels, -1)
    z = z.view(frames, height, width, out_channels, doubling, 2, 2).permute(0, 4, 1, 5, 2, 6, 3)
    if is_first:
        z = z[:, doubling - 1 :]
    y.view(z.shape).add_(z)
    return y
