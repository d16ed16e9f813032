"""Lanes that tell how long their oldest job has been running, so that a hang can be seen."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import ParamSpec, TypeVar

from rtgen.engine.lanes import Lane, Lanes

P = ParamSpec("P")
R = TypeVar("R")


class Watch:
    """Remembers when the jobs that have not ended were submitted; any thread may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._since: dict[int, float] = {}

    @property
    def stalled_s(self) -> float:
        """Seconds since the oldest unfinished job was submitted; 0 if there is none."""
        with self._lock:
            oldest = min(self._since.values(), default=None)
        return 0.0 if oldest is None else time.monotonic() - oldest

    def begin(self) -> int:
        """A job is about to be submitted; returns its number."""
        with self._lock:
            number = next(self._numbers)
            self._since[number] = time.monotonic()
        return number

    def end(self, number: int) -> None:
        """The job has ended, or was not taken."""
        with self._lock:
            self._since.pop(number, None)


class WatchedLane:
    """A lane whose jobs are watched, from the moment when a place is asked for."""

    def __init__(self, lane: Lane, watch: Watch) -> None:
        self._lane, self._watch = lane, watch

    @property
    def free(self) -> int:
        return self._lane.free

    def submit(self, job: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        number = self._watch.begin()
        try:
            future = self._lane.submit(job, *args, **kwargs)
        except BaseException:
            self._watch.end(number)
            raise
        future.add_done_callback(lambda _: self._watch.end(number))
        return future

    def close(self) -> None:
        self._lane.close()


def watched(lanes: Lanes, watch: Watch) -> Lanes:
    """The same lanes, watched."""
    return Lanes(
        denoise=WatchedLane(lanes.denoise, watch),
        decode=WatchedLane(lanes.decode, watch),
        threaded=lanes.threaded,
    )
