from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from rtgen.config import CacheConfig
from rtgen.errors import ConfigError
from rtgen.models import layers
from rtgen.models.denoiser import CachePass, CausalDenoiser, cast_weights
from rtgen.models.invariance import invariant_batch_sizes
from tests.toy import (
    HEIGHT,
    WIDTH,
    avatar_config,
    toy_conditioning,
    toy_denoiser,
    toy_latents,
    toy_timesteps,
)

CACHES = CacheConfig(window=4, sink=1, frames_per_chunk=1, lead=1, merge_clean_pass=True)


def sizes(denoiser: CausalDenoiser, max_batch: int = 4) -> tuple[int, ...]:
    return invariant_batch_sizes(denoiser, max_batch, CACHES, height=HEIGHT, width=WIDTH)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tiles_of_one_row_make_every_batch_size_invariant(dtype: torch.dtype) -> None:
    denoiser = cast_weights(toy_denoiser(avatar_config()), dtype)
    denoiser.row_tile = 1
    assert sizes(denoiser) == (1, 2, 3, 4)


def test_larger_tiles_make_batch_sizes_invariant_at_a_width_without_vector_tails() -> None:
    denoiser = toy_denoiser(avatar_config(attention_head_dim=32))
    denoiser.row_tile = 2
    assert sizes(denoiser) == (1, 2, 3, 4)


def test_the_self_test_returns_only_sizes_that_hold() -> None:
    found = sizes(toy_denoiser(avatar_config()))
    assert found[0] == 1
    assert set(found) <= {1, 2, 3, 4}


def plant(monkeypatch: pytest.MonkeyPatch, bug: Callable[[Tensor], Tensor]) -> None:
    """Applies `bug` to the result of every linear."""

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return bug(torch.nn.functional.linear(x, weight, bias))

    monkeypatch.setattr(layers, "linear", linear)


def test_planted_dependence_on_the_batch_is_found_and_tiles_cure_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plant(monkeypatch, lambda out: out * (1 + 1e-6 * len(out)))
    denoiser = toy_denoiser(avatar_config(attention_head_dim=32))
    assert sizes(denoiser) == (1,)
    for row_tile in (1, 2):
        denoiser.row_tile = row_tile
        assert sizes(denoiser) == (1, 2, 3, 4)


def test_planted_dependence_of_one_place_in_the_batch_is_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def third_row(out: Tensor) -> Tensor:
        if len(out) == 3:
            out[2] *= 1 + 1e-6
        return out

    plant(monkeypatch, third_row)
    denoiser = toy_denoiser()
    denoiser.row_tile = 1
    assert sizes(denoiser) == (1, 2, 3, 4)
    denoiser.row_tile = None
    assert 3 not in sizes(denoiser)


@torch.no_grad()
@pytest.mark.parametrize("row_tile", [1, 2, 3])
def test_tiles_change_results_by_rounding_only(row_tile: int) -> None:
    config = avatar_config()
    denoiser = toy_denoiser(config)
    prepared = denoiser.prepare(toy_conditioning(config, 1, batch=3))

    def run() -> Tensor:
        caches = [denoiser.new_cache(CACHES, HEIGHT, WIDTH) for _ in range(3)]
        passes = [CachePass(cache, 0, (1,)) for cache in caches]
        args = (toy_latents(1, batch=3), toy_timesteps(1, batch=3), prepared)
        out: Tensor = denoiser(*args, caches=passes)
        return out

    plain = run()
    denoiser.row_tile = row_tile
    assert_close(run(), plain, atol=1e-5, rtol=1e-5)
    denoiser.row_tile = 0
    with pytest.raises(ConfigError, match="at least 1"):
        run()
