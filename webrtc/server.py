"""The HTTP face: page, probes, metrics, offers, and what belongs to a session."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import asdict
from pathlib import Path

import numpy as np
from aiohttp import WSMsgType, web

from rtgen.errors import ConfigError, RtgenError
from rtgen.frame_link import SupervisedService
from rtgen.types import EVENTS, PROTOCOL_VERSION, ErrorEvent, Pcm16, SpeechState
from webrtc.aiortc_compat import gather_addresses
from webrtc.config import ServerConfig
from webrtc.encoder import encoder_pool
from webrtc.http import guard, read_body, read_json
from webrtc.hub import Hub
from webrtc.metrics import server_metrics
from webrtc.pump import Surroundings
from webrtc.session import MediaSession
from webrtc.signalling import (
    MAX_SDP_BYTES,
    Problem,
    parse_candidates,
    parse_offer,
    spec_to_dict,
)
from webrtc.uploads import media_pool
from webrtc.voice import find_voice

logger = logging.getLogger(__name__)

STATIC = Path(__file__).parent / "static"
MAX_OFFER_BYTES = 2 * MAX_SDP_BYTES
MAX_PATCH_BYTES = 16 * 1024
MAX_CONTROL_BYTES = 2**20
MAX_SOCKETS = 4
SOCKET_MESSAGES = 64
READ_TIMEOUT_S = 60.0
LAG_PERIOD_S = 0.25
WEBSOCKET_PROTOCOL = "rtgen.v1"


class MediaServer:
    """The media process's server.

    Args:
        service: where sessions come from; stays the caller's.
        config: of the server.

    Attributes:
        app: the aiohttp application.
        hub: the sessions.
    """

    def __init__(self, service: SupervisedService, config: ServerConfig) -> None:
        self._service, self._config = service, config
        self._metrics = server_metrics()
        self._around = Surroundings(
            config=config,
            metrics=self._metrics,
            encode_pool=encoder_pool(config.encoder_threads),
            media_pool=media_pool(),
            voice=find_voice(),
        )
        self.hub = Hub(service, self._around)
        self._lag_s = 0.0
        self._lag_task: asyncio.Task[None] | None = None
        gauge = self._metrics.gauge
        gauge("rtgen_sessions_active", "Sessions that hold a place.", lambda: self.hub.active)
        gauge("rtgen_ready", "Whether /readyz says yes.", lambda: not self._why_not_ready())
        gauge("rtgen_loop_lag_seconds", "How late the event loop wakes.", lambda: self._lag_s)
        gauge("rtgen_generation_restarts", "Processes replaced.", lambda: service.restarts)
        if config.gather:
            gather_addresses(config.gather)
        self.app = web.Application(
            middlewares=[guard(config, self._metrics)], client_max_size=MAX_CONTROL_BYTES
        )
        self.app.on_startup.append(self._start)
        self.app.on_cleanup.append(self._stop)
        self._add_routes()

    def _add_routes(self) -> None:
        add = self.app.router
        add.add_get("/", self._page)
        add.add_static("/static", STATIC)
        add.add_get("/healthz", self._health)
        add.add_get("/readyz", self._readiness)
        add.add_get("/metrics", self._metrics_text)
        add.add_get("/config", self._describe)
        add.add_get("/samples/{name}", self._sample)
        add.add_post("/offer", self._offer)
        add.add_get("/sessions/{id}", self._session)
        add.add_patch("/sessions/{id}", self._trickle)
        add.add_delete("/sessions/{id}", self._delete)
        add.add_post("/sessions/{id}/control", self._control)
        add.add_get("/sessions/{id}/control", self._socket)
        add.add_post("/sessions/{id}/audio", self._audio)
        add.add_post("/sessions/{id}/pcm", self._pcm)

    async def _start(self, _: web.Application) -> None:
        self._lag_task = asyncio.create_task(self._measure_lag())

    async def _stop(self, _: web.Application) -> None:
        if self._lag_task is not None:
            self._lag_task.cancel()
        await self.hub.drain()
        self._around.encode_pool.shutdown(wait=True)
        self._around.media_pool.shutdown(wait=True, cancel_futures=True)

    async def _measure_lag(self) -> None:
        while True:
            before = time.monotonic()
            await asyncio.sleep(LAG_PERIOD_S)
            self._lag_s = max(time.monotonic() - before - LAG_PERIOD_S, 0.0)

    def _why_not_ready(self) -> Problem | None:
        if self.hub.is_draining:
            return Problem(503, "draining", "the server shuts down", 5)
        if not self._service.ready:
            text = self._service.failure or "the model is warming up"
            return Problem(503, "not_ready", text, 5)
        if self.hub.is_starved:
            return Problem(503, "not_ready", "the model makes no pictures", 5)
        return None

    # -- the page and probes

    async def _page(self, _: web.Request) -> web.StreamResponse:
        return web.FileResponse(STATIC / "index.html")

    async def _health(self, _: web.Request) -> web.Response:
        if not self._service.healthy:
            raise Problem(503, "not_ready", self._service.failure or "the model process hangs", 5)
        return web.json_response({"status": "ok"})

    async def _readiness(self, _: web.Request) -> web.Response:
        problem = self._why_not_ready()
        if problem is not None:
            raise problem
        return web.json_response({"status": "ready"})

    async def _metrics_text(self, _: web.Request) -> web.Response:
        own = self._metrics.text()
        # Whatever the generation process measures of itself, by names that it chose.
        theirs = "".join(f"{name} {value:g}\n" for name, value in self._service.figures.items())
        return web.Response(text=own + theirs, content_type="text/plain")

    async def _describe(self, _: web.Request) -> web.Response:
        config, uploads = self._config, self._config.uploads
        body: dict[str, object] = {
            "version": PROTOCOL_VERSION,
            "model": config.model,
            "avatars": list(config.avatars),
            "steps": list(config.steps),
            "default_steps": config.default_steps,
            "states": [state.name.lower() for state in SpeechState],
            "events": list(EVENTS[1:]),
            "text": self._around.voice is not None,
            "samples": [path.stem for path in config.samples],
            "auth": config.token is not None,
            "ice_servers": [server.to_dict() for server in config.ice_servers],
            "max_sessions": config.max_sessions,
            "heartbeat_s": config.limits.heartbeat_s,
            "ready": self._service.ready,
            "limits": {
                "upload_bytes": uploads.max_bytes,
                "upload_s": uploads.max_s,
                "text_chars": 4000,
            },
        }
        if self._service.ready:
            unit_format = self._service.format
            body |= {
                "width": unit_format.width,
                "height": unit_format.height,
                "fps": float(unit_format.fps),
                "frames_per_unit": unit_format.frames_per_unit,
            }
        return web.json_response(body)

    async def _sample(self, request: web.Request) -> web.StreamResponse:
        wanted = request.match_info["name"]
        for path in self._config.samples:
            if path.stem == wanted:
                return web.FileResponse(path)
        raise Problem(404, "not_found", "there is no such sample; /config names them")

    # -- sessions

    def _found(self, request: web.Request) -> MediaSession:
        return self.hub.find(request.match_info["id"])

    async def _offer(self, request: web.Request) -> web.Response:
        offer = parse_offer(await read_json(request, MAX_OFFER_BYTES))
        session, answer, is_resumed = await self.hub.connect(offer)
        url = f"/sessions/{session.id}"
        body = {
            "type": "answer",
            "sdp": answer,
            "session": session.id,
            "url": url,
            "resume": session.resume_token,
            "resumed": is_resumed,
            "ice_servers": [server.to_dict() for server in self._config.ice_servers],
            "heartbeat_s": self._config.limits.heartbeat_s,
        }
        return web.json_response(body, status=201, headers={"Location": url})

    async def _session(self, request: web.Request) -> web.Response:
        session = self._found(request)
        body = {"session": session.id, "spec": spec_to_dict(session.spec), **session.describe()}
        return web.json_response(body)

    async def _trickle(self, request: web.Request) -> web.Response:
        session = self._found(request)
        candidates = parse_candidates(await read_json(request, MAX_PATCH_BYTES))
        await session.add_candidates(candidates)
        return web.Response(status=204)

    async def _delete(self, request: web.Request) -> web.Response:
        await self._found(request).close("deleted")
        return web.Response(status=204)

    async def _control(self, request: web.Request) -> web.Response:
        session = self._found(request)
        reply = session.control(await read_json(request, MAX_CONTROL_BYTES))
        return web.Response(status=204) if reply is None else web.json_response(reply)

    async def _socket(self, request: web.Request) -> web.StreamResponse:
        session = self._found(request)
        if len(session.sinks) >= MAX_SOCKETS:
            raise Problem(429, "busy", f"a session has at most {MAX_SOCKETS} websockets")
        socket = web.WebSocketResponse(
            protocols=[WEBSOCKET_PROTOCOL], max_msg_size=MAX_CONTROL_BYTES, heartbeat=10.0
        )
        await socket.prepare(request)
        sink = SocketSink()
        sink.send(session.state_message())
        session.sinks.add(sink)
        writer = asyncio.create_task(sink.write_to(socket))
        try:
            async for message in socket:
                if message.type is WSMsgType.TEXT:
                    session.receive(message.data, sink, MAX_CONTROL_BYTES)
                else:
                    error = ErrorEvent(message="messages are text", fatal=False)
                    sink.send(error.to_dict())
        finally:
            session.sinks.discard(sink)
            writer.cancel()
        return socket

    async def _audio(self, request: web.Request) -> web.Response:
        session = self._found(request)
        try:
            async with asyncio.timeout(READ_TIMEOUT_S):
                body = await read_body(request, self._config.uploads.max_bytes)
        except TimeoutError as error:
            raise Problem(408, "timeout", "the file came too slowly") from error
        info = await session.driver.speak_file(body)
        return web.json_response(asdict(info), status=202)

    async def _pcm(self, request: web.Request) -> web.Response:
        session = self._found(request)
        text = request.query.get("rate", "48000")
        rate = int(text) if text.isascii() and text.isdigit() and len(text) < 7 else 0
        if not 1_000 <= rate <= 384_000:
            raise ConfigError(f"rate must be 1000 to 384000, got {text!r}")
        source = PcmBody(request)
        await session.driver.speak_stream(source.pieces(), rate)
        return web.json_response({"samples": source.samples})


class PcmBody:
    """A request's body as int16 samples, read only as fast as they are used.

    Attributes:
        samples: read so far.
    """

    def __init__(self, request: web.Request) -> None:
        self._request = request
        self.samples = 0

    async def pieces(self) -> AsyncIterator[Pcm16]:
        """Yields int16 [n]; an odd byte at the end is left out."""
        rest = b""
        async for chunk in self._request.content.iter_chunked(16 * 1024):
            data = rest + chunk
            whole = len(data) // 2 * 2
            rest = data[whole:]
            pcm = np.frombuffer(data[:whole], "<i2").astype(np.int16)
            self.samples += len(pcm)
            yield pcm


class SocketSink:
    """Messages on their way to a websocket: at most `SOCKET_MESSAGES`, then the oldest goes."""

    def __init__(self) -> None:
        self._waiting: deque[dict[str, object]] = deque(maxlen=SOCKET_MESSAGES)
        self._changed = asyncio.Event()

    def send(self, message: dict[str, object]) -> bool:
        """Queues a message."""
        self._waiting.append(message)
        self._changed.set()
        return True

    async def write_to(self, socket: web.WebSocketResponse) -> None:
        """Sends until the socket closes, or the session does."""
        try:
            while not socket.closed:
                while self._waiting:
                    message = self._waiting.popleft()
                    await socket.send_str(json.dumps(message, separators=(",", ":")))
                    if message.get("type") == "session" and message.get("state") == "closed":
                        await socket.close()
                        return
                self._changed.clear()
                await self._changed.wait()
        except (ConnectionError, RtgenError) as error:
            logger.debug("a websocket ended: %s", error)
