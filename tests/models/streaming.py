"""Streams of toy frames through the rolling cache and through the slow oracle."""

from __future__ import annotations

import torch
from torch import Tensor

from rtgen.config import CacheConfig
from rtgen.models.conditioning import Conditioning
from rtgen.models.denoiser import CachePass, CausalDenoiser
from rtgen.models.kv_cache import RollingKVCache
from tests.oracles import SlowStream
from tests.toy import frames_of


def stream(
    denoiser: CausalDenoiser,
    cache: RollingKVCache,
    latents: Tensor,
    timestep: Tensor,
    conditioning: Conditioning,
    start: int = 0,
) -> Tensor:
    """Streams frames [1, T, ...] chunk by chunk; the chunk's one pass is its clean pass."""
    chunk = cache.config.frames_per_chunk
    outs = []
    for begin in range(0, latents.shape[1], chunk):
        end = min(begin + chunk, latents.shape[1])
        prepared = denoiser.prepare(frames_of(conditioning, begin, end))
        item = CachePass(cache, start + begin, (end - begin,))
        outs.append(
            denoiser(latents[:, begin:end], timestep[:, begin:end], prepared, caches=[item])
        )
        cache.commit(end - begin)
        cache.check_integrity()
    return torch.cat(outs, dim=1)


def slow(
    denoiser: CausalDenoiser,
    oracle: SlowStream,
    latents: Tensor,
    timestep: Tensor,
    conditioning: Conditioning,
    start: int = 0,
) -> Tensor:
    chunk = oracle.cache_config.frames_per_chunk
    outs = [
        oracle.chunk(
            latents[0, begin : begin + chunk],
            timestep[0, begin : begin + chunk],
            frames_of(conditioning, begin, begin + chunk),
            start + begin,
        )
        for begin in range(0, latents.shape[1], chunk)
    ]
    return torch.cat(outs)[None].float()


def assume_running(cache: RollingKVCache, frame: int) -> None:
    """Makes the cache believe that it has come to `frame`; unseen frames have zero keys."""
    cache.committed = cache._peak = cache._written = frame
    cache._spans.clear()


def cache_config(shape: tuple[int, int, int, int], mode: str = "absolute") -> CacheConfig:
    window, sink, chunk, lead = shape
    values = {"window": window, "sink": sink, "frames_per_chunk": chunk, "lead": lead}
    return CacheConfig(**values, position_mode=mode)  # type: ignore[arg-type]
