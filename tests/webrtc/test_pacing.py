from __future__ import annotations

import numpy as np
import pytest

from rtgen.errors import ConfigError
from rtgen.types import OUTPUT_RATE
from tests.webrtc.slow import SlowPacer
from webrtc.pacing import BLOCK_SAMPLES, MAX_BEHIND, Pacer, next_multiple

START_NS = 7_000_000_123


def at_ns(position: int) -> int:
    return START_NS + -(-position * 10**9 // OUTPUT_RATE)


def ticks(pacer: Pacer, reached: int) -> list[tuple[str, int]]:
    return [(tick.kind, tick.position) for tick in pacer.due(at_ns(reached))]


def wakings(seed: int, count: int) -> list[int]:
    """Positions at which somebody wakes: mostly in time, sometimes late, seldom very late."""
    rng = np.random.default_rng(seed)
    steps = rng.choice([1, 300, 960, 1100, 2500, 12_000], count, p=[0.1, 0.3, 0.3, 0.2, 0.07, 0.03])
    return [int(at) for at in np.cumsum(steps)]


@pytest.mark.parametrize("step", [None, 1600, 1920, 2000, 3000])
def test_ticks_equal_those_of_the_slow_walk(step: int | None) -> None:
    pacer, slow = Pacer(START_NS), SlowPacer(step)
    if step is not None:
        pacer.set_samples_per_frame(step)
    for reached in wakings(1, 80):
        assert ticks(pacer, reached) == slow.due(reached), reached


def test_the_slow_walk_finds_a_burst() -> None:
    class Bursts(Pacer):
        def due(self, now_ns: int) -> list:  # type: ignore[type-arg]
            self._start_ns, kept = self._start_ns, self._audio
            found = []
            while self.time_ns(kept) <= now_ns:
                found += super().due(self.time_ns(kept))
                kept += BLOCK_SAMPLES
            return found

    pacer, slow = Bursts(START_NS), SlowPacer(None)
    assert any(ticks(pacer, reached) != slow.due(reached) for reached in wakings(1, 80))


def test_a_long_stall_is_skipped_and_time_goes_on() -> None:
    pacer = Pacer(START_NS)
    pacer.set_samples_per_frame(1920)
    assert ticks(pacer, 0) == [("audio", 0), ("video", 0)]
    found = ticks(pacer, OUTPUT_RATE)  # one second later
    assert found == [("audio", 48_000), ("video", 48_000)]
    assert pacer.skipped == 48_000 - BLOCK_SAMPLES
    assert pacer.next_ns() > at_ns(OUTPUT_RATE)


def test_a_short_stall_is_caught_up() -> None:
    pacer = Pacer(START_NS)
    ticks(pacer, 0)
    found = ticks(pacer, BLOCK_SAMPLES + MAX_BEHIND)
    assert [position for _, position in found] == [960, 1920, 2880]
    assert pacer.skipped == 0


def test_the_next_time_is_when_the_next_tick_is_due() -> None:
    pacer = Pacer(START_NS)
    pacer.set_samples_per_frame(2000)
    for _ in range(50):
        next_ns = pacer.next_ns()
        assert pacer.due(next_ns - 50_000) == []
        assert pacer.due(next_ns + 25_000) != []


def test_pictures_start_when_their_length_is_known() -> None:
    pacer = Pacer(START_NS)
    ticks(pacer, 960)
    pacer.set_samples_per_frame(1920)
    assert ticks(pacer, 1920) == [("audio", 1920), ("video", 1920)]
    with pytest.raises(ConfigError):
        pacer.set_samples_per_frame(0)


def test_next_multiple() -> None:
    assert [next_multiple(n, 4) for n in (0, 1, 4, 5)] == [0, 4, 4, 8]
