"""Which live session gives up quality when time runs short, and when it gets it back.

Rung 0 is what was asked for; every rung below costs less. Going down is quick: before anyone is
late if the predicted load is too high, and one rung for the least degraded session whenever a chunk
comes with little time left. Going up is slow: many calm chunks, and a prediction that it fits. So a
load near the limit does not swing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rtgen.errors import ConfigError

LOW_SHARE, CALM_SHARE = 0.25, 0.5
"""Of a chunk's playing time: below the first a chunk came late, above the second it was calm."""
CALM_CHUNKS = 8
FULL_LOAD, CALM_LOAD = 1.0, 0.92
"""Predicted share of the denoiser's time: above the first someone goes down; a session gets quality
back if the load stays below the second."""

Load = Callable[[Mapping[int, int]], float]
"""Predicted load for rungs by `seq`."""


@dataclass(frozen=True, slots=True)
class Move:
    """Session `seq` changes from one rung to another, from its next chunk on."""

    seq: int
    was: int
    rung: int


@dataclass(slots=True)
class _Place:
    lowest: int
    rung: int = 0
    calm: int = 0
    since_move: int = 0


class Ladder:
    """Rungs of the live sessions. Sans-I/O; ties go to the newest session."""

    def __init__(self) -> None:
        self._places: dict[int, _Place] = {}

    @property
    def rungs(self) -> Mapping[int, int]:
        """Rung of each session by its `seq`."""
        return {seq: place.rung for seq, place in self._places.items()}

    def join(self, seq: int, lowest: int) -> None:
        """A session comes, on rung 0.

        Args:
            seq: its name.
            lowest: rung that it never goes below; 0 for a session that has only one.

        Raises:
            ConfigError: it is there, or `lowest` is negative.
        """
        if seq in self._places or lowest < 0:
            raise ConfigError(f"session {seq} is there already, or has no rung ({lowest})")
        self._places[seq] = _Place(lowest)

    def leave(self, seq: int) -> None:
        """A session goes; one that is not there may."""
        self._places.pop(seq, None)

    def make_room(self, load: Load) -> list[Move]:
        """Goes down until the predicted load fits, or nobody may go lower."""
        moves: list[Move] = []
        while load(self.rungs) > FULL_LOAD and (move := self._down(at_once=True)):
            moves.append(move)
        return moves

    def delivered(
        self,
        seq: int,
        headroom_ns: int,
        period_ns: int,
        load: Load,
    ) -> Move | None:
        """A chunk was delivered.

        Args:
            seq: whose.
            headroom_ns: the longest that it might have taken minus what it took, from when it
                could have been begun to its delivery; negative if it was late.
            period_ns: playing time of the chunk.
            load: predicted load.

        Returns:
            What changes, if anything does: perhaps another session.
        """
        place = self._places.get(seq)
        if place is None:
            return None
        place.since_move += 1
        if headroom_ns < LOW_SHARE * period_ns:
            for other in self._places.values():
                other.calm = 0
            return self._down()
        place.calm = place.calm + 1 if headroom_ns > CALM_SHARE * period_ns else 0
        if place.rung and place.calm >= CALM_CHUNKS and self._is_worst(place):
            if load({**self.rungs, seq: place.rung - 1}) <= CALM_LOAD:
                return self._move(seq, place.rung - 1)
            place.calm = 0
        return None

    def _is_worst(self, place: _Place) -> bool:
        return place.rung == max(other.rung for other in self._places.values())

    def _down(self, *, at_once: bool = False) -> Move | None:
        """Moves the least degraded session that may go lower: one rung a chunk, or at once."""
        able = [
            (place.rung, -seq)
            for seq, place in self._places.items()
            if place.rung < place.lowest and (at_once or place.since_move or not place.rung)
        ]
        if not able:
            return None
        rung, negative = min(able)
        return self._move(-negative, rung + 1)

    def _move(self, seq: int, rung: int) -> Move:
        place = self._places[seq]
        move = Move(seq, place.rung, rung)
        place.rung, place.calm, place.since_move = rung, 0, 0
        return move
