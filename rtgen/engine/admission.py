"""Whether one more session fits, before anyone notices that it did not.

The constraints in the order of their price: memory by bytes, the denoiser's and the decoder's time,
the longest response, and last the simulator, which plays the whole set with the real scheduler for
a while and must not miss one chunk. The first that fails names itself.

A live session that would be the only one needs memory alone: if the machine is too slow for it,
nobody else is harmed, and the ladder makes the best of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rtgen.engine.cost_model import CONDITION, DECODE, CostModel, Profile
from rtgen.engine.load import Demand, response_ns, utilization
from rtgen.engine.pacing import MARGIN_NS
from rtgen.engine.simulator import Simulator, Visit
from rtgen.errors import ConfigError

MAX_LOAD = 1.0
"""Largest predicted share of the denoiser's or decoder's time for live sessions. Predictions carry
their safety, 7 % until the scatter is known."""
ORACLE_NS = 5_000_000_000
ORACLE_SEEDS = (0, 1, 2)


@dataclass(frozen=True, slots=True)
class Shortage:
    """What stands in the way of a session.

    Attributes:
        constraint: "memory", "denoise", "decode", "response" or "simulation".
        detail: needed and available, in words.
    """

    constraint: str
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """What the machine has for sessions.

    Attributes:
        memory_bytes: for all sessions together; None: not limited.
        max_load: see `MAX_LOAD`. Above 1 the lanes are overbooked on purpose: lateness is no
            reason to refuse, and the ladder and `LATE_PERIODS` deal with what comes.
    """

    memory_bytes: int | None = None
    max_load: float = MAX_LOAD

    def __post_init__(self) -> None:
        if self.memory_bytes is not None and self.memory_bytes < 0:
            raise ConfigError(f"memory_bytes must not be negative, got {self.memory_bytes}")
        if not self.max_load > 0:
            raise ConfigError(f"max_load must be positive, got {self.max_load}")


def shortage(
    live: Sequence[Demand], offline: Sequence[Demand], cost: CostModel, capacity: Capacity
) -> Shortage | None:
    """The first constraint that a set of sessions breaks, None if it can be served.

    Args:
        live: sessions that keep time, the new one included.
        offline: sessions that take what is left; they need memory and nothing else.
        cost: of the engine, as it is now.
        capacity: of the machine.
    """
    need = (len(live) + len(offline)) * cost.profile.session_bytes
    if capacity.memory_bytes is not None and need > capacity.memory_bytes:
        return Shortage("memory", f"{_mib(need)} of {_mib(capacity.memory_bytes)} MiB")
    if len(live) < 2:
        return None
    costs, decode_ns = cost.costs(), cost.stage_ns(DECODE)
    condition = sum(cost.stage_ns(CONDITION) / demand.period_ns for demand in live)
    for name, load in (
        ("denoise", utilization(live, costs) + condition),
        ("decode", sum(decode_ns / demand.period_ns for demand in live)),
    ):
        if load > capacity.max_load:
            return Shortage(name, f"{load:.0%} of its time, at most {capacity.max_load:.0%}")
    if capacity.max_load > 1:
        return None
    span_ns = response_ns(live, costs, decode_ns) + MARGIN_NS
    window_ns = min(demand.window_ns for demand in live)
    if span_ns > window_ns:
        return Shortage("response", f"{span_ns / 1e6:.0f} ms of {window_ns / 1e6:.0f} ms a chunk")
    missed = _missed(live, _corrected(cost))
    if missed:
        return Shortage("simulation", f"{missed} chunks late in {ORACLE_NS / 1e9:.0f} s of play")
    return None


def _missed(live: Sequence[Demand], profile: Profile) -> int:
    """Late chunks when the set is played, with joins spread over a period."""
    for seed in ORACLE_SEEDS:
        visits = [
            Visit(rungs=(demand,), join_ns=place * demand.period_ns // len(live))
            for place, demand in enumerate(live)
        ]
        report = Simulator(profile, visits, seed=seed, learn=False).run(ORACLE_NS)
        missed = sum(outcome.late for outcome in report.visits)
        if missed:
            return missed
    return 0


def _corrected(cost: CostModel) -> Profile:
    """The profile as it would be measured now, with the safety that predictions carry."""
    costs, profile = cost.costs(), cost.profile
    forward_ns = {
        shape: {size: costs.ns(shape, size) for size in costs.allowed(shape)}
        for shape in costs.sizes
    }
    stages = {name: {1: cost.stage_ns(name)} for name in (CONDITION, DECODE)}
    return Profile(
        device=profile.device,
        model=profile.model,
        forward_ns={**forward_ns, **stages},
        session_bytes=profile.session_bytes,
    )


def _mib(count: int) -> int:
    return -(-count // 2**20)
