"""One session: a face of the service, the connection that shows it, and what makes it speak.

The session outlives its connection for a while, so that a reload takes it up again. While nobody
is connected no unit is acknowledged, so the service makes none.

    units -> Playout -> (one Pacer for both tracks) -> Opus / VideoSender -> Peer
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Callable, Coroutine
from fractions import Fraction
from typing import Any

from rtgen.errors import RtgenError, StreamClosed
from rtgen.types import (
    ErrorEvent,
    Pcm16,
    ServerEvent,
    Session,
    SessionSpec,
    Speak,
    Stats,
    Stop,
    parse_control,
)
from webrtc.driving import Driver
from webrtc.figures import Figures
from webrtc.liveness import Life, State
from webrtc.messages import (
    MAX_MESSAGE,
    Sink,
    media_message,
    microphone_switch,
    parse_message,
    pong,
    state_message,
)
from webrtc.peer import Peer
from webrtc.playout import Block, Playout
from webrtc.pump import Pump, Surroundings
from webrtc.rate_control import RateControl
from webrtc.signalling import Candidate, Problem
from webrtc.tasks import Tasks
from webrtc.turns import TurnRelay

logger = logging.getLogger(__name__)

WATCH_S = 0.5
CLOSE_S = 5.0
MAX_PATCHES = 50
GOODBYE_S = 0.05
"""Given to the last message before its connection is closed."""


class MediaSession:
    """A live session.

    Args:
        session: of the service; this object closes it.
        spec: what was asked for.
        around: shared with others.
        on_closed: called once, when everything is freed.

    Attributes:
        id: unguessable; whoever knows it may control the session.
        resume_token: takes the session up again.
    """

    def __init__(
        self,
        session: Session,
        spec: SessionSpec,
        around: Surroundings,
        on_closed: Callable[[MediaSession], None],
    ) -> None:
        self.id = secrets.token_urlsafe(24)
        self.resume_token = secrets.token_urlsafe(24)
        self.spec = spec
        self.sinks: set[Sink] = set()
        self._session, self._around, self._on_closed = session, around, on_closed
        now_s = time.monotonic()
        self._life = Life(around.config.limits, now_s)
        self._playout = Playout()
        self._turns = TurnRelay()
        self._figures = Figures(around.metrics)
        self._rate = RateControl(around.config.rate, now_s)
        self._peer: Peer | None = None
        self._pump: Pump | None = None
        self._tasks = Tasks(session.id, lambda why: self._close_soon(f"failed: {why}"))
        self._peer_tasks = Tasks(session.id, lambda why: self._close_soon(f"failed: {why}"))
        self._closing: asyncio.Task[None] | None = None
        self._interrupted_ns: int | None = None
        self._patches = 0
        self._log = logging.LoggerAdapter(logger, {"session": session.id})
        self.driver = Driver(
            session,
            around.media_pool,
            around.config.uploads,
            around.voice,
            played=self._played,
            spawn=self._spawn_utterance,
        )
        for work in (self._read_units(), self._read_events(), self._watch()):
            self._tasks.spawn(work)

    @property
    def state(self) -> State:
        """Where the session is in its life."""
        return self._life.state

    @property
    def log_id(self) -> str:
        """Names the session in logs; not a secret."""
        return self._session.id

    @property
    def can_resume(self) -> bool:
        """Whether another connection may take the session over."""
        return self.state in (State.CONNECTING, State.LIVE, State.DETACHED)

    @property
    def is_starved(self) -> bool:
        """Whether the service has made nothing for a connected peer for seconds."""
        return self.state is State.LIVE and self._figures.is_starved(time.monotonic())

    def state_message(self) -> dict[str, object]:
        """What a client is told of the state."""
        return state_message(self.id, self.state, self._life.reason)

    def describe(self) -> dict[str, object]:
        """State and figures, as JSON values."""
        return {"state": str(self.state), "stats": self._media_message()}

    # -- connections

    async def attach(self, peer: Peer, offered_ns: int) -> None:
        """Shows the session on another connection, which was answered.

        Args:
            peer: answered, not yet connected.
            offered_ns: when its offer came, by `time.monotonic_ns`.
        """
        old = self._release_peer()
        self._life.go(State.CONNECTING, time.monotonic())
        self._peer, self._patches = peer, 0
        self._figures.begin(offered_ns)
        self._playout.rebase()
        if old is not None:
            old.send(state_message(self.id, State.CLOSED, "replaced"))
            await old.close()

    async def add_candidates(self, candidates: list[Candidate]) -> None:
        """Adds trickled candidates to the connection.

        Raises:
            Problem: 404 without a connection; 429 after too many times.
        """
        self._patches += 1
        if self._patches > MAX_PATCHES:
            raise Problem(429, "busy", f"a connection takes {MAX_PATCHES} parts of candidates")
        if self._peer is None:
            raise Problem(404, "not_found", "the session has no connection; make an offer")
        await self._peer.add_candidates(candidates)

    def on_connected(self, peer: Peer) -> None:
        """See `PeerEvents`."""
        if peer is not self._peer or self.state is not State.CONNECTING:
            return
        self._life.go(State.LIVE, time.monotonic())
        self._log.info("connected, pictures as %s", peer.codec)
        self._pump = Pump(
            peer,
            self._playout,
            self._rate,
            self._around,
            on_sent=self._figures.sent,
            on_dropped=self._figures.dropped,
            on_block=self._block_sent,
        )
        for work in (self._pump.run(), self._pump.encode()):
            self._peer_tasks.spawn(work)
        self.send(self.state_message())

    def on_channel(self, peer: Peer) -> None:
        """See `PeerEvents`."""
        if peer is self._peer:
            peer.send(self.state_message())

    def on_gone(self, peer: Peer) -> None:
        """See `PeerEvents`."""
        if peer is self._peer:
            self._detach("peer gone", vanished=False)

    def on_message(self, peer: Peer, text: str) -> None:
        """See `PeerEvents`."""
        if peer is self._peer:
            self.receive(text, peer)

    def on_sound(self, peer: Peer, pcm: Pcm16, sample_rate: int) -> None:
        """See `PeerEvents`."""
        if peer is self._peer and self.state is State.LIVE:
            try:
                self.driver.microphone(pcm, sample_rate)
            except RtgenError as error:
                self._log.info("the microphone is not heard any more: %s", error)

    def on_key_frame_request(self, peer: Peer) -> None:
        """See `PeerEvents`."""
        if peer is self._peer and self._pump is not None:
            self._pump.request_key()

    def wants_sound(self) -> bool:
        """See `PeerEvents`."""
        self._life.heard(time.monotonic())
        return self.driver.is_microphone_on

    # -- control

    def receive(self, text: str, sink: Sink, limit: int = MAX_MESSAGE) -> None:
        """Takes a control message; what is wrong with it is told to its sender."""
        self._life.heard(time.monotonic())
        try:
            reply = self.control(parse_message(text, limit))
        except RtgenError as error:
            reply = ErrorEvent(message=str(error), fatal=False).to_dict()
        if reply is not None:
            sink.send(reply)

    def control(self, message: object) -> dict[str, object] | None:
        """Applies a control message and returns the answer to it, if it has one.

        Raises:
            ConfigError: it breaks the schema, or cannot be applied.
            Problem: it cannot be served.
            StreamClosed: the session has ended.
        """
        if isinstance(message, dict) and message.get("type") == "ping":
            return pong(message)
        if isinstance(message, dict) and message.get("type") == "mic":
            self.driver.set_microphone(microphone_switch(message))
            return None
        command = parse_control(message)
        match command:
            case Speak():
                self.driver.speak(command)
            case Stop():
                self._interrupt()
            case _:
                self._session.control(command)
        return None

    def send(self, message: dict[str, object]) -> bool:
        """Sends a message to the peer and all other receivers; whether the peer takes it."""
        for sink in self.sinks:
            sink.send(message)
        return self._peer is not None and self._peer.send(message)

    def _interrupt(self) -> None:
        self._session.control(Stop())
        self._interrupted_ns = time.monotonic_ns()
        self._playout.interrupt()
        self.driver.stop()
        if self._pump is not None:
            self._pump.flush()
        self._around.metrics.add("rtgen_interrupts_total")

    # -- ends

    def drain(self) -> None:
        """The server shuts down: the session ends soon."""
        if self.state not in (State.CLOSED, State.DRAINING, State.NEGOTIATING):
            self._life.go(State.DRAINING, time.monotonic())
            self.send(state_message(self.id, self.state, "shutdown"))

    async def close(self, reason: str) -> None:
        """Frees everything; may be called again."""
        await asyncio.shield(self._close_soon(reason))

    def _close_soon(self, reason: str) -> asyncio.Task[None]:
        if self._closing is None:
            self._closing = asyncio.create_task(self._close(reason))
        return self._closing

    async def _close(self, reason: str) -> None:
        self._life.go(State.CLOSED, time.monotonic(), reason)
        is_told = self.send(self.state_message())
        self.driver.stop()
        peer = self._release_peer()
        await asyncio.gather(*self._tasks.cancel(), return_exceptions=True)
        if peer is not None:
            await asyncio.sleep(GOODBYE_S if is_told else 0)
            await peer.close()
        try:
            async with asyncio.timeout(CLOSE_S):
                await self._session.close()
        except (TimeoutError, RtgenError) as error:
            self._log.warning("the service did not close the session: %s", error)
        self._around.metrics.add("rtgen_session_end_total", reason=reason.split(":")[0])
        self._log.info("closed: %s", reason)
        self._on_closed(self)

    def _detach(self, reason: str, *, vanished: bool) -> None:
        if self.state is State.DRAINING:
            self._close_soon("shutdown")
        elif self.state in (State.CONNECTING, State.LIVE):
            self._life.detach(time.monotonic(), reason, vanished=vanished)
            self._log.info("detached: %s", reason)
            self.driver.set_microphone(False)
            peer = self._release_peer()
            if peer is not None:
                self._tasks.spawn(peer.close())

    def _release_peer(self) -> Peer | None:
        """Stops the pump and lets go of the peer; the caller closes it."""
        self._peer_tasks.cancel()
        peer, self._peer, self._pump = self._peer, None, None
        return peer

    # -- tasks

    def _spawn_utterance(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        async def told() -> None:
            try:
                await work
            except RtgenError as error:
                self.send(ErrorEvent(message=str(error), fatal=False).to_dict())

        return self._tasks.spawn(told())

    async def _read_units(self) -> None:
        async for unit in self._session.units():
            self._playout.put(unit)
            self._figures.unit_came(time.monotonic())
        raise StreamClosed("the service ended the session")

    async def _read_events(self) -> None:
        async for event in self._session.events():
            if isinstance(event, Stats):
                self.driver.follow(event)
            self._tell(self._turns.take(event, self._played()))

    def _tell(self, events: list[ServerEvent]) -> None:
        for event in events:
            self.send(event.to_dict())

    async def _watch(self) -> None:
        number = 0
        while True:
            await asyncio.sleep(WATCH_S)
            number += 1
            peer, now_s = self._peer, time.monotonic()
            if peer is not None and self.state in (State.LIVE, State.DRAINING) and number % 2 == 0:
                report = self._figures.report(await peer.stats(), now_s)
                if report.is_new:
                    self._life.heard(now_s)
                    if report.loss is not None:
                        self._rate.report(report.loss, now_s)
                if self._pump is not None:
                    self._pump.set_bitrate(self._rate.target)
                self.send(self._media_message())
            if self._life.is_silent(now_s):
                self._detach("peer vanished", vanished=True)
            if (reason := self._life.expired(now_s)) is not None:
                self._close_soon(reason)

    def _block_sent(self, block: Block) -> None:
        for unit in block.started:
            self._session.ack(unit)
        if self._interrupted_ns is not None:
            past_s = (time.monotonic_ns() - self._interrupted_ns) / 1e9
            self._around.metrics.observe("rtgen_interrupt_to_silence_seconds", past_s)
            self._interrupted_ns = None
        self._tell(self._turns.due(self._played()))

    def _played(self) -> Fraction:
        return self._playout.media_end

    # -- messages

    def _media_message(self) -> dict[str, object]:
        return media_message(
            self._figures.to_dict(),
            self._playout,
            target_bitrate=self._rate.target,
            codec=None if self._peer is None else self._peer.codec,
            microphone=self.driver.describe_microphone(),
        )
