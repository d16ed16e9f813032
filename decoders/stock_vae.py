"""The decoder of Wan's video autoencoder, streaming and exact.

One latent frame at a time gives the bits of the whole clip, because all that a frame depends on is
in the session's memory: the last two frames of every causal convolution's input. The first latent
frame yields one pixel frame, every later one `frames_per_latent` (Wan's first-frame rule).

Any configuration of diffusers' `AutoencoderKLWan` is read, under its parameter names; Wan2.1 and
Wan2.2 are constants here. Latents are raw: pipelines multiply by `latents_std` and add
`latents_mean` first.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from decoders.base import StreamingDecoder, StreamingNetwork
from decoders.stock_layers import (
    TAIL,
    Algorithm,
    CausalConv3d,
    PointConv,
    Resample,
    ResidualBlock,
    RMSNorm,
    SpatialAttention,
    Tails,
    Upsample,
    add_repeated,
    norm_silu_conv,
)
from rtgen.errors import CheckpointError, ConfigError
from rtgen.weights.loaders import CONFIG_NAME, load_checkpoint, load_strict
from rtgen.weights.wan_vae import (
    WAN21_MEAN,
    WAN21_STD,
    WAN22_MEAN,
    WAN22_STD,
    decoding_state,
)

logger = logging.getLogger(__name__)
_WINOGRAD_BYTES = 2 << 30  # of transformed kernels, beyond which speed is not worth the memory


@dataclass(frozen=True, slots=True, kw_only=True)
class StockVaeConfig:
    """Shape of a `StockVae`; names, spelling and meaning are diffusers'.

    Attributes:
        base_dim: of the encoder, and of the decoder where `decoder_base_dim` is None.
        decoder_base_dim: channels of the decoder's last stage, over `dim_mult[0]`.
        z_dim: latent channels.
        dim_mult: width of each stage over the base, from pixels inwards.
        num_res_blocks: residual blocks of a stage, less the one more that a decoder has.
        temperal_downsample: which stages of the encoder halve frames.
        is_residual: Wan2.2's stages, with a shortcut around each.
        out_channels: of the last convolution.
        patch_size: pixels per side that its channels are shuffled into; None for none.
        latents_mean: per channel, of raw latents.
        latents_std: likewise.
    """

    base_dim: int = 96
    decoder_base_dim: int | None = None
    z_dim: int = 16
    dim_mult: tuple[int, ...] = (1, 2, 4, 4)
    num_res_blocks: int = 2
    temperal_downsample: tuple[bool, ...] = (False, True, True)
    is_residual: bool = False
    out_channels: int = 3
    patch_size: int | None = None
    latents_mean: tuple[float, ...] | None = None
    latents_std: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        if len(self.temperal_downsample) != len(self.dim_mult) - 1:
            raise ConfigError(
                f"temperal_downsample must have one entry less than dim_mult "
                f"({len(self.dim_mult)}), got {len(self.temperal_downsample)}"
            )
        if self.out_channels != 3 * (self.patch_size or 1) ** 2:
            raise ConfigError(
                f"out_channels must be 3 * patch_size^2 = {3 * (self.patch_size or 1) ** 2}, got "
                f"{self.out_channels}"
            )
        for name in ("latents_mean", "latents_std"):
            values = getattr(self, name)
            if values is not None and len(values) != self.z_dim:
                raise ConfigError(
                    f"{name} must have {self.z_dim} numbers (z_dim), got {len(values)}"
                )

    @property
    def blocks(self) -> int:
        """Residual blocks of a stage of the decoder."""
        return self.num_res_blocks + 1

    @property
    def frames_per_latent(self) -> int:
        """Pixel frames of every latent frame but the first."""
        return 2 ** sum(self.temperal_downsample)

    @property
    def spatial_scale(self) -> int:
        """Pixel rows per latent row."""
        return 2 ** len(self.temperal_downsample) * (self.patch_size or 1)

    @property
    def stage_channels(self) -> tuple[int, ...]:
        """Channels in the middle, then out of every stage's residual blocks."""
        base = self.decoder_base_dim if self.decoder_base_dim is not None else self.base_dim
        multiples = self.dim_mult[::-1]
        return tuple(base * multiple for multiple in (multiples[0], *multiples))


