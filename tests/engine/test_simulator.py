"""The scheduler's promises, in virtual time: bounded lateness, no leak, exact replay."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rtgen.engine.cost_model import affine_profile
from rtgen.engine.load import Demand, response_ns, utilization
from rtgen.engine.scheduler import Action, Costs, Forward, Row, Sleep, decide
from rtgen.engine.simulator import Report, Simulator, Visit
from rtgen.engine.trace import changed, load_trace, save_trace
from rtgen.errors import ConfigError

MS, S = 1_000_000, 1_000_000_000
UNIT_NS = 160 * MS
GPU = affine_profile(frames=3, sizes=tuple(range(1, 9)), base_ms=10, frame_ms=2, decode_ms=30)
FITS, TOO_MANY, TWICE = 12, 14, 26
"""Sessions of `demand()` on `GPU`: what admission takes; one too many; twice what it can do."""


def demand(steps: int = 4) -> Demand:
    return Demand(noisy=("3",) * steps, clean="3", units_per_chunk=3, unit_ns=UNIT_NS, lead=6)


def crowd(count: int, rungs: Sequence[int] = (4,), spread_ns: int = 37 * MS) -> list[Visit]:
    demands = tuple(demand(steps) for steps in rungs)
    return [Visit(rungs=demands, join_ns=place * spread_ns) for place in range(count)]


OFFLINE = Visit(rungs=(demand(),), is_live=False)


def fcfs(now: int, live: Sequence[Row], offline: Sequence[Row], costs: Costs) -> Action:
    """One session per forward, whoever came first."""
    ready = [row for row in live if row.release_ns <= now]
    if ready:
        return Forward((min(ready, key=lambda row: (row.release_ns, row.seq)).seq,))
    return Sleep(min((row.release_ns for row in live), default=None))


def test_batches_by_deadline_serve_a_set_that_one_by_one_does_not() -> None:
    visits = crowd(FITS)
    assert Simulator(GPU, visits).run(20 * S).miss_rate(visits) == 0
    assert Simulator(GPU, visits, policy=fcfs).run(20 * S).miss_rate(visits) > 0.9


def test_a_simulation_counts_what_it_does() -> None:
    visits = crowd(1)
    report = Simulator(GPU, visits, noise=0).run(10 * S)
    (out,) = report.visits
    assert out.first_ns == 5 * 16 * MS + 30 * MS  # its reference, four steps, the decode
    assert out.chunks == pytest.approx(10 / 0.48, abs=2)
    assert report.forwards == report.rows == pytest.approx(5 * out.chunks, abs=6)
    assert report.busy_ns == report.forwards * 16 * MS
    assert set(out.responses_ns) == {4 * 16 * MS + 30 * MS}


def test_one_session_too_many_is_served_by_the_ladder() -> None:
    visits = crowd(TOO_MANY, (4, 3, 2))
    assert Simulator(GPU, crowd(TOO_MANY)).run(20 * S).miss_rate(visits) > 0.2
    report = Simulator(GPU, visits, ladder=True).run(20 * S)
    assert report.miss_rate(visits) <= 0.005
    assert any(out.moves for out in report.visits)


def overloaded() -> tuple[list[Visit], Report]:
    """Twice what fits for 20 s, then what fits."""
    visits = [
        replace(visit, leave_ns=None if place < FITS else 20 * S)
        for place, visit in enumerate(crowd(TWICE))
    ]
    return visits, Simulator(GPU, visits).run(30 * S)


def test_under_twice_the_load_latency_is_bounded_and_everyone_gets_a_share() -> None:
    _, report = overloaded()
    for out in report.visits:
        assert out.chunks >= 10
        assert max(out.responses_ns) < 3 * S
    assert report.most_queued <= TWICE
    stayed = report.visits[:FITS]
    assert max((at for out in stayed for at in out.late_at_ns), default=0) < 22 * S


def test_a_stall_moves_the_table_and_nothing_is_made_faster_afterwards() -> None:
    """One forward of two seconds: one late chunk each, then the usual pace."""
    visits = crowd(4)
    calm = Simulator(GPU, visits, noise=0).run(12 * S)
    report = Simulator(GPU, visits, noise=0, spikes={60: 125.0}).run(12 * S)
    for out, usual in zip(report.visits, calm.visits, strict=True):
        assert out.late == 1
        assert 1 * S < out.stall_ns < 2.2 * S
        assert usual.chunks - out.chunks == pytest.approx(2 / 0.48, abs=2)


@settings(deadline=None, max_examples=5)
@given(st.integers(20, 200), st.integers(0, 100))
def test_a_spike_is_over_within_the_lead(at: int, seed: int) -> None:
    visits = crowd(FITS - 2)
    simulator = Simulator(GPU, visits, seed=seed, spikes={at: 5.0})
    trace = simulator.record()
    report = simulator.run(12 * S)
    forwards = [decision for decision in trace if isinstance(decision.action, Forward)]
    spike_ns = forwards[at].now_ns
    late = [when for out in report.visits for when in out.late_at_ns]
    assert all(spike_ns <= when <= spike_ns + 960 * MS + 5 * 58 * MS for when in late)


@settings(deadline=None, max_examples=5)
@given(st.integers(2, 10), st.integers(1, 3), st.integers(0, 100))
def test_offline_work_adds_no_miss_and_gets_done(live: int, offline: int, seed: int) -> None:
    visits = [*crowd(live), *([replace(OFFLINE, join_ns=2 * S)] * offline)]
    report = Simulator(GPU, visits, seed=seed).run(10 * S)
    assert report.miss_rate(visits) == 0
    assert all(out.forwards for out in report.visits[live:])


@settings(deadline=None, max_examples=5)
@given(st.permutations(range(6)))
def test_who_is_listed_where_changes_nothing(order: list[int]) -> None:
    visits = crowd(6, spread_ns=31 * MS)
    plain = Simulator(GPU, visits, noise=0).run(4 * S)
    mixed = Simulator(GPU, [visits[place] for place in order], noise=0).run(4 * S)
    for place, out in zip(order, mixed.visits, strict=True):
        assert out.responses_ns == plain.visits[place].responses_ns


def test_sessions_that_go_leave_nothing_behind() -> None:
    visits = [
        replace(visit, leave_ns=visit.join_ns + (place + 1) * 210 * MS)
        for place, visit in enumerate(crowd(FITS))
    ]
    simulator = Simulator(GPU, [*visits, *visits], ladder=True)
    simulator.run(10 * S)
    assert simulator._guests == {}
    assert simulator._queue == []
    assert simulator._running == ()
    assert simulator._decoding is None
    assert not simulator._events


def test_a_trace_is_replayed_exactly_also_from_a_file(tmp_path: Path) -> None:
    simulator = Simulator(GPU, [*crowd(5), OFFLINE])
    trace = simulator.record()
    simulator.run(3 * S)
    assert len(trace) > 100
    save_trace(tmp_path / "trace", trace)
    loaded = load_trace(tmp_path / "trace")
    assert loaded == trace
    assert list(changed(loaded)) == []
    row = trace[50]
    other = replace(row, now_ns=row.now_ns + 1, action=Forward((99,)))
    assert [found for found, _ in changed([*trace[:3], other])] == [other]
    (tmp_path / "trace").write_text('{"now_ns": 1}\n')
    with pytest.raises(ConfigError, match="not a decision"):
        load_trace(tmp_path / "trace")
    (tmp_path / "trace").write_text("no json\n")
    with pytest.raises(ConfigError, match="no trace"):
        load_trace(tmp_path / "trace")


def test_the_same_seed_gives_the_same_decisions() -> None:
    def played() -> object:
        simulator = Simulator(GPU, crowd(4), seed=3)
        trace = simulator.record()
        simulator.run(2 * S)
        return trace

    assert played() == played()


def test_load_and_response_are_what_can_be_counted_by_hand() -> None:
    costs = Costs({("3", 1): 16, ("3", 2): 22}, {"3": (1, 2)})
    two = [demand(4), demand(1)]
    assert utilization(two, costs) == pytest.approx((5 * 11 + 2 * 11) / (480 * MS))
    assert response_ns(two, costs, 30) == 5 * 22 + 22 + 60
    assert utilization([], costs) == 0
    assert decide(0, (), (), costs) == Sleep(None)
