"""The HTTP face: who may ask, what is refused and how, and that nothing leaks by it."""

from __future__ import annotations

import asyncio
import io
import json
import wave
from typing import Any

import aiohttp
import numpy as np
import pytest
from aiortc import RTCConfiguration, RTCPeerConnection

from rtgen.types import Pcm16
from tests.media import wav_bytes
from tests.sound import tone
from tests.webrtc.live import Client, Site, is_loud, run, site
from webrtc.aiortc_compat import gather_addresses
from webrtc.config import UploadLimits
from webrtc.peer import Peer
from webrtc.signalling import MAX_SDP_BYTES, Problem, check_sdp

TOKEN = "correct-horse"


async def real_sdp() -> str:
    """An offer as aiortc makes it."""
    pc = RTCPeerConnection(RTCConfiguration(iceServers=[]))
    pc.createDataChannel("control")
    pc.addTransceiver("audio")
    pc.addTransceiver("video", direction="recvonly")
    await pc.setLocalDescription(await pc.createOffer())
    sdp: str = pc.localDescription.sdp
    await pc.close()
    return sdp


def test_probes_say_whether_it_lives_and_is_ready() -> None:
    async def work() -> None:
        async with site() as found:
            assert await found.json("GET", "/healthz") == (200, {"status": "ok"})
            assert await found.json("GET", "/readyz") == (200, {"status": "ready"})
            found.service.ready = False
            status, problem = await found.json("GET", "/readyz")
            assert (status, problem["reason"]) == (503, "not_ready")
            status, problem = await found.json("POST", "/offer", json={"sdp": await real_sdp()})
            assert (status, problem["reason"]) == (503, "not_ready")
            found.service.healthy, found.service.failure = False, "it hangs"
            status, problem = await found.json("GET", "/healthz")
            assert (status, problem["detail"]) == (503, "it hangs")
            _, text = await found.json("GET", "/metrics")
            assert "\nrtgen_ready 0\n" in text
            assert "\nrtgen_units_total 3\n" in text
            assert 'rtgen_admission_rejected_total{reason="not_ready"} 1' in text
            assert 'route="/readyz",status="503"' in text

    run(work())


def test_the_page_is_served_with_a_policy_and_config_says_what_there_is() -> None:
    async def work() -> None:
        async with site(steps=(1, 2), default_steps=2) as found:
            async with found.http.get(found.url + "/") as answer:
                assert answer.status == 200
                assert answer.content_type == "text/html"
                assert "default-src 'self'" in answer.headers["Content-Security-Policy"]
            _, config = await found.json("GET", "/config")
            assert config["avatars"] == ["ada", "bo"]
            assert config["fps"] == 25
            assert (config["steps"], config["default_steps"]) == ([1, 2], 2)
            assert config["auth"] is False
            assert config["ice_servers"] == []
            status, problem = await found.json("GET", "/static/../server.py")
            assert status == 404
            status, problem = await found.json("GET", "/nowhere")
            assert (status, problem["reason"]) == (404, "not_found")
            status, problem = await found.json("DELETE", "/offer")
            assert status == 405

    run(work())


WRONG_OFFERS: list[tuple[Any, int]] = [
    ("not json", 400),
    ("[]", 400),
    ({"sdp": 1}, 400),
    ({"type": "answer", "sdp": "v=0"}, 400),
    ({"sdp": ""}, 400),
    ({"sdp": "hello"}, 400),
    ({"sdp": "v=0\r\n"}, 422),
    ({"sdp": "v=0", "extra": 1}, 400),
    ({"sdp": "v=0", "resume": 5}, 400),
    ({"sdp": "v=0", "spec": {"seed": -1}}, 400),
    ({"sdp": "v=0", "spec": {"service_class": "offline"}}, 400),
    ({"sdp": "v=0\r\n" + "m=audio 9 X 0\r\n" * 2}, 422),
    ({"sdp": "v=0\r\nm=message 9 X 0\r\n"}, 422),
    ({"sdp": "v=0\r\nm=audio 9 X 0\r\n" + "a=candidate:1\r\n" * 65}, 422),
    ({"sdp": "v=0" + "x" * MAX_SDP_BYTES}, 413),
    ({"sdp": "v=0" + "x" * 10 * MAX_SDP_BYTES}, 413),
]


