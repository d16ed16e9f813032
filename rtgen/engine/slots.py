"""A session's place in the engine: where it stands between two forwards.

Touched by the engine's thread only.
"""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rtgen.engine.calibrate import shape_of
from rtgen.engine.contract import PipelineSession
from rtgen.engine.intake import UnitPlan
from rtgen.engine.pacing import MARGIN_NS
from rtgen.engine.scheduler import Row
from rtgen.engine.session import SessionCore
from rtgen.types import SessionSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class FinishedLatents:
    """A chunk that waits for the decode lane: its units, and x0 [T, C, h, w]."""

    plans: list[UnitPlan]
    x0: Tensor


@dataclass(slots=True)
class Slot:
    """One session in the engine.

    Attributes:
        seq: order of admission.
        core: the session's bookkeeping.
        spec: what `pipeline` runs with: what is asked for, but for the ladder.
        asked: what was asked for when that was looked at last.
        opened_ns: when the session came.
        pipeline: its state, once opened.
        plans: units of the chunk that is being denoised.
        left: forwards until that chunk's x0.
        since_ns: when its next forward became due.
        served: forwards, for fairness among offline sessions.
        waiting: chunks for the decode lane, oldest first.
        decodes: chunks on the decode lane, oldest first.
        begun: units begun since `pipeline` was opened.
    """

    seq: int
    core: SessionCore
    spec: SessionSpec
    asked: SessionSpec
    opened_ns: int
    pipeline: PipelineSession | None = None
    plans: list[UnitPlan] | None = None
    left: int = 0
    since_ns: int = 0
    served: int = 0
    waiting: deque[FinishedLatents] = field(default_factory=deque)
    decodes: deque[Future[None]] = field(default_factory=deque)
    begun: int = 0
    _shape: str | None = None

    @property
    def is_decoding(self) -> bool:
        """Whether chunks are on their way through the decode lane."""
        return bool(self.waiting or self.decodes)

    @property
    def decode_due_ns(self) -> int | None:
        """When the first waiting chunk must be shown; None for an offline session."""
        if not self.core.is_live:
            return None
        return self.core.deadline_ns(self.waiting[0].plans[0].index)

    @property
    def owes_clean(self) -> bool:
        """Whether a clean pass runs before anything is begun."""
        assert self.pipeline is not None
        stream = self.pipeline.stream
        return self.plans is None and bool(
            stream.num_owed and not stream.cache_config.merge_clean_pass
        )

    @property
    def shape(self) -> str:
        """Shape of its next forward; of a chunk not yet begun, what it will most likely be."""
        if self._shape is None:
            assert self.pipeline is not None
            stream = self.pipeline.stream
            due = stream.next_pass()
            chunk = str(stream.cache_config.frames_per_chunk)
            if due is None:
                self._shape = chunk
            elif self.plans is None and not self.owes_clean and stream.num_owed == 1:
                self._shape = f"{chunk}+{chunk}" if shape_of(due) == chunk else shape_of(due)
            else:
                self._shape = shape_of(due)
        return self._shape

    def begin(self, plans: list[UnitPlan]) -> None:
        """A chunk was begun in the stream."""
        assert self.pipeline is not None
        stream = self.pipeline.stream
        due = stream.next_pass()
        merged = due is not None and due.kind == "merged"
        self.plans, self._shape = plans, None
        self.left = stream.sampling_config.num_inference_steps + stream.num_owed - merged

    def advance(self, now_ns: int) -> None:
        """A forward of it has run."""
        self.left = max(self.left - 1, 0)
        self.served += 1
        self.since_ns = now_ns
        self._shape = None

    def take_back(self, units: int) -> None:
        """Units were rolled back, and the running chunk is gone."""
        self.plans, self.left, self._shape = None, 0, None
        self.begun -= units

    def reopened(self, pipeline: PipelineSession) -> None:
        """Another pipeline session stands at its start."""
        self.pipeline, self.plans, self.left, self._shape = pipeline, None, 0, None
        self.begun = 0

    def row(self, decode_ns: int, condition_ns: int) -> Row | None:
        """What the scheduler is told; None while the session can run nothing.

        Args:
            decode_ns: predicted time of a chunk's decode.
            condition_ns: predicted time of a chunk's conditioning.
        """
        core = self.core
        if self.pipeline is None or core.is_closing or core.is_ended:
            return None
        if core.rollback_units is not None:
            return None
        steps = self.pipeline.stream.sampling_config.num_inference_steps
        release_ns, setup_ns, index = self.since_ns, 0, core.next_index
        if self.plans is not None:
            forwards, index = max(self.left, 1), self.plans[0].index
        elif self.owes_clean:
            forwards = self.pipeline.stream.num_owed + steps
        else:
            begin_ns = core.begin_ns()
            if begin_ns is None:
                return None
            forwards, release_ns, setup_ns = steps, begin_ns, condition_ns
        duration = core.format.duration * core.format.units_per_chunk
        return Row(
            seq=self.seq,
            shape=self.shape,
            release_ns=release_ns,
            due_ns=core.deadline_ns(index) - MARGIN_NS - decode_ns,
            forwards=forwards,
            setup_ns=setup_ns,
            period_ns=int(duration * 10**9),
            is_starting=core.is_starting,
            served=self.served,
        )
