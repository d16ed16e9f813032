"""The engine: the only part that steps streams.

`tick` does one thing at most: open or end a session, take units back, or run one forward of one or
many sessions, as `rtgen.engine.scheduler` decides. So the choice of whom to serve is made anew
between forwards. With thread lanes a thread ticks; with inline lanes whoever waits for a unit does,
and there is no thread at all.

    begin -> noisy passes -> x0 -> decode lane -> unit
                                -> clean pass, alone or merged into the next chunk's first pass

A session that fails is closed with an error event, and taken out of the batch that it failed in;
the others never notice.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
from collections.abc import Callable, Sequence

from rtgen.engine.admission import Capacity
from rtgen.engine.client import EngineSession
from rtgen.engine.clock import Clock, RealClock
from rtgen.engine.contract import Pipeline
from rtgen.engine.cost_model import CONDITION, DECODE, CostModel, Profile
from rtgen.engine.lanes import Lanes, thread_lanes
from rtgen.engine.load_control import RETRY_AFTER_S, LoadControl, Step, prepare
from rtgen.engine.metrics import EngineMetrics
from rtgen.engine.scheduler import Forward, decide
from rtgen.engine.session import SessionCore
from rtgen.engine.slots import FinishedLatents, Slot
from rtgen.engine.stepper import Stepper
from rtgen.engine.trace import Decision
from rtgen.errors import ConfigError, StreamClosed
from rtgen.timing import StageTimer
from rtgen.types import Grant, QualityChanged, Refusal, SessionSpec

logger = logging.getLogger(__name__)


class Engine:
    """Serves sessions of one pipeline.

    With one place nothing is measured. With more, the engine starts by finding the batch sizes at
    which a row's bits do not depend on its company, and the time of each; then it admits what fits.

    Args:
        pipeline: weights and formats.
        lanes: where stages run; None for `thread_lanes()`. The engine closes them.
        clock: time; None for the machine's.
        max_sessions: most sessions, whatever fits.
        profile: times, instead of measuring them; sizes that do not pass the test are left out.
        capacity: limits of admission; None: the free memory, and all of the lanes' time. Like
            `profile` without effect if there is one place.
        recorder: called with every decision, for a trace.

    Attributes:
        timer: times of the stages "condition", "denoise", "clean" and "decode".
        metrics: counters and notices.
        cost: predictions.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        *,
        lanes: Lanes | None = None,
        clock: Clock | None = None,
        max_sessions: int = 1,
        profile: Profile | None = None,
        capacity: Capacity | None = None,
        recorder: Callable[[Decision], None] | None = None,
    ) -> None:
        self.pipeline = pipeline
        self.timer = StageTimer()
        self.metrics = EngineMetrics()
        self._lanes = thread_lanes() if lanes is None else lanes
        self._clock: Clock = RealClock() if clock is None else clock
        self._max_sessions = max_sessions
        self._recorder = recorder
        self._numbers = itertools.count()
        self._slots: list[Slot] = []
        self._signal = threading.Condition()
        self._signals = 0
        self._reserving = threading.Lock()
        self._is_closing = False
        self._until_ns: int | None = None
        if max_sessions == 1:
            self.cost = CostModel(Profile(device="", model="", forward_ns={}))
            sizes: tuple[int, ...] = (1,)
            self._control: LoadControl | None = None
        else:
            self.cost, sizes, self._control = prepare(
                pipeline, self._lanes, max_sessions, profile, capacity, self._note_stale
            )
        self._stepper = Stepper(
            pipeline, self._lanes, self._clock, self.timer, self.cost, sizes, self.wake
        )
        self._thread: threading.Thread | None = None
        if self._lanes.threaded:
            self._thread = threading.Thread(target=self._run, name="rtgen-engine", daemon=True)
            self._thread.start()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def reserve(self, spec: SessionSpec) -> Grant[EngineSession] | Refusal:
        """Opens a session if there is room; the session is primed while the caller goes on.

        One reservation is judged at a time, and its place is taken at once, so two that fit alone
        but not together are never both granted.

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
        with self._reserving:
            refusal = self._refusal(spec)
            if refusal is not None:
                self.metrics.note("refused", self._clock.now_ns(), refusal.reason)
                return refusal
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
                self._require_open()
                slot = Slot(next(self._numbers), core, spec, spec, self._clock.now_ns())
                self._slots.append(slot)
        self.metrics.count("granted_total")
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
            until_ns = self._until_ns
            if until_ns is None or (limit_ns is not None and limit_ns < until_ns):
                return False
            with self._signal:
                self._clock.wait(self._signal, until_ns)
        return True

    def tick(self) -> bool:
        """Does one piece of work for the sessions that need it first.

        With thread lanes this is the engine thread's; with inline lanes anybody may call it, from
        one thread at a time.

        Returns:
            False if there is nothing to do now.
        """
        with self._signal:
            slots = list(self._slots)
        if any(self._guarded(slot, self._tend) for slot in slots):
            return True
        self._stepper.feed_decoder(slots)
        decision = self._decide(slots)
        if self._recorder is not None:
            self._recorder(decision)
        if not isinstance(decision.action, Forward):
            self._until_ns = decision.action.until_ns
            return False
        chosen = {slot.seq: slot for slot in slots}
        rows = [chosen[seq] for seq in (*decision.action.live, *decision.action.offline)]
        self._advance(rows)
        self._stepper.feed_decoder(slots)
        self.metrics.count("forwards_total")
        self.metrics.count("rows_total", len(rows))
        if not decision.action.live:
            self.metrics.count("offline_forwards_total")
        return True

    def _run(self) -> None:
        while True:
            with self._signal:
                seen = self._signals
                if self._is_closing and not self._slots:
                    return
            if self.tick():
                continue
            with self._signal:
                if self._signals == seen:
                    self._clock.wait(self._signal, self._until_ns)

    # -- admission and load

    def _note_stale(self, ratio: float) -> None:
        detail = f"runs take {ratio:.2f} times what was measured at start"
        logger.warning("the profile is stale: %s", detail)
        self.metrics.note("profile_stale", self._clock.now_ns(), detail)

    def _refusal(self, spec: SessionSpec) -> Refusal | None:
        with self._signal:
            self._require_open()
            slots = [slot for slot in self._slots if not slot.core.is_ended]
        now_ns = self._clock.now_ns()
        oldest_s = max((now_ns - slot.opened_ns for slot in slots), default=0) / 1e9
        if len(slots) >= self._max_sessions:
            reason = f"all {self._max_sessions} places for sessions are taken"
            control = self._control
            retry_after_s = control.retry_after_s(oldest_s) if control else RETRY_AFTER_S
            return Refusal(reason=reason, retry_after_s=retry_after_s)
        if self._control is None:
            return None
        return self._control.refusal([*(slot.core.spec for slot in slots), spec], oldest_s)

    def _require_open(self) -> None:
        if self._is_closing:
            raise StreamClosed("the engine is closed; make a new one")

    def _change_quality(self, steps: Sequence[Step]) -> None:
        """Tells what the ladder did; each session follows when its chunk is done."""
        cores = {slot.seq: slot.core for slot in self._slots}
        for step in steps:
            count = step.num_inference_steps
            cores[step.seq].post(QualityChanged(num_inference_steps=count, degraded=step.degraded))
            detail = f"session {cores[step.seq].id} runs with {count} steps"
            logger.info("ladder: %s", detail)
            self.metrics.note("rung", self._clock.now_ns(), detail)

    def _rebalance(self) -> None:
        """The set of live sessions or their quality has changed."""
        if self._control is not None:
            for slot in self._slots:
                slot.core.expect(self._control.expected_ns())
            self.metrics.show(self._control.figures())

    # -- one piece of work

    def _guarded(self, slot: Slot, work: Callable[[Slot], bool]) -> bool:
        try:
            return work(slot)
        except Exception as error:
            # As in `Stepper.forward`: any error is this session's, and ends it alone.
            logger.exception("session %s failed", slot.core.id)
            self._fail(slot, error)
            return True

    def _fail(self, slot: Slot, error: Exception) -> None:
        self.metrics.note("failed", self._clock.now_ns(), f"session {slot.core.id}: {error!r}")
        slot.core.fail(error)
        self._dispose(slot)

    def _tend(self, slot: Slot) -> bool:
        """Whatever a session needs besides forwards; whether there was something."""
        core = slot.core
        while slot.decodes and slot.decodes[0].done():
            slot.decodes.popleft().result()
        if core.is_closing or core.is_ended:
            slot.waiting.clear()
            if slot.decodes:
                return False
            self._dispose(slot)
            return True
        if slot.pipeline is None:
            self._welcome(slot)
            return True
        self._follow_load(slot)
        if core.rollback_units is not None:
            if slot.is_decoding:
                return False
            self._stepper.take_back(slot, core.rollback_units, self._served_spec(slot))
            return True
        spec = self._served_spec(slot)
        if slot.plans is None and not slot.owes_clean and slot.spec != spec:
            steps = spec.num_inference_steps
            if steps is None and self._control is not None:
                steps = self._control.facts.default_steps
            return self._stepper.respec(slot, spec, steps)
        return False

    def _welcome(self, slot: Slot) -> None:
        self._stepper.open(slot)
        slot.since_ns = self._clock.now_ns()
        if not slot.core.is_live:
            others = (other for other in self._slots if other is not slot)
            slot.served = min((one.served for one in others if not one.core.is_live), default=0)
        elif self._control is not None:
            self._change_quality(self._control.join(slot.seq, slot.asked))
            self._rebalance()

    def _follow_load(self, slot: Slot) -> None:
        if self._control is None or not slot.core.is_live:
            return
        steps: list[Step] = []
        if slot.asked.num_inference_steps != slot.core.spec.num_inference_steps:
            steps += self._control.join(slot.seq, slot.core.spec)
        slot.asked = slot.core.spec
        for headroom_ns in slot.core.take_headrooms():
            steps += self._control.delivered(slot.seq, headroom_ns)
        if steps:
            self._change_quality(steps)
            self._rebalance()

    def _served_spec(self, slot: Slot) -> SessionSpec:
        """What a session is to be served with now."""
        spec = slot.core.spec
        return spec if self._control is None else self._control.served_spec(slot.seq, spec)

    def _dispose(self, slot: Slot) -> None:
        with self._signal:
            self._slots.remove(slot)
        slot.waiting.clear()
        for future in slot.decodes:
            future.exception()  # waits; the session has ended, whatever it says
        if slot.pipeline is not None:
            slot.pipeline.close()
        if self._control is not None:
            self._control.leave(slot.seq, (self._clock.now_ns() - slot.opened_ns) / 1e9)
            self._rebalance()
        slot.core.dispose()

    # -- forwards and decodes

    def _decide(self, slots: Sequence[Slot]) -> Decision:
        decode_ns, condition_ns = self.cost.stage_ns(DECODE), self.cost.stage_ns(CONDITION)
        rows = [(slot, slot.row(decode_ns, condition_ns)) for slot in slots]
        live = tuple(row for slot, row in rows if row is not None and slot.core.is_live)
        offline = tuple(row for slot, row in rows if row is not None and not slot.core.is_live)
        now_ns, costs = self._clock.now_ns(), self.cost.costs()
        return Decision(now_ns, live, offline, costs, decide(now_ns, live, offline, costs))

    def _advance(self, slots: Sequence[Slot]) -> None:
        """Begins chunks where none is running, then runs one forward of all."""
        ready = [slot for slot in slots if not self._guarded(slot, self._begin)]
        alike = [slot for slot in ready if slot.shape == ready[0].shape]
        outcomes = self._stepper.forward(alike) if alike else []
        now_ns = self._clock.now_ns()
        for slot, outcome in zip(alike, outcomes, strict=True):
            if isinstance(outcome, Exception):
                logger.error("session %s failed", slot.core.id, exc_info=outcome)
                self._fail(slot, outcome)
                continue
            slot.advance(now_ns)
            if outcome is not None:
                assert slot.plans is not None
                slot.waiting.append(FinishedLatents(slot.plans, outcome))
                slot.plans = None

    def _begin(self, slot: Slot) -> bool:
        if slot.plans is None and not slot.owes_clean:
            self._stepper.begin(slot)
        return False
