"""The two ends of a link together, in one process."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest

from rtgen.engine import host_link
from rtgen.engine.host_messages import Release, Room, UnitReady
from rtgen.engine.host_wire import encode
from rtgen.errors import LinkError, ShapeError, StreamClosed
from rtgen.frame_link import FrameReader, Ticket
from rtgen.types import (
    ErrorEvent,
    Grant,
    Pcm16,
    Refusal,
    ServerEvent,
    SessionSpec,
    SpeechState,
    Stats,
    Stop,
    Unit,
)
from tests.engine.drive import opened, same, sound
from tests.engine.linked import engine, feed, granted, linked, run, settled
from tests.sound import blocks, tone
from tests.toy_pipeline import LIVE, OFFLINE, toy_pipeline


async def rendered(
    pcm: Pcm16, rate: int, spec: SessionSpec
) -> tuple[list[Unit], list[ServerEvent]]:
    async with linked(engine()) as both:
        session = await granted(both, spec)
        feeder = asyncio.create_task(feed(session, pcm, rate))
        units = [unit async for unit in session.units()]
        events = [event async for event in session.events()]
        await feeder
        await session.close()
        await settled(both)
        assert both.link.num_sessions == 0
    return units, events


@pytest.mark.parametrize(("rate", "channels"), [(48_000, 1), (44_100, 2)])
def test_units_over_the_link_equal_the_engine_s(rate: int, channels: int) -> None:
    pcm = tone(2.0, rate)
    if channels == 2:
        pcm = np.stack([pcm, tone(2.0, rate, 300.0)])
    spec = replace(OFFLINE, avatar="bo", seed=11, state=SpeechState.LISTENING)
    units, events = run(rendered(pcm, rate, spec))
    with engine() as alone:
        session = opened(alone, spec)
        expected = list(session.render(blocks(pcm, 24_000), rate))
        told = session.poll_events()
    assert same(units, expected)
    assert [type(e) for e in events] == [type(e) for e in told]
    assert [e for e in events if not isinstance(e, Stats)] == [
        e for e in told if not isinstance(e, Stats)
    ]


@pytest.mark.parametrize("field", ["frames", "audio"])
def test_a_planted_copy_of_the_wrong_slot_is_found(
    monkeypatch: pytest.MonkeyPatch, field: str
) -> None:
    read = FrameReader.read
    last: list[Unit] = []

    def planted(self: FrameReader, ticket: Ticket) -> Unit:
        unit = read(self, ticket)
        last.append(unit)
        return replace(unit, **{field: getattr(last[max(len(last) - 2, 0)], field)})

    monkeypatch.setattr(FrameReader, "read", planted)
    units, _ = run(rendered(tone(1.0), 48_000, OFFLINE))
    with engine() as alone:
        assert not same(units, list(opened(alone, OFFLINE).render([tone(1.0)], 48_000)))


def test_a_reader_that_stops_holds_generation_up_and_loses_nothing() -> None:
    async def work() -> list[Unit]:
        async with linked(engine(), slots=8, per_session=3) as both:
            session = await granted(both, OFFLINE)
            pushed = session.push_audio(tone(30.0), 48_000)
            assert pushed == 4 * 48_000
            await settled(both, 5)
            await asyncio.sleep(0.3)
            assert both.frames.free == 5
            stats = await session.stats()
            # 3 in slots, 1 that waits for one, 4 that the engine may have under way
            assert stats.units <= 8
            feeder = asyncio.create_task(feed(session, tone(30.0)[pushed : 5 * 48_000]))
            units = [unit async for unit in session.units()]
            await feeder
            await session.close()
            return units

    units = run(work())
    np.testing.assert_array_equal(sound(units), tone(30.0)[: 5 * 48_000])
    assert [unit.index for unit in units] == list(range(32))


@pytest.mark.slow
def test_five_hundred_units_leave_every_slot_free() -> None:
    async def work() -> list[int]:
        async with linked(engine(), slots=3, per_session=2) as both:
            session = await granted(both, replace(OFFLINE, num_inference_steps=1))
            feeder = asyncio.create_task(feed(session, tone(80.0), size=48_000))
            indices = [unit.index async for unit in session.units()]
            await feeder
            await settled(both)
            await session.close()
            return indices

    assert run(work()) == list(range(500))


def test_two_sessions_do_not_meet() -> None:
    async def work() -> None:
        async with linked(engine(2), slots=8) as both:
            first, second = await granted(both, OFFLINE), await granted(both, OFFLINE)
            refused = await both.link.reserve(OFFLINE)
            assert isinstance(refused, Refusal)
            assert "2 places" in refused.reason
            tones = [tone(1.0), tone(1.0, hz=500.0)]
            await asyncio.gather(feed(first, tones[0]), feed(second, tones[1]))
            for session, pcm in zip((first, second), tones, strict=True):
                units = [unit async for unit in session.units()]
                assert {unit.session for unit in units} == {session.id}
                np.testing.assert_array_equal(sound(units), pcm)
            await first.close()
            await granted(both, OFFLINE)

    run(work())


def test_a_session_closed_before_it_began_is_gone() -> None:
    async def work() -> None:
        async with linked(engine(1)) as both:
            asking = asyncio.create_task(both.link.reserve(LIVE))
            await asyncio.sleep(0)
            asking.cancel()  # its answer is still to come
            with pytest.raises(asyncio.CancelledError):
                await asking
            with pytest.raises(StreamClosed, match="has ended"):
                await both.link.ask_stats("nobody")
            await both.link.wait_idle()
            assert isinstance(await both.link.reserve(LIVE), Grant)

    run(work())


def test_a_unit_too_large_for_the_slots_ends_its_session() -> None:
    async def work() -> None:
        small = replace(toy_pipeline().format, width=16)
        async with linked(engine(1), slot_format=small) as both:
            session = await granted(both, OFFLINE)
            await feed(session, tone(1.0))
            with pytest.raises(ShapeError, match="a unit must be"):
                async for _ in session.units():
                    pass
            events = [event async for event in session.events()]
            assert any(isinstance(event, ErrorEvent) and event.fatal for event in events)
            await session.close()
            assert isinstance(await both.link.reserve(OFFLINE), Grant)

    run(work())


@pytest.mark.parametrize(
    "data",
    [b"GET / HTTP/1.1\r\n\r\n", encode(Room(session="", epoch=0, total=0, samples=0)),
     encode(Release(slot=0)), encode(Release(slot=-5))],
)  # fmt: skip
def test_bytes_that_break_the_protocol_end_the_link(data: bytes) -> None:
    async def work() -> None:
        async with linked(engine()) as both:
            await granted(both, LIVE)
            both.link._writer.write(data)
            with pytest.raises(LinkError):
                await asyncio.shield(both.serving)

    run(work())


def test_replies_that_break_the_protocol_end_the_reader() -> None:
    async def work() -> None:
        async with linked(engine()) as both:
            session = await granted(both, LIVE)
            both.host.send(Release(slot=0))
            with pytest.raises(LinkError, match="no message for the media process"):
                await asyncio.shield(both.reading)
            assert session.id

    run(work())


def test_a_unit_nobody_knows_gives_its_slot_back() -> None:
    async def work() -> None:
        async with linked(engine(), slots=1) as both:
            session = await granted(both, OFFLINE)
            unit = Unit(
                session="gone",
                generation=0,
                index=0,
                media_time=session.format.duration,
                frames=np.zeros((4, 32, 32, 3), np.uint8),
                audio=np.zeros(7680, np.int16),
                state=SpeechState.IDLE,
            )
            ticket = both.frames.write(unit)
            assert ticket is not None
            both.host.send(UnitReady(session="gone", slot=ticket.slot, sequence=1, generation=0))
            await settled(both)

    run(work())


def test_the_end_of_a_link_fails_what_is_open() -> None:
    async def work() -> None:
        async with linked(engine()) as both:
            session = await granted(both, LIVE)
            await settled(both, both.slots - 2)
            await asyncio.sleep(0.05)
            both.link.fail(LinkError("planted"))
            reading = session.units()
            assert [(await anext(reading)).index, (await anext(reading)).index] == [0, 1]
            with pytest.raises(LinkError, match="planted"):
                await anext(reading)
            assert [e async for e in session.events()] == [
                ErrorEvent(message="planted", fatal=True)
            ]
            with pytest.raises(LinkError, match="planted"):
                session.control(Stop())
            with pytest.raises(LinkError, match="planted"):
                await both.link.reserve(LIVE)
            await session.audio_room(1.0)
            await session.close()

    run(work())


def test_an_answer_that_comes_too_late_leaves_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work() -> None:
        async with linked(engine(1)) as both:
            with monkeypatch.context() as patch:
                patch.setattr(host_link, "ANSWER_S", 0.0)
                with pytest.raises(LinkError, match="no answer"):
                    await both.link.reserve(LIVE)
            with pytest.raises(StreamClosed, match="has ended"):
                await both.link.ask_stats("nobody")
            await both.link.wait_idle()
            assert isinstance(await both.link.reserve(LIVE), Grant)

    run(work())
