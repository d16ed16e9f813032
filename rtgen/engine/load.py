"""What sessions ask of the denoiser, and what that adds up to."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rtgen.engine.scheduler import Costs


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What one session asks of the engine, chunk after chunk.

    Attributes:
        noisy: shapes of the forwards from a chunk's beginning to its x0.
        clean: shape of the forward after x0, None if it is merged into the next chunk's first.
        units_per_chunk: units made together.
        unit_ns: playing time of one.
        lead: units that may exist beyond the one on screen.
    """

    noisy: tuple[str, ...]
    clean: str | None
    units_per_chunk: int
    unit_ns: int
    lead: int

    @property
    def period_ns(self) -> int:
        """Playing time of a chunk."""
        return self.units_per_chunk * self.unit_ns

    @property
    def window_ns(self) -> int:
        """From when a chunk can be begun at the earliest to when it must be shown."""
        return (self.lead - self.units_per_chunk + 1) * self.unit_ns

    @property
    def forwards(self) -> tuple[str, ...]:
        """Shapes of all forwards of a chunk."""
        return self.noisy if self.clean is None else (*self.noisy, self.clean)


def utilization(demands: Sequence[Demand], costs: Costs) -> float:
    """Share of the denoiser's time that live sessions take, in batches as full as they can be."""
    total = 0.0
    for demand in demands:
        for shape in demand.forwards:
            size = costs.largest(shape, len(demands))
            total += costs.ns(shape, size) / size / demand.period_ns
    return total


def response_ns(demands: Sequence[Demand], costs: Costs, decode_ns: int) -> int:
    """Time from a chunk's beginning to its delivery when all sessions are at work.

    All forwards of the costliest session's chunk in full batches, one more that is under way when
    it comes, and its decode behind one that is under way.
    """
    worst = 0
    for demand in demands:
        spans = [costs.ns(s, costs.largest(s, len(demands))) for s in demand.forwards]
        worst = max(worst, sum(spans) + max(spans))
    return worst + 2 * decode_ns
