"""Both ends of a link on one event loop: the real host and the real client, no second process."""

from __future__ import annotations

import asyncio
import math
import os
import socket
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from rtgen.engine.admission import Capacity
from rtgen.engine.engine import Engine
from rtgen.engine.host_lanes import Watch
from rtgen.engine.host_link import ServiceLink
from rtgen.engine.host_messages import Shutdown
from rtgen.engine.host_serve import GenerationHost
from rtgen.engine.host_session import RemoteSession
from rtgen.engine.lanes import thread_lanes
from rtgen.errors import LinkError
from rtgen.frame_link import FrameLink, FrameReader, FrameWriter, SlotLayout, open_segment
from rtgen.types import Grant, Pcm16, SessionSpec, UnitFormat
from tests.sound import blocks
from tests.toy_pipeline import toy_pipeline

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Linked:
    """A link under test.

    Attributes:
        link: the media side.
        host: the engine's side.
        frames: the engine's end of the slots.
        slots: all there are.
        serving: ends when the host does.
        reading: ends when the media side's reader does.
    """

    link: ServiceLink
    host: GenerationHost
    frames: FrameWriter
    slots: int
    serving: asyncio.Task[None]
    reading: asyncio.Task[None]


@asynccontextmanager
async def linked(
    engine: Engine, *, slots: int = 8, per_session: int = 4, slot_format: UnitFormat | None = None
) -> AsyncIterator[Linked]:
    """Serves an engine, which is closed at the end."""
    ours, theirs = socket.socketpair()
    layout = SlotLayout.of(slot_format or engine.pipeline.format, slots)
    segment = open_segment()
    frames = FrameWriter(FrameLink(segment, layout, create=True), per_session=per_session)
    read = FrameReader(FrameLink(segment, layout))
    os.close(segment)
    their_reader, their_writer = await asyncio.open_unix_connection(sock=theirs)
    reader, writer = await asyncio.open_unix_connection(sock=ours)
    host = GenerationHost(engine, Watch(), their_writer, frames, drain_s=1.0)
    link = ServiceLink(reader, writer, read, engine.pipeline.format)
    serving = asyncio.create_task(host.run(their_reader))
    reading = asyncio.create_task(link.run())
    try:
        yield Linked(
            link=link,
            host=host,
            frames=frames,
            slots=slots,
            serving=serving,
            reading=reading,
        )
    finally:
        link.send(Shutdown())
        await asyncio.wait({serving})
        their_writer.close()
        await asyncio.wait({reading})
        link.fail(LinkError("the test is over"))
        await asyncio.sleep(0)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Runs a test's coroutine; fails instead of hanging."""
    return asyncio.run(asyncio.wait_for(work, 240.0))


def engine(max_sessions: int = 1) -> Engine:
    """An engine of the toy; the link closes it."""
    capacity = Capacity(max_load=math.inf)
    return Engine(
        toy_pipeline(), lanes=thread_lanes(), max_sessions=max_sessions, capacity=capacity
    )


async def granted(both: Linked, spec: SessionSpec) -> RemoteSession:
    """A session that must be granted."""
    answer = await both.link.reserve(spec)
    assert isinstance(answer, Grant)
    assert isinstance(answer.session, RemoteSession)
    return answer.session


async def feed(session: RemoteSession, pcm: Pcm16, rate: int = 48_000, size: int = 24_000) -> None:
    """Pushes a recording as there is room, and ends it."""
    for block in blocks(pcm, size):
        rest = block
        while rest.shape[-1]:
            await session.audio_room(0.1)
            rest = rest[..., session.push_audio(rest, rate) :]
    session.end_audio()


async def settled(both: Linked, slots: int | None = None) -> None:
    """Waits until so many slots, all if None, are with the writer."""
    wanted = both.slots if slots is None else slots
    for _ in range(4_000):
        if both.frames.free == wanted:
            return
        await asyncio.sleep(0.005)
    raise AssertionError(f"{both.frames.free} slots are free instead of {wanted}")
