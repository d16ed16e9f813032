from __future__ import annotations

import threading

import pytest

from rtgen.engine.clock import RealClock, VirtualClock
from rtgen.errors import ConfigError


def test_a_virtual_clock_moves_only_when_told() -> None:
    clock = VirtualClock(5)
    clock.advance(0.25)
    assert clock.now_ns() == 250_000_005
    with pytest.raises(ConfigError):
        clock.advance(-1)


def test_waiting_for_a_time_moves_a_virtual_clock_there() -> None:
    clock, condition = VirtualClock(), threading.Condition()
    with condition:
        clock.wait(condition, 10**15)
        clock.wait(condition, 7)  # that time has gone
    assert clock.now_ns() == 10**15


def test_a_real_clock_does_not_wait_for_what_has_gone() -> None:
    clock, condition = RealClock(), threading.Condition()
    start = clock.now_ns()
    with condition:
        clock.wait(condition, start - 10**12)
        clock.wait(condition, start + 1_000)
    assert clock.now_ns() >= start
