"""All sessions of a media process: admission, resumption, drain."""

from __future__ import annotations

import asyncio
import hmac
import logging
import time

from rtgen.errors import ConfigError
from rtgen.frame_link import SupervisedService
from rtgen.types import Refusal
from webrtc.liveness import State
from webrtc.peer import Peer
from webrtc.pump import Surroundings
from webrtc.session import MediaSession
from webrtc.signalling import Offer, Problem

logger = logging.getLogger(__name__)

RETRY_S = 5.0


class Hub:
    """The registry of sessions.

    Args:
        service: where sessions come from; stays the caller's.
        around: shared by sessions.

    Attributes:
        is_draining: no session is granted any more.
    """

    def __init__(self, service: SupervisedService, around: Surroundings) -> None:
        self._service, self._around = service, around
        self._sessions: dict[str, MediaSession] = {}
        self._pending = 0
        self._empty = asyncio.Event()
        self._empty.set()
        self.is_draining = False

    @property
    def active(self) -> int:
        """Sessions that hold a place."""
        return len(self._sessions)

    @property
    def is_starved(self) -> bool:
        """Whether the service has made nothing for a connected session for seconds."""
        return any(session.is_starved for session in self._sessions.values())

    def find(self, session_id: str) -> MediaSession:
        """The session of that id.

        Raises:
            Problem: 404, there is none.
        """
        for known, session in self._sessions.items():
            if hmac.compare_digest(known.encode(), session_id.encode("utf-8", "replace")):
                return session
        raise Problem(404, "not_found", "there is no such session any more; make another offer")

    async def connect(self, offer: Offer) -> tuple[MediaSession, str, bool]:
        """Answers an offer, with a new session or the one that its token names.

        Returns:
            The session, the answer's SDP, and whether it was resumed.

        Raises:
            Problem: 503 no room, warming up or draining; 404 unknown token; 400, 422 a wrong offer.
        """
        offered_ns = time.monotonic_ns()
        is_resumed = offer.resume is not None
        if offer.resume is None:
            session = await self._open(offer)
        else:
            session = self._resumed(offer.resume)
        peer = Peer(offer.sdp, self._around.config.ice_servers, session)
        try:
            answer = await peer.answer(self._around.config.limits.negotiating_s)
            if session.state in (State.CLOSED, State.DRAINING):
                raise Problem(503, "draining", "the session ended meanwhile; try again", RETRY_S)
            await session.attach(peer, offered_ns)
        except BaseException:
            await peer.close()
            if not is_resumed:
                await session.close("no connection")
            raise
        return session, answer, is_resumed

    async def drain(self) -> None:
        """Ends all sessions after their time to finish; grants no more."""
        self.is_draining = True
        for session in [*self._sessions.values()]:
            session.drain()
        try:
            async with asyncio.timeout(self._around.config.limits.draining_s):
                await self._empty.wait()
        except TimeoutError:
            logger.info("%d sessions are cut off", self.active)
        await asyncio.gather(*(s.close("shutdown") for s in [*self._sessions.values()]))

    async def _open(self, offer: Offer) -> MediaSession:
        if self.is_draining:
            raise self._refused("draining", "the server shuts down", RETRY_S)
        if not self._service.ready:
            text = self._service.failure or "the model is still warming up"
            raise self._refused("not_ready", text, RETRY_S)
        most = self._around.config.max_sessions
        if self.active + self._pending >= most:
            raise self._refused("full", f"all {most} places for sessions are taken", RETRY_S)
        self._pending += 1
        try:
            grant = await self._service.reserve(offer.spec)
        except ConfigError as error:
            raise Problem(400, "invalid", str(error)) from error
        finally:
            self._pending -= 1
        if isinstance(grant, Refusal):
            raise self._refused("full", grant.reason, grant.retry_after_s)
        session = MediaSession(grant.session, offer.spec, self._around, self._closed)
        self._sessions[session.id] = session
        self._empty.clear()
        self._around.metrics.add("rtgen_sessions_total")
        logger.info("granted", extra={"session": session.log_id})
        return session

    def _resumed(self, token: str) -> MediaSession:
        for session in self._sessions.values():
            given, known = token.encode("utf-8", "replace"), session.resume_token.encode()
            if hmac.compare_digest(given, known) and session.can_resume:
                return session
        raise Problem(404, "not_found", "nothing to resume any more; make an offer without resume")

    def _refused(self, reason: str, text: str, retry_after_s: float) -> Problem:
        self._around.metrics.add("rtgen_admission_rejected_total", reason=reason)
        return Problem(503, reason, text, retry_after_s)

    def _closed(self, session: MediaSession) -> None:
        self._sessions.pop(session.id, None)
        if not self._sessions:
            self._empty.set()
