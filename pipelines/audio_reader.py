"""Speech from any file that PyAV reads, as a stream of 48 kHz mono int16 blocks.

Any container, codec, rate and channel count: the file's best audio stream is decoded packet by
packet, mixed down and resampled, so memory does not grow with the length. Encoder delay that the
container declares (AAC edit lists, MP3 and Opus pre-skip) is removed by the decoder, and the
resampler's own delay is compensated: sample n of the blocks is time n / 48000 of the sound.

Damage is an error, never a silent repair: a packet that cannot be decoded, a file that ends before
its header says, float samples that are not finite or not scaled to -1..1. An Ogg or MP3 stream
that simply stops has no mark by which one could tell; it ends where it ends.
"""

from __future__ import annotations

import logging
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Self

import av
import numpy as np
import numpy.typing as npt
from av.audio.frame import AudioFrame
from av.audio.stream import AudioStream

from rtgen.errors import MediaError

__all__ = ["SAMPLE_RATE", "AudioInfo", "AudioReader", "check_audio"]

logger = logging.getLogger(__name__)

Int16 = npt.NDArray[np.int16]

SAMPLE_RATE = 48000
FLOAT_FORMATS = frozenset({"flt", "fltp", "dbl", "dblp"})
# 18 dB above full scale: no recording peaks there, integers stored as floats do.
LARGEST_FLOAT = 8.0
# Containers whose header states the exact length of the audio stream.
EXACT_LENGTH = frozenset({"wav", "flac", "mov"})
LENGTH_TOLERANCE_S = Fraction(1, 5)
# Programs that write WAV to a pipe cannot know its size and store 0, 0x7ffff..., or 0xffffffff.
UNKNOWN_RIFF_SIZE = 0x7FFF0000
PLAYLISTS = (b"#EXTM3U", b"\xef\xbb\xbf#EXTM3U", b"ffconcat ")


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioInfo:
    """What a file's audio stream is, and how long it really decodes to.

    Attributes:
        container: short name of the container format ("wav", "mp3", "mov", ...).
        codec: name of the codec.
        sample_rate: Hz, before resampling.
        channels: before mixing down.
        duration_s: seconds of decoded sound, exact.
    """

    container: str
    codec: str
    sample_rate: int
    channels: int
    duration_s: Fraction


