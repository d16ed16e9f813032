from __future__ import annotations

from fractions import Fraction

import pytest

from rtgen.engine.pacing import MARGIN_NS, SAFETY, START_NS, Pacer

MS = 1_000_000
UNIT_NS = 160 * MS


def test_nothing_is_due_before_anything_was_shown() -> None:
    pacer = Pacer(Fraction(4, 25), lead=2)
    assert pacer.deadline_ns(5) is None
    assert pacer.begin_ns(5) == 0


def test_deadlines_follow_the_last_unit_shown() -> None:
    pacer = Pacer(Fraction(4, 25), lead=2)
    pacer.show(10, 1_000 * MS)
    assert pacer.deadline_ns(11) == 1_160 * MS
    assert pacer.deadline_ns(13) == 1_480 * MS
    pacer.show(11, 1_500 * MS)  # the client stalled: the table moves, nothing is caught up
    assert pacer.deadline_ns(12) == 1_660 * MS


def test_a_unit_is_begun_as_early_as_allowed_until_its_cost_is_known() -> None:
    pacer = Pacer(Fraction(4, 25), lead=2)
    pacer.show(0, 0)
    assert pacer.begin_ns(3) == 3 * UNIT_NS - 2 * UNIT_NS


def test_a_unit_is_begun_as_late_as_its_making_allows() -> None:
    pacer = Pacer(Fraction(4, 25), lead=2)
    pacer.show(0, 0)
    for _ in range(50):
        pacer.measure(60 * MS)
    assert pacer.ahead_ns == 60 * MS * SAFETY + MARGIN_NS
    assert pacer.begin_ns(2) == 2 * UNIT_NS - pacer.ahead_ns
    for _ in range(50):
        pacer.measure(1_000 * MS)  # a slow machine: never earlier than the lead allows
    assert pacer.ahead_ns == 2 * UNIT_NS


def test_deadlines_do_not_drift_over_an_hour() -> None:
    pacer = Pacer(Fraction(4, 30), lead=2)  # 133.3 ms: no whole number of nanoseconds
    pacer.show(0, 0)
    assert pacer.deadline_ns(27_000) == 3_600 * 1_000 * MS


def test_before_anything_was_shown_units_ought_to_come_soon() -> None:
    pacer = Pacer(Fraction(4, 25), lead=2, created_ns=1_000 * MS)
    assert pacer.due_ns(0) == 1_000 * MS + START_NS
    assert pacer.due_ns(2) == 1_000 * MS + START_NS + 2 * UNIT_NS
    pacer.show(0, 1_100 * MS)
    assert pacer.due_ns(1) == 1_260 * MS


def test_waiting_for_others_and_the_predicted_load_make_units_begin_earlier() -> None:
    pacer = Pacer(Fraction(4, 25), lead=2)
    pacer.show(0, 0)
    pacer.measure(60 * MS)
    alone = pacer.ahead_ns
    pacer.expected_ns = 100 * MS
    assert pacer.ahead_ns == 100 * MS + MARGIN_NS
    pacer.expected_ns = 0
    pacer.begin(2, pacer.begin_ns(2) + 30 * MS)
    assert pacer.ahead_ns == alone + 30 * MS


def test_headroom_is_what_is_left_of_the_longest_that_a_chunk_may_take() -> None:
    pacer = Pacer(Fraction(4, 25), lead=2)
    pacer.begin(0, 0)
    assert pacer.deliver(0, 50 * MS) == 2 * UNIT_NS - 50 * MS
    pacer.show(0, 60 * MS)
    pacer.begin(1, 60 * MS)
    pacer.begin(2, 100 * MS)
    assert pacer.deliver(1, 110 * MS) == 2 * UNIT_NS - 50 * MS
    late_ns = 500 * MS
    assert pacer.deliver(2, pacer.due_ns(2) + late_ns) == -late_ns


def test_chunks_that_were_taken_back_are_forgotten() -> None:
    pacer = Pacer(Fraction(4, 25), lead=2)
    for _ in range(100):
        pacer.begin(0, 0)
        pacer.begin(1, 0)
    pacer.begin(0, 20 * MS)
    pacer.deliver(0, 30 * MS)
    with pytest.raises(KeyError):
        pacer.deliver(1, 40 * MS)
