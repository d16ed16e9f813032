"""A session over a link, as its client sees it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pipelines.avatar import AvatarSession
from rtgen.engine import host_link
from rtgen.engine.engine import Engine
from rtgen.engine.host_session import RemoteSession
from rtgen.engine.lanes import thread_lanes
from rtgen.errors import ConfigError, LinkError, MediaError, ShapeError, StreamClosed
from rtgen.types import (
    ErrorEvent,
    Finished,
    SessionSpec,
    SetAvatar,
    SetState,
    Speak,
    SpeechState,
    Started,
    Stats,
    Stop,
    TriggerEvent,
    Unit,
)
from tests.engine.drive import sound
from tests.engine.faulty import seeing
from tests.engine.linked import Linked, engine, feed, granted, linked, run, settled
from tests.sound import tone
from tests.toy_pipeline import LIVE, OFFLINE, toy_pipeline


async def interrupted(both: Linked, times: int) -> list[Unit]:
    """Talks to a live session and stops it in mid-speech, checking what must hold each time."""
    session = await granted(both, LIVE)
    shown: list[Unit] = []
    stops = 0
    session.push_audio(tone(20.0), 48_000)
    async for unit in session.units():
        assert unit.generation == stops, "a unit of an older generation was delivered"
        assert unit.index == len(shown), "the stream does not go on after the last unit shown"
        session.ack(unit)
        shown.append(unit)
        if len(shown) % 3 == 0:
            if stops == times:
                break
            await settled(both, both.slots - 2)  # units that nobody read are there to be dropped
            session.control(Stop())
            stops += 1
            session.push_audio(tone(20.0), 48_000)
    await session.close()
    await settled(both)
    events = [event async for event in session.events() if not isinstance(event, Stats)]
    assert all(isinstance(event, (Started, Finished)) for event in events)
    return shown


def test_interrupts_drop_older_units_and_free_their_slots() -> None:
    async def work() -> list[Unit]:
        async with linked(engine(), slots=3, per_session=2) as both:
            return await interrupted(both, 4)

    shown = run(work())
    assert {unit.generation for unit in shown} == set(range(5))
    assert all(unit.media_time == unit.index * toy_pipeline().format.duration for unit in shown)


def test_a_planted_delivery_of_older_units_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def planted(self: RemoteSession) -> None:
        if self._is_closing:
            self._tickets.clear()

    monkeypatch.setattr(RemoteSession, "_drop_units", planted)

    async def work() -> None:
        async with linked(engine(), slots=3, per_session=2) as both:
            await interrupted(both, 4)

    with pytest.raises(AssertionError):
        run(work())


def test_an_interrupt_frees_unread_units_at_once() -> None:
    async def work() -> None:
        async with linked(engine(), slots=2) as both:
            session = await granted(both, LIVE)
            await settled(both, 0)  # both units of the lead lie in slots; nobody takes them
            session.control(Stop())
            unit = await anext(session.units())
            assert (unit.generation, unit.index) == (1, 0)
            await session.close()
            await settled(both)

    run(work())


def test_closing_frees_the_place_while_units_wait() -> None:
    async def work() -> None:
        async with linked(engine(1), slots=2) as both:
            for _ in range(3):
                session = await granted(both, OFFLINE)
                session.push_audio(tone(3.0), 48_000)
                await settled(both, 0)
                await session.close()
                await session.close()
                assert [unit async for unit in session.units()] == []
                await settled(both)
                with pytest.raises(StreamClosed):
                    session.push_audio(tone(1.0), 48_000)

    run(work())


def test_what_the_engine_alone_can_judge_comes_as_an_event() -> None:
    async def work() -> None:
        async with linked(engine()) as both:
            session = await granted(both, LIVE)
            events = session.events()
            session.control(SetAvatar(avatar="nobody"))
            event = await anext(events)
            assert isinstance(event, ErrorEvent)
            assert not event.fatal
            assert "nobody" in event.message
            session.control(SetState(state=SpeechState.THINKING))
            session.control(TriggerEvent(event="nod"))
            async for unit in session.units():
                session.ack(unit)
                if unit.state is SpeechState.THINKING:
                    break
            await session.close()

    run(work())


def test_what_can_be_judged_here_is_an_error_at_once() -> None:
    async def work() -> None:
        async with linked(engine()) as both:
            with pytest.raises(ConfigError, match="nobody"):
                await both.link.reserve(SessionSpec(avatar="nobody"))
            live = await granted(both, LIVE)
            with pytest.raises(ConfigError, match="no voice"):
                live.control(Speak(text="hello"))
            with pytest.raises(ConfigError, match="not driven by pictures"):
                live.push_frame(np.zeros((4, 4, 3), np.uint8))
            with pytest.raises(MediaError, match="int16"):
                live.push_audio(np.zeros(4, np.float32), 48_000)
            with pytest.raises(MediaError, match="sample_rate"):
                live.push_audio(tone(0.1), 10)
            unit = await anext(live.units())
            with pytest.raises(ConfigError, match="not delivered yet"):
                live.ack(replace(unit, index=unit.index + 1))
            with pytest.raises(ConfigError, match="not delivered here"):
                live.ack(replace(unit, session="other"))
            await live.close()
            offline = await granted(both, OFFLINE)
            with pytest.raises(ConfigError, match="do not fit"):
                offline.control(Speak(audio=bytes(2 * 5 * 48_000)))
            with pytest.raises(ConfigError, match="not interrupted"):
                offline.control(Stop())
            with pytest.raises(ConfigError, match="holds 4.0 s"):
                await offline.audio_room(5.0)
            offline.control(Speak(audio=tone(1.0).tobytes()))
            offline.end_audio()
            with pytest.raises(StreamClosed, match="ended by end_audio"):
                offline.push_audio(tone(0.1), 48_000)
            units = [unit async for unit in offline.units()]
            np.testing.assert_array_equal(sound(units), tone(1.0))

    run(work())


def test_a_failure_in_the_engine_is_raised_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def planted(self: AvatarSession, x0: object) -> None:
        raise ArithmeticError("planted")

    monkeypatch.setattr(AvatarSession, "decode", planted)

    async def work() -> None:
        async with linked(engine()) as both:
            session = await granted(both, LIVE)
            with pytest.raises(StreamClosed, match="planted"):
                async for _ in session.units():
                    pass
            event = [event async for event in session.events()][-1]
            assert isinstance(event, ErrorEvent)
            assert event.fatal
            with pytest.raises(StreamClosed, match="planted"):
                session.push_audio(tone(0.1), 48_000)
            await session.close()
            monkeypatch.undo()
            again = await granted(both, OFFLINE)
            await feed(again, tone(1.0))
            assert len([unit async for unit in again.units()]) == 7

    run(work())


def test_nothing_is_added_to_a_link_that_does_not_move(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with linked(engine()) as both:
            session = await granted(both, LIVE)
            with monkeypatch.context() as patch:
                patch.setattr(host_link, "MAX_BACKLOG_BYTES", -1)
                assert session.push_audio(tone(0.1), 48_000) == 0
                with pytest.raises(LinkError, match="too many messages wait"):
                    session.control(Stop())
            assert session.push_audio(tone(0.1), 48_000) == 4_800

    run(work())


def test_the_newest_picture_replaces_those_not_sent() -> None:
    async def work() -> None:
        pipeline = seeing()
        served = Engine(pipeline, lanes=thread_lanes())
        async with linked(served) as both:
            session = await granted(both, LIVE)
            for value in (1, 2, 3):
                picture = np.full((3, 5, 3), value, np.uint8)
                session.push_frame(picture)
                picture[:] = 9  # what was given is the session's, as it was
            with pytest.raises(ShapeError, match="uint8"):
                session.push_frame(np.zeros((3, 5), np.uint8))
            async for unit in session.units():
                session.ack(unit)
                values = [frame[0, 0, 0] for frame in pipeline.seen]
                if values and values[-1] == 3:
                    break
            assert pipeline.seen[-1].shape == (3, 5, 3)
            assert set(values) <= {1, 3}

    run(work())


def test_events_that_nobody_reads_are_bounded_and_figures_make_room() -> None:
    async def work() -> None:
        async with linked(engine()) as both:
            session = await granted(both, LIVE)
            stats = await session.stats()
            error = ErrorEvent(message="kept", fatal=False)
            session._post(error)
            for _ in range(200):
                session._post(stats)
            await session.close()
            events = [event async for event in session.events()]
            assert len(events) == 64
            assert events[0] == error

    run(work())
