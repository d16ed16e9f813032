"""The ring by itself: which frames a view holds, and what is refused."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from rtgen.config import CacheConfig
from rtgen.errors import ConfigError, ShapeError
from rtgen.models.kv_cache import RollingKVCache

LAYERS, TOKENS, HEADS, DIM = 2, 3, 2, 24


def ring(**changes: object) -> RollingKVCache:
    config = CacheConfig(**{"window": 6, "sink": 1, "lead": 2, **changes})  # type: ignore[arg-type]
    return RollingKVCache(
        config, num_layers=LAYERS, tokens_per_frame=TOKENS, num_heads=HEADS, head_dim=DIM
    )


def marked(start: int, frames: int, layer: int = 0) -> Tensor:
    """Values that tell frame, token and layer: frame + token / 10 + 1000 layer."""
    frame = torch.arange(start, start + frames).repeat_interleave(TOKENS)
    token = torch.arange(TOKENS).repeat(frames) / 10
    return (frame + token + 1000 * layer)[:, None, None].expand(-1, HEADS, DIM).float()


def write(cache: RollingKVCache, start: int, frames: int) -> None:
    for layer in range(LAYERS):
        cache.write(layer, start, -marked(start, frames, layer), marked(start, frames, layer))


def advance(cache: RollingKVCache, chunks: int) -> None:
    for _ in range(chunks):
        write(cache, cache.committed, cache.config.frames_per_chunk)
        cache.commit(cache.config.frames_per_chunk)


def seen(cache: RollingKVCache, query_end: int, layer: int = 1) -> list[int]:
    """Frames in a view, sorted; checks that their tokens are whole and mask equals compact."""
    view = cache.view(layer, query_end)
    values = view.values if view.mask is None else view.values[view.mask]
    keys = view.keys if view.mask is None else view.keys[view.mask]
    compact = view.compact()
    assert compact.mask is None
    assert torch.equal(compact.values, values)
    assert torch.equal(compact.keys, keys)
    numbers = values[:, 0, 0].tolist()
    frames = sorted({int(number - 1000 * layer) for number in numbers})
    assert_close(values.sort(0).values, torch.cat([marked(f, 1, layer) for f in frames]))
    assert torch.equal(keys, -values)
    return frames


SWEEP = [
    {"window": w, "sink": s, "frames_per_chunk": f, "lead": lead, "merge_clean_pass": merge}
    for w, s, f, lead, merge in itertools.product(
        (3, 6, 9), (0, 1, 3), (1, 3), (0, 2), (False, True)
    )
    if w - s >= f
]


@pytest.mark.parametrize("values", SWEEP, ids=lambda v: "-".join(map(str, v.values())))
def test_a_view_holds_the_sink_and_the_most_recent_frames(values: dict[str, int]) -> None:
    cache = ring(**values)
    window, sink, size = values["window"], values["sink"], values["frames_per_chunk"]
    for _ in range(20):
        write(cache, cache.committed, size)
        end = cache.committed + size
        expected = [f for f in range(end) if f < sink or f >= end - (window - sink)]
        assert seen(cache, end) == expected
        cache.commit(size)
        cache.check_integrity()


def test_planted_ring_that_is_one_slot_short_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    short = property(lambda self: self.recent + self.lead - 1)
    monkeypatch.setattr(CacheConfig, "ring_frames", short)
    cache = ring(lead=0)
    advance(cache, 5)
    write(cache, 5, 1)
    with pytest.raises(ConfigError, match="the ring holds"):
        cache.view(0, 6)


def test_a_span_has_no_mask_while_the_stream_is_short_and_at_most_the_spare_frames_later() -> None:
    cache = ring(window=6, sink=1, lead=2)
    for end in range(1, 40):
        advance(cache, 1)
        view = cache.view(0, end)
        holes = 0 if view.mask is None else int((~view.mask).sum())
        assert (view.mask is None) == (holes == 0)
        assert holes <= (0 if end <= 6 else 2 * TOKENS)
    assert len(cache._masks) <= cache.config.ring_frames


def test_nothing_moves_and_nothing_grows() -> None:
    cache = ring()
    advance(cache, 20)
    places = (cache.keys.data_ptr(), cache.values.data_ptr(), cache.nbytes, len(cache._masks))
    advance(cache, 500)
    seen(cache, cache.committed)
    assert (cache.keys.data_ptr(), cache.values.data_ptr(), cache.nbytes) == places[:3]
    assert len(cache._spans) <= 1
    assert cache.nbytes == 2 * 4 * LAYERS * cache.config.num_frames * TOKENS * HEADS * DIM


def test_a_merged_pass_shows_each_group_its_own_window() -> None:
    cache = ring(window=6, sink=1, frames_per_chunk=2, lead=1, merge_clean_pass=True)
    advance(cache, 6)
    write(cache, 12, 4)
    assert seen(cache, 14) == [0, 9, 10, 11, 12, 13]
    assert seen(cache, 16) == [0, 11, 12, 13, 14, 15]


def test_rollback_reaches_lead_frames_behind_the_furthest_commit_and_no_further() -> None:
    cache = ring(lead=2)
    advance(cache, 30)
    cache.rollback(2)
    write(cache, 28, 1)
    assert seen(cache, 29) == [0, 24, 25, 26, 27, 28]
    cache.commit(1)
    cache.rollback(1)
    with pytest.raises(ConfigError, match=r"lead 2.*raise lead"):
        cache.rollback(1)
    assert cache.committed == 28
    with pytest.raises(ConfigError):
        cache.rollback(-1)


def test_rollback_at_the_start_stops_at_frame_zero() -> None:
    cache = ring(lead=2)
    advance(cache, 1)
    with pytest.raises(ConfigError, match="frame 0"):
        cache.rollback(2)
    cache.rollback(1)
    assert cache.committed == 0


@pytest.mark.parametrize(
    ("start", "frames", "match"),
    [(31, 1, "commit the frames before"), (30, 2, "smaller chunks"), (10, 1, "has left the ring")],
)
def test_frames_that_do_not_fit_are_refused(start: int, frames: int, match: str) -> None:
    cache = ring()
    advance(cache, 30)
    with pytest.raises(ConfigError, match=match):
        write(cache, start, frames)


def test_a_view_or_commit_of_frames_that_were_never_written_is_refused() -> None:
    cache = ring()
    advance(cache, 3)
    with pytest.raises(ConfigError, match="the ring holds"):
        cache.view(0, 4)
    with pytest.raises(ConfigError, match="cannot commit 1"):
        cache.commit(1)


def test_discard_zeroes_the_frames_and_nothing_else() -> None:
    cache = ring(frames_per_chunk=3, window=7)
    advance(cache, 5)
    before, _ = cache.read(10, 5)
    write(cache, 15, 3)
    cache.discard(15, 3)
    after, _ = cache.read(15, 3)
    assert not after.any()
    assert torch.equal(cache.read(10, 5)[0], before)


def test_integrity_check_finds_nan_and_broken_counters() -> None:
    cache = ring()
    advance(cache, 10)
    cache.keys[1, 0, 0, 0] = torch.nan
    with pytest.raises(ConfigError, match="layer 1"):
        cache.check_integrity()
    other = ring()
    advance(other, 10)
    other.committed = 3
    with pytest.raises(ConfigError, match="inconsistent"):
        other.check_integrity()


@pytest.mark.parametrize("mode", ["absolute", "relative"])
def test_snapshot_restore_and_clone_keep_everything(mode: str) -> None:
    cache = ring(position_mode=mode)
    advance(cache, 11)
    view = cache.view(0, 11)
    expected = view.keys.clone()
    snapshot, twin = cache.snapshot(), cache.clone()
    advance(cache, 9)
    cache.view(0, 20)
    cache.restore(snapshot)
    for same in (cache, twin):
        assert same.committed == 11
        assert torch.equal(same.view(0, 11).keys, expected)
        advance(same, 1)
        same.check_integrity()
    assert torch.equal(cache.keys, twin.keys)
    with pytest.raises(ShapeError, match="same configuration"):
        ring(window=5).restore(snapshot)


def test_a_cache_made_in_inference_mode_can_be_written_outside_it() -> None:
    with torch.inference_mode():
        cache = ring(position_mode="relative")
        advance(cache, 9)
        cache.view(0, 9)
    with torch.no_grad():
        advance(cache, 9)
        cache.view(0, 18)


def test_a_sink_that_is_rewritten_late_stands_at_its_turned_place() -> None:
    cache = ring(window=6, sink=2, position_mode="relative")
    advance(cache, 12)
    keys = torch.randn(LAYERS, 2 * TOKENS, HEADS, DIM)
    fresh = ring(window=6, sink=2, frames_per_chunk=2, position_mode="relative")
    advance(fresh, 6)
    for target in (cache, fresh):
        target.view(0, 12)
        target.write(0, 0, keys[0], keys[0])
    a, b = cache.view(0, 12).keys[: 2 * TOKENS], fresh.view(0, 12).keys[: 2 * TOKENS]
    assert_close(a, b)
    assert (a - keys[0]).abs().max() > 0.1
