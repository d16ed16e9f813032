"""Merged passes, roll-back, discarded passes and mixed rows on the rolling cache."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from rtgen.config import CacheConfig, DenoiserConfig
from rtgen.models import kv_cache
from rtgen.models.conditioning import Conditioning, PreparedConditioning
from rtgen.models.denoiser import CachePass, CausalDenoiser
from rtgen.models.kv_cache import RollingKVCache
from tests.models.streaming import cache_config, stream
from tests.toy import (
    HEIGHT,
    WIDTH,
    avatar_config,
    frames_of,
    toy_conditioning,
    toy_denoiser,
    toy_latents,
    toy_timesteps,
)


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def clean_then_noisy(
    denoiser: CausalDenoiser,
    config: CacheConfig,
    chunks: int,
    merged: bool,
    groups: tuple[int, ...] | None = None,
) -> list[Tensor]:
    """Each chunk's noisy output; its clean pass runs before the next or together with it."""
    size = config.frames_per_chunk
    cache = denoiser.new_cache(config, HEIGHT, WIDTH)
    clean, noisy = (toy_latents(chunks * size, seed=seed) for seed in (5, 6))
    timestep = toy_timesteps(chunks * size)
    conditioning = toy_conditioning(denoiser.config, chunks * size)
    text = denoiser.prepare(conditioning)
    outs = []
    for i in range(chunks):
        now, before = slice(i * size, (i + 1) * size), slice((i - 1) * size, i * size)
        prepared = denoiser.prepare(frames_of(conditioning, now.start, now.stop), text)
        if i > 0:
            old = denoiser.prepare(frames_of(conditioning, before.start, before.stop), text)
            zero = torch.zeros(1, size)
            if merged:
                out = denoiser(
                    torch.cat((clean[:, before], noisy[:, now]), 1),
                    torch.cat((zero, timestep[:, now]), 1),
                    PreparedConditioning.join_frames([old, prepared]),
                    caches=[CachePass(cache, before.start, groups or (size, size))],
                )
                cache.commit(size)
                outs.append(out[:, size:])
                continue
            item = CachePass(cache, before.start, (size,))
            denoiser(clean[:, before], zero, old, caches=[item])
            cache.commit(size)
        item = CachePass(cache, now.start, (size,))
        outs.append(denoiser(noisy[:, now], timestep[:, now], prepared, caches=[item]))
    return outs


@pytest.mark.parametrize("mode", ["absolute", "relative"])
@pytest.mark.parametrize("shape", [(6, 1, 1, 2), (6, 3, 3, 0), (5, 1, 2, 3), (4, 0, 1, 0)], ids=str)
def test_a_merged_pass_equals_separate_passes(shape: tuple[int, int, int, int], mode: str) -> None:
    window, sink, size, lead = shape
    config = CacheConfig(
        window=window,
        sink=sink,
        frames_per_chunk=size,
        lead=lead,
        merge_clean_pass=True,
        position_mode=mode,  # type: ignore[arg-type]
    )
    denoiser = toy_denoiser(avatar_config())
    merged = clean_then_noisy(denoiser, config, 12, merged=True)
    separate = clean_then_noisy(denoiser, config, 12, merged=False)
    assert_close(merged, separate, atol=2e-5, rtol=1e-4)


def test_planted_merged_pass_as_one_group_is_seen() -> None:
    config = CacheConfig(window=6, sink=1, lead=2, merge_clean_pass=True)
    denoiser = toy_denoiser()
    separate = clean_then_noisy(denoiser, config, 8, merged=False)
    leaking = clean_then_noisy(denoiser, config, 8, merged=True, groups=(2,))
    # The clean frame has seen its noisy successor.
    assert all((a - b).abs().max() > 1e-3 for a, b in zip(leaking[1:], separate[1:], strict=True))


@pytest.mark.parametrize("mode", ["absolute", "relative"])
@pytest.mark.parametrize("back", [1, 2, 3])
def test_rollback_and_replay_equals_never_having_left(back: int, mode: str) -> None:
    config = CacheConfig(window=5, sink=1, lead=3, position_mode=mode)  # type: ignore[arg-type]
    denoiser, frames = toy_denoiser(), 30
    latents, timestep = toy_latents(frames), toy_timesteps(frames)
    straight = denoiser.new_cache(config, HEIGHT, WIDTH)
    expected = stream(denoiser, straight, latents, timestep, Conditioning())
    cache = denoiser.new_cache(config, HEIGHT, WIDTH)
    wrong = toy_latents(frames, seed=9)
    for start, stop in itertools.pairwise((0, 2, 9, 17, 24, frames)):
        out = stream(
            denoiser, cache, latents[:, start:stop], timestep[:, start:stop], Conditioning(), start
        )
        assert_close(out, expected[:, start:stop], atol=0, rtol=0)
        if stop < frames:  # a future that is taken back
            stream(denoiser, cache, wrong[:, :back], timestep[:, :back], Conditioning(), stop)
            cache.rollback(back)


