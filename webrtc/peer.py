"""One WebRTC connection to a browser or other peer: negotiation, tracks, data channel, reports."""

from __future__ import annotations

import asyncio
import datetime
import json
import logging
from dataclasses import dataclass
from typing import Protocol, cast

import av
import numpy as np
from aiortc import (
    RTCBundlePolicy,
    RTCConfiguration,
    RTCDataChannel,
    RTCIceServer,
    RTCPeerConnection,
    RTCRtpSender,
    RTCSessionDescription,
)
from aiortc.mediastreams import MediaStreamError, MediaStreamTrack
from aiortc.sdp import candidate_from_sdp

from rtgen.types import Pcm16
from webrtc.aiortc_compat import on_key_frame_request
from webrtc.config import IceServer
from webrtc.encoder import VideoCodec
from webrtc.signalling import Candidate, Problem, RemoteSdp, sent_video_codec
from webrtc.tracks import PacketTrack

logger = logging.getLogger(__name__)

CONTROL_LABEL = "control"
AUDIO_PACKETS, VIDEO_PACKETS = 10, 2
MAX_BUFFERED = 256 * 1024
"""Bytes of control messages that may wait for a slow peer; then messages to it are dropped."""
CLOSE_TIMEOUT_S = 5.0


class PeerEvents(Protocol):
    """Who is told what a peer does; called in the event loop."""

    def on_connected(self, peer: Peer) -> None:
        """Media can flow."""

    def on_gone(self, peer: Peer) -> None:
        """The connection failed or was closed by the other side."""

    def on_channel(self, peer: Peer) -> None:
        """Messages can be sent."""

    def on_message(self, peer: Peer, text: str) -> None:
        """A message came over the data channel."""

    def on_sound(self, peer: Peer, pcm: Pcm16, sample_rate: int) -> None:
        """The peer's microphone, mono int16 [samples]."""

    def on_key_frame_request(self, peer: Peer) -> None:
        """The peer cannot decode on."""

    def wants_sound(self) -> bool:
        """Whether the microphone is listened to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerStats:
    """What receiver reports say.

    Attributes:
        reported: when the last report came, by the wall clock; None before the first.
        rtt_s: round-trip time, if known.
        loss: share of video packets lost in the last report, 0 to 1; None before the first.
        video_bytes: sent in all.
    """

    reported: datetime.datetime | None
    rtt_s: float | None
    loss: float | None
    video_bytes: int


class Peer:
    """A connection.

    Args:
        sdp: the peer's offer.
        ice_servers: to be used by our side.
        events: who is told.

    Attributes:
        audio: where packets of sound go; None if the peer wants no sound.
        video: where packets of pictures go; None if the peer wants no pictures.
        codec: of the pictures, once answered.
    """

    def __init__(
        self, sdp: RemoteSdp, ice_servers: tuple[IceServer, ...], events: PeerEvents
    ) -> None:
        self._sdp, self._ice_servers, self._events = sdp, ice_servers, events
        servers = [
            RTCIceServer(urls=list(s.urls), username=s.username, credential=s.credential)
            for s in ice_servers
        ]
        self._pc = RTCPeerConnection(
            RTCConfiguration(iceServers=servers, bundlePolicy=RTCBundlePolicy.MAX_BUNDLE)
        )
        self._channel: RTCDataChannel | None = None
        self._listeners: set[asyncio.Task[None]] = set()
        self._senders: list[RTCRtpSender] = []
        self._is_closed = False
        self.audio = PacketTrack("audio", AUDIO_PACKETS) if "audio" in sdp.kinds else None
        self.video = PacketTrack("video", VIDEO_PACKETS) if "video" in sdp.kinds else None
        self.codec: VideoCodec | None = None

    async def answer(self, timeout_s: float) -> str:
        """Negotiates, gathers all our candidates, and returns the answer's SDP.

        Raises:
            Problem: 422, the offer cannot be used; 504, gathering took too long.
        """
        self._pc.on("connectionstatechange", self._on_state)
        self._pc.on("datachannel", self._on_channel)
        self._pc.on("track", self._on_track)
        try:
            async with asyncio.timeout(timeout_s):
                self._add_tracks()
                await self._pc.setRemoteDescription(RTCSessionDescription(self._sdp.text, "offer"))
                await self._pc.setLocalDescription(await self._pc.createAnswer())
        except TimeoutError as error:
            raise Problem(504, "timeout", "no ICE server answered in time; try again") from error
        except Exception as error:
            # A boundary: damaged SDP makes aiortc raise anything, and is the peer's fault.
            logger.info("an offer cannot be used: %r", error)
            raise Problem(
                422, "invalid", "the offer's SDP cannot be used; send one that a browser made"
            ) from error
        text: str = self._pc.localDescription.sdp
        if "a=candidate:" not in text and not self._ice_servers:
            raise Problem(422, "invalid", "the offer's SDP has no media that can be answered")
        if "a=candidate:" not in text:
            raise Problem(504, "timeout", "no ICE candidate was found; check the ICE servers")
        codec = sent_video_codec(text)
        if codec in ("H264", "VP8"):
            self.codec = cast(VideoCodec, codec)
        return text

    async def add_candidates(self, candidates: list[Candidate]) -> None:
        """Adds trickled candidates; those that cannot be understood are skipped (RFC 9725)."""
        for candidate in candidates:
            try:
                parsed = candidate_from_sdp(candidate.line.removeprefix("candidate:"))
                parsed.sdpMid, parsed.sdpMLineIndex = candidate.mid, candidate.index
                await self._pc.addIceCandidate(parsed)
            except Exception as error:  # noqa: BLE001
                # A boundary, as in `answer`.
                logger.info("a candidate was skipped: %r", error)

    def send(self, message: dict[str, object]) -> bool:
        """Sends a control message; False if the peer has no open channel, or reads too slowly."""
        channel = self._channel
        if channel is None or channel.readyState != "open" or channel.bufferedAmount > MAX_BUFFERED:
            return False
        channel.send(json.dumps(message, separators=(",", ":")))
        return True

    async def stats(self) -> PeerStats:
        """Figures of the last receiver reports."""
        reported: datetime.datetime | None = None
        rtt_s: float | None = None
        loss: float | None = None
        video_bytes = 0
        for sender in self._senders:
            for entry in (await sender.getStats()).values():
                if entry.type == "remote-inbound-rtp":
                    reported = max(filter(None, (reported, entry.timestamp)))
                    rtt_s = entry.roundTripTime if rtt_s is None else rtt_s
                    if entry.kind == "video":
                        loss = entry.fractionLost / 256
                elif entry.type == "outbound-rtp" and entry.kind == "video":
                    video_bytes = entry.bytesSent
        return PeerStats(reported=reported, rtt_s=rtt_s, loss=loss, video_bytes=video_bytes)

    async def close(self) -> None:
        """Ends the connection; may be called again."""
        if self._is_closed:
            return
        self._is_closed = True
        for task in self._listeners:
            task.cancel()
        for track in (self.audio, self.video):
            if track is not None:
                track.stop()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await self._pc.close()
        except Exception as error:  # noqa: BLE001
            # A boundary: after a half-applied offer aiortc's close raises anything.
            logger.warning("closing a connection failed: %r", error)

    def _add_tracks(self) -> None:
        for kind in self._sdp.kinds:
            if kind == "audio" and self.audio is not None:
                audio = self._pc.addTransceiver(self.audio, direction="sendrecv")
                self._senders.append(audio.sender)
            elif kind == "video" and self.video is not None:
                video = self._pc.addTransceiver(self.video, direction="sendonly")
                codecs = RTCRtpSender.getCapabilities("video").codecs
                # Before the offer is applied: afterwards it would be ignored.
                video.setCodecPreferences(sorted(codecs, key=lambda c: c.mimeType != "video/H264"))
                on_key_frame_request(video.sender, self._on_key_frame_request)
                self._senders.append(video.sender)

    def _on_state(self) -> None:
        if self._is_closed:
            return
        if self._pc.connectionState == "connected":
            self._events.on_connected(self)
        elif self._pc.connectionState in ("failed", "closed"):
            self._events.on_gone(self)

    def _on_channel(self, channel: RTCDataChannel) -> None:
        if channel.label != CONTROL_LABEL or self._channel is not None:
            return
        self._channel = channel
        channel.on("message", self._on_message)
        self._events.on_channel(self)

    def _on_message(self, message: object) -> None:
        if not self._is_closed and isinstance(message, str):
            self._events.on_message(self, message)

    def _on_key_frame_request(self) -> None:
        self._events.on_key_frame_request(self)

    def _on_track(self, track: MediaStreamTrack) -> None:
        # Read always: what is not read would pile up in aiortc.
        task = asyncio.create_task(self._listen(track))
        self._listeners.add(task)
        task.add_done_callback(self._listeners.discard)

    async def _listen(self, track: MediaStreamTrack) -> None:
        try:
            while True:
                frame = await track.recv()
                if isinstance(frame, av.AudioFrame) and self._events.wants_sound():
                    self._events.on_sound(self, mono(frame), frame.sample_rate)
        except MediaStreamError:
            return


def mono(frame: av.AudioFrame) -> Pcm16:
    """The mean of an s16 frame's channels, int16 [samples]."""
    channels = frame.layout.nb_channels
    samples = frame.to_ndarray()
    if not frame.format.is_planar:
        samples = samples.reshape(-1, channels).T
    if len(samples) == 1:
        return cast(Pcm16, samples[0])
    return cast(Pcm16, np.rint(samples.astype(np.float32).mean(0)).astype(np.int16))
