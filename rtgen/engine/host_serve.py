"""The engine's end of a link: sessions, slots and signs of life, on the process's event loop.

Per session one task moves finished units into slots, waiting for credit, and one moves events.
What a client asks for wrongly ends nothing: it hears of it by an event. A message that breaks the
protocol ends the link, and with it the process.
"""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from fractions import Fraction
from functools import partial

import numpy as np

from rtgen.engine.aio import AsyncSession
from rtgen.engine.client import EngineSession
from rtgen.engine.engine import Engine
from rtgen.engine.host_lanes import Watch
from rtgen.engine.host_messages import (
    Ack,
    AskStats,
    Audio,
    Beat,
    Closed,
    CloseSession,
    Control,
    EndAudio,
    Ended,
    Event,
    Failed,
    Granted,
    Message,
    Picture,
    PictureTaken,
    Refused,
    Release,
    Reserve,
    Room,
    Shutdown,
    StatsReply,
    UnitReady,
)
from rtgen.engine.host_wire import encode, read_message
from rtgen.errors import LinkError, RtgenError
from rtgen.frame_link import FrameWriter
from rtgen.types import OUTPUT_RATE, ErrorEvent, Refusal, SpeechState, Stats, Stop, Unit

logger = logging.getLogger(__name__)

BEAT_S = 0.25
RETRY_AFTER_S = 5.0
_QUIET_BYTES = 1 << 16
"""While more than this waits to be sent, signs of life are left out: the reader has stopped."""

SessionCommand = Audio | EndAudio | Control | Ack | Picture


