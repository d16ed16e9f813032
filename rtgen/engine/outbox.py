"""What a session has for its client: finished units, events, and the figures about them.

Not thread-safe; its session locks it. Units are bounded by the session's credits. Events are
bounded by number: the oldest figures make room first, then the oldest event.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from fractions import Fraction

from rtgen.timing import StageTimer
from rtgen.types import ErrorEvent, Finished, ServerEvent, Started, Stats, Unit

MAX_EVENTS = 64
STATS_EVERY = 25
"""Units from one `Stats` event to the next."""


class Outbox:
    """Finished units and events of one session.

    Args:
        timer: the engine's stage times.
        duration: seconds of one unit.
    """

    def __init__(self, timer: StageTimer, duration: Fraction) -> None:
        self._timer = timer
        self._duration = duration
        self.units: deque[Unit] = deque()
        self._events: deque[ServerEvent] = deque()
        self._open_turn: Started | None = None
        self._delivered = self._dropped = self._late = 0
        self._times_ns: deque[int] = deque(maxlen=33)

    def put(
        self,
        unit: Unit,
        turns: Iterable[Started | Finished],
        *,
        now_ns: int,
        is_late: bool,
        buffered_s: float,
    ) -> None:
        """Adds a unit and the turns of speech that start or end in it."""
        self.units.append(unit)
        self._times_ns.append(now_ns)
        self._delivered += 1
        self._late += is_late
        for turn in turns:
            self._open_turn = turn if isinstance(turn, Started) else None
            self.post(turn)
        if self._delivered % STATS_EVERY == 0:
            self.post(self.stats(buffered_s))

    def drop(self, count: int) -> None:
        """Forgets the units that wait; `count` were made or begun for nothing."""
        self.units.clear()
        self._dropped += count

    def end_turn(self, generation: int, played_s: float) -> None:
        """Reports a turn that was announced and is cut at `played_s`."""
        if self._open_turn is not None:
            position_s = max(played_s, self._open_turn.position_s)
            self.post(Finished(generation=generation, position_s=position_s, interrupted=True))
            self._open_turn = None

    def fail(self, message: str) -> None:
        """Reports what ended the session."""
        self.post(ErrorEvent(message=message, fatal=True))

    def pop_event(self) -> ServerEvent | None:
        """The next event, None if there is none now."""
        return self._events.popleft() if self._events else None

    def stats(self, buffered_s: float) -> Stats:
        """Figures so far; the real-time factor is over the last 32 units."""
        times = self._times_ns
        span_ns = times[-1] - times[0] if len(times) > 1 else 0
        media_ns = float(self._duration * (len(times) - 1) * 10**9)
        return Stats(
            units=self._delivered,
            dropped=self._dropped,
            late=self._late,
            buffered_s=buffered_s,
            real_time_factor=media_ns / span_ns if span_ns else 0.0,
            stage_ms={
                name: {"p50": stage.wall_p50, "p95": stage.wall_p95, "max": stage.wall_max}
                for name, stage in self._timer.summary().items()
            },
        )

    def post(self, event: ServerEvent) -> None:
        """Adds an event; the oldest figures make room, then the oldest event."""
        if len(self._events) >= MAX_EVENTS:
            oldest = next((old for old in self._events if isinstance(old, Stats)), self._events[0])
            self._events.remove(oldest)
        self._events.append(event)
