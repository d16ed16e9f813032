"""Holds `started` and `finished` back until their moment is played; free of I/O.

The service tells of a turn when its unit is made, up to two units before anybody hears it.
"""

from __future__ import annotations

from collections import deque
from fractions import Fraction

from rtgen.types import ErrorEvent, Finished, ServerEvent, Started

MAX_HELD = 64


class TurnRelay:
    """Events of one session in order; at most `MAX_HELD` wait, then the oldest go out early."""

    def __init__(self) -> None:
        self._held: deque[Started | Finished] = deque()

    def take(self, event: ServerEvent, played: Fraction) -> list[ServerEvent]:
        """Takes an event and returns what is to be sent now.

        Args:
            event: from the service.
            played: media time that was played, seconds.
        """
        is_end = isinstance(event, ErrorEvent) and event.fatal
        if is_end or (isinstance(event, Finished) and event.interrupted):
            # What was announced and will not be played is told at once, so that turns pair.
            return [*self._all(), event]
        if not isinstance(event, Started | Finished):
            return [event]
        self._held.append(event)
        early = [self._held.popleft()] if len(self._held) > MAX_HELD else []
        return [*early, *self.due(played)]

    def due(self, played: Fraction) -> list[ServerEvent]:
        """Events whose moment has been played."""
        found: list[ServerEvent] = []
        while self._held and self._held[0].position_s <= played:
            found.append(self._held.popleft())
        return found

    def _all(self) -> list[ServerEvent]:
        found: list[ServerEvent] = list(self._held)
        self._held.clear()
        return found