def test_wrong_offers_are_refused_in_words_and_take_no_place() -> None:
    async def work() -> None:
        async with site() as found:
            for body, expected in WRONG_OFFERS:
                data = body if isinstance(body, str) else json.dumps(body)
                status, problem = await found.json("POST", "/offer", data=data)
                assert status == expected, (str(body)[:80], problem)
                assert problem["status"] == expected
                assert problem["detail"]
            sdp = await real_sdp()
            offer = {"sdp": sdp, "spec": {"avatar": "nobody"}}
            status, problem = await found.json("POST", "/offer", json=offer)
            assert (status, problem["reason"]) == (400, "invalid")
            status, _ = await found.json("POST", "/offer", json={"sdp": sdp, "resume": "x"})
            assert status == 404
            assert found.server.hub.active == 0

    run(work())


def mutations(sdp: str, count: int) -> list[str]:
    """Damaged offers: lines lost, doubled, swapped, cut, and characters changed."""
    rng = np.random.default_rng(5)
    found = []
    for _ in range(count):
        lines = sdp.splitlines()
        for _ in range(int(rng.integers(1, 4))):
            at = int(rng.integers(len(lines)))
            match int(rng.integers(5)):
                case 0:
                    del lines[at]
                case 1:
                    lines.insert(at, lines[int(rng.integers(len(lines)))])
                case 2:
                    lines[at] = lines[at][: int(rng.integers(len(lines[at]) + 1))]
                case 3 if lines[at]:
                    where = int(rng.integers(len(lines[at])))
                    changed = chr(int(rng.integers(1, 0x250)))
                    lines[at] = lines[at][:where] + changed + lines[at][where + 1 :]
                case _:
                    other = int(rng.integers(len(lines)))
                    lines[at], lines[other] = lines[other], lines[at]
        found.append("\r\n".join(lines) + "\r\n")
    return found


class Deaf:
    """Hears nothing of what a peer does."""

    def on_connected(self, peer: Peer) -> None: ...
    def on_gone(self, peer: Peer) -> None: ...
    def on_channel(self, peer: Peer) -> None: ...
    def on_message(self, peer: Peer, text: str) -> None: ...
    def on_sound(self, peer: Peer, pcm: Pcm16, sample_rate: int) -> None: ...
    def on_key_frame_request(self, peer: Peer) -> None: ...
    def wants_sound(self) -> bool:
        return False


def test_damaged_sdp_is_answered_or_refused_and_leaves_nothing() -> None:
    async def work() -> None:
        gather_addresses(("127.0.0.1",))
        refused = answered = 0
        for sdp in mutations(await real_sdp(), 200):
            peer = None
            try:
                peer = Peer(check_sdp(sdp), (), Deaf())
                assert "a=candidate:" in await peer.answer(5.0)
                answered += 1
            except Problem as problem:
                refused += 400 <= problem.status < 500
            finally:
                if peer is not None:
                    await peer.close()
        assert refused + answered == 200  # no server error
        assert min(refused, answered) > 20
        assert len(asyncio.all_tasks()) < 5

    run(work())


def test_damaged_offers_give_no_server_error_and_leak_no_place() -> None:
    async def work() -> None:
        async with site() as found:
            statuses = []
            for sdp in mutations(await real_sdp(), 20):
                status, answer = await found.json("POST", "/offer", json={"sdp": sdp})
                statuses.append(status)
                if status == 201:
                    assert (await found.json("DELETE", answer["url"]))[0] == 204
            assert {s for s in statuses if s >= 500} == set()
            assert 0 < statuses.count(201) < len(statuses)
            assert found.server.hub.active == 0

    run(work(), 120)


def test_a_full_server_says_when_to_come_back() -> None:
    async def work() -> None:
        # The media side has room for four, the engine for one.
        async with site(max_sessions=1) as found:
            client = Client(found)
            assert await client.connect() == 201
            body = {"sdp": await real_sdp()}
            async with found.http.post(found.url + "/offer", json=body) as answer:
                problem = await answer.json(content_type="application/problem+json")
                assert answer.status == 503
                assert problem["reason"] == "full"
                assert "places" in problem["detail"]
                assert int(answer.headers["Retry-After"]) >= 1
            await client.close()

    run(work())


