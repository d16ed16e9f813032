"""Figures of one session: what was sent, how late, and what the receiver reports."""

from __future__ import annotations

import datetime
import time
from collections import deque
from dataclasses import dataclass

from rtgen.timing import percentile
from webrtc.metrics import Metrics
from webrtc.peer import PeerStats
from webrtc.playout import Picture
from webrtc.video_sender import Sent

RECENT = 128
STARVED_S = 5.0


@dataclass(frozen=True, slots=True)
class Report:
    """News from the receiver.

    Attributes:
        is_new: whether a report came since the last look: a sign of life.
        loss: share of video packets lost, 0 to 1; None if unknown.
    """

    is_new: bool
    loss: float | None


class Figures:
    """Counts for one session; shared counters go to `metrics`."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._sent = self._repeated = self._dropped = self._keys = 0
        self._fresh_ns: deque[int] = deque(maxlen=RECENT)
        self._encode_ms: deque[float] = deque(maxlen=RECENT)
        self._late_ms: deque[float] = deque(maxlen=RECENT)
        self._offered_ns: int | None = None
        self._first_s: float | None = None
        self._unit_s = time.monotonic()
        self._reported: datetime.datetime | None = None
        self._stats: PeerStats | None = None
        self._bytes: tuple[float, int] | None = None
        self._kbps: int | None = None

    def begin(self, offered_ns: int) -> None:
        """Another connection was offered at that time."""
        self._offered_ns = offered_ns
        self._reported = self._stats = self._bytes = self._kbps = None
        self._unit_s = time.monotonic()

    def unit_came(self, now_s: float) -> None:
        """The service made a unit."""
        self._unit_s = now_s

    def is_starved(self, now_s: float) -> bool:
        """Whether no unit came for `STARVED_S`."""
        return now_s - self._unit_s > STARVED_S

    def dropped(self, picture: Picture) -> None:
        """A picture found no room before the encoder."""
        self._dropped += 1
        self._metrics.add("rtgen_frames_dropped_total")

    def sent(self, sent: Sent) -> None:
        """A picture was handed to the connection."""
        now_ns = time.monotonic_ns()
        self._sent += 1
        self._metrics.add("rtgen_frames_sent_total")
        if sent.picture.is_repeat:
            self._repeated += 1
            self._metrics.add("rtgen_frames_repeated_total")
        else:
            self._fresh_ns.append(now_ns)
        if sent.encoded.is_key:
            self._keys += 1
            self._metrics.add("rtgen_keyframes_total")
        self._encode_ms.append(sent.encoded.wall_ns / 1e6)
        self._late_ms.append(sent.lateness_ns / 1e6)
        self._metrics.observe("rtgen_encode_seconds", sent.encoded.wall_ns / 1e9)
        self._metrics.observe("rtgen_frame_lateness_seconds", sent.lateness_ns / 1e9)
        if self._offered_ns is not None:
            self._first_s = (now_ns - self._offered_ns) / 1e9
            self._metrics.observe("rtgen_ttff_seconds", self._first_s)
            self._offered_ns = None

    def report(self, stats: PeerStats, now_s: float) -> Report:
        """Takes the receiver's reports, about once a second."""
        is_new = stats.reported is not None and stats.reported != self._reported
        self._reported, self._stats = stats.reported, stats
        if self._bytes is not None and now_s > self._bytes[0]:
            bits = 8 * (stats.video_bytes - self._bytes[1])
            self._kbps = round(bits / (now_s - self._bytes[0]) / 1000)
        self._bytes = (now_s, stats.video_bytes)
        return Report(is_new, stats.loss)

    def to_dict(self) -> dict[str, object]:
        """As JSON values."""
        second_ago_ns = time.monotonic_ns() - 10**9
        stats = self._stats
        rtt_s = None if stats is None else stats.rtt_s
        return {
            "fps": float(sum(at_ns > second_ago_ns for at_ns in self._fresh_ns)),
            "sent": self._sent,
            "repeated": self._repeated,
            "dropped": self._dropped,
            "keyframes": self._keys,
            "encode_ms": _spread(self._encode_ms),
            "late_ms": _spread(self._late_ms),
            "bitrate_kbps": self._kbps,
            "rtt_ms": None if rtt_s is None else round(1000 * rtt_s, 1),
            "loss": None if stats is None or stats.loss is None else round(stats.loss, 3),
            "first_frame_ms": None if self._first_s is None else round(1000 * self._first_s),
        }


def _spread(values: deque[float]) -> dict[str, float] | None:
    if not values:
        return None
    found = list(values)
    return {
        "p50": round(percentile(found, 0.5), 2),
        "p95": round(percentile(found, 0.95), 2),
        "max": round(max(found), 2),
    }
