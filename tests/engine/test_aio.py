from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import numpy as np
import pytest

from pipelines.avatar import AvatarSession
from rtgen.engine.aio import AsyncService
from rtgen.engine.engine import Engine
from rtgen.engine.lanes import thread_lanes
from rtgen.errors import ConfigError, StreamClosed
from rtgen.types import (
    ErrorEvent,
    Finished,
    Grant,
    Refusal,
    Service,
    Session,
    SessionSpec,
    Started,
    Stop,
    Unit,
)
from tests.engine.drive import opened, same, sound
from tests.sound import blocks, tone
from tests.toy_pipeline import LIVE, OFFLINE, toy_pipeline

T = TypeVar("T")


def run(work: Coroutine[Any, Any, T]) -> T:
    """Runs a test's coroutine; fails instead of hanging, and leaves no thread."""
    before = threading.active_count()
    result = asyncio.run(asyncio.wait_for(work, 300.0))
    assert threading.active_count() == before
    return result


async def granted(service: Service, spec: SessionSpec) -> Session:
    answer = await service.reserve(spec)
    assert isinstance(answer, Grant)
    return answer.session


def test_an_offline_session_over_an_event_loop_equals_a_blocking_one() -> None:
    pcm = tone(6.0)

    async def work(engine: Engine) -> list[Unit]:
        session = await granted(AsyncService(engine), OFFLINE)

        async def feed() -> None:
            for block in blocks(pcm, 24_000):
                rest = block
                while len(rest):
                    await session.audio_room(0.1)
                    rest = rest[session.push_audio(rest, 48_000) :]
            session.end_audio()

        feeder = asyncio.create_task(feed())
        units = [unit async for unit in session.units()]
        await feeder
        events = [event async for event in session.events()]
        await session.close()
        assert [e.type for e in events if not e.type == "stats"] == ["started", "finished"]
        return units

    with Engine(toy_pipeline(), lanes=thread_lanes()) as engine:
        units = run(work(engine))
        blocking = list(opened(engine, OFFLINE).render([pcm], 48_000))
    np.testing.assert_array_equal(sound(units), pcm)
    assert same(units, blocking)


def test_a_live_session_speaks_and_is_interrupted() -> None:
    async def work(engine: Engine) -> None:
        service = AsyncService(engine)
        session = await granted(service, LIVE)
        assert isinstance(await service.reserve(LIVE), Refusal)
        session.push_audio(tone(60.0), 48_000)
        generations = set()
        async for unit in session.units():
            generations.add(unit.generation)
            session.ack(unit)
            if unit.index == 3 and unit.generation == 0:
                session.control(Stop())
            if unit.generation == 1 and unit.index >= 6:
                break
        assert generations == {0, 1}
        events = session.events()
        first, second = await anext(events), await anext(events)
        assert isinstance(first, Started)
        assert isinstance(second, Finished)
        assert second.interrupted
        await session.close()
        await session.close()
        assert [unit async for unit in session.units()] == []

    with Engine(toy_pipeline(), lanes=thread_lanes()) as engine:
        run(work(engine))


def test_the_loop_goes_on_while_a_session_waits() -> None:
    async def work(engine: Engine) -> int:
        session = await granted(AsyncService(engine), OFFLINE)  # nothing is pushed: it waits
        waiter = asyncio.create_task(anext(aiter(session.units()), None))
        turns = 0
        while turns < 100:
            await asyncio.sleep(0)
            turns += 1
        assert not waiter.done()
        await session.close()
        assert await waiter is None
        return turns

    with Engine(toy_pipeline(), lanes=thread_lanes()) as engine:
        assert run(work(engine)) == 100


def test_a_failure_is_raised_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def planted(self: AvatarSession, x0: object) -> None:
        raise ArithmeticError("planted")

    monkeypatch.setattr(AvatarSession, "decode", planted)

    async def work(engine: Engine) -> None:
        session = await granted(AsyncService(engine), LIVE)
        with pytest.raises(StreamClosed, match="planted"):
            async for _ in session.units():
                pass
        events = [event async for event in session.events()]
        assert isinstance(events[-1], ErrorEvent)

    with Engine(toy_pipeline(), lanes=thread_lanes()) as engine:
        run(work(engine))


def test_a_loop_that_ended_with_a_session_open_harms_nobody() -> None:
    async def abandon(engine: Engine) -> None:
        await granted(AsyncService(engine), LIVE)

    with Engine(toy_pipeline(), lanes=thread_lanes(), max_sessions=2) as engine:
        asyncio.run(abandon(engine))
        assert len(list(opened(engine, OFFLINE).render([tone(0.3)], 48_000))) == 2


def test_a_caller_that_gives_up_while_it_waits_keeps_no_place() -> None:
    async def work(engine: Engine) -> None:
        service = AsyncService(engine)
        asked = asyncio.create_task(service.reserve(OFFLINE))
        await asyncio.sleep(0)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        for _ in range(3_000):
            answer = await service.reserve(OFFLINE)
            if isinstance(answer, Grant):
                await answer.session.close()
                return
            await asyncio.sleep(0.01)
        pytest.fail("the place was not given back")

    with Engine(toy_pipeline(), lanes=thread_lanes()) as engine:
        run(work(engine))


def test_a_wrong_spec_is_refused_as_an_error() -> None:
    async def work(engine: Engine) -> None:
        with pytest.raises(ConfigError):
            await AsyncService(engine).reserve(SessionSpec(avatar="nobody"))

    with Engine(toy_pipeline(), lanes=thread_lanes()) as engine:
        run(work(engine))
