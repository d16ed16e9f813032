"""The engine as an event loop sees it: `rtgen.types.Service` and `Session`, nothing blocks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

from rtgen.engine.client import EngineSession
from rtgen.engine.engine import Engine
from rtgen.types import (
    ControlMessage,
    Grant,
    Pcm16,
    Pixels,
    Refusal,
    ServerEvent,
    Session,
    SessionSpec,
    Unit,
)


class AsyncSession:
    """A session for one event loop. Thread lanes only: nobody else would step the engine."""

    def __init__(self, session: EngineSession) -> None:
        self._core = session.core
        self._loop = asyncio.get_running_loop()
        self._waiters: set[asyncio.Future[None]] = set()
        self._core.listeners.append(self._changed)

    @property
    def id(self) -> str:
        return self._core.id

    async def units(self) -> AsyncIterator[Unit]:
        core = self._core
        while True:
            await self._until(core.has_unit_or_end)
            unit = core.pop_unit()
            if unit is None:
                core.raise_error()
                return
            yield unit

    async def events(self) -> AsyncIterator[ServerEvent]:
        while True:
            while (event := self._core.pop_event()) is not None:
                yield event
            if self._core.is_disposed:
                return
            await self._next_change()

    def push_audio(self, pcm: Pcm16, sample_rate: int) -> int:
        return self._core.push_audio(pcm, sample_rate)

    def end_audio(self) -> None:
        self._core.end_audio()

    async def audio_room(self, seconds: float) -> None:
        core = self._core
        core.check_room(seconds)
        await self._until(
            lambda: core.is_closing or core.is_ended or core.audio_room_s() >= seconds
        )

    def push_frame(self, frame: Pixels) -> None:
        self._core.push_frame(frame)

    def control(self, message: ControlMessage) -> None:
        self._core.control(message)

    def ack(self, unit: Unit) -> None:
        self._core.ack(unit)

    async def close(self) -> None:
        self._core.request_close()
        await self._until(lambda: self._core.is_disposed)

    async def _until(self, predicate: Callable[[], bool]) -> None:
        while not predicate():
            await self._next_change()

    async def _next_change(self) -> None:
        # Nothing is missed between the caller's look and this wait: a change after the look
        # schedules `_release`, which the loop runs once this coroutine has given way.
        waiter = self._loop.create_future()
        self._waiters.add(waiter)
        try:
            await waiter
        finally:
            self._waiters.discard(waiter)

    def _changed(self) -> None:
        """Called by any thread; the loop may be closed already when a session is torn down."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._release)

    def _release(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)


class AsyncService:
    """`rtgen.types.Service` over an engine in this process.

    Args:
        engine: with thread lanes; stays the caller's to close.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def reserve(self, spec: SessionSpec) -> Grant[Session] | Refusal:
        # Admission plays the set of sessions through; the loop goes on meanwhile.
        loop = asyncio.get_running_loop()
        asked = loop.run_in_executor(None, self._engine.reserve, spec)
        try:
            answer = await asyncio.shield(asked)
        except asyncio.CancelledError:
            asked.add_done_callback(_give_back)
            raise
        if isinstance(answer, Refusal):
            return answer
        return Grant(AsyncSession(answer.session))


def _give_back(asked: asyncio.Future[Grant[EngineSession] | Refusal]) -> None:
    """Closes what was granted to a caller that has gone."""
    if asked.cancelled() or asked.exception() is not None:
        return
    answer = asked.result()
    if isinstance(answer, Grant):
        answer.session.core.request_close()
