"""Our outgoing tracks: packets in, as aiortc takes them out."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import av
from aiortc import MediaStreamTrack
from aiortc.mediastreams import MediaStreamError


class PacketTrack(MediaStreamTrack):
    """A track of coded packets. Bounded: when full, the oldest packet makes room.

    Args:
        kind: "audio" or "video".
        limit: packets that may wait.
    """

    def __init__(self, kind: str, limit: int) -> None:
        super().__init__()
        self.kind = kind
        self._limit = limit
        self._packets: deque[av.Packet[Any]] = deque()
        self._changed = asyncio.Event()

    @property
    def waiting(self) -> int:
        """Packets that wait. No `__len__`: aiortc takes a false track for none."""
        return len(self._packets)

    def put(self, packet: av.Packet[Any]) -> None:
        """Sends a packet as soon as the connection takes it."""
        if len(self._packets) >= self._limit:
            self._packets.popleft()
        self._packets.append(packet)
        self._changed.set()

    def clear(self) -> int:
        """Drops what waits; returns how many packets that were."""
        count = len(self._packets)
        self._packets.clear()
        return count

    async def recv(self) -> av.Packet[Any]:
        """The next packet; ends the track's sender once it is stopped."""
        while not self._packets:
            if self.readyState != "live":
                raise MediaStreamError
            self._changed.clear()
            await self._changed.wait()
        return self._packets.popleft()

    def stop(self) -> None:
        """Ends the track."""
        super().stop()
        self._changed.set()