class AudioReader:
    """An open audio file; iterate `blocks()` once.

    Args:
        path: a file, or a pipe that can be opened by name.

    Raises:
        MediaError: the file is missing, a folder, not readable, not audio, or has no audio stream.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        _check_path(self.path)
        try:
            # An absolute path cannot be taken for a protocol, and a playlist cannot fetch from one.
            self._container = av.open(
                str(self.path.absolute()),
                mode="r",
                options={"protocol_whitelist": "file"},
                metadata_errors="replace",
            )
        except (av.FFmpegError, ValueError) as error:
            raise MediaError(
                f"{self.path}: expected a sound or video file, but it cannot be read as one "
                f"({_reason(error)}); give a WAV, MP3, Ogg, FLAC, M4A, MP4, WebM or MKV file"
            ) from error
        try:
            self._stream = self._audio_stream()
        except MediaError:
            self._container.close()
            raise
        self._samples: dict[int, int] = {}

    def _audio_stream(self) -> AudioStream:
        stream = self._container.streams.best("audio")
        if not isinstance(stream, AudioStream):
            kinds = ", ".join(sorted({stream.type for stream in self._container.streams}))
            raise MediaError(
                f"{self.path}: expected an audio stream, the file has none "
                f"(it holds: {kinds or 'nothing'}); give a file with sound"
            )
        if stream.codec_context is None:
            raise MediaError(
                f"{self.path}: no decoder for the codec of its audio stream; convert it to WAV"
            )
        return stream

    @property
    def decoded_s(self) -> Fraction:
        """Seconds of sound decoded so far."""
        return sum((Fraction(n, rate) for rate, n in self._samples.items()), Fraction(0))

    @property
    def info(self) -> AudioInfo:
        """The stream's format; `duration_s` is what has been decoded so far."""
        context = self._stream.codec_context
        return AudioInfo(
            container=self._container.format.name.split(",")[0],
            codec=context.name,
            sample_rate=context.sample_rate,
            channels=context.layout.nb_channels,
            duration_s=self.decoded_s,
        )

    def blocks(self) -> Iterator[Int16]:
        """Yields the sound as it is decoded: int16 [samples] mono at `SAMPLE_RATE`.

        Block sizes follow the file's packets; only one packet is held.

        Raises:
            MediaError: the file is damaged, cut short, silent of samples, or holds bad floats.
        """
        resampler: av.AudioResampler | None = None
        layout = ""
        for frame in self.frames():
            current = f"{frame.sample_rate} {frame.format.name} {frame.layout.name}"
            if resampler is None or current != layout:  # chained streams may change format
                yield from _mono(resampler, None)
                resampler = av.AudioResampler(format="s16", layout="mono", rate=SAMPLE_RATE)
                layout = current
            frame.pts = None  # the samples are joined in order, whatever the timestamps say
            yield from _mono(resampler, frame)
        yield from _mono(resampler, None)

    def frames(self) -> Iterator[AudioFrame]:
        """Yields the decoded frames as they are in the file, checked.

        Raises:
            MediaError: as for `blocks`.
        """
        damage: MediaError | None = None
        try:
            for packet in self._container.demux(self._stream):
                try:
                    frames = packet.decode()
                except av.error.InvalidDataError as error:
                    at = float(self.decoded_s)
                    damage = MediaError(
                        f"{self.path}: the file is damaged {at:.2f} s from its start "
                        f"({_reason(error)}); repair or re-encode it"
                    )
                    continue
                for frame in frames:
                    if damage is not None:
                        raise damage
                    self._check_samples(frame)
                    rate = frame.sample_rate
                    self._samples[rate] = self._samples.get(rate, 0) + frame.samples
                    yield frame
        except av.FFmpegError as error:
            raise MediaError(
                f"{self.path}: cannot be read on from {float(self.decoded_s):.2f} s "
                f"({_reason(error)})"
            ) from error
        self._check_end(damage)

    def _check_samples(self, frame: AudioFrame) -> None:
        if frame.format.name not in FLOAT_FORMATS:
            return
        samples = frame.to_ndarray()
        good = np.abs(samples) <= LARGEST_FLOAT  # false for NaN
        if good.all():
            return
        row, column = (int(i) for i in np.argwhere(~good)[0])
        packed = not frame.format.is_planar
        index = column // frame.layout.nb_channels if packed else column
        at = float(self.decoded_s) + index / frame.sample_rate
        value = float(samples[row, column])
        hint = "scale the samples down" if np.isfinite(value) else "mend or re-export the file"
        raise MediaError(
            f"{self.path}: expected float samples between -1 and 1, got {value:g} at {at:.4f} s; "
            f"{hint}"
        )

    def _check_end(self, damage: MediaError | None) -> None:
        decoded = self.decoded_s
        if decoded == 0:
            raise damage or MediaError(
                f"{self.path}: the audio stream is empty; give a file that holds sound"
            )
        stream = self._stream
        declared = Fraction(0)
        if stream.duration is not None and stream.time_base is not None:
            declared = stream.duration * stream.time_base
        if self.info.container in EXACT_LENGTH and decoded < declared - LENGTH_TOLERANCE_S:
            raise MediaError(
                f"{self.path}: the file is cut short: its header says {float(declared):.2f} s, "
                f"{float(decoded):.2f} s can be read; get the whole file or re-encode this one"
            )
        if damage is not None:
            logger.warning("%s: left out the end of the file, which is no sound", self.path)

    def close(self) -> None:
        """Closes the file. Safe to call again."""
        self._container.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()


def check_audio(path: str | Path) -> AudioInfo | None:
    """Decodes a whole file once, in constant memory, and returns what it is.

    Finds damage before any picture has been made for it. Decoding is some hundred times faster
    than real time.

    Returns:
        None for a pipe, which can be read only once.

    Raises:
        MediaError: as for `AudioReader` and `AudioReader.blocks`.
    """
    _check_path(Path(path))
    if not Path(path).is_file():
        return None
    with AudioReader(path) as reader:
        for _ in reader.frames():
            pass
        return reader.info


def _mono(resampler: av.AudioResampler | None, frame: AudioFrame | None) -> Iterator[Int16]:
    if resampler is None:
        return
    for resampled in resampler.resample(frame):
        if resampled is not None:
            yield resampled.to_ndarray().reshape(-1).astype(np.int16, copy=False)


def _check_path(path: Path) -> None:
    try:
        status = path.stat()
        if stat.S_ISDIR(status.st_mode):
            raise MediaError(f"{path}: expected a sound file, this is a folder")
        if not stat.S_ISREG(status.st_mode):
            return
        if status.st_size == 0:
            raise MediaError(f"{path}: the file is empty; give a file that holds sound")
        with path.open("rb") as file:
            head = file.read(16)
    except (OSError, ValueError) as error:  # ValueError: a null character in the name
        raise MediaError(f"{path}: cannot be opened ({_reason(error)})") from error
    if head.startswith(PLAYLISTS):  # the demuxer would wait for a live stream to go on
        raise MediaError(
            f"{path}: expected a sound file, this is a playlist; give one entry's file"
        )
    if head[:4] == b"RIFF" and head[8:12] == b"WAVE":
        size = int.from_bytes(head[4:8], "little")
        if size < UNKNOWN_RIFF_SIZE and size + 8 > status.st_size + 1:  # + 1: a lost pad byte
            raise MediaError(
                f"{path}: the file is cut short: its header says {size + 8} bytes, "
                f"it has {status.st_size}; get the whole file or re-encode this one"
            )


def _reason(error: Exception) -> str:
    return str(getattr(error, "strerror", None) or error)
