"""Batch invariance: a stream's output must have the same bits in any company.

Kernels choose their order of sums by the number of rows, and vectorised functions treat the tail
of a tensor in another way, so a row's last bits may depend on the batch. Two cures:
`invariant_batch_sizes` measures on this device, with these weights, for which batch sizes every
row equals the row alone, and whoever forms batches keeps to those sizes; `CausalDenoiser.row_tile`
runs a fixed number of rows at a time. With one row a time equality holds by construction; with
more, the place within the tile is left, and the measurement covers it.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from rtgen.config import CacheConfig, DenoiserConfig
from rtgen.models.blocks import CachePass
from rtgen.models.conditioning import Conditioning, PreparedConditioning
from rtgen.models.denoiser import CausalDenoiser

logger = logging.getLogger(__name__)


@torch.inference_mode()
def invariant_batch_sizes(
    denoiser: CausalDenoiser,
    max_batch: int,
    cache_config: CacheConfig,
    *,
    height: int,
    width: int,
    seed: int = 0,
) -> tuple[int, ...]:
    """Batch sizes at which every row comes out, bit for bit, as it does alone.

    Rows at different places of their streams are run alone and in batches of every size, at two
    places of the batch; outputs and the keys and values left in the rings are compared. With
    `merge_clean_pass` the merged pass is tried as well.

    Args:
        denoiser: with the weights, device, dtype, backend and row tile that will serve.
        max_batch: largest batch to try.
        cache_config: of the streams.
        height: latent rows.
        width: latent columns.
        seed: of the random rows.

    Returns:
        The sizes that passed, ascending; 1 is always among them.
    """
    rows = [
        _Row(denoiser, cache_config, height, width, seed + index, index)
        for index in range(max_batch)
    ]
    chunk = cache_config.frames_per_chunk
    shapes = [(chunk,), (chunk, chunk)] if cache_config.merge_clean_pass else [(chunk,)]
    sizes = set(range(1, max_batch + 1))
    for groups in shapes:
        alone = [row.result(_run(denoiser, [row], groups)[0], sum(groups)) for row in rows]
        for size in sorted(sizes - {1}):
            for first in {0, max_batch - size // 2}:
                picked = [(first + i) % max_batch for i in range(size)]
                outs = _run(denoiser, [rows[i] for i in picked], groups)
                for i, out in zip(picked, outs, strict=True):
                    if not _equal(rows[i].result(out, sum(groups)), alone[i]):
                        sizes.discard(size)
    logger.info("batch sizes with invariant rows, of 1..%d: %s", max_batch, sorted(sizes))
    return tuple(sorted(sizes))


class _Row:
    """One stream with a made-up past, about to run its next pass again and again."""

    def __init__(
        self,
        denoiser: CausalDenoiser,
        cache_config: CacheConfig,
        height: int,
        width: int,
        seed: int,
        index: int,
    ) -> None:
        config, chunk = denoiser.config, cache_config.frames_per_chunk
        random = torch.Generator().manual_seed(seed)
        self.cache = denoiser.new_cache(cache_config, height, width)
        for _ in range(index % (cache_config.window // chunk + 2)):
            for layer in range(config.num_layers):
                shape = (chunk * self.cache.tokens_per_frame, *self.cache.keys.shape[2:])
                k, v = (torch.randn(shape, generator=random) for _ in range(2))
                self.cache.write(layer, self.cache.committed, k, v)
            self.cache.commit(chunk)
        device, frames = self.cache.device, 2 * chunk
        shape = (1, frames, config.in_channels, height, width)
        self.latents = torch.randn(shape, generator=random).to(device)
        self.timestep = (1000 * torch.rand(1, frames, generator=random)).to(device)
        conditioning = random_conditioning(config, 1, frames, random)
        self.prepared = denoiser.prepare(conditioning.to(device))

    def result(self, out: Tensor, frames: int) -> tuple[Tensor, Tensor, Tensor]:
        keys, values = self.cache.read(self.cache.committed, frames)
        return out.clone(), keys, values


def _run(denoiser: CausalDenoiser, rows: list[_Row], groups: tuple[int, ...]) -> Tensor:
    frames = sum(groups)
    return denoiser(
        torch.cat([row.latents[:, :frames] for row in rows]),
        torch.cat([row.timestep[:, :frames] for row in rows]),
        PreparedConditioning.stack([row.prepared.first_frames(frames) for row in rows]),
        caches=[CachePass(row.cache, row.cache.committed, groups) for row in rows],
    )


def _equal(a: tuple[Tensor, ...], b: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def random_conditioning(
    config: DenoiserConfig, batch: int, frames: int, random: torch.Generator, prompt_rows: int = 512
) -> Conditioning:
    """Random conditioning of the parts a model has, on the CPU, for self-tests and benches."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(batch, *shape, generator=random)

    def integers(high: int) -> Tensor:
        return torch.randint(high, (batch, frames), generator=random)

    return Conditioning(
        prompt_embeds=None if config.text_dim is None else normal(prompt_rows, config.text_dim),
        audio=None
        if config.audio_dim is None
        else normal(frames, config.audio_tokens, config.audio_dim),
        state=integers(config.num_states) if config.num_states else None,
        event=integers(config.num_events) if config.num_events else None,
        control=normal(frames, config.control_dim) if config.control_dim else None,
    )
