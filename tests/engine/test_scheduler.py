"""The scheduler against slow oracles that try everything, and its rules one by one."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rtgen.engine import scheduler
from rtgen.engine.scheduler import (
    Action,
    Costs,
    DecodeJob,
    Forward,
    Row,
    Sleep,
    decide,
    decide_decode,
    slack_ns,
)
from tests.test_layering import loaded_after

MS = 1_000_000
BASE, EACH = 10, 2
Policy = Callable[[int, Sequence[Row], Sequence[Row], Costs], Action]


def costs(*sizes: int, shapes: Sequence[str] = ("1",)) -> Costs:
    """10 + 2 a row."""
    return Costs(
        {(shape, size): BASE + EACH * size for shape in shapes for size in sizes},
        {shape: tuple(sizes) for shape in shapes},
    )


ALL = costs(1, 2, 3, 4)


def misses(policy: Policy, rows: Sequence[Row]) -> int:
    """Plays rows that are all there at the start to their end; how many came late."""
    left, now, late = {row.seq: row for row in rows}, 0, 0
    while left:
        action = policy(now, list(left.values()), (), ALL)
        assert isinstance(action, Forward)
        now += ALL.ns("1", len(action.live))
        for seq in action.live:
            late += now > left.pop(seq).due_ns
    return late


def fewest_misses(rows: Sequence[Row], now: int = 0) -> int:
    """The best that any order of any batches can do, found by trying all of them."""
    if not rows:
        return 0
    best = len(rows)
    for size in range(1, min(4, len(rows)) + 1):
        done = now + ALL.ns("1", size)
        for batch in itertools.combinations(rows, size):
            rest = [row for row in rows if row not in batch]
            late = sum(done > row.due_ns for row in batch)
            best = min(best, late + fewest_misses(rest, done))
    return best


due_times = st.lists(st.integers(0, 80), min_size=1, max_size=5)


@settings(deadline=None, max_examples=60)
@given(due_times)
def test_whatever_can_be_on_time_is(dues: list[int]) -> None:
    rows = [Row(seq=seq, shape="1", due_ns=due, period_ns=1000) for seq, due in enumerate(dues)]
    if fewest_misses(rows) == 0:
        assert misses(decide, rows) == 0


@pytest.mark.parametrize("bug", ["order", "cut"])
def test_the_oracle_finds_a_scheduler_that_orders_or_cuts_wrongly(bug: str) -> None:
    def planted(now: int, live: Sequence[Row], offline: Sequence[Row], costs: Costs) -> Action:
        rows = sorted(live, key=lambda row: row.seq if bug == "order" else row.due_ns)
        return Forward(tuple(row.seq for row in rows[: 1 if bug == "order" else 4]))

    dues = {"order": (50, 50, 12), "cut": (12, 100, 100, 100)}[bug]
    rows = [Row(seq=seq, shape="1", due_ns=due, period_ns=1000) for seq, due in enumerate(dues)]
    assert fewest_misses(rows) == 0
    assert misses(decide, rows) == 0
    assert misses(planted, rows) > 0


rows_drawn = st.builds(
    Row,
    seq=st.integers(0, 10**6),
    shape=st.sampled_from(("1", "2")),
    release_ns=st.integers(0, 40),
    due_ns=st.integers(0, 200),
    forwards=st.integers(1, 4),
    setup_ns=st.integers(0, 3),
    period_ns=st.integers(20, 100),
)
many = st.lists(rows_drawn, max_size=5, unique_by=lambda row: row.seq)


def chosen_slowly(now: int, live: Sequence[Row], table: Costs) -> tuple[int, ...]:
    """The batch by its definition: of all allowed sets with the head, the best by four rules."""
    ready = [row for row in live if row.release_ns <= now]

    def urgency(row: Row) -> tuple[int, int, int]:
        hopeless = now - row.due_ns >= 2 * row.period_ns
        return (now + row.period_ns if hopeless else row.due_ns, row.due_ns, row.seq)

    head = min(ready, key=urgency)
    alike = [row for row in ready if row.shape == head.shape]
    sets = [
        batch
        for size in table.allowed(head.shape)
        for batch in itertools.combinations(sorted(alike, key=urgency), size)
        if head in batch
    ]

    def on_time(batch: Sequence[Row]) -> bool:
        setup = sum(row.setup_ns for row in batch)
        return now + setup + head.forwards * table.ns(head.shape, len(batch)) <= head.due_ns

    fitting = [batch for batch in sets if on_time(sorted_prefix(batch, alike, urgency))] or sets
    largest = max(len(batch) for batch in fitting)
    best = min(
        (batch for batch in fitting if len(batch) == largest),
        key=lambda batch: [urgency(row) for row in batch],
    )
    return tuple(row.seq for row in best)


def sorted_prefix(
    batch: Sequence[Row], alike: Sequence[Row], urgency: Callable[[Row], tuple[int, int, int]]
) -> Sequence[Row]:
    """The most urgent rows, as many as the batch has: only they may be chosen."""
    return sorted(alike, key=urgency)[: len(batch)]


@settings(deadline=None, max_examples=200)
@given(many, st.integers(0, 60), st.sampled_from([(1,), (1, 2), (1, 2, 4), (1, 3)]))
def test_the_batch_is_the_one_that_the_definition_gives(
    live: list[Row], now: int, sizes: tuple[int, ...]
) -> None:
    table = costs(*sizes, shapes=("1", "2"))
    action = decide(now, live, (), table)
    if any(row.release_ns <= now for row in live):
        assert action == Forward(chosen_slowly(now, live, table))
    else:
        assert action == Sleep(min((row.release_ns for row in live), default=None))


@settings(deadline=None, max_examples=60)
@given(many, many, st.integers(0, 60), st.randoms(use_true_random=False))
def test_the_order_in_which_sessions_are_listed_changes_nothing(
    live: list[Row], offline: list[Row], now: int, random: object
) -> None:
    table = costs(1, 2, 4, shapes=("1", "2"))
    action = decide(now, live, offline, table)
    assert decide(now, live[::-1], offline[::-1], table) == action


@settings(deadline=None, max_examples=200)
@given(many, many, st.integers(0, 60))
def test_offline_work_is_never_worth_a_live_deadline(
    live: list[Row], offline: list[Row], now: int
) -> None:
    table = costs(1, 2, 4, shapes=("1", "2"))
    action, bare = decide(now, live, offline, table), decide(now, live, (), table)
    if not isinstance(action, Forward) or not action.offline:
        return
    assert not any(row.is_starting for row in live)
    if action.live:
        assert isinstance(bare, Forward)
        assert action.live == bare.live
    shape = next(row.shape for row in offline if row.seq == action.offline[0])
    rows = len(action.live) + len(action.offline)
    assert rows in table.allowed(shape)
    slack = slack_ns(now, live, table)
    if slack is not None:
        alone = table.ns(shape, len(action.live)) if action.live else 0
        setup = sum(row.setup_ns for row in offline if row.seq in action.offline)
        assert table.ns(shape, rows) - alone + setup <= slack


def test_offline_work_waits_while_a_session_starts() -> None:
    offline = [Row(seq=9, shape="1")]
    starting = Row(seq=0, shape="1", release_ns=500, due_ns=10**6, is_starting=True)
    assert decide(0, [], offline, ALL) == Forward((), (9,))
    assert decide(0, [starting], offline, ALL) == Sleep(500)
    running = Row(seq=0, shape="1", release_ns=500, due_ns=10**6)
    assert decide(0, [running], offline, ALL) == Forward((), (9,))


def test_offline_rows_ride_along_where_there_is_slack() -> None:
    offline = [Row(seq=8, shape="1", served=5), Row(seq=9, shape="1", served=4)]
    easy = Row(seq=0, shape="1", due_ns=1000, period_ns=1000)
    assert decide(0, [easy], offline, ALL) == Forward((0,), (9, 8))
    tight = Row(seq=0, shape="1", due_ns=14, period_ns=1000)
    assert decide(0, [tight], offline, ALL) == Forward((0,), (9,))
    late = Row(seq=0, shape="1", due_ns=5, period_ns=1000)
    assert decide(0, [late], offline, ALL) == Forward((0,))


def test_offline_sessions_take_turns() -> None:
    served = dict.fromkeys(range(3), 0)
    for _ in range(30):
        rows = [Row(seq=seq, shape="1", served=count) for seq, count in served.items()]
        action = decide(0, (), rows, costs(1))
        assert isinstance(action, Forward)
        served[action.offline[0]] += 1
    assert set(served.values()) == {10}


def test_a_session_late_beyond_help_gives_way_and_is_not_forgotten() -> None:
    late = Row(seq=0, shape="1", due_ns=-250, period_ns=100)
    on_time = Row(seq=1, shape="1", due_ns=90, period_ns=100)
    later = Row(seq=2, shape="1", due_ns=110, period_ns=100)
    single = costs(1)
    assert decide(0, [late, on_time, later], (), single) == Forward((1,))
    assert decide(0, [late, later], (), single) == Forward((0,))
    barely = Row(seq=0, shape="1", due_ns=-150, period_ns=100)
    assert decide(0, [barely, on_time, later], (), single) == Forward((0,))


def test_an_unknown_shape_runs_alone_and_is_taken_to_be_costly() -> None:
    rows = [Row(seq=seq, shape="7", due_ns=1000) for seq in range(3)]
    assert decide(0, rows, (), ALL) == Forward((0,))
    assert ALL.ns("7", 1) == BASE + EACH
    assert Costs({}).ns("1", 1) == 0


def test_live_chunks_are_decoded_by_deadline_and_offline_ones_into_slack() -> None:
    jobs = [DecodeJob(0, None), DecodeJob(1, 500), DecodeJob(2, 400)]
    assert decide_decode(0, jobs, [400, 500], 1, 30) == 2
    offline = jobs[:1]
    assert decide_decode(0, offline, [], 1, 30) == 0
    assert decide_decode(0, offline, [100], 0, 30) == 0
    assert decide_decode(0, offline, [100], 1, 30) is None
    assert decide_decode(0, offline, [50], 0, 30) is None
    assert decide_decode(0, [], [50], 0, 30) is None


def test_the_module_knows_no_clock() -> None:
    names = set(vars(scheduler))
    assert not names & {"time", "asyncio", "threading", "random"}


def test_decisions_simulations_and_admission_load_no_torch() -> None:
    assert not loaded_after("import rtgen.engine.admission, rtgen.engine.trace", "torch")
