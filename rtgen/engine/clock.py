"""Time for the engine: the machine's, or one that tests move by hand."""

from __future__ import annotations

import threading
import time
from typing import Protocol

from rtgen.errors import ConfigError


class Clock(Protocol):
    """Nanoseconds that never go back."""

    def now_ns(self) -> int: ...

    def wait(self, condition: threading.Condition, until_ns: int | None) -> None:
        """Waits, holding `condition`, until it is notified or `until_ns` has come.

        Args:
            condition: acquired by the caller; released while waiting.
            until_ns: of this clock, or None to wait for a notification alone.
        """
        ...


class RealClock:
    """The machine's monotonic clock."""

    def now_ns(self) -> int:
        return time.monotonic_ns()

    def wait(self, condition: threading.Condition, until_ns: int | None) -> None:
        if until_ns is None:
            condition.wait()
        elif (left_ns := until_ns - time.monotonic_ns()) > 0:
            condition.wait(left_ns / 1e9)


class VirtualClock:
    """A clock for tests and simulations: it moves by `advance`, and to the time waited for.

    Args:
        start_ns: what it shows first.
    """

    def __init__(self, start_ns: int = 0) -> None:
        self._now_ns = start_ns

    def now_ns(self) -> int:
        return self._now_ns

    def advance(self, seconds: float) -> None:
        """Moves the clock forward.

        Raises:
            ConfigError: seconds is negative.
        """
        if seconds < 0:
            raise ConfigError(f"a clock does not go back, got {seconds} s")
        self._now_ns += round(seconds * 1e9)

    def wait(self, condition: threading.Condition, until_ns: int | None) -> None:
        if until_ns is None:
            condition.wait()
        else:
            self._now_ns = max(self._now_ns, until_ns)
