"""Sound of an uploaded file, decoded piece by piece, from memory and within limits.

The container is told from its first bytes and must be one of a short list: formats that name other
files or addresses (playlists, concat scripts) are never opened. Functions here block; they run on
a pool of threads.
"""

from __future__ import annotations

import io
import threading
import time
from collections.abc import Generator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import cast

import av
import numpy as np

from rtgen.types import OUTPUT_RATE, Pcm16
from webrtc.config import UploadLimits
from webrtc.signalling import Problem

PIECE_SAMPLES = OUTPUT_RATE // 2
MAX_CHANNELS = 8


def media_pool() -> ThreadPoolExecutor:
    """The threads that decode files."""
    return ThreadPoolExecutor(2, thread_name_prefix="rtgen-media")


def container_of(head: bytes) -> str | None:
    """FFmpeg's name of the demuxer for a file that starts with these bytes; None if unknown."""
    if head[:4] in (b"RIFF", b"RF64") and head[8:12] == b"WAVE":
        return "wav"
    if head[4:8] == b"ftyp":
        return "mov"
    if head[:3] == b"ID3" or (len(head) > 1 and head[0] == 0xFF and head[1] & 0xE6 == 0xE2):
        return "mp3"
    if len(head) > 1 and head[0] == 0xFF and head[1] & 0xF6 == 0xF0:
        return "aac"
    starts = {b"fLaC": "flac", b"OggS": "ogg", b"\x1a\x45\xdf\xa3": "matroska", b"FORM": "aiff"}
    return starts.get(head[:4])


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadInfo:
    """What an uploaded file is.

    Attributes:
        container: its format.
        codec: of its sound.
        sample_rate: Hz.
        channels: number of them.
        duration_s: as its header says; None if it does not.
    """

    container: str
    codec: str
    sample_rate: int
    channels: int
    duration_s: float | None


class Upload:
    """An uploaded file that is being decoded; calls from several threads wait for each other.

    Args:
        body: the whole file.
        limits: of its length and of the work on it.

    Raises:
        Problem: 415 no sound file; 413 too long; 422 damaged, or of an odd format.
    """

    def __init__(self, body: bytes, limits: UploadLimits) -> None:
        self._limits = limits
        self._lock = threading.Lock()
        self._is_closed = False
        self._worked_s = 0.0
        self._samples = 0
        name = container_of(body[:16])
        if name is None:
            raise Problem(
                415,
                "unsupported_media",
                "expected a sound file: wav, mp3, m4a, ogg, flac, aac, aiff or webm",
            )
        try:
            self._container = av.open(io.BytesIO(body), "r", format=name)
        except (av.FFmpegError, ValueError, OSError) as error:
            raise Problem(422, "invalid", f"the {name} file cannot be read: {error}") from error
        try:
            self.info = self._checked(name)
        except Problem:
            self._container.close()
            raise
        self._blocks = self._decode()

    def next_piece(self) -> Pcm16 | None:
        """Decodes the next half second or less, int16 [samples] mono at 48 kHz; None at the end.

        Raises:
            Problem: 413 more sound or work than allowed; 422 damaged.
        """
        with self._lock:
            return None if self._is_closed else self._next_piece()

    def close(self) -> None:
        """Frees the file; may be called again."""
        with self._lock:
            self._is_closed = True
            self._blocks.close()
            self._container.close()

    def _next_piece(self) -> Pcm16 | None:
        start = time.monotonic()
        parts: list[Pcm16] = []
        count = 0
        try:
            while count < PIECE_SAMPLES and (block := next(self._blocks, None)) is not None:
                parts.append(block)
                count += len(block)
        except av.FFmpegError as error:
            raise Problem(422, "invalid", f"the file is damaged: {error}") from error
        finally:
            self._worked_s += time.monotonic() - start
        self._samples += count
        if self._samples > self._limits.max_s * OUTPUT_RATE:
            raise Problem(413, "too_large", f"a file may hold {self._limits.max_s:g} s of sound")
        return np.concatenate(parts) if parts else None

    def _checked(self, name: str) -> UploadInfo:
        streams = self._container.streams.audio
        if not streams:
            raise Problem(415, "unsupported_media", "the file holds no sound")
        context = streams[0].codec_context
        rate, channels = context.sample_rate, context.layout.nb_channels
        if not (1_000 <= rate <= 384_000 and 1 <= channels <= MAX_CHANNELS):
            raise Problem(
                422, "invalid", f"expected 1 to 8 channels at 1 to 384 kHz, got {channels}, {rate}"
            )
        duration = self._container.duration
        duration_s = None if duration is None else duration / 1_000_000
        if duration_s is not None and duration_s > self._limits.max_s:
            raise Problem(
                413,
                "too_large",
                f"a file may hold {self._limits.max_s:g} s of sound, got {duration_s:.0f} s",
            )
        return UploadInfo(
            container=name,
            codec=context.name,
            sample_rate=rate,
            channels=channels,
            duration_s=duration_s,
        )

    def _decode(self) -> Generator[Pcm16, None, None]:
        resampler = av.AudioResampler(format="s16", layout="mono", rate=OUTPUT_RATE)
        started = time.monotonic()
        for packet in self._container.demux(self._container.streams.audio[0]):
            spent_s = self._worked_s + time.monotonic() - started
            if spent_s > self._limits.max_decode_s:
                raise Problem(413, "too_large", "decoding the file takes too long")
            for frame in packet.decode():
                frame.pts = None
                for part in resampler.resample(frame):
                    yield cast(Pcm16, part.to_ndarray().reshape(-1).astype(np.int16, copy=False))
                    started = time.monotonic()
        for part in resampler.resample(None):
            yield cast(Pcm16, part.to_ndarray().reshape(-1).astype(np.int16, copy=False))
