"""The causal denoiser: Wan's transformer block with per-frame modulation and a rolling cache.

One class serves public Wan-family checkpoints (parameter names are those of diffusers'
`WanTransformer3DModel`) and small models of our own; what a model lacks (text) or has in
addition (audio, state, event, control) is a matter of its configuration.

The forward runs densely over the frames given (training, oracle) or over one rolling cache per
row; matrix products run on the whole batch, self-attention over caches row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from rtgen.config import CacheConfig, DenoiserConfig
from rtgen.errors import ConfigError, ShapeError
from rtgen.models.blocks import Block, CachePass, DenseAttention, RingAttention, SelfAttend
from rtgen.models.conditioning import ConditionEmbedder, Conditioning, PreparedConditioning
from rtgen.models.kv_cache import RollingKVCache
from rtgen.models.layers import LayerNorm, Linear, PatchEmbedding
from rtgen.models.rope import frame_rope

__all__ = ["CachePass", "CausalDenoiser", "block_causal_mask", "cast_weights"]


class CausalDenoiser(nn.Module):
    """A diffusion transformer that is causal over chunks of latent frames.

    Args:
        config: its shape. Weights are initialised as Wan's: the output projection is zero.

    Attributes:
        config: the configuration.
        attention_backend: one of `rtgen.models.attention.BACKENDS`; may be changed at any time.
            "naive" trains faster on CPU in bfloat16.
        row_tile: batch rows of a cached pass that run at a time, the last tile padded; None for
            all at once. Products, and vectorised functions with their tails, may round differently
            for every batch size. With tiles of 1 a row cannot depend on its company; for larger
            ones see `rtgen.models.invariance`.
    """

    def __init__(self, config: DenoiserConfig) -> None:
        super().__init__()
        self.config = config
        self.attention_backend = "sdpa"
        self.row_tile: int | None = None
        dim = config.inner_dim
        self.patch_embedding = PatchEmbedding(config.in_channels, dim, config.patch_size)
        if config.position_grid is not None:
            tokens = config.position_grid[0] * config.position_grid[1]
            self.position_embedding = nn.Parameter(torch.randn(tokens, dim) * 0.02)
        self.condition_embedder = ConditionEmbedder(config)
        self.blocks = nn.ModuleList([Block(config) for _ in range(config.num_layers)])
        _, p, q = config.patch_size
        self.norm_out = LayerNorm(dim, eps=config.eps, elementwise_affine=False)
        self.proj_out = Linear(dim, p * q * config.out_channels)
        self.scale_shift_table = nn.Parameter(torch.randn(1, 2, dim) / dim**0.5)
        self._initialise()

    def _initialise(self) -> None:
        for module in self.modules():
            if isinstance(module, nn.Linear):
                nn.init.xavier_uniform_(module.weight)
                nn.init.zeros_(module.bias)
        embedder = self.condition_embedder
        for name in ("time_embedder", "text_embedder"):
            if hasattr(embedder, name):
                nn.init.normal_(getattr(embedder, name).linear_1.weight, std=0.02)
                nn.init.normal_(getattr(embedder, name).linear_2.weight, std=0.02)
        frame = embedder.frame_embedder
        for name in ("audio_pool", "control_embedder"):
            if hasattr(frame, name):
                nn.init.zeros_(getattr(frame, name).linear_2.weight)
        for name in ("state_embedder", "event_embedder"):
            if hasattr(frame, name):
                nn.init.zeros_(getattr(frame, name).weight)
        if self.config.condition_map:
            nn.init.zeros_(embedder.condition_map.to_tokens.weight)
            nn.init.zeros_(embedder.condition_map.to_draft.weight)
        nn.init.zeros_(self.proj_out.weight)

    @property
    def _blocks(self) -> list[Block]:
        return cast(list[Block], list(self.blocks))

    def prepare(
        self, conditioning: Conditioning, text: PreparedConditioning | None = None
    ) -> PreparedConditioning:
        """Computes what all passes of a chunk share.

        Args:
            conditioning: raw conditioning of the chunk's T frames.
            text: an earlier result for the same prompt, whose text keys and values are taken
                over; `conditioning.prompt_embeds` is then not read.

        Raises:
            ConfigError: a part is missing or not known to the model.
            ShapeError: a part has the wrong shape.
        """
        conditioning.validate(self.config)
        embedder = self.condition_embedder
        text_kv = audio_kv = None
        if text is not None:
            text_kv = text.text
        elif conditioning.prompt_embeds is not None:
            context = embedder.text_embedder(conditioning.prompt_embeds)
            text_kv = torch.stack([block.attn2.keys_values(context) for block in self._blocks])
        if conditioning.audio is not None:
            context = embedder.embed_audio(conditioning.audio)
            audio_kv = torch.stack(
                [block.audio_attn.keys_values(context) for block in self._blocks]
            )
        return PreparedConditioning(
            text=text_kv,
            audio=audio_kv,
            temb=embedder.embed_frame(conditioning),
            picture=embedder.condition_map(conditioning) if self.config.condition_map else None,
        )

    def new_cache(self, cache_config: CacheConfig, height: int, width: int) -> RollingKVCache:
        """An empty ring for one stream of `height` by `width` latents, beside the weights."""
        weight = self._blocks[0].attn1.to_k.weight
        return RollingKVCache(
            cache_config,
            num_layers=self.config.num_layers,
            tokens_per_frame=self.config.tokens_per_frame(height, width),
            num_heads=self.config.num_attention_heads,
            head_dim=self.config.attention_head_dim,
            device=weight.device,
            dtype=weight.dtype,
        )

    def forward(
        self,
        latents: Tensor,
        timestep: Tensor,
        prepared: PreparedConditioning,
        *,
        caches: Sequence[CachePass] | None = None,
        mask: Tensor | None = None,
        frame_positions: Sequence[int] | None = None,
    ) -> Tensor:
        """One pass; what it predicts is `config.prediction_type`.

        Args:
            latents: [B, T, C, h, w] float.
            timestep: [B, T] float, 0..1000, one per frame.
            prepared: result of `prepare` for these rows and frames.
            caches: one per row: attend over the rings, which are written in place. Without
                gradients only.
            mask: [T*N, T*N] or [B, T*N, T*N] bool for dense attention (`block_causal_mask`); None
                for all frames to all.
            frame_positions: T positions for dense attention; default 0..T-1.

        Returns:
            [B, T, C_out, h, w] in the dtype of `latents`.

        Raises:
            ShapeError: latents, timestep, prepared or caches do not fit together.
            ConfigError: `caches` together with `mask`, `frame_positions` or gradients, or a pass
                that the ring cannot hold.
        """
        self._check(latents, timestep, prepared)
        b, t, _, h, w = latents.shape
        grid = (h // self.config.patch_size[1], w // self.config.patch_size[2])
        if caches is None:
            positions = range(t) if frame_positions is None else frame_positions
            attend = DenseAttention(self._rotation(positions, grid), mask, self.attention_backend)
            return self._run(latents, timestep, prepared, attend)
        if mask is not None or frame_positions is not None:
            raise ConfigError("caches know masks and positions; give neither with caches")
        self._check_passes(caches, b, t, grid)
        if self.row_tile is None or b == self.row_tile:
            ring = self._ring(caches, b, grid)
            return self._run(latents, timestep, prepared, ring)
        outs = []
        for start in range(0, b, self.row_tile):
            rows = [min(row, b - 1) for row in range(start, start + self.row_tile)]
            passes = caches[start : start + self.row_tile]
            ring = self._ring(passes, self.row_tile, grid)
            out = self._run(latents[rows], timestep[rows], prepared.rows(rows), ring)
            outs.append(out[: len(passes)])
        return torch.cat(outs)

    def _run(
        self, latents: Tensor, timestep: Tensor, prepared: PreparedConditioning, attend: SelfAttend
    ) -> Tensor:
        _, p, q = self.config.patch_size
        b, t, _, h, w = latents.shape
        x = self.patch_embedding(latents).float()  # [B, T, N, D]
        if self.config.position_grid is not None:
            x = x + self.position_embedding
        if prepared.picture is not None:
            x = x + self.condition_embedder.condition_map.to_tokens(prepared.picture).float()
        temb, modulation = self.condition_embedder.embed_time(timestep, prepared.temb)
        layers = self.config.num_layers
        text = [None] * layers if prepared.text is None else prepared.text.unbind(0)
        audio = [None] * layers if prepared.audio is None else prepared.audio.unbind(0)
        for i, block in enumerate(self._blocks):
            x = block(x, modulation, i, attend, text[i], audio[i])
        shift, scale = (self.scale_shift_table.float() + temb[:, :, None])[..., None, :].unbind(2)
        x = self.proj_out(torch.addcmul(shift, self.norm_out(x), 1 + scale))
        if prepared.picture is not None:
            x = x + self.condition_embedder.condition_map.draft(prepared.picture)
        x = x.view(b, t, h // p, w // q, p, q, -1).permute(0, 1, 6, 2, 4, 3, 5)
        return x.reshape(b, t, self.config.out_channels, h, w).to(latents.dtype)

    def _rotation(self, positions: Sequence[int], grid: tuple[int, int]) -> Tensor:
        device = self.scale_shift_table.device
        return frame_rope(positions, *grid, self.config.attention_head_dim, device)

    def _ring(self, passes: Sequence[CachePass], rows: int, grid: tuple[int, int]) -> RingAttention:
        frames = sum(passes[0].groups)
        starts = [item.start_frame for item in passes]
        starts += [starts[-1]] * (rows - len(starts))
        rotations = [self._rotation(range(start, start + frames), grid) for start in starts]
        return RingAttention(torch.stack(rotations), passes, self.attention_backend)

    def _check_passes(
        self, caches: Sequence[CachePass], batch: int, frames: int, grid: tuple[int, int]
    ) -> None:
        if len(caches) != batch or any(sum(item.groups) != frames for item in caches):
            raise ShapeError(
                f"one CachePass per row with groups of {frames} frames in all is needed for "
                f"{batch} rows, got groups {[item.groups for item in caches]}"
            )
        if torch.is_grad_enabled():
            raise ConfigError("a cached pass keeps no gradients; use torch.inference_mode()")
        if self.row_tile is not None and self.row_tile < 1:
            raise ConfigError(f"row_tile must be at least 1 or None, got {self.row_tile}")
        for item in caches:
            if item.cache.tokens_per_frame != grid[0] * grid[1]:
                raise ShapeError(
                    f"the cache holds {item.cache.tokens_per_frame} tokens per frame, the latents "
                    f"have {grid[0] * grid[1]}; make the cache for this latent size"
                )
            item.cache.check_range(item.start_frame, frames)

    def _check(self, latents: Tensor, timestep: Tensor, prepared: PreparedConditioning) -> None:
        config = self.config
        if latents.ndim != 5 or latents.shape[2] != config.in_channels:
            raise ShapeError(
                f"latents must be [B, T, {config.in_channels}, h, w], got {list(latents.shape)}"
            )
        b, t, _, h, w = latents.shape
        tokens = config.tokens_per_frame(h, w)
        if config.position_grid is not None:
            rows, columns = config.position_grid
            if (h // config.patch_size[1], w // config.patch_size[2]) != (rows, columns):
                raise ShapeError(
                    f"this model knows {rows}x{columns} tokens per frame, got latents of {h}x{w} "
                    f"({tokens} tokens)"
                )
        if timestep.shape != (b, t):
            raise ShapeError(f"timestep must be [{b}, {t}], got {list(timestep.shape)}")
        for name, needed, value, shape in (
            ("text", config.text_dim is not None, prepared.text, (b,)),
            ("audio", config.audio_dim is not None, prepared.audio, (b, t)),
        ):
            if (value is not None) != needed:
                raise ConfigError(f"prepared {name} must be given exactly when the model has it")
            if value is not None and value.shape[2 : 2 + len(shape)] != shape:
                raise ShapeError(
                    f"prepared {name} is for {list(value.shape[2 : 2 + len(shape)])} (rows, "
                    f"frames), the latents have {list(shape)}"
                )
        if prepared.temb is not None and prepared.temb.shape[:2] != (b, t):
            raise ShapeError(
                f"prepared temb is for {list(prepared.temb.shape[:2])} (rows, frames), the latents "
                f"have {[b, t]}"
            )


def block_causal_mask(
    num_frames: int,
    tokens_per_frame: int,
    frames_per_chunk: int,
    window: int,
    sink: int = 0,
    device: torch.device | str = "cpu",
) -> Tensor:
    """The dense mask that a ring stands for: what each chunk sees of sink, window and itself.

    Args:
        num_frames: T; the last chunk may be shorter.
        tokens_per_frame: tokens of one latent frame.
        frames_per_chunk: frames that see each other.
        window: frames seen in all, sink and own chunk included.
        sink: first frames, always seen.
        device: where the mask is needed.

    Returns:
        [T*N, T*N] bool, True where the query (row) sees the key (column).
    """
    frames = torch.arange(num_frames)
    ends = (frames // frames_per_chunk + 1) * frames_per_chunk
    ends = ends.clamp(max=num_frames)[:, None]
    recent = frames >= ends - (window - sink)
    allowed = (frames < ends) & (recent | (frames < sink))
    allowed = allowed.repeat_interleave(tokens_per_frame, 0)
    return allowed.repeat_interleave(tokens_per_frame, 1).to(device)


def cast_weights(denoiser: CausalDenoiser, dtype: torch.dtype) -> CausalDenoiser:
    """Casts weights in place, except those that stay float32: time embedder, norms, tables."""
    for name, parameter in denoiser.named_parameters():
        keep = any(part in name for part in _FLOAT32_PARTS)
        parameter.data = parameter.data.to(torch.float32 if keep else dtype)
    return denoiser


_FLOAT32_PARTS = ("time_embedder", "scale_shift_table", "norm", "position")
