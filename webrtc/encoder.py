"""Encoders of pictures and sound, by PyAV, giving packets ready for aiortc's packetisers.

aiortc sends `av.Packet`s as they are, so preset, rate and key frames are ours. Pictures are encoded
on a private pool of threads, one job of a session at a time; sound costs 0.4 ms a block and is
encoded where it is cut. Packets carry positions of the output clock (1/48000 s) as time stamps.
"""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal, cast

import av
import numpy as np
from av.video.codeccontext import VideoCodecContext
from av.video.frame import PictureType

from rtgen.errors import ConfigError
from rtgen.types import OUTPUT_RATE, Pcm16, Pixels

VideoCodec = Literal["H264", "VP8"]
TIME_BASE = Fraction(1, OUTPUT_RATE)
KEY_FRAME_PERIOD = 2 * OUTPUT_RATE
"""Samples after which a key frame is made anyway, for peers whose request got lost."""
REOPEN_RATIO = 1.25
"""A larger step up, and for libvpx down, takes an encoder that is opened anew: a key frame."""
OPUS_BITRATE = 48_000


def encoder_pool(threads: int) -> ThreadPoolExecutor:
    """The threads that encode pictures; nothing else may use them, or frames come late."""
    return ThreadPoolExecutor(threads, thread_name_prefix="rtgen-encode")


@dataclass(frozen=True, slots=True, kw_only=True)
class Encoded:
    """One coded picture.

    Attributes:
        packet: Annex-B access unit, or VP8 frame.
        is_key: whether decoding can start here.
        size: bytes.
        wall_ns: time that encoding took.
    """

    packet: av.Packet[Any]
    is_key: bool
    size: int
    wall_ns: int


class VideoEncoder:
    """One stream of pictures to packets; one in, one out. Not thread-safe.

    H.264: x264, superfast, zerolatency, constrained baseline, parameter sets with each key frame.
    VP8: libvpx, real time.

    Args:
        codec: as negotiated.
        fps: pictures per second.
        bitrate: to start with, bits per second.
        max_bitrate: that will ever be asked for.
    """

    def __init__(
        self, codec: VideoCodec, fps: Fraction, *, bitrate: int, max_bitrate: int = 4_000_000
    ) -> None:
        if codec not in ("H264", "VP8"):
            raise ConfigError(f"codec must be H264 or VP8, got {codec!r}")
        self.codec: VideoCodec = codec
        self._fps = fps
        self._bitrate = bitrate
        self._max_bitrate = max_bitrate
        self._context: VideoCodecContext | None = None
        self._opened_bitrate = bitrate
        self._last_key = 0

    @property
    def bitrate(self) -> int:
        """Bits per second that are aimed at."""
        return self._bitrate

    def set_bitrate(self, bitrate: int) -> None:
        """From the next picture on."""
        self._bitrate = min(bitrate, self._max_bitrate)

    def encode(self, rgb: Pixels, position: int, *, key: bool = False) -> Encoded:
        """Encodes the next picture.

        Args:
            rgb: uint8 [H, W, 3]; another size than before starts the stream anew.
            position: its time stamp; must ascend.
            key: make a key frame.
        """
        start_ns = time.perf_counter_ns()
        context = self._ready(rgb.shape[1], rgb.shape[0])
        # Always a new frame: a kept one would keep its picture type, and every repeat of it would
        # be a key frame.
        frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(rgb), format="rgb24")
        frame = frame.reformat(format="yuv420p")
        frame.pts, frame.time_base = position, TIME_BASE
        if key or position - self._last_key >= KEY_FRAME_PERIOD:
            frame.pict_type = PictureType.I
        packets = context.encode(frame)
        if len(packets) != 1:
            raise ConfigError(f"the {self.codec} encoder gave {len(packets)} packets for a picture")
        packet = packets[0]
        packet.pts, packet.time_base = position, TIME_BASE
        if packet.is_keyframe:
            self._last_key = position
        return Encoded(
            packet=packet,
            is_key=packet.is_keyframe,
            size=packet.size,
            wall_ns=time.perf_counter_ns() - start_ns,
        )

    def _ready(self, width: int, height: int) -> VideoCodecContext:
        context = self._context
        if context is not None and (context.width, context.height) == (width, height):
            ratio = self._bitrate / self._opened_bitrate
            if self.codec == "H264" and ratio <= REOPEN_RATIO:
                context.bit_rate = self._bitrate  # x264 follows, below what it was opened with
                return context
            if 1 / REOPEN_RATIO <= ratio <= REOPEN_RATIO:
                return context
        self._context = self._open(width, height)
        self._opened_bitrate = self._bitrate
        return self._context

    def _open(self, width: int, height: int) -> VideoCodecContext:
        if width % 2 or height % 2:
            raise ConfigError(f"pictures must have even sides, got {width}x{height}")
        name = {"H264": "libx264", "VP8": "libvpx"}[self.codec]
        context = cast(VideoCodecContext, av.CodecContext.create(name, "w"))
        context.width, context.height, context.pix_fmt = width, height, "yuv420p"
        context.framerate, context.time_base = self._fps, TIME_BASE
        context.bit_rate = self._bitrate
        context.gop_size = 100_000  # key frames are asked for, by position
        context.max_b_frames = 0
        context.thread_count = 1
        context.options = self._options()
        return context

    def _options(self) -> dict[str, str]:
        rate = str(self._bitrate)
        if self.codec == "H264":
            # A buffer of a third of a second keeps key frames from stalling the line.
            return {
                "preset": "superfast",
                "tune": "zerolatency",
                "profile": "baseline",
                "level": "31",
                "forced-idr": "1",
                "maxrate": rate,
                "bufsize": str(self._bitrate // 3),
                "x264-params": "scenecut=0:repeat-headers=1",
            }
        return {
            "deadline": "realtime",
            "cpu-used": "-8",
            "lag-in-frames": "0",
            "auto-alt-ref": "0",
            "error-resilient": "default",
            "minrate": rate,
            "maxrate": rate,
            "bufsize": rate,
        }


class OpusEncoder:
    """Blocks of sound to Opus packets: mono, 20 ms each."""

    def __init__(self, bitrate: int = OPUS_BITRATE) -> None:
        context = av.CodecContext.create("libopus", "w")
        context.bit_rate = bitrate
        context.format, context.layout = "s16", "mono"
        context.sample_rate, context.time_base = OUTPUT_RATE, TIME_BASE
        context.options = {"application": "voip", "frame_duration": "20"}
        self._context = context

    def encode(self, pcm: Pcm16, position: int) -> av.Packet[Any]:
        """Encodes one block.

        Args:
            pcm: int16 [BLOCK_SAMPLES].
            position: its time stamp.
        """
        frame = av.AudioFrame.from_ndarray(pcm[None], format="s16", layout="mono")
        frame.sample_rate, frame.pts, frame.time_base = OUTPUT_RATE, position, TIME_BASE
        packets = self._context.encode(frame)
        if len(packets) != 1:
            raise ConfigError(f"the Opus encoder gave {len(packets)} packets for a block")
        packet = packets[0]
        packet.pts, packet.time_base = position, TIME_BASE
        return packet