WAN21_VAE = StockVaeConfig(latents_mean=WAN21_MEAN, latents_std=WAN21_STD)
WAN22_VAE = StockVaeConfig(
    base_dim=160,
    decoder_base_dim=256,
    z_dim=48,
    is_residual=True,
    out_channels=12,
    patch_size=2,
    latents_mean=WAN22_MEAN,
    latents_std=WAN22_STD,
)
# Fields of diffusers' configuration that say nothing about decoding.
_UNUSED = {"attn_scales", "dropout", "in_channels", "clip_output"} | {
    "scale_factor_temporal",
    "scale_factor_spatial",
}


class _Middle(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.resnets = nn.ModuleList([ResidualBlock(channels, channels) for _ in range(2)])
        self.attentions = nn.ModuleList([SpatialAttention(channels)])

    def forward(self, x: Tensor, tails: Tails) -> Tensor:
        return self.resnets[1](self.attentions[0](self.resnets[0](x, tails)), tails)


class _Stage(nn.Module):
    """Residual blocks, then a resampler but in the last stage."""

    def __init__(self, config: StockVaeConfig, index: int) -> None:
        super().__init__()
        widths, last = config.stage_channels, index == len(config.dim_mult) - 1
        out = widths[index + 1]
        # Wan2.1's resamplers halve the channels, Wan2.2's keep them.
        first = widths[index] if config.is_residual or index == 0 else widths[index] // 2
        self.resnets = nn.ModuleList(
            [ResidualBlock(out if i else first, out) for i in range(config.blocks)]
        )
        self.temporal = not last and config.temperal_downsample[::-1][index]
        self.is_residual = config.is_residual
        self.upsamplers, self.upsampler = None, None
        if not last and config.is_residual:
            self.upsampler = Resample(out, out, temporal=self.temporal)
        elif not last:
            self.upsamplers = nn.ModuleList([Resample(out, out // 2, temporal=self.temporal)])

    def forward(self, x: Tensor, tails: Tails) -> Tensor:
        y = x
        for block in self.resnets:
            y = block(y, tails)
        if self.upsamplers is not None:
            return self.upsamplers[0](y, tails)
        if self.upsampler is not None:
            y = self.upsampler(y, tails)
            return add_repeated(y, x, temporal=self.temporal, is_first=tails.is_first)
        return y


class _Decoder(nn.Module):
    def __init__(self, config: StockVaeConfig) -> None:
        super().__init__()
        widths = config.stage_channels
        self.conv_in = CausalConv3d(config.z_dim, widths[0])
        self.mid_block = _Middle(widths[0])
        self.up_blocks = nn.ModuleList([_Stage(config, i) for i in range(len(config.dim_mult))])
        self.norm_out = RMSNorm(widths[-1])
        self.conv_out = CausalConv3d(widths[-1], config.out_channels)

    def forward(self, x: Tensor, tails: Tails) -> Tensor:
        buffer = self.conv_in.room(x, tails)
        buffer[TAIL:] = x
        x = self.mid_block(self.conv_in(buffer, tails), tails)
        for stage in self.up_blocks:
            x = stage(x, tails)
        return norm_silu_conv(self.norm_out, self.conv_out, x, tails)


class StockVae(StreamingNetwork):
    """The decoding half of `AutoencoderKLWan`, for inference.

    Parameters have diffusers' names. `prepare` must follow every change of weights, dtype or
    device.
    """

    def __init__(self, config: StockVaeConfig) -> None:
        super().__init__()
        self.config = config
        self.latent_channels = config.z_dim
        self.post_quant_conv = PointConv(config.z_dim, config.z_dim)
        self.decoder = _Decoder(config)
        self._is_prepared = False
        for slot, conv in enumerate(self._convs()):
            conv.slot = slot

    def _convs(self) -> list[CausalConv3d]:
        return [module for module in self.modules() if isinstance(module, CausalConv3d)]

    def prepare(self, algorithm: Algorithm | None = None) -> StockVae:
        """Lays weights out for a convolution algorithm (None: see `load_stock_decoder`).

        Returns:
            Itself.

        Raises:
            ConfigError: the algorithm needs another dtype.
        """
        if algorithm is None:
            algorithm = self._fastest()
            logger.info("convolutions of the stock decoder: %s", algorithm)
        for module in self.modules():
            if isinstance(module, CausalConv3d):
                module.prepare(algorithm)
            elif isinstance(module, Upsample):
                module.prepare()
        self._is_prepared = True
        return self

    def _fastest(self) -> Algorithm:
        weight = self.post_quant_conv.weight
        if weight.dtype != torch.float32 or weight.device.type != "cpu":
            return "conv3d"
        kernels = 4 * sum(conv.weight.nbytes for conv in self._convs())
        return "winograd" if kernels < _WINOGRAD_BYTES else "conv2d"

    def new_memory(self, height: int, width: int) -> tuple[Tensor, ...]:
        if height < 1 or width < 1:
            raise ConfigError(
                f"latents must have a row and a column at least, got {height}x{width}"
            )
        decoder = self.decoder
        scales = dict.fromkeys(self._convs(), 1)
        for index, stage in enumerate(decoder.up_blocks):
            scales |= {c: 2**index for c in stage.modules() if isinstance(c, CausalConv3d)}
        scales[decoder.conv_out] = 2 ** (len(decoder.up_blocks) - 1)
        return tuple(
            conv.weight.new_zeros(TAIL, height * scale, width * scale, conv.in_channels)
            for conv, scale in scales.items()
        )

    def stream(
        self, latents: Tensor, memory: tuple[Tensor, ...], is_first: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        if not self._is_prepared:
            raise ConfigError("the weights are not laid out yet; call prepare() first")
        tails = Tails(memory, is_first)
        x = self.post_quant_conv(latents.permute(1, 2, 0)[None].contiguous())
        pixels = self.decoder(x, tails).permute(0, 3, 1, 2)  # [T, C, H, W]
        if len(tails.new) != len(memory):
            raise ConfigError(f"{len(tails.new)} of {len(memory)} convolutions left a memory")
        if self.config.patch_size is not None:
            # Wan2.2 orders the pixels of a patch by column, then row: (c, x, y).
            p = self.config.patch_size
            pixels = F.pixel_shuffle(
                pixels.unflatten(1, (3, p, p)).transpose(2, 3).flatten(1, 3), p
            )
        return pixels.clamp(-1, 1), tuple(tails.new[slot] for slot in range(len(memory)))


def config_from_json(values: Mapping[str, Any]) -> StockVaeConfig:
    """A configuration from diffusers' `config.json`.

    Raises:
        ConfigError: a field is unknown, or a value breaks a rule.
    """
    known = {field.name for field in dataclasses.fields(StockVaeConfig)}
    arguments: dict[str, Any] = {}
    for name, value in values.items():
        if name.startswith("_") or name in _UNUSED:
            continue
        if name not in known:
            raise ConfigError(f"the decoder has no {name} = {value!r}; use an AutoencoderKLWan")
        arguments[name] = tuple(value) if isinstance(value, list) else value
    return StockVaeConfig(**arguments)


def load_stock_decoder(
    path: Path | str,
    *,
    latent_space: str,
    config: StockVaeConfig | None = None,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    algorithm: Algorithm | None = None,
    lead: int = 2,
) -> StreamingDecoder:
    """Reads a stock decoder.

    Args:
        path: a folder in diffusers' layout, or one weights file of either naming.
        latent_space: name of the latent space, as the denoiser carries it.
        config: needed for a file; of a folder, None reads its `config.json`.
        dtype: of the weights.
        device: where to put them.
        algorithm: of the convolutions; None takes the one that measured fastest. In float32 on a
            CPU that is "winograd" where its kernels, four times as large, come to less than 2 GiB
            (Wan2.1: 1.1 GiB), else "conv2d"; otherwise "conv3d", since in bfloat16 a sum of three
            is rounded twice more.
        lead: latent frames that a session can be rolled back; each costs a session's memory again.

    Raises:
        CheckpointError: a file is missing or damaged; or the weights do not fit, all are listed.
        ConfigError: the configuration is not one of this class, or missing.
    """
    path = Path(path)
    if path.is_dir():
        config = config_from_json(_read_json(path / CONFIG_NAME)) if config is None else config
        files = sorted(path.glob("diffusion_pytorch_model*.safetensors"))
        if not files:
            raise CheckpointError(f"{path} holds no diffusion_pytorch_model*.safetensors")
    else:
        files = [path]
    if config is None:
        raise ConfigError(f"{path} is one file and tells no configuration; give config=WAN21_VAE")
    checkpoint: dict[str, Any] = {}
    for file in files:
        checkpoint |= load_checkpoint(file)
    with torch.device("meta"):
        network = StockVae(config)
    load_strict(network, decoding_state(checkpoint, config.blocks), str(path), assign=True)
    network.to(device=device, dtype=dtype).eval().requires_grad_(False).prepare(algorithm)
    return StreamingDecoder(network, latent_space=latent_space, lead=lead)


def _read_json(path: Path) -> Mapping[str, Any]:
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    if not isinstance(values, Mapping):
        raise CheckpointError(f"{path} must hold an object, it holds {type(values).__name__}")
    return values