class _HostedSession:
    """A session of the engine and the tasks that serve it."""

    def __init__(self, host: GenerationHost, session: EngineSession) -> None:
        self._host, self._session = host, session
        self._face = AsyncSession(session)
        self._generation = self._epoch = self._total = 0
        self._last_room: Room | None = None
        self._loop = asyncio.get_running_loop()
        session.core.listeners.append(self._changed)
        self._units = asyncio.create_task(self._move_units())
        self._events = asyncio.create_task(self._move_events())
        self._units.add_done_callback(self._units_done)
        self._events.add_done_callback(self._events_done)
        self._closing: asyncio.Task[None] | None = None
        self.done = asyncio.gather(self._units, self._events, return_exceptions=True)

    def receive(self, message: SessionCommand) -> None:
        """Does what the client asks; what the engine refuses is reported by an event."""
        try:
            self._apply(message)
        except RtgenError as error:
            core = self._session.core
            if not (core.is_ended or core.is_closing):
                self._report(str(error), fatal=False)
        self._send_room()

    def stats(self) -> Stats:
        """Figures so far."""
        return self._session.stats()

    def close(self) -> None:
        """Begins to end the session; may be called again."""
        if self._closing is None:
            self._units.cancel()
            self._closing = asyncio.create_task(self._face.close())

    async def wait_closed(self) -> None:
        """Ends the session and waits until nothing is left of it."""
        self.close()
        await self.done

    def _apply(self, message: SessionCommand) -> None:
        face = self._face
        match message:
            case Audio():
                self._epoch, self._total = message.epoch, message.total
                pcm = np.frombuffer(message.pcm, np.int16)
                if message.channels != 1:
                    pcm = pcm.reshape(message.channels, -1)
                accepted = face.push_audio(pcm, message.sample_rate)
                if accepted != pcm.shape[-1]:
                    raise LinkError(f"{accepted} of {pcm.shape[-1]} samples fitted; sound is lost")
            case EndAudio():
                face.end_audio()
            case Control():
                self._epoch, self._total = message.epoch, message.total
                face.control(message.message)
                if isinstance(message.message, Stop):
                    self._generation += 1
                    self._host.wake()
            case Ack():
                face.ack(self._shown(message))
            case Picture():
                shape = (message.height, message.width, 3)
                self._host.send(PictureTaken(session=self._session.id))
                face.push_frame(np.frombuffer(message.pixels, np.uint8).reshape(shape))

    def _shown(self, message: Ack) -> Unit:
        """A unit with what an acknowledgement needs."""
        return Unit(
            session=self._session.id,
            generation=message.generation,
            index=message.index,
            media_time=Fraction(0),
            frames=np.zeros((0, 0, 0, 3), np.uint8),
            audio=np.zeros(0, np.int16),
            state=SpeechState.IDLE,
        )

    async def _move_units(self) -> None:
        host = self._host
        async for unit in self._face.units():
            await host.wait_credit(unit.session, partial(self._is_stale, unit))
            ticket = None if self._is_stale(unit) else host.frames.write(unit)
            if ticket is not None:
                host.send(
                    UnitReady(
                        session=unit.session,
                        slot=ticket.slot,
                        sequence=ticket.sequence,
                        generation=ticket.generation,
                    )
                )

    async def _move_events(self) -> None:
        async for event in self._face.events():
            self._host.send(Event(session=self._session.id, event=event))

    def _units_done(self, task: asyncio.Task[None]) -> None:
        """Tells the client that no unit follows, and why; also if the task never ran."""
        error = None if task.cancelled() else task.exception()
        if error is None:
            name, text = None, ""
        elif isinstance(error, RtgenError):
            name, text = type(error).__name__, str(error)
        else:
            logger.error("session %s failed", self._session.id, exc_info=error)
            name, text = "RtgenError", f"internal error: {error!r}"
        if error is not None and self._session.core.error is None:
            self._report(text, fatal=True)  # the engine reports its own errors itself
            self.close()
        self._host.send(Ended(session=self._session.id, error=name, message=text))

    def _events_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("the events of session %s failed", self._session.id, exc_info=error)
        self._host.send(Closed(session=self._session.id))

    def _is_stale(self, unit: Unit) -> bool:
        return unit.generation < self._generation

    def _report(self, text: str, *, fatal: bool) -> None:
        event = ErrorEvent(message=text, fatal=fatal)
        self._host.send(Event(session=self._session.id, event=event))

    def _changed(self) -> None:
        """Called by any thread after any change; a unit that was begun has made room."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._send_room)

    def _send_room(self) -> None:
        if self.done.done():
            return
        room = Room(
            session=self._session.id,
            epoch=self._epoch,
            total=self._total,
            samples=round(self._session.core.audio_room_s() * OUTPUT_RATE),
        )
        if room != self._last_room:
            self._last_room = room
            self._host.send(room)


class GenerationHost:
    """Serves an engine to one client.

    Args:
        engine: on thread lanes; closed at the end.
        watch: of its lanes.
        writer: of the socket.
        frames: where units go.
        drain_s: how long sessions may go on after SIGTERM.

    Attributes:
        frames: where units go.
    """

    def __init__(
        self,
        engine: Engine,
        watch: Watch,
        writer: asyncio.StreamWriter,
        frames: FrameWriter,
        *,
        drain_s: float,
    ) -> None:
        self._engine, self._watch, self._writer = engine, watch, writer
        self.frames = frames
        self._drain_s = drain_s
        self._sessions: dict[str, _HostedSession] = {}
        self._credit = asyncio.Event()
        self._idle = asyncio.Event()
        self._draining = asyncio.Event()

    async def run(self, reader: asyncio.StreamReader) -> None:
        """Serves until `Shutdown`, the end of the stream, or the end of a drain.

        Raises:
            LinkError: a message broke the protocol.
        """
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self.drain)
        reading = asyncio.create_task(self._read(reader))
        beating = asyncio.create_task(self._beat())
        draining = asyncio.create_task(self._drained())
        try:
            await asyncio.wait({reading, draining}, return_when=asyncio.FIRST_COMPLETED)
            if reading.done():
                reading.result()
        finally:
            loop.remove_signal_handler(signal.SIGTERM)
            for task in (reading, beating, draining):
                task.cancel()
            for session in list(self._sessions.values()):
                await session.wait_closed()
            self._engine.close()

    def drain(self) -> None:
        """Takes no more sessions, and stops when those that are open are closed."""
        logger.info("draining: %d sessions are open", len(self._sessions))
        self._draining.set()
        self._send_beat()

    def send(self, message: Message) -> None:
        """Sends without waiting; what a client can cause is bounded by its credits."""
        if not self._writer.is_closing():
            self._writer.write(encode(message))

    def wake(self) -> None:
        """Makes those who wait for credit look again."""
        self._credit.set()

    async def wait_credit(self, session: str, is_stale: Callable[[], bool]) -> None:
        """Waits for a slot for a session's unit, or until the unit is wanted no more."""
        while not (self.frames.has_credit(session) or is_stale()):
            self._credit.clear()
            await self._credit.wait()

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while (message := await read_message(reader)) is not None:
            if isinstance(message, Shutdown):
                return
            self._handle(message)

    def _handle(self, message: Message) -> None:
        match message:
            case Reserve():
                self._reserve(message)
            case Release(slot=slot):
                self.frames.release(slot)
                self.wake()
            case AskStats(request=number, session=name):
                self._answer_stats(number, name)
            case CloseSession(session=name):
                if (session := self._sessions.get(name)) is not None:
                    session.close()
            case Audio() | EndAudio() | Control() | Ack() | Picture():
                if (session := self._sessions.get(message.session)) is not None:
                    session.receive(message)
            case _:
                raise LinkError(f"{type(message).__name__} is no message for the engine")

    def _reserve(self, message: Reserve) -> None:
        number = message.request
        if self._draining.is_set():
            reason = "the generation process takes no more sessions, it is being replaced"
            self.send(Refused(request=number, reason=reason, retry_after_s=RETRY_AFTER_S))
            return
        try:
            answer = self._engine.reserve(message.spec)
        except RtgenError as error:
            self.send(Failed(request=number, error=type(error).__name__, message=str(error)))
            return
        if isinstance(answer, Refusal):
            reason, after_s = answer.reason, answer.retry_after_s
            self.send(Refused(request=number, reason=reason, retry_after_s=after_s))
            return
        session = answer.session
        room = round(session.core.audio_room_s() * OUTPUT_RATE)
        self.send(Granted(request=number, session=session.id, room=room))
        hosted = self._sessions[session.id] = _HostedSession(self, session)
        hosted.done.add_done_callback(lambda _: self._forget(session.id))

    def _forget(self, name: str) -> None:
        del self._sessions[name]
        self._idle.set()

    def _answer_stats(self, number: int, name: str) -> None:
        hosted = self._sessions.get(name)
        if hosted is None:
            text = f"session {name} has ended; open another one"
            self.send(Failed(request=number, error="StreamClosed", message=text))
        else:
            self.send(StatsReply(request=number, stats=hosted.stats()))

    async def _beat(self) -> None:
        while True:
            self._send_beat()
            await asyncio.sleep(BEAT_S)

    def _send_beat(self) -> None:
        if self._writer.transport.get_write_buffer_size() < _QUIET_BYTES:
            figures = {
                **self._engine.metrics.counts(),
                "rtgen_generation_sessions": len(self._sessions),
                "rtgen_generation_free_slots": self.frames.free,
            }
            beat = Beat(
                stalled_s=self._watch.stalled_s,
                draining=self._draining.is_set(),
                figures=figures,
            )
            self.send(beat)

    async def _drained(self) -> None:
        await self._draining.wait()
        try:
            async with asyncio.timeout(self._drain_s):
                while self._sessions:
                    self._idle.clear()
                    await self._idle.wait()
        except TimeoutError:
            logger.warning("%d sessions are ended by the drain's limit", len(self._sessions))
