"""The bookkeeping of one session: what is under way, what was delivered and what was shown.

Called from the client's threads, the engine's and the decode lane's; one lock guards it, and no
call keeps it longer than it takes to move some samples. Nothing here waits.

A unit is begun only with a credit. Live, a credit comes back when a unit is acknowledged, and
there are `lead` of them; offline, when the client takes a unit. So no queue behind can grow.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import replace

import numpy as np

from rtgen.engine.clock import Clock
from rtgen.engine.intake import Intake, UnitPlan
from rtgen.engine.outbox import Outbox
from rtgen.engine.pacing import Pacer
from rtgen.errors import ConfigError, RtgenError, ShapeError, StreamClosed
from rtgen.timing import StageTimer
from rtgen.types import (
    ControlMessage,
    Pcm16,
    Pixels,
    ServerEvent,
    SessionSpec,
    SetAvatar,
    SetQuality,
    SetState,
    Speak,
    Stats,
    Stop,
    TriggerEvent,
    Unit,
    UnitFormat,
)

OFFLINE_UNITS = 4
"""Units of an offline session that may be under way or wait for the client."""


class SessionCore:
    """State shared by a session's client and the engine.

    Args:
        session_id: name of the session.
        spec: what was asked for.
        unit_format: sizes of the pipeline's units.
        clock: the engine's.
        timer: the engine's stage times, for `stats`.
        check: raises `ConfigError` for a spec that the pipeline cannot serve.
        wake: tells the engine that there may be work; called without the lock held.

    Attributes:
        spec: what is asked for now.
        changed: the lock; notified after every change that a client may wait for.
        listeners: called, from any thread and without the lock, after such a change.
        error: what the session failed of.
        is_closing: the client wants no more.
        is_ended: no unit will be delivered any more.
        is_disposed: the engine holds nothing for it any more.
    """

    def __init__(
        self,
        session_id: str,
        spec: SessionSpec,
        unit_format: UnitFormat,
        *,
        clock: Clock,
        timer: StageTimer,
        check: Callable[[SessionSpec], None],
        wake: Callable[[], None],
    ) -> None:
        self.id = session_id
        self.spec = spec
        self.format = unit_format
        self.is_live = spec.service_class == "live"
        self.changed = threading.Condition()
        self.listeners: list[Callable[[], None]] = []
        self.error: BaseException | None = None
        self.is_closing = self.is_ended = self.is_disposed = False
        self._clock, self._check, self._wake = clock, check, wake
        self._intake = Intake(spec, unit_format)
        self._outbox = Outbox(timer, unit_format.duration)
        self._pacer = Pacer(
            unit_format.duration, unit_format.lead, unit_format.units_per_chunk, clock.now_ns()
        )
        self._generation = 0
        self._begun = 0  # units begun: the next index
        self._delivered = 0  # the next index to be delivered
        self._freed = 0  # units acknowledged (live) or taken by the client (offline)
        self._under_way: deque[UnitPlan] = deque()  # begun and not freed
        self._has_delivered = False
        self._headrooms_ns: deque[int] = deque(maxlen=64)
        self._rollback: int | None = None

    # -- the client's side

    def push_audio(self, pcm: Pcm16, sample_rate: int) -> int:
        """See `EngineSession.push_audio`."""
        with self.changed:
            self.require_open()
            accepted = self._intake.push_audio(pcm, sample_rate)
        self._wake()
        return accepted

    def end_audio(self) -> None:
        """See `EngineSession.end_audio`."""
        with self.changed:
            self.require_open()
            self._intake.end_audio()
            self._finish_if_done()
        self._notify()
        self._wake()

    def audio_room_s(self) -> float:
        """Seconds of sound that would be accepted now."""
        with self.changed:
            return self._intake.room_s

    def check_room(self, seconds: float) -> None:
        """Raises `ConfigError` if that much sound never fits."""
        capacity_s = self._intake.capacity_s
        if not 0 <= seconds <= capacity_s:
            raise ConfigError(f"a session holds {capacity_s} s of sound, asked for {seconds} s")

    def push_frame(self, frame: Pixels) -> None:
        """See `EngineSession.push_frame`."""
        if not self.format.takes_frames:
            raise ConfigError("this model is not driven by pictures; push sound")
        if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3:
            raise ShapeError(f"a picture is uint8 [H, W, 3], got {frame.dtype} {frame.shape}")
        with self.changed:
            self.require_open()
            self._intake.frame = frame

    def control(self, message: ControlMessage) -> None:
        """See `EngineSession.control`."""
        with self.changed:
            self.require_open()
            match message:
                case Stop():
                    self._interrupt()
                case SetState():
                    self._intake.base_state = message.state
                case TriggerEvent():
                    self._intake.add_gesture(message.event)
                case Speak():
                    self._intake.speak(message)
                case SetAvatar():
                    self._change(replace(self.spec, avatar=message.avatar))
                case SetQuality():
                    steps = message.num_inference_steps
                    self._change(replace(self.spec, num_inference_steps=steps))
        self._notify()
        self._wake()

    def ack(self, unit: Unit) -> None:
        """See `EngineSession.ack`."""
        with self.changed:
            if unit.generation != self._generation or unit.index < self._freed:
                return
            if unit.session != self.id or unit.index >= self._delivered:
                raise ConfigError(f"unit {unit.index} of {unit.session} was not delivered here")
            self._pacer.show(unit.index, self._clock.now_ns())
            if self.is_live:
                self._free(unit.index + 1)
        self._wake()

    def pop_unit(self) -> Unit | None:
        """The next delivered unit, None if there is none now."""
        with self.changed:
            if not self._outbox.units:
                return None
            unit = self._outbox.units.popleft()
            if not self.is_live:
                self._free(unit.index + 1)
        self._wake()
        return unit

    def pop_event(self) -> ServerEvent | None:
        """The next event, None if there is none now."""
        with self.changed:
            return self._outbox.pop_event()

    def has_unit_or_end(self) -> bool:
        """Whether `pop_unit` would give a unit, or none is to come."""
        return bool(self._outbox.units) or self.is_ended or self.is_closing

    def raise_error(self) -> None:
        """Raises what the session failed of, if it did: errors of ours as they are."""
        if isinstance(self.error, RtgenError):
            raise self.error
        if self.error is not None:
            raise StreamClosed(f"session {self.id} failed: {self.error!r}") from self.error

    def require_open(self) -> None:
        """Raises what the session failed of, or `StreamClosed` if it has ended otherwise."""
        self.raise_error()
        if self.is_closing or self.is_ended:
            raise StreamClosed(f"session {self.id} has ended; open another one")

    def stats(self) -> Stats:
        """Figures so far."""
        with self.changed:
            return self._outbox.stats(self._intake.buffered_s)

    def request_close(self) -> None:
        """Asks the engine to end the session; units that the client did not take are dropped."""
        with self.changed:
            if not self.is_closing:
                self.is_closing = True
                self._outbox.drop(self._begun - self._freed)
                self._end_turn()
        self._notify()
        self._wake()

    # -- the engine's side

    @property
    def rollback_units(self) -> int | None:
        """Units that the pipeline has to take back before anything is begun; None for none."""
        return self._rollback

    def rolled_back(self, units: int) -> None:
        """The pipeline has taken `units` back."""
        with self.changed:
            self._rollback = ((self._rollback or 0) - units) or None

    def begin_ns(self) -> int | None:
        """Earliest time for the next chunk to be begun; None: something else must happen first."""
        with self.changed:
            if self.is_closing or self.is_ended or self._rollback is not None:
                return None
            size = self.format.units_per_chunk
            credits = self.format.lead if self.is_live else max(OFFLINE_UNITS, size)
            if self._begun + size - self._freed > credits or not self._intake.has_chunk:
                return None
            return self._pacer.begin_ns(self._begun) if self.is_live else 0

    @property
    def is_starting(self) -> bool:
        """Whether a live client waits for its first unit."""
        return self.is_live and not self._has_delivered

    def deadline_ns(self, index: int | None = None) -> int:
        """When a unit of a live session must be shown; far away for an offline one.

        Args:
            index: of the unit; None for the next one to be delivered.
        """
        with self.changed:
            if not self.is_live:
                return 2**63
            return self._pacer.due_ns(self._delivered if index is None else index)

    @property
    def next_index(self) -> int:
        """Index of the next unit to be begun."""
        return self._begun

    def expect(self, span_ns: int) -> None:
        """Sets what the engine's load predicts for a chunk, from its beginning to its delivery."""
        with self.changed:
            self._pacer.expected_ns = span_ns

    def take_headrooms(self) -> list[int]:
        """Headrooms of the live chunks delivered since the last call; see `Pacer.deliver`."""
        with self.changed:
            taken = list(self._headrooms_ns)
            self._headrooms_ns.clear()
        return taken

    def post(self, event: ServerEvent) -> None:
        """Tells the client something."""
        with self.changed:
            self._outbox.post(event)
        self._notify()

    def plan(self) -> list[UnitPlan]:
        """Takes the input of the next chunk's units."""
        with self.changed:
            now_ns = self._clock.now_ns()
            if self.is_live:
                self._pacer.begin(self._begun, now_ns)
            plans = []
            for _ in range(self.format.units_per_chunk):
                plans.append(self._intake.take(self._begun, self._generation, now_ns))
                self._begun += 1
            self._under_way.extend(plans)
        self._notify()
        return plans

    def deliver(self, plans: list[UnitPlan], frames: Pixels) -> None:
        """Hands a chunk's units to the client, or drops them if they are of an older generation.

        Args:
            plans: as `plan` gave them.
            frames: uint8 [units * frames_per_unit, H, W, 3].
        """
        now_ns = self._clock.now_ns()
        per_unit = self.format.frames_per_unit
        with self.changed:
            if self.is_live and plans[0].generation == self._generation:
                self._headrooms_ns.append(self._pacer.deliver(plans[0].index, now_ns))
            for number, plan in enumerate(plans):
                is_stale = plan.generation != self._generation
                if is_stale or self.is_closing or self.is_ended:
                    continue
                if plan.padding < self.format.output_samples:
                    pixels = frames[number * per_unit : (number + 1) * per_unit]
                    self._deliver(plan, pixels, now_ns)
            self._finish_if_done()
        self._notify()

    def fail(self, error: BaseException) -> None:
        """Ends the session with an error; units delivered before it can still be taken."""
        with self.changed:
            self.error = error
            self.is_ended = True
            self._end_turn()
            text = str(error) if isinstance(error, RtgenError) else f"internal error: {error!r}"
            self._outbox.fail(text)
        self._notify()

    def dispose(self) -> None:
        """The engine has freed everything."""
        with self.changed:
            self.is_ended = self.is_disposed = True
        self._notify()

    # -- under the lock

    def _deliver(self, plan: UnitPlan, pixels: Pixels, now_ns: int) -> None:
        unit = Unit(
            session=self.id,
            generation=plan.generation,
            index=plan.index,
            media_time=plan.index * self.format.duration,
            frames=pixels,
            audio=plan.taken.pcm,
            state=plan.state,
            padding=plan.padding,
        )
        deadline_ns = self._pacer.deadline_ns(plan.index)
        self._outbox.put(
            unit,
            plan.turns,
            now_ns=now_ns,
            is_late=self.is_live and deadline_ns is not None and now_ns > deadline_ns,
            buffered_s=self._intake.buffered_s,
        )
        self._delivered = plan.index + 1
        self._has_delivered = True

    def _interrupt(self) -> None:
        if not self.is_live:
            raise ConfigError("an offline session is not interrupted; close it")
        dropped = len(self._under_way)
        self._generation += 1
        self._intake.interrupt(self._under_way, self._freed)
        self._under_way.clear()
        self._outbox.drop(dropped)
        self._begun = self._delivered = self._freed
        if dropped:
            self._rollback = (self._rollback or 0) + dropped
        self._end_turn()

    def _end_turn(self) -> None:
        self._outbox.end_turn(self._generation, float(self._freed * self.format.duration))

    def _change(self, spec: SessionSpec) -> None:
        self._check(spec)
        self.spec = spec

    def _free(self, until: int) -> None:
        self._freed = until
        while self._under_way and self._under_way[0].index < until:
            self._under_way.popleft()

    def _finish_if_done(self) -> None:
        if self._intake.is_used_up:
            size = self.format.output_samples
            missing = (plan for plan in self._under_way if plan.index >= self._delivered)
            if all(plan.padding == size for plan in missing):
                self.is_ended = True

    def _notify(self) -> None:
        with self.changed:
            self.changed.notify_all()
            listeners = tuple(self.listeners)
        for listener in listeners:
            listener()
