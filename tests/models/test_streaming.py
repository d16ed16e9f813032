"""The rolling cache against two oracles: one dense masked forward, and the slow stream."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from rtgen.config import CacheConfig
from rtgen.models.conditioning import Conditioning
from rtgen.models.denoiser import block_causal_mask
from rtgen.models.kv_cache import RollingKVCache
from rtgen.models.rope import apply_rope, time_shift
from tests.models.streaming import assume_running, cache_config, slow, stream
from tests.oracles import SlowStream
from tests.toy import (
    HEIGHT,
    TOKENS,
    WIDTH,
    avatar_config,
    text_config,
    toy_conditioning,
    toy_config,
    toy_denoiser,
    toy_latents,
    toy_timesteps,
)

# window, sink, frames per chunk, lead; two of them leave no frame to spare.
SHAPES = [(6, 1, 1, 2), (4, 0, 1, 0), (6, 3, 3, 2), (5, 1, 2, 3), (9, 3, 3, 0), (3, 0, 3, 1)]
SHAPES += [(7, 2, 1, 5), (4, 3, 1, 1)]


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("backend", ["sdpa", "naive"])
def test_streaming_equals_one_dense_forward_under_the_block_causal_mask(
    shape: tuple[int, int, int, int], backend: str
) -> None:
    config = avatar_config()
    denoiser, frames = toy_denoiser(config), 24
    denoiser.attention_backend = backend
    latents, timestep = toy_latents(frames), toy_timesteps(frames)
    conditioning = toy_conditioning(config, frames)
    window, sink, chunk, _ = shape
    mask = block_causal_mask(frames, TOKENS, chunk, window, sink)
    dense = denoiser(latents, timestep, denoiser.prepare(conditioning), mask=mask)
    cache = denoiser.new_cache(cache_config(shape), HEIGHT, WIDTH)
    out = stream(denoiser, cache, latents, timestep, conditioning)
    assert 0.3 < dense.square().mean().sqrt() < 3
    assert_close(out, dense, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("mode", ["absolute", "relative"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_streaming_equals_the_slow_stream(shape: tuple[int, int, int, int], mode: str) -> None:
    config = avatar_config()
    denoiser, frames = toy_denoiser(config), 15
    latents, timestep = toy_latents(frames), toy_timesteps(frames)
    conditioning = toy_conditioning(config, frames)
    cache = denoiser.new_cache(cache_config(shape, mode), HEIGHT, WIDTH)
    out = stream(denoiser, cache, latents, timestep, conditioning)
    oracle = SlowStream(denoiser, cache_config(shape, mode))
    expected = slow(denoiser, oracle, latents, timestep, conditioning)
    assert_close(out, expected, atol=2e-5, rtol=1e-4)


def test_the_dense_forward_equals_the_slow_stream_for_text_and_for_no_conditioning() -> None:
    for config in (text_config(), toy_config(), toy_config(patch_size=(1, 1, 2))):
        denoiser, frames = toy_denoiser(config), 4
        latents, timestep = toy_latents(frames), toy_timesteps(frames)
        conditioning = toy_conditioning(config, frames)
        shape = CacheConfig(window=frames, frames_per_chunk=frames)
        expected = slow(denoiser, SlowStream(denoiser, shape), latents, timestep, conditioning)
        out = denoiser(latents, timestep, denoiser.prepare(conditioning))
        assert_close(out, expected, atol=2e-5, rtol=1e-4)


def difference_with(cache: RollingKVCache, shape: tuple[int, int, int, int], mode: str) -> Tensor:
    """Largest error of each frame against the slow stream, for planted bugs."""
    denoiser, frames = toy_denoiser(), 12
    latents, timestep = toy_latents(frames), toy_timesteps(frames)
    conditioning = Conditioning()
    out = stream(denoiser, cache, latents, timestep, conditioning)
    oracle = SlowStream(denoiser, cache_config(shape, mode))
    expected = slow(denoiser, oracle, latents, timestep, conditioning)
    return (out - expected).abs().amax(dim=(0, 2, 3, 4))


@pytest.mark.parametrize("mode", ["absolute", "relative"])
@pytest.mark.parametrize("off", [-1, 1])
def test_planted_off_by_one_eviction_is_seen_once_the_window_is_full(off: int, mode: str) -> None:
    shape = (6, 1, 1, 2)
    wrong = cache_config((6 + off, 1, 1, 2), mode)
    errors = difference_with(toy_denoiser().new_cache(wrong, HEIGHT, WIDTH), shape, mode)
    assert errors[: 6 + min(off, 0)].max() < 1e-4
    assert errors[8:].min() > 1e-3


@pytest.mark.parametrize("mode", ["absolute", "relative"])
def test_planted_loss_of_the_sink_is_seen(mode: str) -> None:
    shape = (6, 2, 1, 2)
    wrong = cache_config((4, 0, 1, 2), mode)
    errors = difference_with(toy_denoiser().new_cache(wrong, HEIGHT, WIDTH), shape, mode)
    assert errors[:4].max() < 1e-4
    assert errors[6:].min() > 1e-3


def test_planted_sink_that_does_not_follow_the_window_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(RollingKVCache, "_turn_sink", lambda self, layer, offset: None)
    shape = (6, 2, 1, 2)
    cache = toy_denoiser().new_cache(cache_config(shape, "relative"), HEIGHT, WIDTH)
    errors = difference_with(cache, shape, "relative")
    assert errors[:6].max() < 1e-4
    assert errors[7:].min() > 1e-3


def test_planted_turning_of_an_already_turned_sink_is_seen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def turn_again(self: RollingKVCache, layer: int, offset: int) -> None:
        sink = self.keys[layer, : self.config.sink * self.tokens_per_frame]
        shift = time_shift(offset, self.head_dim, self.device)
        sink.copy_(apply_rope(sink, shift))

    monkeypatch.setattr(RollingKVCache, "_turn_sink", turn_again)
    shape = (6, 2, 1, 2)
    cache = toy_denoiser().new_cache(cache_config(shape, "relative"), HEIGHT, WIDTH)
    errors = difference_with(cache, shape, "relative")
    assert errors[:7].max() < 1e-4  # one turn is right, the second is not
    assert errors[9:].min() > 1e-3


@pytest.mark.parametrize("start", [1020, 2**20])
@pytest.mark.parametrize("mode", ["absolute", "relative"])
def test_there_is_no_largest_frame(start: int, mode: str) -> None:
    denoiser, frames, shape = toy_denoiser(), 10, (6, 1, 1, 2)
    latents, timestep = toy_latents(frames), toy_timesteps(frames)
    cache = denoiser.new_cache(cache_config(shape, mode), HEIGHT, WIDTH)
    oracle = SlowStream(denoiser, cache_config(shape, mode))
    for part, begin in ((slice(0, 1), 0), (slice(1, None), start)):
        assume_running(cache, begin)
        args = (latents[:, part], timestep[:, part], Conditioning(), begin)
        out = stream(denoiser, cache, *args)
        expected = slow(denoiser, oracle, *args)
        assert_close(out, expected, atol=2e-5, rtol=1e-4)


def outputs_from(start: int, mode: str) -> Tensor:
    denoiser, frames, shape = toy_denoiser(), 10, (6, 1, 1, 2)
    latents, timestep = toy_latents(frames), toy_timesteps(frames)
    cache = denoiser.new_cache(cache_config(shape, mode), HEIGHT, WIDTH)
    stream(denoiser, cache, latents[:, :1], timestep[:, :1], Conditioning())
    assume_running(cache, start)
    return stream(denoiser, cache, latents[:, 1:], timestep[:, 1:], Conditioning(), start)


def test_relative_mode_depends_on_the_absolute_frame_only_until_the_window_is_full() -> None:
    full = outputs_from(6, "relative")
    assert_close(outputs_from(1020, "relative"), full, atol=2e-5, rtol=1e-4)
    assert_close(outputs_from(2**20, "relative"), full, atol=2e-5, rtol=1e-4)


def test_planted_absolute_mode_does_depend_on_the_absolute_frame() -> None:
    difference = (outputs_from(1020, "absolute") - outputs_from(6, "absolute")).abs()
    assert difference.max() > 1e-2
