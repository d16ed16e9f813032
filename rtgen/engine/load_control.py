"""The engine's judgement of its load: who may come, who goes down a rung, how long a chunk takes.

Joins admission, ladder and cost model for the sessions of one engine. `refusal` is asked by
clients' threads, everything else by the engine's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from rtgen.engine.admission import Capacity, shortage
from rtgen.engine.calibrate import (
    ModelFacts,
    free_bytes,
    measure,
    model_facts,
    restricted,
    safe_sizes,
)
from rtgen.engine.contract import Pipeline
from rtgen.engine.cost_model import DECODE, CostModel, Profile
from rtgen.engine.ladder import Ladder, Move
from rtgen.engine.lanes import Lanes
from rtgen.engine.load import Demand, response_ns, utilization
from rtgen.errors import ConfigError
from rtgen.types import Refusal, SessionSpec, UnitFormat

MAX_BATCH = 8
"""Largest batch that is tried at start."""
RETRY_AFTER_S = 5.0
MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0


@dataclass(frozen=True, slots=True)
class Step:
    """A session's forwards per unit change.

    Attributes:
        seq: the session.
        num_inference_steps: from its next chunk on.
        degraded: whether they are fewer than was asked for.
    """

    seq: int
    num_inference_steps: int
    degraded: bool


def prepare(
    pipeline: Pipeline,
    lanes: Lanes,
    max_sessions: int,
    profile: Profile | None,
    capacity: Capacity | None,
    on_stale: Callable[[float], None],
) -> tuple[CostModel, tuple[int, ...], LoadControl]:
    """Measures what an engine of many sessions needs to know; see `Engine` for the arguments.

    If it fails, the lanes are closed.

    Returns:
        Predictions, the batch sizes at which rows keep their bits, and the control.
    """
    try:
        facts = model_facts(pipeline, lanes)
        sizes = safe_sizes(pipeline, min(max_sessions, MAX_BATCH), lanes)
        if profile is None:
            profile = measure(pipeline, facts, sizes, lanes)
    except BaseException:
        lanes.close()
        raise
    cost = CostModel(restricted(profile, sizes), on_stale)
    if capacity is None:
        capacity = Capacity(memory_bytes=free_bytes(facts.device))
    return cost, sizes, LoadControl(facts, pipeline.format, cost, capacity, pipeline.check)


class LoadControl:
    """See the module.

    Args:
        facts: of the model.
        unit_format: of its units.
        cost: predictions.
        capacity: of the machine.
        check: raises `ConfigError` for a spec that the pipeline cannot serve; says which rungs
            there are.
    """

    def __init__(
        self,
        facts: ModelFacts,
        unit_format: UnitFormat,
        cost: CostModel,
        capacity: Capacity,
        check: Callable[[SessionSpec], None],
    ) -> None:
        self.facts, self.cost = facts, cost
        self._format, self._capacity, self._check = unit_format, capacity, check
        self._ladder = Ladder()
        self._steps: dict[int, tuple[int, ...]] = {}
        self._lengths_s: deque[float] = deque(maxlen=32)

    def refusal(self, specs: Sequence[SessionSpec], oldest_s: float) -> Refusal | None:
        """Why a set of sessions cannot be served, None if it can.

        Args:
            specs: of the sessions there, and of the one that wants to come.
            oldest_s: age of the session that was opened first.
        """
        live = [self._demand(spec) for spec in specs if spec.service_class == "live"]
        offline = [self._demand(spec) for spec in specs if spec.service_class == "offline"]
        found = shortage(live, offline, self.cost, self._capacity)
        if found is None:
            return None
        reason = f"no room for another session: {found.constraint} ({found.detail})"
        return Refusal(reason=reason, retry_after_s=self.retry_after_s(oldest_s))

    def retry_after_s(self, oldest_s: float) -> float:
        """When a place is likely to be free: the usual length of a session, less its age."""
        if not self._lengths_s:
            return RETRY_AFTER_S
        left = median(self._lengths_s) - oldest_s
        return min(max(left, MIN_RETRY_S), MAX_RETRY_S)

    def join(self, seq: int, spec: SessionSpec) -> list[Step]:
        """A live session comes, or asks for something else; returns who has to go down for it."""
        self._ladder.leave(seq)
        self._steps[seq] = self._rungs(spec)
        self._ladder.join(seq, len(self._steps[seq]) - 1)
        return [self._step(move) for move in self._ladder.make_room(self._load)]

    def leave(self, seq: int, length_s: float) -> None:
        """A session has gone after `length_s`."""
        self._ladder.leave(seq)
        self._steps.pop(seq, None)
        self._lengths_s.append(length_s)

    def delivered(self, seq: int, headroom_ns: int) -> list[Step]:
        """A live chunk was delivered; see `Ladder.delivered`."""
        period_ns = int(self._format.duration * self._format.units_per_chunk * 10**9)
        move = self._ladder.delivered(seq, headroom_ns, period_ns, self._load)
        return [] if move is None else [self._step(move)]

    def served_spec(self, seq: int, spec: SessionSpec) -> SessionSpec:
        """What a session is served with: what it asks for, but for its rung."""
        rung = self._ladder.rungs.get(seq, 0)
        return replace(spec, num_inference_steps=self._steps[seq][rung]) if rung else spec

    def expected_ns(self) -> int:
        """Predicted time from a chunk's beginning to its delivery; 0 for a session alone."""
        demands = self._demands(self._ladder.rungs)
        if len(demands) < 2:
            return 0
        return response_ns(demands, self.cost.costs(), self.cost.stage_ns(DECODE))

    def figures(self) -> dict[str, float]:
        """Load and predictions now.

        Returns:
            `load_ratio`: predicted share of the denoiser's time that live sessions take;
            `slowdown_ratio`: recent times over profiled ones; `predictor_error_ratio`: relative
            error that 95 % of recent predictions do not exceed, once there are any.
        """
        figures = {
            "load_ratio": self._load(self._ladder.rungs),
            "slowdown_ratio": self.cost.ratio,
        }
        error = self.cost.error(0.95)
        return figures if error is None else {**figures, "predictor_error_ratio": error}

    def _load(self, rungs: Mapping[int, int]) -> float:
        return utilization(self._demands(rungs), self.cost.costs())

    def _demands(self, rungs: Mapping[int, int]) -> list[Demand]:
        return [
            self.facts.demand(self._steps[seq][rung], self._format) for seq, rung in rungs.items()
        ]

    def _demand(self, spec: SessionSpec) -> Demand:
        return self.facts.demand(spec.num_inference_steps, self._format)

    def _rungs(self, spec: SessionSpec) -> tuple[int, ...]:
        """Steps from what is asked for down to the session's floor, those that the model has."""
        asked = spec.num_inference_steps or self.facts.default_steps
        rungs = [asked]
        for steps in range(asked - 1, (spec.min_inference_steps or 1) - 1, -1):
            try:
                self._check(replace(spec, num_inference_steps=steps, min_inference_steps=None))
            except ConfigError:
                continue
            rungs.append(steps)
        return tuple(rungs)

    def _step(self, move: Move) -> Step:
        return Step(move.seq, self._steps[move.seq][move.rung], degraded=move.rung > 0)
