"""Counters and gauges of the engine, and notices of what happened to it.

Counters have Prometheus' form: names `rtgen_engine_*`, seconds, bytes, `_total`. Notices are
bounded by number, the oldest makes room.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass

MAX_NOTICES = 256


@dataclass(frozen=True, slots=True)
class Notice:
    """Something that an operator may want to know.

    Attributes:
        kind: "profile_stale", "rung", "refused" or "failed".
        at_ns: by the engine's clock.
        detail: in words.
    """

    kind: str
    at_ns: int
    detail: str


class EngineMetrics:
    """Counts; any thread may count and read."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, float] = {}
        self._notices: deque[Notice] = deque(maxlen=MAX_NOTICES)

    def count(self, name: str, by: float = 1) -> None:
        """Adds to `rtgen_engine_<name>`."""
        with self._lock:
            key = f"rtgen_engine_{name}"
            self._counts[key] = self._counts.get(key, 0) + by

    def show(self, figures: Mapping[str, float]) -> None:
        """Sets gauges `rtgen_engine_<name>`."""
        with self._lock:
            self._counts.update({f"rtgen_engine_{name}": value for name, value in figures.items()})

    def note(self, kind: str, at_ns: int, detail: str) -> None:
        """Keeps a notice and counts its kind."""
        with self._lock:
            self._notices.append(Notice(kind, at_ns, detail))
        self.count(f"{kind}_total")

    def counts(self) -> dict[str, float]:
        """All counters and gauges as they are."""
        with self._lock:
            return dict(self._counts)

    def notices(self) -> list[Notice]:
        """The latest notices, oldest first."""
        with self._lock:
            return list(self._notices)
