"""When live units must be there, and when they are begun: pure functions of what was observed.

A unit is begun as late as its making allows, because what it says and shows is decided then.
"""

from __future__ import annotations

from collections import deque
from fractions import Fraction

from rtgen.timing import percentile

MARGIN_NS = 40_000_000
"""Kept free before a unit's time, for its way to the screen."""
SAFETY = 1.25


class Pacer:
    """The time table of one live session, in nanoseconds of the engine's clock.

    The client's playout is the master: the last acknowledgement says when a unit was shown, and
    later units follow at their exact distance. A client that stalls moves the table, so nothing is
    made faster afterwards to catch up.

    Args:
        duration: seconds of one unit.
        lead: units that may exist beyond the one on screen.
    """

    def __init__(self, duration: Fraction, lead: int) -> None:
        self._duration = duration
        self._most_ahead_ns = int(lead * duration * 10**9)
        self._shown: tuple[int, int] | None = None
        self._spans_ns: deque[int] = deque(maxlen=32)

    def show(self, index: int, now_ns: int) -> None:
        """Unit `index` is on the screen since `now_ns`."""
        self._shown = (index, now_ns)

    def measure(self, span_ns: int) -> None:
        """A unit took `span_ns` from its beginning to its delivery."""
        self._spans_ns.append(span_ns)

    @property
    def ahead_ns(self) -> int:
        """How long before its time a unit is begun; as early as allowed until measured."""
        if not self._spans_ns:
            return self._most_ahead_ns
        usual = percentile(list(self._spans_ns), 0.95)
        return min(int(usual * SAFETY) + MARGIN_NS, self._most_ahead_ns)

    def deadline_ns(self, index: int) -> int | None:
        """When unit `index` has to be on the screen; None before anything was shown."""
        if self._shown is None:
            return None
        shown, at_ns = self._shown
        return at_ns + int((index - shown) * self._duration * 10**9)

    def begin_ns(self, index: int) -> int:
        """When unit `index` is to be begun; 0 before anything was shown."""
        deadline = self.deadline_ns(index)
        return 0 if deadline is None else deadline - self.ahead_ns
