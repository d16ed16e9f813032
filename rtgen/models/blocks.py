"""The denoiser's transformer block, and the two ways its self-attention can look around.

For frame t with time embedding e_t and modulation m = table + proj(silu(e_t)):

    h = LN(x) * (1 + m1) + m0;  x += m2 * self_attention(h)
    x += text_attention(norm2(x))                      all prompt rows, no mask
    x += audio_attention(audio_norm(x))                only the audio tokens of frame t
    h = LN(x) * (1 + m4) + m3;  x += m5 * ffn(h)

Self-attention is dense over the frames given (training, oracle), or runs over one ring per row:
then keys and values of all frames are written first, and every group of frames attends to what
it may see.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rtgen.config import DenoiserConfig
from rtgen.models.attention import attention
from rtgen.models.kv_cache import RollingKVCache
from rtgen.models.layers import FeedForward, LayerNorm, Linear, RMSNorm
from rtgen.models.rope import apply_rope


@dataclass(frozen=True, slots=True)
class CachePass:
    """Where one batch row stands in its stream.

    Attributes:
        cache: the stream's ring; written in place.
        start_frame: index of the row's first latent frame in its stream.
        groups: latent frames per attention group, in order. Frames of a group see each other and
            what came before: (F,) for a chunk, (F, F) for a clean pass merged with a noisy one.
    """

    cache: RollingKVCache
    start_frame: int
    groups: tuple[int, ...]


class DenseAttention:
    """Self-attention over the frames of the batch itself."""

    def __init__(self, rotation: Tensor, mask: Tensor | None, backend: str) -> None:
        self.rotation = rotation  # [N, d / 2]
        self.mask = mask
        self.backend = backend

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q.to(v.dtype), k.to(v.dtype), v, self.mask, self.backend)


class RingAttention:
    """Self-attention of every row over its own ring; rows beyond the passes are padding."""

    def __init__(self, rotation: Tensor, passes: Sequence[CachePass], backend: str) -> None:
        self.rotation = rotation  # [B, N, d / 2] or [N, d / 2]
        self.passes = passes
        self.backend = backend

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        outs: list[Tensor] = []
        for row, item in enumerate(self.passes):
            cache = item.cache
            cache.write(layer, item.start_frame, k[row], v[row])
            queries = q[row].to(cache.dtype)
            token, end = 0, item.start_frame
            for frames in item.groups:
                end += frames
                view = cache.view(layer, end)
                if self.backend != "naive":
                    view = view.compact()  # a mask costs more than copying around the hole
                stop = token + frames * cache.tokens_per_frame
                out = attention(
                    queries[None, token:stop],
                    view.keys[None],
                    view.values[None],
                    view.mask,
                    self.backend,
                )
                outs.append(out[0])
                token = stop
        if len(outs) == 1 == len(q):
            return outs[0][None]
        padding = outs[0].new_zeros(q[len(self.passes) :].flatten(0, 1).shape)
        return torch.cat((*outs, padding)).view(q.shape)


SelfAttend = DenseAttention | RingAttention


class Attention(nn.Module):
    """Projections of one attention: self-attention, or cross-attention over prepared keys."""

    def __init__(self, config: DenoiserConfig) -> None:
        super().__init__()
        dim = config.inner_dim
        self.heads = config.num_attention_heads
        self.to_q = Linear(dim, dim)
        self.to_k = Linear(dim, dim)
        self.to_v = Linear(dim, dim)
        self.to_out = nn.ModuleList([Linear(dim, dim)])
        self.norm_q = RMSNorm(dim, eps=config.eps)
        self.norm_k = RMSNorm(dim, eps=config.eps)

    def forward(self, x: Tensor, layer: int, attend: SelfAttend) -> Tensor:
        """Self-attention of tokens [B, N, D] float32; returns [B, N, D]."""
        shape = (*x.shape[:2], self.heads, -1)
        q = self.norm_q(self.to_q(x)).view(shape)
        k = self.norm_k(self.to_k(x)).view(shape)
        v = self.to_v(x).view(shape)
        q, k = apply_rope(q, attend.rotation), apply_rope(k, attend.rotation)
        return self.to_out[0](attend(layer, q, k, v).flatten(-2))

    def keys_values(self, context: Tensor) -> Tensor:
        """Keys and values of cross-attention, [..., D] -> [2, ..., heads, d]."""
        v = self.to_v(context)
        k = self.norm_k(self.to_k(context)).to(v.dtype)
        return torch.stack((k, v)).view(2, *context.shape[:-1], self.heads, -1)

    def cross(self, x: Tensor, keys_values: Tensor, backend: str) -> Tensor:
        """Cross-attention of tokens.

        Args:
            x: [B, T, N, D] float32.
            keys_values: [2, B, S, heads, d], or [2, B, T, S, heads, d] for keys of each frame.
            backend: attention backend.

        Returns:
            [B, T, N, D].
        """
        k, v = keys_values.unbind(0)
        q = self.norm_q(self.to_q(x)).to(v.dtype)
        if k.ndim == 5:
            q, k, v = q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1)
        else:
            q = q.flatten(1, 2)
        q = q.view(*q.shape[:2], self.heads, -1)
        return self.to_out[0](attention(q, k, v, None, backend).reshape(x.shape))


class Block(nn.Module):
    """One transformer block (see the module's docstring)."""

    def __init__(self, config: DenoiserConfig) -> None:
        super().__init__()
        dim = config.inner_dim
        self.norm1 = LayerNorm(dim, eps=config.eps, elementwise_affine=False)
        self.attn1 = Attention(config)
        self.has_text = config.text_dim is not None
        if self.has_text:
            affine = config.cross_attn_norm
            self.norm2 = LayerNorm(dim, eps=config.eps) if affine else nn.Identity()
            self.attn2 = Attention(config)
        if config.audio_dim is not None:
            self.audio_norm = LayerNorm(dim, eps=config.eps)
            self.audio_attn = Attention(config)
        self.ffn = FeedForward(dim, config.ffn_dim, config.activation_fn)
        self.norm3 = LayerNorm(dim, eps=config.eps, elementwise_affine=False)
        self.scale_shift_table = nn.Parameter(torch.randn(1, 6, dim) / dim**0.5)

    def forward(
        self,
        x: Tensor,
        modulation: Tensor,
        layer: int,
        attend: SelfAttend,
        text: Tensor | None,
        audio: Tensor | None,
    ) -> Tensor:
        """Tokens in, tokens out.

        Args:
            x: [B, T, N, D] float32.
            modulation: [B, T, 6, D] float32.
            layer: index of this block.
            attend: self-attention, dense or over rings.
            text: [2, B, Lt, heads, d] or None.
            audio: [2, B, T, A, heads, d] or None.
        """
        m = (self.scale_shift_table.float() + modulation)[..., None, :].unbind(2)  # 6 x [B,T,1,D]
        h = torch.addcmul(m[0], self.norm1(x), 1 + m[1])
        x = torch.addcmul(x, self.attn1(h.flatten(1, 2), layer, attend).view_as(x), m[2])
        if text is not None:
            x = x + self.attn2.cross(self.norm2(x), text, attend.backend)
        if audio is not None:
            x = x + self.audio_attn.cross(self.audio_norm(x), audio, attend.backend)
        h = torch.addcmul(m[3], self.norm3(x), 1 + m[4])
        return torch.addcmul(x, self.ffn(h), m[5])
