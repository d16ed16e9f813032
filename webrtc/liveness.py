"""Whether a peer is there, and how long a session may stay in a state; free of I/O."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass

from rtgen.errors import ConfigError


class State(enum.StrEnum):
    """Where a session is in its life.

    NEGOTIATING -> CONNECTING -> LIVE -> DETACHED; a resumed session is CONNECTING again; from
    everywhere to CLOSED. DRAINING is LIVE under a server that shuts down.
    """

    NEGOTIATING = "negotiating"
    CONNECTING = "connecting"
    LIVE = "live"
    DETACHED = "detached"
    DRAINING = "draining"
    CLOSED = "closed"


NEXT: dict[State, frozenset[State]] = {
    State.NEGOTIATING: frozenset({State.CONNECTING, State.CLOSED}),
    State.CONNECTING: frozenset(
        {State.CONNECTING, State.LIVE, State.DETACHED, State.DRAINING, State.CLOSED}
    ),
    State.LIVE: frozenset({State.CONNECTING, State.DETACHED, State.DRAINING, State.CLOSED}),
    State.DETACHED: frozenset({State.CONNECTING, State.DRAINING, State.CLOSED}),
    State.DRAINING: frozenset({State.CLOSED}),
    State.CLOSED: frozenset(),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeLimits:
    """Seconds; each state ends by itself.

    A peer that vanishes without a word is missed after `silence_s` and its place is free after
    `lost_s` more; one that said good-bye to its connection keeps its place for `resume_s`.

    Attributes:
        negotiating_s: from the offer to the answer.
        connecting_s: from the answer to a connection.
        silence_s: without RTCP and heartbeat, after which a peer is gone.
        lost_s: for which the place of a vanished peer is kept.
        resume_s: for which the place of a peer that closed its connection is kept.
        draining_s: for which sessions go on while the server shuts down.
        session_s: of a session in all.
        heartbeat_s: between two heartbeats of a peer.
    """

    negotiating_s: float = 5.0
    connecting_s: float = 12.0
    silence_s: float = 6.0
    lost_s: float = 3.0
    resume_s: float = 8.0
    draining_s: float = 5.0
    session_s: float = 3600.0
    heartbeat_s: float = 2.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ConfigError(f"{name} must be a positive number of seconds, got {value}")
        if self.silence_s <= self.heartbeat_s:
            raise ConfigError(
                f"silence_s must exceed heartbeat_s, got {self.silence_s} and {self.heartbeat_s}"
            )


class Life:
    """State, time limits and last sign of life of one session.

    Args:
        limits: in seconds.
        now_s: time, by any monotonic clock.

    Attributes:
        state: now.
        reason: why it is closed or detached.
    """

    def __init__(self, limits: TimeLimits, now_s: float) -> None:
        self._limits = limits
        self._born_s = self._since_s = self._heard_s = now_s
        self._detached_s = limits.resume_s
        self.state = State.NEGOTIATING
        self.reason = ""

    def go(self, state: State, now_s: float, reason: str = "") -> None:
        """Changes the state.

        Raises:
            ConfigError: that state does not follow this one.
        """
        if state not in NEXT[self.state]:
            raise ConfigError(f"a session does not go from {self.state} to {state}")
        self.state, self.reason = state, reason
        self._since_s = self._heard_s = now_s

    def heard(self, now_s: float) -> None:
        """The peer gave a sign of life."""
        self._heard_s = max(self._heard_s, now_s)

    def detach(self, now_s: float, reason: str, *, vanished: bool) -> None:
        """The peer has gone; its place is kept for a while."""
        self.go(State.DETACHED, now_s, reason)
        self._detached_s = self._limits.lost_s if vanished else self._limits.resume_s

    def is_silent(self, now_s: float) -> bool:
        """Whether a connected peer has not been heard of for too long."""
        connected = self.state in (State.LIVE, State.DRAINING)
        return connected and now_s - self._heard_s > self._limits.silence_s

    def expired(self, now_s: float) -> str | None:
        """Why the session must be closed now, None if it need not."""
        limits, in_state_s = self._limits, now_s - self._since_s
        if self.state is not State.CLOSED and now_s - self._born_s > limits.session_s:
            return "time is up"
        match self.state:
            case State.NEGOTIATING if in_state_s > limits.negotiating_s:
                return "negotiation took too long"
            case State.CONNECTING if in_state_s > limits.connecting_s:
                return "no connection"
            case State.DETACHED if in_state_s > self._detached_s:
                return self.reason or "peer gone"
            case State.DRAINING if in_state_s > limits.draining_s:
                return "shutdown"
        return None
