"""A decoder that is a transformer, one latent frame at a time, after FlashDecoder.

The paper is arXiv 2607.14898. A latent frame becomes one token for every 16x16 pixels. A backbone
runs over the tokens of the frame and of the one before; then every token is split into the pixel
frames of its unit, refined over the unit and the end of the one before; each refined token paints
its 16x16 pixels.

Where it departs from the paper, each a field of the configuration: attention within shifted windows
but for a few global layers; a refinement of its own width that looks back fewer pixel frames; a 3x3
convolution on a 4-pixel grid before the last shuffle, so that what a token paints is not cut off at
its edges; latents that are factored by pixel frame feed each frame's channels to its refinement.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decoders.base import StreamingNetwork
from decoders.flash_layers import FlashBlock, Grid, KeysValues, make_grid
from rtgen.errors import ConfigError, ShapeError
from rtgen.models.layers import Linear, RMSNorm

_COARSE = 4  # pixels per side of a cell of the output convolution's grid
PATCH = 16  # pixels per side that a token paints


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashConfig:
    """Shape of a `FlashNetwork`.

    Attributes:
        latent_channels: C of a latent frame.
        fold: latent rows and columns per token: 2 where a latent pixel is 8x8 pixels, 1 for 16x16.
        dim: width of the backbone.
        num_layers: its blocks.
        num_heads: its query heads.
        num_kv_heads: key and value heads, of backbone and refinement.
        refine_layers: blocks of the refinement.
        refine_dim: its width, a multiple of the head's; None for that of the backbone.
        refine_memory: pixel frames of the unit before that it looks back to.
        frames_per_latent: pixel frames of a unit.
        first_frames: pixel frames of a stream's first unit, the last ones: 1 for Wan's rule.
        has_mlp: whether a feed-forward layer stands before the output.
        seam_conv: whether the output has its convolution.
        window: token rows and columns of an attention window; None for the whole frame.
        global_layers: blocks of the backbone that look over the whole frame nevertheless.
        is_factored: whether channels are stacked by pixel frame.
        position_grid: token rows and columns of a learned position table and a canvas, for a camera
            that stands still; None for any size.
    """

    latent_channels: int
    fold: int = 1
    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    refine_layers: int = 2
    refine_dim: int | None = None
    refine_memory: int = 4
    frames_per_latent: int = 4
    first_frames: int = 1
    has_mlp: bool = True
    seam_conv: bool = True
    window: int | None = None
    global_layers: tuple[int, ...] = ()
    is_factored: bool = False
    position_grid: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        head = self.dim // self.num_heads
        rules = {
            "dim must be a multiple of num_heads": self.dim % self.num_heads == 0,
            "heads must have an even width of at least 6": head >= 6 and head % 2 == 0,
            "refine_dim must be a multiple of the head's width": self.refined % head == 0,
            "num_kv_heads must divide num_heads and the refinement's heads": (
                self.num_heads % self.num_kv_heads == 0
                and self.refined // head % self.num_kv_heads == 0
            ),
            "refine_memory must be 1 to frames_per_latent": (
                1 <= self.refine_memory <= self.frames_per_latent
            ),
            "first_frames must be 1 to frames_per_latent": (
                1 <= self.first_frames <= self.frames_per_latent
            ),
            "window must be at least 2": self.window is None or self.window >= 2,
            "global_layers must be blocks of the backbone": all(
                0 <= layer < self.num_layers for layer in self.global_layers
            ),
            "channels factored by frame must divide by frames_per_latent, without fold": (
                not self.is_factored
                or (self.latent_channels % self.frames_per_latent == 0 and self.fold == 1)
            ),
        }
        for rule, holds in rules.items():
            if not holds:
                raise ConfigError(f"{rule}, got {self}")

    @property
    def head_dim(self) -> int:
        """Width of a head."""
        return self.dim // self.num_heads

    @property
    def refined(self) -> int:
        """Width of the refinement."""
        return self.dim if self.refine_dim is None else self.refine_dim


class FlashNetwork(StreamingNetwork):
    """The decoder's weights; streams, and runs whole clips for training.

    Attributes:
        attention_backend: one of `rtgen.models.attention.BACKENDS`.
    """

    def __init__(self, config: FlashConfig) -> None:
        super().__init__()
        self.config = config
        self.latent_channels = config.latent_channels
        self.attention_backend = "sdpa"
        dim, refined, head = config.dim, config.refined, config.head_dim
        self.embed = Linear(config.latent_channels * config.fold**2, dim)
        self.blocks = nn.ModuleList(
            [
                FlashBlock(
                    dim,
                    config.num_heads,
                    config.num_kv_heads,
                    memory=1,
                    window=None if layer in config.global_layers else config.window,
                    shift=_shift(config, layer),
                )
                for layer in range(config.num_layers)
            ]
        )
        self.split = Linear(dim, config.frames_per_latent * refined)
        if config.is_factored:
            self.embed_frame = Linear(config.latent_channels // config.frames_per_latent, refined)
        self.refinement = nn.ModuleList(
            [
                FlashBlock(
                    refined,
                    refined // head,
                    config.num_kv_heads,
                    memory=config.refine_memory,
                    window=config.window,
                    shift=_shift(config, layer),
                )
                for layer in range(config.refine_layers)
            ]
        )
        if config.has_mlp:
            self.norm_mlp = RMSNorm(refined, eps=1e-6)
            self.mlp = nn.ModuleList([Linear(refined, 4 * refined), Linear(4 * refined, refined)])
        self.norm_out = RMSNorm(refined, eps=1e-6)
        self.proj_out = Linear(refined, 3 * PATCH**2)
        if config.seam_conv:
            channels = 3 * (PATCH // _COARSE) ** 2
            self.conv_out = nn.Conv2d(channels, channels, 3, padding=1)
            nn.init.zeros_(self.conv_out.weight)
            nn.init.zeros_(self.conv_out.bias)  # type: ignore[arg-type]
        if config.position_grid is not None:
            rows, columns = config.position_grid
            self.position = nn.Parameter(torch.randn(rows * columns, dim) * 0.02)
            self.register_buffer("canvas", torch.zeros(3, PATCH * rows, PATCH * columns))
            self.canvas: Tensor

    def grid(self, height: int, width: int) -> Grid:
        """The tokens of latents of a size.

        Raises:
            ConfigError: the size is not a whole number of tokens, or not the one of its table.
        """
        config = self.config
        fold = config.fold
        if height < fold or width < fold or height % fold or width % fold:
            raise ConfigError(
                f"latent rows and columns must be multiples of {fold}, got {height}x{width}"
            )
        size = height // fold, width // fold
        if config.position_grid is not None and size != config.position_grid:
            raise ConfigError(f"the decoder paints {config.position_grid} tokens, got {size}")
        slots = max(2, config.refine_memory + config.frames_per_latent)
        return make_grid(*size, config.head_dim, slots, self.embed.weight.device)

    def new_memory(self, height: int, width: int) -> tuple[Tensor, ...]:
        grid, config = self.grid(height, width), self.config
        shape = grid.height * grid.width, config.num_kv_heads, config.head_dim
        memories = [1] * config.num_layers + [config.refine_memory] * config.refine_layers
        weight = self.embed.weight
        return tuple(weight.new_zeros(1, count, *shape) for count in memories for _ in range(2))

    def stream(
        self, latents: Tensor, memory: tuple[Tensor, ...], is_first: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        grid = self.grid(*latents.shape[1:])
        pixels, left = self.run(latents[None, None], None if is_first else memory, grid)
        return pixels[0], left

    def forward(
        self, latents: Tensor, memory: tuple[Tensor, ...] | None = None
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Decodes consecutive latent frames at once, with the result of streaming them.

        Args:
            latents: [B, T, C, h, w].
            memory: what an earlier call left; None at the beginning of a stream. Detach it to cut
                the gradient.

        Returns:
            pixels [B, F, 3, 16 rows, 16 columns] float32, about [-1, 1], and the memory.

        Raises:
            ShapeError: latents have another number of channels or axes.
            ConfigError: latents of this size cannot be decoded.
        """
        if latents.ndim != 5 or latents.shape[2] != self.latent_channels:
            raise ShapeError(
                f"latents must be [B, T, {self.latent_channels}, h, w], got {list(latents.shape)}"
            )
        return self.run(latents, memory, self.grid(*latents.shape[3:]))

    def run(
        self, latents: Tensor, memory: tuple[Tensor, ...] | None, grid: Grid
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """`forward` on a grid at hand and without checks: what is compiled or captured."""
        config = self.config
        b, t = latents.shape[:2]
        folded = F.pixel_unshuffle(latents.flatten(0, 1), config.fold)
        x = self.embed(folded.flatten(2).transpose(1, 2)).float()
        if config.position_grid is not None:
            x = x + self.position
        x = x.view(b, t, 1, *x.shape[1:])  # [B, T, 1, N, D]
        left: list[Tensor] = []

        def through(block: nn.Module, x: Tensor) -> Tensor:
            place = len(left)
            remembered: KeysValues | None = None
            if memory is not None:
                remembered = memory[place], memory[place + 1]
            x, kept = block(x, grid, remembered, self.attention_backend)
            left.extend(kept)
            return x

        for block in self.blocks:
            x = through(block, x)
        frames = config.frames_per_latent
        y = self.split(x[:, :, 0]).float().view(b, t, x.shape[3], frames, -1).transpose(2, 3)
        if config.is_factored:
            own = latents.reshape(b, t, frames, -1, x.shape[3]).transpose(3, 4)
            y = y + self.embed_frame(own)
        for block in self.refinement:
            y = through(block, y)
        if config.has_mlp:
            y = y + self.mlp[1](F.silu(self.mlp[0](self.norm_mlp(y))))
        y = y.flatten(1, 2)  # [B, F, N, D]
        if memory is None:
            y = y[:, frames - config.first_frames :]
        return self._paint(self.proj_out(self.norm_out(y)), grid), tuple(left)

    def _paint(self, y: Tensor, grid: Grid) -> Tensor:
        """[B, F, N, 3 * 256] to pixels."""
        shape = y.shape[:2]
        cells = y.flatten(0, 1).transpose(1, 2).unflatten(2, (grid.height, grid.width))  # type: ignore[no-untyped-call]
        cells = F.pixel_shuffle(cells, PATCH // _COARSE)
        if self.config.seam_conv:
            cells = cells.contiguous(memory_format=torch.channels_last)
            cells = cells + self.conv_out(cells)
        pixels = F.pixel_shuffle(cells, _COARSE).float()
        if self.config.position_grid is not None:
            pixels = pixels * 0.5 + self.canvas
        return pixels.unflatten(0, shape)  # type: ignore[no-untyped-call]


def _shift(config: FlashConfig, layer: int) -> int:
    """Every second block's windows start half a window later."""
    return 0 if config.window is None or layer % 2 == 0 else config.window // 2
