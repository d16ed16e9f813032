"""Real peers on the loopback interface: what is sent arrives, and ends when it should."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.sound import tone
from tests.webrtc.live import Client, ToneTrack, is_loud, run, site
from webrtc.playout import Playout


def speech(seconds: float) -> dict[str, object]:
    pcm = tone(seconds)[::3]  # 16 kHz
    return {"audio": base64.b64encode(pcm.astype("<i2").tobytes()).decode(), "sample_rate": 16_000}


@pytest.mark.parametrize("codec", ["H264", "VP8"])
def test_a_peer_sees_and_hears_the_avatar(codec: str) -> None:
    async def work() -> None:
        async with site() as found:
            client = Client(found)
            assert await client.connect(codec=codec, spec={"avatar": "bo", "seed": 3}) == 201
            await client.live()
            client.send("speak", **speech(0.5))
            await client.until(lambda: client.told("finished"))
            await client.until(lambda: client.told("media"))
            await client.until(lambda: sum(map(is_loud, client.sound)) > 15)
            started, finished = client.told("started"), client.told("finished")
            assert len(started) == len(finished) == 1
            length = finished[0]["position_s"] - started[0]["position_s"]
            assert length == pytest.approx(0.5, abs=0.02)
            assert not finished[0]["interrupted"]
            media = client.told("media")[-1]
            assert media["codec"] == codec
            assert media["sent"] > 0
            assert {(p.width, p.height) for p in client.pictures} == {(32, 32)}
            stamps = [p.pts for p in client.pictures if p.pts is not None]
            assert all(b > a for a, b in zip(stamps, stamps[1:], strict=False))
            assert all((b - a) % 3600 == 0 for a, b in zip(stamps, stamps[1:], strict=False))
            assert client.told("session")[-1]["state"] == "live"
            status, body = await found.json("GET", client.path)
            assert (status, body["state"], body["spec"]["avatar"]) == (200, "live", "bo")
            status, _ = await found.json("DELETE", client.path)
            assert status == 204
            assert found.server.hub.active == 0
            status, problem = await found.json("GET", client.path)
            assert (status, problem["reason"]) == (404, "not_found")
            await client.close()

    run(work())


async def stop_and_speak_again() -> None:
    """Interrupts speech and listens for what is left of it."""
    async with site() as found:
        client = Client(found)
        assert await client.connect() == 201
        await client.live()
        client.send("speak", **speech(1.4))
        await client.until(lambda: sum(map(is_loud, client.sound)) >= 5)
        client.send("stop")
        await client.until(lambda: client.told("finished"))
        assert client.told("finished")[0]["interrupted"]
        # What was on its way when the message came: the jitter buffer and one block.
        await asyncio.sleep(0.3)
        client.sound.clear()
        await client.until(lambda: len(client.sound) > 40)
        assert sum(map(is_loud, client.sound)) == 0
        media = client.told("media")
        await client.until(lambda: client.told("media") != media)
        assert client.told("media")[-1]["generation"] == 1
        # It speaks again.
        client.send("speak", **speech(0.4))
        await client.until(lambda: sum(map(is_loud, client.sound)) > 8)
        await client.until(lambda: len(client.told("finished")) == 2)
        assert not client.told("finished")[1]["interrupted"]
        await client.close()


def test_after_a_stop_nothing_of_the_old_generation_is_heard() -> None:
    run(stop_and_speak_again())


def test_a_stop_that_drops_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    from rtgen.engine.intake import Intake

    monkeypatch.setattr(Intake, "interrupt", lambda *_: None)
    monkeypatch.setattr(Playout, "interrupt", lambda self: 0)
    with pytest.raises(AssertionError, match="is_loud"):
        run(stop_and_speak_again(), 25.0)


def test_the_microphone_drives_the_face_when_it_is_on() -> None:
    async def work() -> None:
        async with site() as found:
            client = Client(found)
            assert await client.connect(microphone=ToneTrack(tone(60.0))) == 201
            await client.live()
            await asyncio.sleep(0.3)
            assert not client.told("started")
            client.send("mic", on=True)
            await client.until(lambda: client.told("started"))
            await client.until(lambda: sum(map(is_loud, client.sound)) > 20)
            client.send("mic", on=False)
            await client.until(lambda: client.told("finished"))
            await client.close()

    run(work())


def test_a_peer_that_vanishes_frees_its_place() -> None:
    async def work() -> None:
        async with site() as found:
            client = Client(found)
            assert await client.connect() == 201
            await client.live()
            assert found.server.hub.active == 1
            # As if killed: no packet goes out any more, and nobody says good-bye.
            client.mute()
            await client.until(lambda: found.server.hub.active == 0, 10.0)
            second = Client(found)
            assert await second.connect() == 201
            await second.live()
            await second.close()
            await client.close()

    run(work())


def test_a_peer_that_closes_keeps_its_place_for_a_while_and_resumes() -> None:
    async def work() -> None:
        async with site() as found:
            client = Client(found)
            assert await client.connect() == 201
            await client.live()
            token, path = client.answer["resume"], client.path
            await client.close()
            second = Client(found)
            assert await second.connect(resume=token) == 201
            assert second.answer["resumed"]
            assert second.path == path
            await second.live()
            media = len(second.told("media"))
            await second.until(lambda: len(second.told("media")) > media)
            await second.close()
            third = Client(found)
            await third.until(lambda: found.server.hub.active == 0, 10.0)
            assert await third.connect(resume=token) == 404
            await third.close()

    run(work())


def test_a_resumed_session_leaves_its_older_connection() -> None:
    async def work() -> None:
        async with site() as found:
            first, second = Client(found), Client(found)
            assert await first.connect() == 201
            await first.live()
            assert await second.connect(resume=first.answer["resume"]) == 201
            await second.live()
            await first.until(lambda: first.told("session")[-1]["reason"] == "replaced")
            assert found.server.hub.active == 1
            await first.close()
            await asyncio.sleep(0.3)
            seen = len(second.pictures)
            await second.until(lambda: len(second.pictures) > seen + 5)
            await second.close()

    run(work())


def test_two_sessions_never_hear_each_other() -> None:
    async def work() -> None:
        async with site(max_sessions=2) as found:
            first, second = Client(found), Client(found)
            assert await first.connect() == 201
            assert await second.connect() == 201
            await first.live()
            await second.live()
            first.send("speak", **speech(0.6))
            await first.until(lambda: first.told("finished"))
            await first.until(lambda: sum(map(is_loud, first.sound)) > 20)
            assert sum(map(is_loud, second.sound)) == 0
            assert not second.told("started")
            await first.close()
            await second.close()

    run(work())


def test_wrong_messages_are_answered_and_harm_nothing() -> None:
    async def work() -> None:
        async with site() as found:
            client = Client(found)
            assert await client.connect() == 201
            await client.live()
            for text in ("{", "[1]", '{"version":2,"type":"stop"}', "[" * 5000, "x" * 70_000):
                client.channel.send(text)
            await client.until(lambda: len(client.told("error")) == 5)
            client.send("trigger_event", event="dance")
            client.send("mic", on="yes")
            client.send("ping", time_ms=12.5)
            await client.until(lambda: client.told("pong"))
            assert client.told("pong")[0]["time_ms"] == 12.5
            assert len(client.told("error")) == 7
            assert not any(error["fatal"] for error in client.told("error"))
            await client.close()

    run(work())


def test_a_failing_service_ends_its_session_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from pipelines.avatar import AvatarSession

    async def work() -> None:
        async with site() as found:
            client = Client(found)
            assert await client.connect() == 201
            await client.live()

            def planted(self: AvatarSession, x0: object) -> None:
                raise ArithmeticError("planted")

            monkeypatch.setattr(AvatarSession, "decode", planted)
            await client.until(lambda: found.server.hub.active == 0)
            await client.until(lambda: client.told("session")[-1]["state"] == "closed")
            assert "planted" in client.told("session")[-1]["reason"]
            await client.close()

    run(work())


def test_a_key_frame_follows_a_request_of_the_peer() -> None:
    async def work() -> None:
        async with site() as found:
            client = Client(found)
            assert await client.connect() == 201
            await client.live()
            video = next(r for r in client.pc.getReceivers() if r.track.kind == "video")
            requested: list[bool] = []
            session = found.server.hub.find(client.answer["session"])
            pump = session._pump
            assert pump is not None
            plain = pump.request_key

            def counted() -> None:
                requested.append(True)
                plain()

            pump.request_key = counted  # type: ignore[method-assign]
            for source in video.getSynchronizationSources():
                await video._send_rtcp_pli(source.source)
            await client.until(lambda: requested)
            await client.close()

    run(work())


def test_a_stopped_stream_of_samples_ends_with_the_interrupt() -> None:
    async def work() -> None:
        async with site() as found:
            client = Client(found)
            assert await client.connect() == 201
            await client.live()

            async def endless() -> AsyncIterator[bytes]:
                while True:
                    yield tone(0.2).astype("<i2").tobytes()
                    await asyncio.sleep(0.1)

            request = asyncio.create_task(found.json("POST", client.path + "/pcm", data=endless()))
            await client.until(lambda: client.told("started"))
            client.send("stop")
            status, problem = await request
            assert (status, problem["reason"]) == (409, "interrupted")
            await client.until(lambda: client.told("finished"))
            await client.close()

    run(work())


def test_many_stops_in_a_row_leave_a_session_that_speaks() -> None:
    async def work() -> None:
        async with site() as found:
            client = Client(found)
            assert await client.connect() == 201
            await client.live()
            for number in range(20):
                if number % 4 == 0:
                    client.send("speak", **speech(0.5))
                client.send("stop")
                await asyncio.sleep(0.02)
            client.send("speak", **speech(0.3))
            await client.until(
                lambda: client.told("finished") and not client.told("finished")[-1]["interrupted"]
            )
            assert len(client.told("started")) == len(client.told("finished"))
            await client.until(
                lambda: client.told("media") and client.told("media")[-1]["generation"] == 20
            )
            assert client.told("error") == []
            await client.close()

    run(work())


def test_a_storm_of_reloads_leaves_nothing_behind() -> None:
    async def work() -> None:
        async with site() as found:
            token = None
            for _ in range(8):
                client = Client(found)
                body: dict[str, Any] = {} if token is None else {"resume": token}
                assert await client.connect(**body) == 201
                token = client.answer["resume"]
                await asyncio.sleep(0.05)
                await client.close()
            assert found.server.hub.active == 1
            last = Client(found)
            assert await last.connect(resume=token) == 201
            await last.live()
            await found.json("DELETE", last.path)
            await last.close()
            assert found.server.hub.active == 0
            await asyncio.sleep(0.3)
            assert len(asyncio.all_tasks()) < 12

    run(work())
