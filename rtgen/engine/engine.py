"""The engine: the only part that steps streams.

`tick` does one thing at most: open a session, take units back, run one forward, or begin a chunk.
So the choice of whom to serve is made anew between forwards. With thread lanes a thread ticks;
with inline lanes whoever waits for a unit does, and there is no thread at all.

    begin -> noisy passes -> x0 -> decode lane -> unit
                                -> clean pass, alone or merged into the next chunk's first pass

A session that fails is closed with an error event; the others never notice.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from rtgen.engine.audio_buffer import decimate
from rtgen.engine.client import EngineSession
from rtgen.engine.clock import Clock, RealClock
from rtgen.engine.contract import Pipeline, PipelineSession, UnitInput
from rtgen.engine.intake import UnitPlan
from rtgen.engine.lanes import Lanes, thread_lanes
from rtgen.engine.session import SessionCore
from rtgen.errors import ConfigError, StreamClosed
from rtgen.sampling.stream import run_passes
from rtgen.timing import StageTimer
from rtgen.types import OUTPUT_RATE, Grant, Refusal, SessionSpec

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

RETRY_AFTER_S = 5.0


@dataclass(slots=True)
class _Slot:
    """A session's place in the engine; touched by the stepping thread only.

    Attributes:
        core: the session's bookkeeping.
        pipeline: its state, once opened.
        spec: what `pipeline` was opened with.
        plans: units of the chunk that is being denoised.
        decodes: chunks on the decode lane, oldest first.
        begun: units begun since `pipeline` was opened.
    """

    core: SessionCore
    spec: SessionSpec
    pipeline: PipelineSession | None = None
    plans: list[UnitPlan] | None = None
    decodes: deque[Future[None]] = field(default_factory=deque)
    begun: int = 0


class Engine:
    """Serves sessions of one pipeline.

    Args:
        pipeline: weights and formats.
        lanes: where stages run; None for `thread_lanes()`. The engine closes them.
        clock: time; None for the machine's.
        max_sessions: places.

    Attributes:
        timer: times of the stages "condition", "denoise", "clean" and "decode".
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        lanes: Lanes | None = None,
        clock: Clock | None = None,
        max_sessions: int = 1,
    ) -> None:
        self.pipeline = pipeline
        self.timer = StageTimer()
        self._lanes = thread_lanes() if lanes is None else lanes
        self._clock: Clock = RealClock() if clock is None else clock
        self._max_sessions = max_sessions
        self._slots: list[_Slot] = []
        self._signal = threading.Condition()
        self._signals = 0
        self._is_closing = False
        self._thread: threading.Thread | None = None
        if self._lanes.threaded:
            self._thread = threading.Thread(target=self._run, name="rtgen-engine", daemon=True)
            self._thread.start()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reserve(self, spec: SessionSpec) -> Grant[EngineSession] | Refusal:
        """Opens a session if there is a place; the session is primed while the caller goes on.

        Raises:
            ConfigError: the pipeline can never serve this spec.
            StreamClosed: the engine is closed.
        """
        self.pipeline.check(spec)
        unit_format = self.pipeline.format
        if spec.service_class == "live" and unit_format.lead < unit_format.units_per_chunk:
            raise ConfigError(
                f"a live session needs a lead of at least one chunk, {unit_format.units_per_chunk} "
                f"units, the model has {unit_format.lead}; use the offline class"
            )
        core = SessionCore(
            secrets.token_hex(8),
            spec,
            unit_format,
            clock=self._clock,
            timer=self.timer,
            check=self.pipeline.check,
            wake=self.wake,
        )
        with self._signal:
            if self._is_closing:
                raise StreamClosed("the engine is closed; make a new one")
            taken = sum(not slot.core.is_ended for slot in self._slots)
            if taken >= self._max_sessions:
                reason = f"all {self._max_sessions} places for sessions are taken"
                return Refusal(reason=reason, retry_after_s=RETRY_AFTER_S)
            self._slots.append(_Slot(core, spec))
        self.wake()
        return Grant(EngineSession(core, self))

    def close(self) -> None:
        """Ends all sessions, threads and lanes; may be called again."""
        with self._signal:
            self._is_closing = True
            cores = [slot.core for slot in self._slots]
        for core in cores:
            core.request_close()
        self.wake()
        if self._thread is not None:
            self._thread.join()
        else:
            while self.tick():
                pass
        self._lanes.close()

    def wake(self) -> None:
        """Makes the engine look for work; from any thread."""
        with self._signal:
            self._signals += 1
            self._signal.notify_all()

    def wait_for(
        self, core: SessionCore, predicate: Callable[[], bool], timeout_s: float | None
    ) -> bool:
        """Waits until a predicate of a session holds, ticking meanwhile if nobody else does.

        Args:
            core: whose `changed` is notified when the predicate may hold.
            predicate: asked with the lock held.
            timeout_s: None for no limit.

        Returns:
            Whether it holds; False after the timeout, or, with inline lanes, when nothing more
            can happen by itself.
        """
        if self._thread is not None:
            with core.changed:
                return core.changed.wait_for(predicate, timeout_s)
        limit_ns = None if timeout_s is None else self._clock.now_ns() + int(timeout_s * 1e9)
        while not predicate():
            if self.tick():
                continue
            until_ns = self._next_ns()
            if until_ns is None or (limit_ns is not None and limit_ns < until_ns):
                return False
            with self._signal:
                self._clock.wait(self._signal, until_ns)
        return True

    def tick(self) -> bool:
        """Does one piece of work for the session that needs it first.

        With thread lanes this is the engine thread's; with inline lanes anybody may call it, from
        one thread at a time.

        Returns:
            False if there is nothing to do now.
        """
        with self._signal:
            slots = list(self._slots)
        for slot in sorted(slots, key=lambda slot: slot.core.deadline_ns()):
            try:
                if self._step(slot):
                    return True
            except Exception as error:
                # The one place that stops at any error: it is this session's, and ends it.
                logger.exception("session %s failed", slot.core.id)
                slot.core.fail(error)
                self._dispose(slot)
                return True
        return False

    def _run(self) -> None:
        while True:
            with self._signal:
                seen = self._signals
                if self._is_closing and not self._slots:
                    return
            if self.tick():
                continue
            until_ns = self._next_ns()
            with self._signal:
                if self._signals == seen:
                    self._clock.wait(self._signal, until_ns)

    def _next_ns(self) -> int | None:
        """When a session becomes ready by time alone; None if none does."""
        with self._signal:
            cores = [slot.core for slot in self._slots]
        times = [at for core in cores if (at := core.begin_ns()) is not None]
        now_ns = self._clock.now_ns()
        return min((at for at in times if at > now_ns), default=None)

    def _step(self, slot: _Slot) -> bool:
        core = slot.core
        while slot.decodes and slot.decodes[0].done():
            slot.decodes.popleft().result()
        if core.is_closing or core.is_ended:
            if slot.decodes:
                return False
            self._dispose(slot)
            return True
        if slot.pipeline is None:
            self._open(slot)
            return True
        if core.rollback_units is not None:
            if slot.decodes:
                return False
            self._take_back(slot, core.rollback_units)
            return True
        stream = slot.pipeline.stream
        if slot.plans is not None:
            self._denoise(slot, slot.plans)
            return True
        if stream.num_owed and not stream.cache_config.merge_clean_pass:
            self._lanes.denoise.submit(self._pass, "clean", slot.pipeline).result()
            return True
        if slot.spec != core.spec:
            return self._respec(slot)
        begin_ns = core.begin_ns()
        if begin_ns is None or begin_ns > self._clock.now_ns() or not self._lanes.decode.free:
            return False
        slot.plans = core.plan()
        slot.begun += len(slot.plans)
        self._lanes.denoise.submit(self._begin, slot.pipeline, slot.plans).result()
        return True

    def _open(self, slot: _Slot) -> None:
        slot.spec, slot.begun = slot.core.spec, 0
        slot.pipeline = self._lanes.denoise.submit(self.pipeline.open, slot.spec).result()

    def _respec(self, slot: _Slot) -> bool:
        """Follows a change of avatar or quality between two chunks."""
        assert slot.pipeline is not None
        if slot.spec.avatar == slot.core.spec.avatar:
            slot.spec = slot.core.spec
            if slot.spec.num_inference_steps is not None:
                slot.pipeline.set_num_inference_steps(slot.spec.num_inference_steps)
        else:
            if slot.decodes:
                return False
            slot.pipeline.close()
            self._open(slot)
        return True

    def _take_back(self, slot: _Slot, units: int) -> None:
        assert slot.pipeline is not None
        slot.plans = None
        if units <= slot.begun:
            slot.begun -= units
            slot.pipeline.rollback(units)
        else:  # the avatar was changed after the unit on screen: start it anew
            slot.pipeline.close()
            self._open(slot)
        slot.core.rolled_back(units)

    def _denoise(self, slot: _Slot, plans: list[UnitPlan]) -> None:
        assert slot.pipeline is not None
        x0 = self._lanes.denoise.submit(self._pass, "denoise", slot.pipeline).result()
        if x0 is None:
            return
        slot.plans = None
        future = self._lanes.decode.submit(self._decode, slot.core, slot.pipeline, plans, x0)
        slot.decodes.append(future)
        future.add_done_callback(lambda _: self.wake())

    def _dispose(self, slot: _Slot) -> None:
        with self._signal:
            self._slots.remove(slot)
        for future in slot.decodes:
            future.exception()  # waits; the session has ended, whatever it says
        if slot.pipeline is not None:
            slot.pipeline.close()
        slot.core.dispose()

    # -- on the lanes

    def _begin(self, pipeline: PipelineSession, plans: list[UnitPlan]) -> None:
        factor = OUTPUT_RATE // self.pipeline.format.model_rate
        with self.timer.stage("condition"):
            pipeline.begin(
                [
                    UnitInput(
                        audio=decimate(plan.taken.window, factor),
                        state=plan.state,
                        event=plan.event,
                        frame=plan.frame,
                    )
                    for plan in plans
                ]
            )

    def _pass(self, stage: str, pipeline: PipelineSession) -> Tensor | None:
        with self.timer.stage(stage):
            (x0,) = run_passes(self.pipeline.denoiser, [pipeline.stream], self.pipeline.batch_sizes)
        return x0

    def _decode(
        self, core: SessionCore, pipeline: PipelineSession, plans: list[UnitPlan], x0: Tensor
    ) -> None:
        with self.timer.stage("decode"):
            frames = pipeline.decode(x0)
        core.deliver(plans, frames)
