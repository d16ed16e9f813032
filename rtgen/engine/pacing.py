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
START_NS = 500_000_000
"""From a session's opening to when its first unit ought to be there."""


class Pacer:
    """The time table of one live session, in nanoseconds of the engine's clock.

    The client's playout is the master: the last acknowledgement says when a unit was shown, and
    later units follow at their exact distance. A client that stalls moves the table, so nothing is
    made faster afterwards to catch up.

    Args:
        duration: seconds of one unit.
        lead: units that may exist beyond the one on screen.
        units_per_chunk: units begun together.
        created_ns: when the session was opened.

    Attributes:
        expected_ns: least time to reckon with from a unit's beginning to its delivery, whatever
            was measured: what the load of the engine now predicts.
    """

    def __init__(
        self, duration: Fraction, lead: int, units_per_chunk: int = 1, created_ns: int = 0
    ) -> None:
        self._duration = duration
        self._most_ahead_ns = int(lead * duration * 10**9)
        self._window_ns = int((lead - units_per_chunk + 1) * duration * 10**9)
        self._created_ns = self._freed_ns = created_ns
        self._shown: tuple[int, int] | None = None
        self._begins: dict[int, tuple[int, int]] = {}
        self._spans_ns: deque[int] = deque(maxlen=32)
        self._waits_ns: deque[int] = deque(maxlen=32)
        self.expected_ns = 0

    def show(self, index: int, now_ns: int) -> None:
        """Unit `index` is on the screen since `now_ns`, and a place for another one is free."""
        self._shown = (index, now_ns)
        self._freed_ns = now_ns

    def measure(self, span_ns: int) -> None:
        """A unit took `span_ns` from its beginning to its delivery."""
        self._spans_ns.append(span_ns)

    def begin(self, index: int, now_ns: int) -> None:
        """The chunk whose first unit is `index` is begun; what was begun beyond it is void."""
        ready_ns = now_ns
        if self._shown is not None:
            ready_ns = min(max(self.begin_ns(index), self._freed_ns), now_ns)
            self._waits_ns.append(now_ns - ready_ns)
        self._begins = {old: times for old, times in self._begins.items() if old < index}
        self._begins[index] = (ready_ns, now_ns)

    def deliver(self, index: int, now_ns: int) -> int:
        """The chunk whose first unit is `index` is finished.

        Returns:
            Its headroom in nanoseconds: the longest that it might have taken minus what it took,
            from when it could have been begun; for a late one minus its lateness.
        """
        ready_ns, begun_ns = self._begins.pop(index)
        self.measure(now_ns - begun_ns)
        headroom_ns = self._window_ns - (now_ns - ready_ns)
        deadline_ns = self.deadline_ns(index)
        if deadline_ns is not None and now_ns > deadline_ns:
            return min(headroom_ns, deadline_ns - now_ns)
        return headroom_ns

    @property
    def ahead_ns(self) -> int:
        """How long before its time a unit is begun; as early as allowed until measured."""
        if not self._spans_ns:
            return self._most_ahead_ns
        usual = percentile(list(self._spans_ns), 0.95)
        wait = percentile(list(self._waits_ns), 0.95) if self._waits_ns else 0
        span = max(int(usual * SAFETY) + int(wait), self.expected_ns)
        return min(span + MARGIN_NS, self._most_ahead_ns)

    def deadline_ns(self, index: int) -> int | None:
        """When unit `index` has to be on the screen; None before anything was shown."""
        if self._shown is None:
            return None
        shown, at_ns = self._shown
        return at_ns + int((index - shown) * self._duration * 10**9)

    def due_ns(self, index: int) -> int:
        """`deadline_ns`; before anything was shown, when the unit ought to be there."""
        known = self.deadline_ns(index)
        if known is not None:
            return known
        return self._created_ns + START_NS + int(index * self._duration * 10**9)

    def begin_ns(self, index: int) -> int:
        """When unit `index` is to be begun; 0 before anything was shown."""
        deadline = self.deadline_ns(index)
        return 0 if deadline is None else deadline - self.ahead_ns
