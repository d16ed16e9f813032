"""Stage times: wall and CPU time of named parts of the loop, as percentiles over recent ones.

CPU time is that of the thread that runs the stage. It is the honest cost on a machine that others
use too; intra-op helper threads are not in it, so measure costs with one intra-op thread.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from rtgen.errors import ConfigError


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest of `values` that at least `share` of them do not exceed (nearest rank).

    Args:
        values: at least one, in any order.
        share: 0 to 1.

    Raises:
        ConfigError: no values, or a share out of range.
    """
    if not values or not 0 <= share <= 1:
        raise ConfigError(f"percentile needs values and a share in [0, 1], got {share}")
    return sorted(values)[max(math.ceil(share * len(values)), 1) - 1]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSummary:
    """Times of one stage in milliseconds; count and CPU sum over all runs, the rest over recent.

    Attributes:
        count: runs since the timer was made.
        wall_p50: median wall time.
        wall_p95: wall time that 95 % do not exceed.
        wall_max: longest.
        cpu_mean: mean CPU time of the running thread.
        cpu_total: CPU time since the timer was made.
    """

    count: int
    wall_p50: float
    wall_p95: float
    wall_max: float
    cpu_mean: float
    cpu_total: float


class StageTimer:
    """Times stages; any thread may record, and reading does not disturb.

    Args:
        capacity: runs per stage that the percentiles look back on; older ones are forgotten.
    """

    def __init__(self, capacity: int = 512) -> None:
        if capacity < 1:
            raise ConfigError(f"capacity must be at least 1, got {capacity}")
        self._capacity = capacity
        self._lock = threading.Lock()
        self._recent: dict[str, deque[tuple[int, int]]] = {}
        self._totals: dict[str, tuple[int, int]] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Times the body and records it under `name`, also when it raises."""
        wall, cpu = time.perf_counter_ns(), time.thread_time_ns()
        try:
            yield
        finally:
            self.record(name, time.perf_counter_ns() - wall, time.thread_time_ns() - cpu)

    def record(self, name: str, wall_ns: int, cpu_ns: int) -> None:
        """Adds one run of a stage that was timed elsewhere."""
        with self._lock:
            recent = self._recent.setdefault(name, deque(maxlen=self._capacity))
            recent.append((wall_ns, cpu_ns))
            count, total = self._totals.get(name, (0, 0))
            self._totals[name] = (count + 1, total + cpu_ns)

    def summary(self) -> dict[str, StageSummary]:
        """The stages seen so far, in the order of their first run."""
        with self._lock:
            recent = {name: tuple(runs) for name, runs in self._recent.items()}
            totals = dict(self._totals)
        return {name: _summary(runs, *totals[name]) for name, runs in recent.items()}

    def reset(self) -> None:
        """Forgets everything, for example after a warm-up."""
        with self._lock:
            self._recent.clear()
            self._totals.clear()


def _summary(runs: Sequence[tuple[int, int]], count: int, cpu_total_ns: int) -> StageSummary:
    wall = [wall_ns / 1e6 for wall_ns, _ in runs]
    return StageSummary(
        count=count,
        wall_p50=percentile(wall, 0.5),
        wall_p95=percentile(wall, 0.95),
        wall_max=max(wall),
        cpu_mean=sum(cpu_ns for _, cpu_ns in runs) / len(runs) / 1e6,
        cpu_total=cpu_total_ns / 1e6,
    )
