"""The media process's end of a link to one generation process: requests, sessions, dispatch."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from dataclasses import dataclass

from rtgen.engine.host_messages import (
    AskStats,
    Beat,
    Closed,
    Command,
    Ended,
    Event,
    Failed,
    Granted,
    Message,
    PictureTaken,
    Refused,
    Release,
    Reserve,
    Room,
    StatsReply,
    UnitReady,
)
from rtgen.engine.host_session import RemoteSession, SessionReply, rebuilt_error
from rtgen.engine.host_wire import encode, read_message
from rtgen.errors import LinkError, RtgenError
from rtgen.frame_link import FrameReader, Ticket
from rtgen.types import Grant, Refusal, Session, SessionSpec, Stats, Unit, UnitFormat

MAX_BACKLOG_BYTES = 64 << 20
"""More than this waits to be sent only if the other process has stopped reading."""
ANSWER_S = 5.0


@dataclass(slots=True)
class _Request:
    """A question that was asked; `spec` if it is a reservation."""

    future: asyncio.Future[RemoteSession | Refusal | Stats]
    spec: SessionSpec | None = None


class ServiceLink:
    """Sessions over one connection; belongs to one event loop.

    Args:
        reader: of the socket, after the handshake.
        writer: of the socket.
        frames: where the units lie.
        unit_format: sizes of units.

    Attributes:
        beats: signs of life so far.
        beat: the last one.
        error: why the link is gone.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        frames: FrameReader,
        unit_format: UnitFormat,
    ) -> None:
        self._reader, self._writer = reader, writer
        self._frames, self._format = frames, unit_format
        self._numbers = itertools.count()
        self._requests: dict[int, _Request] = {}
        self._sessions: dict[str, RemoteSession] = {}
        self._changed = asyncio.Event()
        self.beats = 0
        self.beat = Beat(stalled_s=0.0, draining=False, figures={})
        self.error: RtgenError | None = None

    @property
    def num_sessions(self) -> int:
        """Sessions whose place is not free yet."""
        return len(self._sessions)

    @property
    def is_congested(self) -> bool:
        return self._writer.transport.get_write_buffer_size() > MAX_BACKLOG_BYTES

    async def run(self) -> None:
        """Takes messages until the stream ends or the connection breaks.

        Raises:
            LinkError: what came breaks the protocol.
        """
        with contextlib.suppress(ConnectionError):  # a process that dies resets it
            while (message := await read_message(self._reader)) is not None:
                self._dispatch(message)

    def fail(self, error: RtgenError) -> None:
        """Ends everything with `error`; may be called again."""
        if self.error is not None:
            return
        self.error = error
        self._writer.close()
        for request in self._requests.values():
            if not request.future.done():
                request.future.set_exception(error)
        for session in self._sessions.values():
            session.fail(error)
        self._requests.clear()
        self._sessions.clear()
        self._changed.set()

    async def reserve(self, spec: SessionSpec) -> Grant[Session] | Refusal:
        """Asks the engine for a session.

        Raises:
            ConfigError: the pipeline can never serve this spec.
            LinkError: the process is gone, or gave no answer in time.
        """
        number = next(self._numbers)
        answer = await self._ask(number, Reserve(request=number, spec=spec), spec)
        if isinstance(answer, Refusal):
            return answer
        assert isinstance(answer, RemoteSession)
        return Grant(answer)

    async def wait_idle(self) -> None:
        """Returns when no session is open."""
        while self._sessions:
            self._changed.clear()
            await self._changed.wait()

    # -- for sessions

    def send(self, command: Command) -> None:
        if self.error is None and not self._writer.is_closing():
            self._writer.write(encode(command))

    def read(self, ticket: Ticket) -> Unit:
        try:
            return self._frames.read(ticket)
        except LinkError as error:
            self.fail(error)
            raise

    async def ask_stats(self, session: str) -> Stats:
        number = next(self._numbers)
        answer = await self._ask(number, AskStats(request=number, session=session), None)
        assert isinstance(answer, Stats)
        return answer

    # -- inside

    async def _ask(
        self, number: int, command: Command, spec: SessionSpec | None
    ) -> RemoteSession | Refusal | Stats:
        if self.error is not None:
            raise self.error
        future = asyncio.get_running_loop().create_future()
        self._requests[number] = _Request(future, spec)
        self.send(command)
        try:
            async with asyncio.timeout(ANSWER_S):
                return await future
        except (TimeoutError, asyncio.CancelledError) as error:
            # Nobody will take the session, whether it is here already or still to come.
            if future.done() and not future.cancelled() and future.exception() is None:
                answer = future.result()
                if isinstance(answer, RemoteSession):
                    answer.request_close()
            if isinstance(error, TimeoutError):
                raise LinkError(f"the generation process gave no answer in {ANSWER_S} s") from error
            raise
        finally:
            self._requests.pop(number, None)

    def _dispatch(self, message: Message) -> None:
        match message:
            case Beat():
                self.beats += 1
                self.beat = message
            case Granted():
                self._grant(message)
            case Refused(request=number, reason=reason, retry_after_s=retry_after_s):
                self._answer(number, Refusal(reason=reason, retry_after_s=retry_after_s))
            case StatsReply(request=number, stats=stats):
                self._answer(number, stats)
            case Failed(request=number, error=name, message=text):
                self._answer(number, rebuilt_error(name, text))
            case UnitReady() | Event() | Room() | PictureTaken() | Ended() | Closed():
                self._forward(message)
            case _:
                raise LinkError(f"{type(message).__name__} is no message for the media process")

    def _grant(self, message: Granted) -> None:
        request = self._requests.get(message.request)
        spec = request.spec if request else None
        session = RemoteSession(
            self, message.session, spec or SessionSpec(), self._format, message.room
        )
        self._sessions[session.id] = session
        if request is None or request.future.done():
            session.request_close()
        else:
            request.future.set_result(session)

    def _answer(self, number: int, answer: Refusal | Stats | RtgenError) -> None:
        request = self._requests.get(number)
        if request is None or request.future.done():
            return
        if isinstance(answer, RtgenError):
            request.future.set_exception(answer)
        else:
            request.future.set_result(answer)

    def _forward(self, message: SessionReply) -> None:
        session = self._sessions.get(message.session)
        if session is None:
            if isinstance(message, UnitReady):
                self.send(Release(slot=message.slot))
            return
        session.receive(message)
        if session.is_closed:
            del self._sessions[session.id]
            self._changed.set()
