"""Small media files for tests: sounds in many formats, and a reader that trusts nothing of ours."""

from __future__ import annotations

import contextlib
import resource
import struct
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.floating]
PACKED = {"<i2": (1, 16), "<f4": (3, 32), "<f8": (3, 64)}


def click_train(rate: int, seconds: float, every_s: float = 0.2) -> Floats:
    """Single-sample clicks at 0, every_s, ... on digital silence."""
    samples = np.zeros(round(rate * seconds), np.float32)
    samples[:: round(rate * every_s)] = 0.9
    return samples


def wav_bytes(samples: Floats, rate: int, kind: str = "<i2") -> bytes:
    """A WAV file written by hand. samples: [n] or [n, channels], in -1..1."""
    columns = samples if samples.ndim == 2 else samples[:, None]
    tag, bits = PACKED[kind]
    scaled = columns * 32767 if kind == "<i2" else columns
    data = np.ascontiguousarray(scaled).astype(kind).tobytes()
    channels = columns.shape[1]
    step = channels * bits // 8
    head = struct.pack("<4sIHHIIHH", b"fmt ", 16, tag, channels, rate, rate * step, step, bits)
    body = b"WAVE" + head + struct.pack("<4sI", b"data", len(data)) + data
    return struct.pack("<4sI", b"RIFF", len(body)) + body


def encode_audio(
    path: Path, samples: Floats, rate: int, codec: str, kind: str, layout: str = "stereo"
) -> None:
    """Encodes one channel, copied to all, with any codec; the suffix chooses the container."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=rate)
        assert isinstance(stream, av.AudioStream)
        stream.layout = layout
        stream.format = kind
        channels = stream.codec_context.layout.nb_channels
        planes = np.tile(samples.astype(np.float32), (channels, 1))
        frame = av.AudioFrame.from_ndarray(planes, format="fltp", layout=layout)
        frame.sample_rate, frame.pts, frame.time_base = rate, 0, Fraction(1, rate)
        container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def encode_picture_only(path: Path) -> None:
    """A video of five grey frames without sound."""
    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=25)
        assert isinstance(stream, av.VideoStream)
        stream.width = stream.height = 32
        for _ in range(5):
            image = np.full((32, 32, 3), 128, np.uint8)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(image, format="rgb24")))
        container.mux(stream.encode(None))


def decode(path: Path) -> tuple[list[Fraction], Floats, Floats]:
    """Decodes an MP4 as a player does.

    Returns:
        the time of each frame in seconds, the mean brightness of each frame (0..255), and the
        sound as float32 [samples] where index 0 is time 0.
    """
    times: list[Fraction] = []
    brightness: list[float] = []
    with av.open(str(path)) as container:
        for picture in container.decode(video=0):
            assert picture.pts is not None
            assert picture.time_base is not None
            times.append(picture.pts * picture.time_base)
            brightness.append(float(picture.to_ndarray(format="rgb24").mean()))
    sound: list[Floats] = []
    with av.open(str(path)) as container:
        for frame in container.decode(audio=0):
            assert frame.pts is not None
            assert frame.time_base is not None
            start = frame.pts * frame.time_base * frame.sample_rate
            assert start == sum(len(part) for part in sound), "a gap in the sound"
            sound.append(frame.to_ndarray()[0])
    return times, np.array(brightness), np.concatenate(sound)


@contextlib.contextmanager
def disk_of(num_bytes: int) -> Iterator[None]:
    """No file of this process may grow beyond `num_bytes`: what a full disk is to a writer."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
