"""Sends one session's sound and pictures over one connection, each when it is due."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass
from fractions import Fraction

from rtgen.types import OUTPUT_RATE
from webrtc.config import ServerConfig
from webrtc.encoder import OpusEncoder, VideoEncoder
from webrtc.metrics import Metrics
from webrtc.pacing import Pacer, Tick
from webrtc.peer import Peer
from webrtc.playout import Block, Picture, Playout
from webrtc.rate_control import RateControl
from webrtc.video_sender import Sent, VideoSender
from webrtc.voice import Voice


@dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """What the sessions of a server share.

    Attributes:
        config: of the server.
        metrics: of the server.
        encode_pool: threads for pictures, and nothing else.
        media_pool: threads for decoding files.
        voice: synthesizer, or None.
    """

    config: ServerConfig
    metrics: Metrics
    encode_pool: Executor
    media_pool: Executor
    voice: Voice | None


class Pump:
    """The one pacer of a connection: both tracks follow it, nothing else sleeps for media.

    Args:
        peer: connected.
        playout: what is to be sent.
        rate: target of the pictures' bitrate.
        around: shared with other sessions.
        on_sent: told of each picture that was sent.
        on_dropped: told of each picture for which there was no room before the encoder.
        on_block: told of each block of sound that was sent.
    """

    def __init__(
        self,
        peer: Peer,
        playout: Playout,
        rate: RateControl,
        around: Surroundings,
        *,
        on_sent: Callable[[Sent], None],
        on_dropped: Callable[[Picture], None],
        on_block: Callable[[Block], None],
    ) -> None:
        self._peer, self._playout, self._rate, self._around = peer, playout, rate, around
        self._on_sent, self._on_dropped, self._on_block = on_sent, on_dropped, on_block
        self._opus = OpusEncoder()
        self._sender: VideoSender | None = None
        self._has_sender = asyncio.Event()

    async def run(self) -> None:
        """Sends until it is cancelled."""
        pacer = Pacer(time.monotonic_ns())
        while True:
            step = self._playout.samples_per_frame
            if step is not None and step != pacer.samples_per_frame:
                pacer.set_samples_per_frame(step)
                self._open_sender(step)
            for tick in pacer.due(time.monotonic_ns()):
                if tick.kind == "audio":
                    self._send_sound(tick)
                else:
                    self._send_picture(tick)
            delay_ns = pacer.next_ns() - time.monotonic_ns()
            await asyncio.sleep(max(delay_ns, 0) / 1e9)

    async def encode(self) -> None:
        """Encodes pictures until it is cancelled."""
        await self._has_sender.wait()
        if self._sender is not None:
            await self._sender.run()

    def request_key(self) -> None:
        """The peer cannot decode on."""
        if self._sender is not None:
            self._sender.request_key()

    def set_bitrate(self, bitrate: int) -> None:
        """Of the pictures, bits per second."""
        if self._sender is not None:
            self._sender.encoder.set_bitrate(bitrate)

    def flush(self) -> None:
        """Drops everything that was not sent."""
        if self._peer.audio is not None:
            self._peer.audio.clear()
        if self._sender is not None:
            self._sender.flush()

    def _open_sender(self, samples_per_frame: int) -> None:
        peer = self._peer
        if peer.video is None or peer.codec is None or self._sender is not None:
            return
        encoder = VideoEncoder(
            peer.codec,
            Fraction(OUTPUT_RATE, samples_per_frame),
            bitrate=self._rate.target,
            max_bitrate=self._around.config.rate.most,
        )
        self._sender = VideoSender(peer.video, encoder, self._around.encode_pool, self._on_sent)
        self._has_sender.set()

    def _send_sound(self, tick: Tick) -> None:
        gaps = self._playout.gaps
        block = self._playout.audio(tick.position)
        self._around.metrics.add("rtgen_playout_gaps_total", self._playout.gaps - gaps)
        if self._peer.audio is not None:
            self._peer.audio.put(self._opus.encode(block.pcm, tick.position))
        self._on_block(block)

    def _send_picture(self, tick: Tick) -> None:
        picture = self._playout.video(tick.position)
        if picture is None or self._sender is None:
            return
        if not self._sender.offer(picture, tick.due_ns):
            self._on_dropped(picture)
