"""A media server over a real engine at toy size, and a real peer to drive it, in one process."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import aiohttp
import av
import numpy as np
from aiohttp import web
from aiortc import RTCConfiguration, RTCPeerConnection, RTCRtpSender, RTCSessionDescription
from aiortc.mediastreams import MediaStreamError, MediaStreamTrack

from rtgen.engine.admission import Capacity
from rtgen.engine.aio import AsyncService
from rtgen.engine.engine import Engine
from rtgen.engine.lanes import thread_lanes
from rtgen.types import Grant, Pcm16, Refusal, Session, SessionSpec, UnitFormat
from tests.toy_pipeline import toy_pipeline
from webrtc.config import ServerConfig
from webrtc.liveness import TimeLimits
from webrtc.peer import mono
from webrtc.server import MediaServer

T = TypeVar("T")
QUICK = TimeLimits(
    negotiating_s=5, connecting_s=5, silence_s=4, lost_s=0.5, resume_s=1.5, draining_s=0.5,
    heartbeat_s=0.5,
)  # fmt: skip


class LocalService:
    """The engine of this process as a supervised service."""

    def __init__(self, max_sessions: int = 1) -> None:
        self._engine = Engine(
            toy_pipeline(),
            lanes=thread_lanes(),
            max_sessions=max_sessions,
            capacity=Capacity(max_load=math.inf),
        )
        self._service = AsyncService(self._engine)
        self.ready = self.healthy = True
        self.failure: str | None = None
        self.restarts = 0
        self.is_closed = False
        self.figures: Mapping[str, float] = {"rtgen_units_total": 3.0}

    @property
    def state(self) -> str:
        return "ready" if self.ready else "starting"

    @property
    def format(self) -> UnitFormat:
        return toy_pipeline().format

    @property
    def description(self) -> Mapping[str, Any]:
        return {}

    async def reserve(self, spec: SessionSpec) -> Grant[Session] | Refusal:
        return await self._service.reserve(spec)

    async def start(self) -> None:
        self.ready = True

    async def until_ready(self) -> None:
        return

    async def drain(self, timeout_s: float) -> bool:
        self.ready = False
        return True

    async def close(self) -> None:
        self.is_closed = True
        self._engine.close()


class Address:
    """Where a server answers.

    Attributes:
        url: without a slash at its end.
    """

    def __init__(self, url: str) -> None:
        self.url, self.http = url, aiohttp.ClientSession()

    async def json(self, method: str, path: str, **options: Any) -> tuple[int, Any]:
        async with self.http.request(method, self.url + path, **options) as answer:
            text = await answer.text()
            return answer.status, json.loads(text) if text.startswith(("{", "[")) else text


class Site(Address):
    """A running server of this process.

    Attributes:
        service: behind it.
        server: the object that is tested.
    """

    def __init__(self, url: str, service: LocalService, server: MediaServer) -> None:
        super().__init__(url)
        self.service, self.server = service, server


@asynccontextmanager
async def site(
    *, max_sessions: int = 1, limits: TimeLimits = QUICK, **options: Any
) -> AsyncIterator[Site]:
    """A server on a free port of the loopback interface."""
    service = LocalService(max_sessions)
    config = ServerConfig(port=0, limits=limits, avatars=("ada", "bo"), **options)
    server = MediaServer(service, config)
    runner = web.AppRunner(server.app, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        found = Site(f"http://127.0.0.1:{runner.addresses[0][1]}", service, server)
        try:
            yield found
        finally:
            await found.http.close()
    finally:
        await runner.cleanup()
        await service.close()


class ToneTrack(MediaStreamTrack):
    """A microphone that hears what it is given, 20 ms at a time, in real time."""

    kind = "audio"

    def __init__(self, pcm: Pcm16) -> None:
        super().__init__()
        self._pcm, self._at = pcm, 0

    async def recv(self) -> av.AudioFrame:
        await asyncio.sleep(0.02)
        block = np.zeros(960, np.int16)
        part = self._pcm[self._at : self._at + 960]
        block[: len(part)] = part
        frame = av.AudioFrame.from_ndarray(block[None], format="s16", layout="mono")
        frame.sample_rate, frame.pts = 48_000, self._at
        self._at += 960
        return frame


class Client:
    """A browser without a screen.

    Attributes:
        sound: blocks received, int16 mono.
        pictures: count of frames received, with their time stamps.
        messages: from the server, over the data channel.
    """

    def __init__(self, site: Address, token: str | None = None) -> None:
        self.site = site
        self.headers = {} if token is None else {"Authorization": f"Bearer {token}"}
        self.pc = RTCPeerConnection(RTCConfiguration(iceServers=[]))
        self.channel = self.pc.createDataChannel("control")
        self.sound: list[Pcm16] = []
        self.pictures: list[av.VideoFrame] = []
        self.messages: list[dict[str, Any]] = []
        self.answer: dict[str, Any] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._changed = asyncio.Event()
        self.channel.on("message", self._message)
        self.pc.on("track", self._track)

    async def connect(
        self,
        *,
        codec: str | None = None,
        microphone: MediaStreamTrack | None = None,
        **body: Any,
    ) -> int:
        """Offers; returns the status."""
        self.pc.addTransceiver(microphone or "audio", direction="sendrecv")
        video = self.pc.addTransceiver("video", direction="recvonly")
        if codec is not None:
            codecs = RTCRtpSender.getCapabilities("video").codecs
            video.setCodecPreferences([c for c in codecs if c.mimeType == f"video/{codec}"])
        await self.pc.setLocalDescription(await self.pc.createOffer())
        offer = {"type": "offer", "sdp": self.pc.localDescription.sdp, **body}
        status, self.answer = await self.site.json(
            "POST", "/offer", json=offer, headers=self.headers
        )
        if status == 201:
            await self.pc.setRemoteDescription(
                RTCSessionDescription(self.answer["sdp"], self.answer["type"])
            )
        return status

    @property
    def path(self) -> str:
        return str(self.answer["url"])

    def send(self, kind: str, **fields: object) -> None:
        self.channel.send(json.dumps({"version": 1, "type": kind, **fields}))

    def told(self, kind: str) -> list[dict[str, Any]]:
        return [message for message in self.messages if message["type"] == kind]

    async def until(self, claim: Callable[[], object], seconds: float = 20.0) -> None:
        """Waits until something holds."""
        async with asyncio.timeout(seconds):
            while not claim():
                self._changed.clear()
                try:
                    await asyncio.wait_for(self._changed.wait(), 0.1)
                except TimeoutError:
                    continue

    async def live(self) -> None:
        """Waits until pictures come and messages can be sent."""
        await self.until(lambda: len(self.pictures) > 2 and self.channel.readyState == "open")

    def mute(self) -> None:
        """From now on nothing leaves, as if the process had been killed."""
        dtls: Any = self.pc.getSenders()[0].transport
        dtls._send_rtp = dtls._send_data = dtls.transport._connection.send = _nowhere

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await self.pc.close()

    def _message(self, text: str) -> None:
        self.messages.append(json.loads(text))
        self._changed.set()

    def _track(self, track: MediaStreamTrack) -> None:
        self._tasks.append(asyncio.create_task(self._read(track)))

    async def _read(self, track: MediaStreamTrack) -> None:
        try:
            while True:
                frame = await track.recv()
                if isinstance(frame, av.AudioFrame):
                    self.sound.append(mono(frame))
                elif isinstance(frame, av.VideoFrame):
                    self.pictures.append(frame)
                self._changed.set()
        except MediaStreamError:
            return


async def _nowhere(*_: object) -> None:
    return


def is_loud(block: Pcm16) -> bool:
    """Whether 20 ms hold sound; Opus leaves some noise in silence."""
    return float(np.sqrt(np.mean(block.astype(np.float64) ** 2))) > 300


def run(work: Coroutine[Any, Any, T], seconds: float = 60.0) -> T:
    """Runs a test's coroutine; fails instead of hanging, and leaves no thread of ours."""
    result = asyncio.run(asyncio.wait_for(work, seconds))
    left = [t.name for t in threading.enumerate() if t.name.startswith("rtgen")]
    assert left == []
    return result
