from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rtgen.engine import admission
from rtgen.engine.admission import Capacity, shortage
from rtgen.engine.cost_model import CostModel, Profile, affine_profile
from rtgen.engine.load import Demand
from rtgen.engine.simulator import Simulator, Visit
from rtgen.errors import ConfigError

MS, S = 1_000_000, 1_000_000_000
ROOM = Capacity()


def demand(steps: int = 4, frames: int = 3, lead: int = 6) -> Demand:
    shape = str(frames)
    return Demand(
        noisy=(shape,) * steps,
        clean=shape,
        units_per_chunk=frames,
        unit_ns=160 * MS,
        lead=lead,
    )


def profile(decode_ms: float = 30, base_ms: float = 10, session_bytes: int = 0) -> Profile:
    return affine_profile(
        frames=3,
        sizes=tuple(range(1, 9)),
        base_ms=base_ms,
        frame_ms=2,
        decode_ms=decode_ms,
        session_bytes=session_bytes,
    )


def most(cost: CostModel, capacity: Capacity = ROOM, wanted: Demand | None = None) -> int:
    """The largest set that is taken."""
    one, count = demand() if wanted is None else wanted, 16
    while count and shortage([one] * count, [], cost, capacity) is not None:
        count -= 1
    return count


def constraint(count: int, cost: CostModel, capacity: Capacity = ROOM) -> str:
    found = shortage([demand()] * count, [], cost, capacity)
    assert found is not None
    return found.constraint


def test_the_denoiser_is_full_at_twelve() -> None:
    cost = CostModel(profile())
    assert most(cost) == 12
    assert constraint(13, cost) == "denoise"


def test_a_slow_decoder_is_what_stands_in_the_way() -> None:
    cost = CostModel(profile(decode_ms=100))
    assert most(cost) == 4
    assert constraint(5, cost) == "decode"


def test_memory_counts_offline_sessions_too() -> None:
    cost = CostModel(profile(session_bytes=2**20))
    capacity = Capacity(memory_bytes=5 * 2**20)
    assert most(cost, capacity) == 5
    found = shortage([demand()] * 3, [demand()] * 3, cost, capacity)
    assert found is not None
    assert (found.constraint, found.detail) == ("memory", "6 of 5 MiB")
    assert shortage([], [demand()] * 5, cost, capacity) is None


def test_a_chunk_that_takes_longer_than_the_lead_is_refused() -> None:
    short = demand(lead=3)  # one unit of time for a chunk
    cost = CostModel(profile(base_ms=30))
    found = shortage([short, short], [], cost, ROOM)
    assert found is not None
    assert found.constraint == "response"


def test_a_session_alone_is_taken_whatever_it_costs() -> None:
    cost = CostModel(profile(base_ms=500, session_bytes=2**20))
    assert shortage([demand()], [demand()], cost, ROOM) is None
    assert shortage([demand()] * 2, [], cost, ROOM) is not None
    assert shortage([demand()], [], cost, Capacity(memory_bytes=0)) is not None


def test_the_simulator_has_the_last_word(monkeypatch: pytest.MonkeyPatch) -> None:
    cost = CostModel(profile())
    monkeypatch.setattr(admission, "_missed", lambda live, profile: len(live) // 4)
    assert most(cost) == 3
    assert constraint(4, cost) == "simulation"


def test_a_slower_machine_takes_fewer() -> None:
    cost = CostModel(profile())
    for _ in range(60):
        cost.observe("3", 8, 2 * 58 * MS)
    assert most(cost) < 8


@settings(deadline=None, max_examples=4)
@given(
    steps=st.integers(1, 4),
    base_ms=st.integers(2, 20),
    decode_ms=st.integers(5, 60),
    seed=st.integers(10, 1000),
    joins=st.lists(st.integers(0, 2000), min_size=16, max_size=16),
)
def test_what_is_taken_misses_nothing(
    steps: int, base_ms: int, decode_ms: int, seed: int, joins: list[int]
) -> None:
    true = profile(decode_ms, base_ms)
    count = most(CostModel(true), wanted=demand(steps))
    visits = [Visit(rungs=(demand(steps),), join_ns=join * MS) for join in joins[:count]]
    report = Simulator(true, visits, seed=seed).run(10 * S)
    assert report.miss_rate(visits) == 0


def test_the_miss_test_sees_a_set_that_is_too_large() -> None:
    visits = [Visit(rungs=(demand(),), join_ns=place * 30 * MS) for place in range(15)]
    assert Simulator(profile(), visits).run(10 * S).miss_rate(visits) > 0


def test_wrong_limits_are_errors() -> None:
    with pytest.raises(ConfigError, match="memory_bytes"):
        Capacity(memory_bytes=-1)
    with pytest.raises(ConfigError, match="max_load"):
        Capacity(max_load=0)


def test_lanes_can_be_overbooked_on_purpose() -> None:
    cost = CostModel(profile(session_bytes=2**20))
    freely = Capacity(memory_bytes=20 * 2**20, max_load=math.inf)
    assert shortage([demand()] * 20, [], cost, freely) is None
    assert constraint(21, cost, freely) == "memory"
    assert constraint(13, cost, Capacity(max_load=1.02)) == "denoise"
