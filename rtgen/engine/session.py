"""The bookkeeping of one session: what waits, what is under way, what was delivered and shown.

Called from the client's threads, the engine's and the decode lane's; one lock guards it, and no
call keeps it longer than it takes to move some samples. Nothing here waits.

Bounds: sound by seconds (the pusher keeps what is not accepted), units under way and undelivered
by credits (nothing is begun without one), gestures by number (more are refused), events by number
(the oldest figures go first), pictures of a camera by one (the newest stays).
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from rtgen.engine.audio_buffer import AudioBuffer, TakenAudio
from rtgen.engine.clock import Clock
from rtgen.engine.outbox import Outbox
from rtgen.engine.pacing import Pacer
from rtgen.engine.speech import SpeechTracker
from rtgen.errors import ConfigError, RtgenError, ShapeError, StreamClosed
from rtgen.timing import StageTimer
from rtgen.types import (
    OUTPUT_RATE,
    ControlMessage,
    Finished,
    Pcm16,
    Pixels,
    ServerEvent,
    SessionSpec,
    SetAvatar,
    SetQuality,
    SetState,
    Speak,
    SpeechState,
    Started,
    Stats,
    Stop,
    TriggerEvent,
    Unit,
    UnitFormat,
)

LIVE_AUDIO_S = 120.0
OFFLINE_AUDIO_S = 4.0
OFFLINE_UNITS = 4
MAX_GESTURES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitPlan:
    """A unit that was begun: everything about it but its pictures.

    Attributes:
        generation: of the session when it was begun.
        index: of the unit.
        taken: its sound.
        padding: samples of silence that fill an offline session's last unit.
        state: what the face does.
        event: gesture that starts with it.
        frame: newest picture of the client's camera.
        begun_ns: when it was begun, by the engine's clock.
        turns: turns of speech that start or end in it.
    """

    generation: int
    index: int
    taken: TakenAudio
    padding: int
    state: SpeechState
    event: str
    frame: Pixels | None
    begun_ns: int
    turns: tuple[Started | Finished, ...]


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
        changed: the lock; notified after every change that a client may wait for.
        listeners: called, from any thread and without the lock, after such a change.
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
        self._clock, self._check, self._wake = clock, check, wake
        self._capacity_s = LIVE_AUDIO_S if self.is_live else OFFLINE_AUDIO_S
        self._audio = AudioBuffer(unit_format, self._capacity_s)
        self._speech = SpeechTracker()
        self._pacer = Pacer(unit_format.duration, unit_format.lead)
        self._base_state = spec.state
        self._gestures: deque[str] = deque()
        self._frame: Pixels | None = None
        self._input_ended = False
        self._generation = 0
        self._begun = 0  # units begun: the next index
        self._freed = 0  # units acknowledged (live) or taken by the client (offline)
        self._delivered = 0  # next index to be delivered
        self._under_way: deque[UnitPlan] = deque()  # begun and not freed
        self._outbox = Outbox(timer, unit_format.duration)
        self._rollback: int | None = None
        self.error: BaseException | None = None
        self.is_closing = False  # the client wants no more
        self.is_ended = False  # no unit will be delivered any more
        self.is_disposed = False  # the engine holds nothing for it any more

    # -- the client's side

    def push_audio(self, pcm: Pcm16, sample_rate: int) -> int:
        """See `rtgen.types.Session.push_audio`.

        Live, at most 120 s wait; offline, 4 s. What does not fit is not accepted.

        Raises:
            MediaError: not int16 sound, or a rate out of range.
            StreamClosed: the session has ended, or its sound has been declared complete.
        """
        with self.changed:
            self._require_open()
            if self._input_ended:
                raise StreamClosed("the sound was ended by end_audio; open another session")
            accepted = self._audio.push(np.asarray(pcm), sample_rate)
        self._wake()
        return accepted

    def end_audio(self) -> None:
        """See `rtgen.types.Session.end_audio`.

        Raises:
            StreamClosed: the session has ended.
        """
        with self.changed:
            self._require_open()
            self._audio.end_utterance()
            self._input_ended = not self.is_live
            self._finish_if_done()
        self._notify()
        self._wake()

    def audio_room_s(self) -> float:
        """Seconds of sound that would be accepted now."""
        with self.changed:
            return self._audio.room / OUTPUT_RATE

    def check_room(self, seconds: float) -> None:
        """Raises `ConfigError` if that much sound never fits."""
        if not 0 <= seconds <= self._capacity_s:
            raise ConfigError(f"a session holds {self._capacity_s} s of sound, asked {seconds} s")

    def push_frame(self, frame: Pixels) -> None:
        """See `rtgen.types.Session.push_frame`.

        Raises:
            ConfigError: the pipeline is not driven by pictures.
            ShapeError: not uint8 [H, W, 3].
            StreamClosed: the session has ended.
        """
        if not self.format.takes_frames:
            raise ConfigError("this model is not driven by pictures; push sound")
        if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3:
            raise ShapeError(f"a picture is uint8 [H, W, 3], got {frame.dtype} {frame.shape}")
        with self.changed:
            self._require_open()
            self._frame = frame

    def control(self, message: ControlMessage) -> None:
        """See `rtgen.types.Session.control`.

        Raises:
            ConfigError: text to speak, sound that does not fit, an unknown avatar, too many
                steps or waiting gestures, or an interrupt of an offline session.
            StreamClosed: the session has ended.
        """
        with self.changed:
            self._require_open()
            match message:
                case Stop():
                    self._interrupt()
                case SetState():
                    self._base_state = message.state
                case TriggerEvent():
                    if len(self._gestures) >= MAX_GESTURES:
                        raise ConfigError(f"{MAX_GESTURES} gestures wait already; try later")
                    self._gestures.append(message.event)
                case Speak():
                    self._speak(message)
                case SetAvatar():
                    self._respec(replace(self.spec, avatar=message.avatar))
                case SetQuality():
                    steps = message.num_inference_steps
                    self._respec(replace(self.spec, num_inference_steps=steps))
        self._notify()
        self._wake()

    def ack(self, unit: Unit) -> None:
        """See `rtgen.types.Session.ack`.

        Raises:
            ConfigError: a unit that was never delivered.
        """
        with self.changed:
            if unit.generation != self._generation or unit.index < self._freed:
                return
            if unit.session != self.id or unit.index >= self._delivered:
                raise ConfigError(f"unit {unit.index} of {unit.session} was not delivered here")
            self._free(unit.index + 1)
            self._pacer.show(unit.index, self._clock.now_ns())
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
        """Whether `pop_unit` would give a unit or none is to come."""
        return bool(self._outbox.units) or self.is_ended or self.is_closing

    def stats(self) -> Stats:
        """Figures so far."""
        with self.changed:
            return self._outbox.stats(self._audio.available / OUTPUT_RATE)

    def request_close(self) -> None:
        """Asks the engine to end the session; undelivered units are dropped."""
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
            left = (self._rollback or 0) - units
            self._rollback = left or None

    def begin_ns(self) -> int | None:
        """Earliest time for the next chunk to be begun; None: something else must happen first."""
        with self.changed:
            if self.is_closing or self.is_ended or self._rollback is not None:
                return None
            size = self.format.units_per_chunk
            room = self.format.lead if self.is_live else max(OFFLINE_UNITS, size)
            if self._begun + size - self._freed > room:
                return None
            if self.is_live:
                return self._pacer.begin_ns(self._begun)
            missing = (size - 1) * self.format.output_samples + self._audio.unit_need
            has_sound = self._audio.available > 0
            ready = has_sound if self._input_ended else self._audio.available >= missing
            return 0 if ready else None

    def deadline_ns(self) -> int:
        """When the next unit must be shown; the engine serves the earliest first."""
        with self.changed:
            if not self.is_live:
                return 2**63
            return self._pacer.deadline_ns(self._begun) or 0

    def plan(self) -> list[UnitPlan]:
        """Takes the input of the next chunk's units."""
        with self.changed:
            plans = [self._plan() for _ in range(self.format.units_per_chunk)]
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
            for number, plan in enumerate(plans):
                if plan.generation != self._generation or self.is_closing or self.is_ended:
                    continue
                if plan.padding < self.format.output_samples:
                    pixels = frames[number * per_unit : (number + 1) * per_unit]
                    self._deliver(plan, pixels, now_ns)
            self._finish_if_done()
        self._notify()

    def fail(self, error: BaseException) -> None:
        """Ends the session with an error."""
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

    def _require_open(self) -> None:
        if self.is_closing or self.is_ended:
            raise StreamClosed(f"session {self.id} has ended; open another one")

    def _plan(self) -> UnitPlan:
        size = self.format.output_samples
        start = self._begun * size
        if self.is_live and self._audio.is_open and not self._audio.available:
            if self._speech.is_starved(start):
                self._audio.end_utterance()
        taken = self._audio.take()
        speaking, turns = self._speech.follow(start, taken, self._generation)
        plan = UnitPlan(
            generation=self._generation,
            index=self._begun,
            taken=taken,
            padding=0 if self.is_live else size - taken.pushed,
            state=SpeechState.SPEAKING if speaking else self._base_state,
            event=self._gestures.popleft() if self._gestures else "none",
            frame=self._frame,
            begun_ns=self._clock.now_ns(),
            turns=tuple(turns),
        )
        self._begun += 1
        self._frame = None
        return plan

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
            buffered_s=self._audio.available / OUTPUT_RATE,
        )
        self._delivered = plan.index + 1
        self._pacer.measure(now_ns - plan.begun_ns)

    def _interrupt(self) -> None:
        if not self.is_live:
            raise ConfigError("an offline session is not interrupted; close it")
        units = self._begun - self._freed
        self._generation += 1
        self._audio.interrupt(units)
        self._speech.interrupt(self._freed * self.format.output_samples)
        for plan in reversed(self._under_way):
            if plan.event != "none":
                self._gestures.appendleft(plan.event)
        self._under_way.clear()
        self._outbox.drop(units)
        self._begun = self._delivered = self._freed
        if units or self._rollback is not None:
            self._rollback = (self._rollback or 0) + units
        self._end_turn()

    def _end_turn(self) -> None:
        """Reports a turn that was announced and is cut."""
        self._outbox.end_turn(self._generation, float(self._freed * self.format.duration))

    def _speak(self, message: Speak) -> None:
        if message.text:
            raise ConfigError("the engine has no voice; send speak with audio")
        pcm = np.frombuffer(message.audio, "<i2").astype(np.int16)
        self._audio.end_utterance()
        need = -(-len(pcm) * OUTPUT_RATE // message.sample_rate)
        if self._input_ended or need > self._audio.room:
            raise ConfigError(
                f"{need / OUTPUT_RATE:.1f} s of speech do not fit, there is room for "
                f"{self._audio.room / OUTPUT_RATE:.1f} s; push it in parts"
            )
        self._audio.push(pcm, message.sample_rate)
        self._audio.end_utterance()

    def _respec(self, spec: SessionSpec) -> None:
        self._check(spec)
        self.spec = spec

    def _free(self, until: int) -> None:
        self._freed = until
        while self._under_way and self._under_way[0].index < until:
            self._under_way.popleft()

    def _finish_if_done(self) -> None:
        if self._input_ended and not self._audio.available and not self.is_ended:
            waiting = [plan for plan in self._under_way if plan.index >= self._delivered]
            size = self.format.output_samples
            self.is_ended = all(plan.padding == size for plan in waiting)

    def _notify(self) -> None:
        with self.changed:
            self.changed.notify_all()
            listeners = tuple(self.listeners)
        for listener in listeners:
            listener()