def test_only_who_has_the_token_is_served() -> None:
    async def work() -> None:
        async with site(token=TOKEN) as found:
            body = {"sdp": await real_sdp()}
            for headers in ({}, {"Authorization": "Bearer wrong-horse"}, {"Authorization": "é"}):
                async with found.http.post(
                    found.url + "/offer", json=body, headers=headers
                ) as answer:
                    assert answer.status == 401
                    assert answer.headers["WWW-Authenticate"] == "Bearer"
            for path in ("/", "/healthz", "/readyz", "/config", "/static/favicon.svg"):
                assert (await found.json("GET", path))[0] == 200, path
            assert (await found.json("GET", "/metrics"))[0] == 401
            client = Client(found, TOKEN)
            assert await client.connect() == 201
            assert (await found.json("DELETE", client.path))[0] == 401
            url = found.url + client.path + "/control"
            with pytest.raises(aiohttp.WSServerHandshakeError):
                await found.http.ws_connect(url, protocols=["rtgen.v1"])
            protocols = ["rtgen.v1", f"bearer.{TOKEN}"]
            async with found.http.ws_connect(url, protocols=protocols) as socket:
                assert socket.protocol == "rtgen.v1"
            await client.close()

    run(work())


def test_pages_of_other_origins_and_names_are_refused() -> None:
    async def work() -> None:
        async with site(cors_origins=("https://friend.example",)) as found:
            for headers, expected in (
                ({"Origin": "https://evil.example"}, 403),
                ({"Origin": "null"}, 403),
                ({"Host": "rebound.example"}, 403),
                ({"Origin": found.url}, 200),
                ({"Origin": "https://friend.example"}, 200),
            ):
                status, _ = await found.json("GET", "/config", headers=headers)
                assert status == expected, headers
            headers = {"Origin": "https://friend.example"}
            async with found.http.options(found.url + "/offer", headers=headers) as answer:
                assert answer.status == 204
                assert answer.headers["Access-Control-Allow-Origin"] == "https://friend.example"
                assert "Location" in answer.headers["Access-Control-Expose-Headers"]
            async with found.http.get(found.url + "/config") as answer:
                assert "Access-Control-Allow-Origin" not in answer.headers

    run(work())


def test_candidates_may_come_later_and_within_limits() -> None:
    async def work() -> None:
        async with site() as found:
            client = Client(found)
            assert await client.connect() == 201
            line = "candidate:1 1 udp 2130706431 127.0.0.1 9 typ host"
            good = {"candidates": [{"candidate": line, "sdpMid": "0", "sdpMLineIndex": 0}]}
            bad = {"candidates": [{"candidate": "candidate:nonsense", "sdpMid": "0"}]}
            for body, expected in (
                (good, 204),
                ({"candidates": []}, 204),
                (bad, 204),  # what cannot be understood is skipped
                ({"candidates": [{"candidate": 1}]}, 400),
                ({"candidates": [good["candidates"][0]] * 65}, 422),
                ({}, 400),
            ):
                status, _ = await found.json("PATCH", client.path, json=body)
                assert status == expected, body
            await client.close()

    run(work())


async def speaking(found: Site) -> Client:
    client = Client(found)
    assert await client.connect() == 201
    await client.live()
    return client


def test_an_uploaded_file_is_spoken_and_a_second_one_waits() -> None:
    async def work() -> None:
        async with site() as found:
            client = await speaking(found)
            noise = np.sin(np.arange(22_050) * 0.06) * 0.4
            body = wav_bytes(noise, 44_100)
            status, info = await found.json("POST", client.path + "/audio", data=body)
            assert status == 202
            assert (info["container"], info["sample_rate"], info["channels"]) == ("wav", 44_100, 1)
            assert info["duration_s"] == pytest.approx(0.5)
            await client.until(lambda: client.told("finished"))
            await client.until(lambda: sum(map(is_loud, client.sound)) > 18)
            await client.close()

    run(work())


