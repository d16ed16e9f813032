"""A session of another process, as an event loop sees it.

Same calls, same bounds and same errors as `rtgen.engine.aio.AsyncSession`. A message that only the
engine can judge is answered by an `ErrorEvent` that is not fatal. Everything runs on one loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import Protocol

import numpy as np

from rtgen import errors
from rtgen.engine.host_audio import AudioRoom, cost
from rtgen.engine.host_messages import (
    Ack,
    Audio,
    Closed,
    CloseSession,
    Command,
    Control,
    EndAudio,
    Ended,
    Event,
    Picture,
    PictureTaken,
    Release,
    Room,
    UnitReady,
)
from rtgen.engine.host_wire import MAX_PAYLOAD_BYTES
from rtgen.errors import ConfigError, MediaError, RtgenError, ShapeError, StreamClosed
from rtgen.frame_link import Ticket
from rtgen.types import (
    OUTPUT_RATE,
    ControlMessage,
    ErrorEvent,
    Pcm16,
    Pixels,
    ServerEvent,
    SessionSpec,
    Speak,
    Stats,
    Stop,
    Unit,
    UnitFormat,
)

MAX_EVENTS = 64
AUDIO_BYTES = 1 << 20
"""Sound goes in messages of at most about this size, so that nothing waits behind a large one."""

_ERRORS = {
    kind.__name__: kind
    for kind in (
        ConfigError,
        ShapeError,
        errors.CheckpointError,
        errors.BackendUnavailable,
        MediaError,
        StreamClosed,
        errors.LinkError,
    )
}

SessionReply = UnitReady | Event | Room | PictureTaken | Ended | Closed


def rebuilt_error(name: str, message: str) -> RtgenError:
    """An error of the other process: the same class where it is one of ours."""
    return _ERRORS.get(name, RtgenError)(message)


class Port(Protocol):
    """What a session needs of its link."""

    @property
    def is_congested(self) -> bool:
        """Whether so much waits to be sent that nothing more should be added."""

    def send(self, command: Command) -> None:
        """Sends without waiting; does nothing once the link is gone."""

    def read(self, ticket: Ticket) -> Unit:
        """Copies a unit out of its slot."""

    async def ask_stats(self, session: str) -> Stats:
        """Asks the engine for a session's figures."""


