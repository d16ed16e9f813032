"""Scaled dot-product attention behind one function; every change of layout happens here.

| name     | what                                                   | where |
|----------|--------------------------------------------------------|-------|
| sdpa     | `torch.nn.functional.scaled_dot_product_attention`     | any   |
| naive    | explicit products and a float32 softmax                | any   |
| varlen   | `torch.nn.attention.varlen`, split-KV off              | CUDA  |
| xformers | `xformers.ops.memory_efficient_attention`              | CUDA  |

"naive" is the oracle of the others. It is also the one to train with in bfloat16 on CPU when rows
are short: there the backward of SDPA is several times slower (in float32 it is not).
"""

from __future__ import annotations

import importlib.util
import logging
import math

import torch
import torch.nn.functional as F
from torch import Tensor

from rtgen.errors import BackendUnavailable, ConfigError

logger = logging.getLogger(__name__)

BACKENDS = ("sdpa", "naive", "varlen", "xformers")
# These take no mask: the caller hands over exactly the keys to attend to.
UNMASKED_BACKENDS = ("varlen", "xformers")


def resolve_backend(name: str, device: torch.device | str) -> str:
    """The backend to use on a device.

    Args:
        name: one of `BACKENDS`, or "auto": varlen on a CUDA device that has it, else sdpa.
        device: where attention will run.

    Raises:
        ConfigError: the name is unknown.
        BackendUnavailable: a backend was named that cannot run here.
    """
    device = torch.device(device)
    if name == "auto":
        choice = "varlen" if _why_not("varlen", device) is None else "sdpa"
        logger.info("attention backend on %s: %s", device, choice)
        return choice
    if name not in BACKENDS:
        raise ConfigError(f"attention backend must be one of {BACKENDS} or 'auto', got {name!r}")
    reason = _why_not(name, device)
    if reason is not None:
        raise BackendUnavailable(
            f"attention backend {name!r} cannot run on {device}: {reason}; use 'sdpa' or 'auto'"
        )
    return name


def _why_not(name: str, device: torch.device) -> str | None:
    if device.type == "cuda" and not torch.cuda.is_available():
        return "torch finds no CUDA device"
    if name not in UNMASKED_BACKENDS:
        return None
    if device.type != "cuda":
        return "it needs a CUDA device"
    module = "torch.nn.attention.varlen" if name == "varlen" else "xformers"
    if importlib.util.find_spec(module) is None:
        return f"{module} is not installed"
    if name == "varlen" and torch.cuda.get_device_capability(device) < (8, 0):
        return "it needs compute capability 8.0"
    return None


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, backend: str = "sdpa"
) -> Tensor:
    """Attention of queries over keys, softmax(q k^T / sqrt(d)) v.

    Args:
        q: [B, N, heads, d].
        k: [B, S, heads, d], same dtype.
        v: [B, S, heads, d], same dtype.
        mask: bool, True where a query may look: [S], [N, S] or [B, N, S]; None for everywhere.
        backend: one of `BACKENDS`, already resolved.

    Returns:
        [B, N, heads, d] in the dtype of `v`.

    Raises:
        ConfigError: the backend takes no mask and one was given, or its name is unknown.
    """
    if mask is not None and mask.ndim == 3:
        mask = mask[:, None]  # [B, 1, N, S]
    if backend == "sdpa":
        if mask is not None and mask.ndim == 1:
            mask = mask[None]
        out = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), attn_mask=mask
        )
        return out.transpose(1, 2)
    if backend == "naive":
        return _naive(q, k, v, mask)
    if mask is not None:
        raise ConfigError(f"attention backend {backend!r} takes no mask; use 'sdpa' or 'naive'")
    if backend == "varlen":
        return _varlen(q, k, v)
    if backend == "xformers":
        from xformers.ops import memory_efficient_attention

        out = memory_efficient_attention(q, k.contiguous(), v.contiguous())
        return out
    raise ConfigError(f"attention backend must be one of {BACKENDS}, got {backend!r}")


def _naive(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    scale = 1.0 / math.sqrt(q.shape[-1])
    scores = torch.matmul((q * scale).transpose(1, 2), k.permute(0, 2, 3, 1))  # [B, heads, N, S]
    if mask is not None:
        scores = scores + torch.zeros_like(mask, dtype=scores.dtype).masked_fill_(
            ~mask, float("-inf")
        )
    weights = scores.softmax(dim=-1, dtype=torch.promote_types(scores.dtype, torch.float32))
    return torch.matmul(weights.to(v.dtype), v.transpose(1, 2)).transpose(1, 2)


def _varlen(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    from torch.nn.attention.varlen import varlen_attn

    batch, queries, keys = q.shape[0], q.shape[1], k.shape[1]
    starts_q = torch.arange(0, (batch + 1) * queries, queries, dtype=torch.int32, device=q.device)
    starts_k = torch.arange(0, (batch + 1) * keys, keys, dtype=torch.int32, device=q.device)
    out = varlen_attn(
        q.flatten(0, 1),
        k.flatten(0, 1),
        v.flatten(0, 1),
        starts_q,
        starts_k,
        queries,
        keys,
        num_splits=1,  # a row's bits must not depend on the other rows
    )
    assert isinstance(out, Tensor)  # no auxiliary outputs were asked for
    return out.view(q.shape)
