"""From pictures to the video track: encoding off the loop, with at most two pictures unsent."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass

from rtgen.types import OUTPUT_RATE
from webrtc.encoder import Encoded, VideoEncoder
from webrtc.playout import Picture
from webrtc.tracks import PacketTrack

MAX_UNSENT = 2
KEY_SPACING = OUTPUT_RATE // 4
"""Samples between two key frames that were asked for: a peer repeats its request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """A picture that was handed to the connection.

    Attributes:
        picture: what it shows.
        encoded: what was sent.
        lateness_ns: after it was due.
    """

    picture: Picture
    encoded: Encoded
    lateness_ns: int


class VideoSender:
    """Encodes one session's pictures in order.

    Too many pictures are dropped before they are encoded: a coded picture that is missing would
    spoil all that follow. After an interrupt, coded pictures that were not sent are dropped all the
    same, and the next one is a key frame.

    Args:
        track: where packets go.
        encoder: of the negotiated codec; used by one job at a time.
        pool: where it runs.
        on_sent: called for each picture sent.
    """

    def __init__(
        self,
        track: PacketTrack,
        encoder: VideoEncoder,
        pool: Executor,
        on_sent: Callable[[Sent], None],
    ) -> None:
        self._track, self._encoder, self._pool, self._on_sent = track, encoder, pool, on_sent
        self._waiting: deque[tuple[Picture, int]] = deque()
        self._is_encoding = False
        self._changed = asyncio.Event()
        self._epoch = 0
        self._must_key = True  # nothing else can be decoded
        self._wants_key = False
        self._last_key = -KEY_SPACING

    @property
    def unsent(self) -> int:
        """Pictures taken and not yet handed to the connection."""
        return len(self._waiting) + self._is_encoding + self._track.waiting

    @property
    def encoder(self) -> VideoEncoder:
        """What encodes; its bitrate may be set at any time."""
        return self._encoder

    def offer(self, picture: Picture, due_ns: int) -> bool:
        """Takes a picture if there is room; returns whether.

        Args:
            picture: later than those before.
            due_ns: when it should be sent, by `time.monotonic_ns`.
        """
        if self.unsent >= MAX_UNSENT:
            return False
        self._waiting.append((picture, due_ns))
        self._changed.set()
        return True

    def request_key(self) -> None:
        """Makes one of the next pictures a key frame."""
        self._wants_key = True

    def flush(self) -> None:
        """Drops everything unsent."""
        self._epoch += 1
        self._waiting.clear()
        if self._track.clear() or self._is_encoding:
            self._must_key = True

    async def run(self) -> None:
        """Encodes until it is cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            while not self._waiting:
                self._changed.clear()
                await self._changed.wait()
            picture, due_ns = self._waiting.popleft()
            epoch, key = self._epoch, self._takes_key(picture.position)
            self._is_encoding = True
            try:
                encoded = await loop.run_in_executor(self._pool, self._encode, picture, key)
            finally:
                self._is_encoding = False
            if epoch != self._epoch:
                continue
            if encoded.is_key:
                self._last_key = picture.position
            self._track.put(encoded.packet)
            lateness_ns = time.monotonic_ns() - due_ns
            self._on_sent(Sent(picture=picture, encoded=encoded, lateness_ns=lateness_ns))

    def _takes_key(self, position: int) -> bool:
        is_spaced = position - self._last_key >= KEY_SPACING
        if not (self._must_key or (self._wants_key and is_spaced)):
            return False
        self._must_key = self._wants_key = False
        return True

    def _encode(self, picture: Picture, key: bool) -> Encoded:
        return self._encoder.encode(picture.rgb, picture.position, key=key)