class RemoteSession:
    """One session of the generation process; see `rtgen.types.Session`.

    Args:
        port: the link.
        session_id: as the engine named it.
        spec: what was asked for.
        unit_format: sizes of units.
        room: samples at `OUTPUT_RATE` that may wait.
    """

    def __init__(
        self, port: Port, session_id: str, spec: SessionSpec, unit_format: UnitFormat, room: int
    ) -> None:
        self._port = port
        self._id = session_id
        self._is_live = spec.service_class == "live"
        self._format = unit_format
        self._room = AudioRoom(room)
        self._waiters: set[asyncio.Future[None]] = set()
        self._tickets: deque[Ticket] = deque()
        self._events: deque[ServerEvent] = deque()
        self._generation = self._next_index = 0
        self._is_complete = self._is_closing = False
        self._units_ended = self._is_disposed = False
        self._error: RtgenError | None = None
        self._picture: Pixels | None = None
        self._picture_away = False

    @property
    def id(self) -> str:
        return self._id

    @property
    def format(self) -> UnitFormat:
        """Sizes of its units."""
        return self._format

    @property
    def is_closed(self) -> bool:
        """Whether the engine holds nothing for it any more."""
        return self._units_ended and self._is_disposed

    # -- the client's side

    async def units(self) -> AsyncIterator[Unit]:
        while True:
            await self._until(lambda: bool(self._tickets) or self._units_ended or self._is_closing)
            if not self._tickets:
                if self._error is not None:
                    raise self._error
                return
            ticket = self._tickets.popleft()
            unit = self._port.read(ticket)
            self._port.send(Release(slot=ticket.slot))
            self._next_index = unit.index + 1
            yield unit

    async def events(self) -> AsyncIterator[ServerEvent]:
        while True:
            await self._until(lambda: bool(self._events) or self._is_disposed)
            if not self._events:
                return
            yield self._events.popleft()

    def push_audio(self, pcm: Pcm16, sample_rate: int) -> int:
        self._require_open()
        if self._is_complete:
            raise StreamClosed("the sound was ended by end_audio; open another session")
        pcm = np.asarray(pcm)
        if pcm.dtype != np.int16 or pcm.ndim not in (1, 2) or (pcm.ndim == 2 and not len(pcm)):
            raise MediaError(
                f"sound must be int16 [samples] or [channels, samples], got {pcm.dtype} "
                f"{list(pcm.shape)}"
            )
        if not 1_000 <= sample_rate <= 384_000:
            raise MediaError(f"sample_rate must be 1000 to 384000, got {sample_rate}")
        if self._port.is_congested:
            return 0
        channels = 1 if pcm.ndim == 1 else len(pcm)
        accepted, size = self._room.fits(pcm.shape[-1], sample_rate), AUDIO_BYTES // (2 * channels)
        before = self._room.total
        for start in range(0, accepted, max(size, 1)):
            end = min(start + max(size, 1), accepted)
            message = Audio(
                session=self._id,
                sample_rate=sample_rate,
                channels=channels,
                epoch=self._room.epoch,
                total=before + cost(end, sample_rate),
                pcm=pcm[..., start:end].tobytes(),
            )
            self._port.send(message)
        self._room.take(accepted, sample_rate)
        return accepted

    def end_audio(self) -> None:
        self._require_open()
        self._is_complete = not self._is_live
        self._port.send(EndAudio(session=self._id))

    async def audio_room(self, seconds: float) -> None:
        capacity_s = self._room.capacity / OUTPUT_RATE
        if not 0 <= seconds <= capacity_s:
            raise ConfigError(f"a session holds {capacity_s} s of sound, asked for {seconds} s")
        need = seconds * OUTPUT_RATE
        await self._until(
            lambda: (
                self._is_closing
                or self._units_ended
                or (self._room.samples >= need and not self._port.is_congested)
            )
        )

    def push_frame(self, frame: Pixels) -> None:
        if not self._format.takes_frames:
            raise ConfigError("this model is not driven by pictures; push sound")
        if frame.dtype != np.uint8 or frame.ndim != 3 or frame.shape[2] != 3:
            raise ShapeError(f"a picture is uint8 [H, W, 3], got {frame.dtype} {frame.shape}")
        if not 0 < frame.size <= MAX_PAYLOAD_BYTES:
            raise ShapeError(f"a picture has 1 to {MAX_PAYLOAD_BYTES} bytes, got {frame.size}")
        self._require_open()
        self._picture = frame.copy()
        self._send_picture()

    def control(self, message: ControlMessage) -> None:
        self._require_open()
        if self._port.is_congested:
            raise errors.LinkError("too many messages wait for the generation process; try later")
        room = self._room
        if isinstance(message, Stop):
            if not self._is_live:
                raise ConfigError("an offline session is not interrupted; close it")
            room.reset()
            self._generation += 1
            self._drop_units()
        elif isinstance(message, Speak):
            self._take_speech(message)
        self._port.send(
            Control(session=self._id, epoch=room.epoch, total=room.total, message=message)
        )

    def ack(self, unit: Unit) -> None:
        if unit.session != self._id:
            raise ConfigError(f"unit {unit.index} of {unit.session} was not delivered here")
        if unit.generation < self._generation:
            return
        if unit.generation > self._generation or unit.index >= self._next_index:
            raise ConfigError(f"unit {unit.index} of {unit.session} was not delivered yet")
        self._port.send(Ack(session=self._id, generation=unit.generation, index=unit.index))

    async def stats(self) -> Stats:
        """Figures so far.

        Raises:
            StreamClosed: the session has ended.
            LinkError: the generation process is gone.
        """
        self._require_open()
        return await self._port.ask_stats(self._id)

    async def close(self) -> None:
        self.request_close()
        await self._until(lambda: self.is_closed)

    def request_close(self) -> None:
        """Asks for the end of the session without waiting for it; may be called again."""
        if not self._is_closing:
            self._is_closing = True
            self._drop_units()
            self._port.send(CloseSession(session=self._id))
            self._wake()

    # -- the link's side

    def receive(self, message: SessionReply) -> None:
        """Takes a message of the generation process."""
        match message:
            case UnitReady(slot=slot, sequence=sequence, generation=generation):
                self._tickets.append(Ticket(slot=slot, sequence=sequence, generation=generation))
                if self._is_closing or generation < self._generation:
                    self._drop_units()
            case Event(event=event):
                self._post(event)
            case Room(epoch=epoch, total=total, samples=samples):
                self._room.report(epoch, total, samples)
            case PictureTaken():
                self._picture_away = False
                self._send_picture()
            case Ended(error=name, message=text):
                self._units_ended = True
                if name is not None:
                    self._error = rebuilt_error(name, text)
            case Closed():
                self._is_disposed = True
        self._wake()

    def fail(self, error: RtgenError) -> None:
        """The link is gone: units that are here can still be taken, then `error` is raised."""
        if not self._is_disposed:
            self._post(ErrorEvent(message=str(error), fatal=True))
        if not self._units_ended and not self._is_closing:
            self._error = error
        self._units_ended = self._is_disposed = True
        self._wake()

    # -- inside

    def _require_open(self) -> None:
        if self._error is not None:
            raise self._error
        if self._is_closing or self._units_ended:
            raise StreamClosed(f"session {self._id} has ended; open another one")

    def _take_speech(self, message: Speak) -> None:
        if message.text:
            raise ConfigError("the engine has no voice; send speak with audio")
        samples, rate = len(message.audio) // 2, message.sample_rate
        too_long = self._is_complete or len(message.audio) > MAX_PAYLOAD_BYTES
        if too_long or cost(samples, rate) > self._room.samples:
            raise ConfigError(
                f"{samples / rate:.1f} s of speech do not fit, there is room for "
                f"{self._room.samples / OUTPUT_RATE:.1f} s; push it in parts"
            )
        self._room.take(samples, rate)

    def _drop_units(self) -> None:
        """Gives back the slots of units that nobody will take."""
        kept: deque[Ticket] = deque()
        for ticket in self._tickets:
            if self._is_closing or ticket.generation < self._generation:
                self._port.send(Release(slot=ticket.slot))
            else:
                kept.append(ticket)
        self._tickets = kept

    def _send_picture(self) -> None:
        if self._picture is not None and not self._picture_away:
            height, width, _ = self._picture.shape
            pixels, self._picture = self._picture.tobytes(), None
            self._picture_away = True
            message = Picture(session=self._id, height=height, width=width, pixels=pixels)
            self._port.send(message)

    def _post(self, event: ServerEvent) -> None:
        if len(self._events) >= MAX_EVENTS:
            oldest = next((old for old in self._events if isinstance(old, Stats)), self._events[0])
            self._events.remove(oldest)
        self._events.append(event)

    async def _until(self, predicate: Callable[[], bool]) -> None:
        loop = asyncio.get_running_loop()
        while not predicate():
            waiter = loop.create_future()
            self._waiters.add(waiter)
            try:
                await waiter
            finally:
                self._waiters.discard(waiter)

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