def test_a_long_file_ends_by_a_stop_and_another_can_follow() -> None:
    async def work() -> None:
        async with site() as found:
            client = await speaking(found)
            long = wav_bytes(np.sin(np.arange(300 * 8_000) * 0.3) * 0.4, 8_000)
            path = client.path + "/audio"
            assert (await found.json("POST", path, data=io.BytesIO(long)))[0] == 202
            await client.until(lambda: client.told("started"))
            status, problem = await found.json(
                "POST", client.path + "/audio", data=io.BytesIO(long)
            )
            assert (status, problem["reason"]) == (409, "busy")
            client.send("stop")
            await client.until(lambda: client.told("finished"))
            short = wav_bytes(np.sin(np.arange(8_000) * 0.3) * 0.4, 8_000)
            assert (await found.json("POST", client.path + "/audio", data=short))[0] == 202
            await client.until(lambda: len(client.told("finished")) == 2)
            assert [turn["interrupted"] for turn in client.told("finished")] == [True, False]
            await client.close()

    run(work())


def bombs() -> list[tuple[bytes, int]]:
    """Uploads that must be refused, and how."""
    header = io.BytesIO()
    with wave.open(header, "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(1)
        file.setframerate(1000)
        file.writeframes(bytes(20_000))
    return [
        (b"", 415),
        (b"#EXTM3U\nfile:///etc/passwd\n", 415),
        (b"ffconcat version 1.0\nfile /etc/passwd\n", 415),
        (b"\x89PNG\r\n\x1a\n" + bytes(100), 415),
        (b"RIFF\xff\xff\xff\xffWAVE" + bytes(100), 422),
        (b"\x1a\x45\xdf\xa3" + bytes(1000), 422),
        (b"OggS" + bytes(1000), 422),
        (header.getvalue(), 413),  # 20 s from 20 kB
        (bytes(300_000), 413),
    ]


def test_upload_bombs_are_refused_and_the_session_goes_on() -> None:
    async def work() -> None:
        limits = UploadLimits(max_bytes=200_000, max_s=5.0)
        async with site(uploads=limits) as found:
            client = await speaking(found)
            for body, expected in bombs():
                status, problem = await found.json("POST", client.path + "/audio", data=body)
                assert status == expected, (body[:20], problem)
            seen = len(client.pictures)
            await client.until(lambda: len(client.pictures) > seen + 5)
            assert (await found.json("GET", client.path))[1]["state"] == "live"
            await client.close()

    run(work())


def test_pushed_samples_are_spoken() -> None:
    async def work() -> None:
        async with site() as found:
            client = await speaking(found)
            body = tone(0.4).astype("<i2").tobytes()
            path = client.path + "/pcm"
            status, answer = await found.json("POST", path + "?rate=48000", data=body)
            assert (status, answer) == (200, {"samples": len(tone(0.4))})
            await client.until(lambda: client.told("finished"))
            for rate in ("0", "x", "9999999", "-5"):
                assert (await found.json("POST", path + f"?rate={rate}", data=b""))[0] == 400
            await client.close()

    run(work())


def test_a_websocket_and_plain_requests_control_the_session_too() -> None:
    async def work() -> None:
        async with site() as found:
            client = await speaking(found)
            path = client.path + "/control"
            async with found.http.ws_connect(found.url + path, protocols=["rtgen.v1"]) as socket:
                assert (await socket.receive_json())["state"] == "live"
                await socket.send_json({"version": 1, "type": "ping", "time_ms": 1})
                kinds = [(await socket.receive_json())["type"] for _ in range(2)]
                assert "pong" in kinds
                message = {"version": 1, "type": "set_state", "state": "thinking"}
                assert (await found.json("POST", path, json=message))[0] == 204
                status, problem = await found.json("POST", path, json={"type": "stop"})
                assert (status, problem["reason"]) == (400, "invalid")
                assert (await found.json("DELETE", client.path))[0] == 204
                told = [received.json() async for received in socket]
                assert (told[-1]["type"], told[-1]["state"]) == ("session", "closed")
            await client.close()

    run(work())


def test_a_drained_server_says_good_bye_and_grants_no_more() -> None:
    async def work() -> None:
        async with site() as found:
            client = await speaking(found)
            await found.server.hub.drain()
            assert found.server.hub.active == 0
            await client.until(lambda: client.told("session")[-1]["state"] == "closed")
            assert [m["state"] for m in client.told("session")][-2:] == ["draining", "closed"]
            status, problem = await found.json("POST", "/offer", json={"sdp": await real_sdp()})
            assert (status, problem["reason"]) == (503, "draining")
            assert (await found.json("GET", "/readyz"))[0] == 503
            await client.close()

    run(work())