def test_planted_ring_without_spare_slots_is_seen_by_rollback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(CacheConfig, "ring_frames", property(lambda self: self.recent))
    monkeypatch.setattr(RollingKVCache, "_find_span", _unchecked_find_span)
    with pytest.raises(AssertionError):
        test_rollback_and_replay_equals_never_having_left(2, "absolute")


_find_span = RollingKVCache._find_span


def _unchecked_find_span(self: RollingKVCache, query_end: int) -> kv_cache._Span:
    written, self._written = self._written, query_end
    span = _find_span(self, query_end)
    self._written = written
    return span


def test_a_discarded_pass_of_nan_leaves_no_trace() -> None:
    for backend in ("sdpa", "naive"):
        denoiser, frames = toy_denoiser(), 14
        denoiser.attention_backend = backend
        latents, timestep = toy_latents(frames), toy_timesteps(frames)
        config = CacheConfig(window=5, sink=1, lead=2)
        expected = stream(
            denoiser, denoiser.new_cache(config, HEIGHT, WIDTH), latents, timestep, Conditioning()
        )
        cache = denoiser.new_cache(config, HEIGHT, WIDTH)
        outs: list[Tensor] = []
        for i in range(frames):
            part = slice(i, i + 1)
            poison = torch.full_like(latents[:, part], torch.nan)
            item = CachePass(cache, i, (1,))
            prepared = denoiser.prepare(Conditioning())
            assert denoiser(poison, timestep[:, part], prepared, caches=[item]).isnan().all()
            cache.discard(i, 1)
            if i > 2:  # the slot of the discarded frame is now a hole of the window
                cache.rollback(1)
                args = (latents[:, i - 1 : i], timestep[:, i - 1 : i], Conditioning(), i - 1)
                again = stream(denoiser, cache, *args)
                assert_close(again, outs[-1], atol=0, rtol=0)
            outs.append(
                stream(denoiser, cache, latents[:, part], timestep[:, part], Conditioning(), i)
            )
        assert_close(torch.cat(outs, 1), expected, atol=2e-6, rtol=1e-5)


def test_planted_nan_that_is_not_discarded_poisons_a_masked_slot() -> None:
    denoiser, frames = toy_denoiser(), 12
    denoiser.attention_backend = "naive"
    latents, timestep = toy_latents(frames), toy_timesteps(frames)
    cache = denoiser.new_cache(CacheConfig(window=5, sink=1, lead=2), HEIGHT, WIDTH)
    stream(denoiser, cache, latents[:, :9], timestep[:, :9], Conditioning())
    poison = torch.full_like(latents[:, :1], torch.nan)
    prepared = denoiser.prepare(Conditioning())
    denoiser(poison, timestep[:, :1], prepared, caches=[CachePass(cache, 9, (1,))])
    cache.rollback(1)
    out = denoiser(latents[:, 8:9], timestep[:, 8:9], prepared, caches=[CachePass(cache, 8, (1,))])
    assert out.isnan().any()


def test_rows_of_one_batch_may_stand_anywhere_in_their_streams() -> None:
    config: DenoiserConfig = avatar_config()
    denoiser, shape = toy_denoiser(config), (6, 1, 1, 2)
    starts = (0, 3, 11, 20)
    latents, timestep = toy_latents(21), toy_timesteps(21)
    conditioning = toy_conditioning(config, 21)
    caches, alone = [], []
    for start in starts:
        cache = denoiser.new_cache(cache_config(shape), HEIGHT, WIDTH)
        outs = stream(
            denoiser,
            cache,
            latents[:, : start + 1],
            timestep[:, : start + 1],
            frames_of(conditioning, 0, start + 1),
        )
        cache.rollback(1)
        caches.append(cache)
        alone.append(outs[:, -1:])
    rows = [denoiser.prepare(frames_of(conditioning, s, s + 1)) for s in starts]
    together = denoiser(
        torch.cat([latents[:, s : s + 1] for s in starts]),
        torch.cat([timestep[:, s : s + 1] for s in starts]),
        PreparedConditioning.stack(rows),
        caches=[CachePass(c, s, (1,)) for c, s in zip(caches, starts, strict=True)],
    )
    assert_close(together, torch.cat(alone), atol=2e-5, rtol=1e-4)
