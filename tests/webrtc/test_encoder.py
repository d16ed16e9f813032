from __future__ import annotations

from fractions import Fraction

import av
import numpy as np
import pytest

from rtgen.errors import ConfigError
from rtgen.types import Pixels
from webrtc.encoder import OpusEncoder, VideoCodec, VideoEncoder
from webrtc.pacing import BLOCK_SAMPLES

FPS = Fraction(25)
CODECS: tuple[VideoCodec, ...] = ("H264", "VP8")


def pictures(count: int, size: int = 64) -> list[Pixels]:
    """A square that wanders over a ramp."""
    found = []
    for number in range(count):
        picture = np.zeros((size, size, 3), np.uint8)
        picture[:] = np.linspace(40, 200, size, dtype=np.uint8)[:, None]
        at = 2 * number % (size - 16)
        picture[at : at + 16, at : at + 16] = (220, 60, 30)
        found.append(picture)
    return found


def decoder(codec: VideoCodec) -> av.VideoCodecContext:
    context = av.CodecContext.create({"H264": "h264", "VP8": "vp8"}[codec], "r")
    assert isinstance(context, av.VideoCodecContext)
    return context


@pytest.mark.parametrize("codec", CODECS)
def test_packets_decode_to_the_pictures_one_by_one(codec: VideoCodec) -> None:
    encoder, reader = VideoEncoder(codec, FPS, bitrate=1_000_000), decoder(codec)
    for number, picture in enumerate(pictures(30)):
        encoded = encoder.encode(picture, 1920 * number)
        assert encoded.packet.pts == 1920 * number
        assert encoded.size == len(bytes(encoded.packet))
        (shown,) = reader.decode(av.Packet(bytes(encoded.packet)))
        error = shown.to_ndarray(format="rgb24").astype(int) - picture
        assert np.sqrt(np.mean(error**2)) < 16


@pytest.mark.parametrize("codec", CODECS)
def test_key_frames_come_when_asked_for_and_every_two_seconds(codec: VideoCodec) -> None:
    encoder = VideoEncoder(codec, FPS, bitrate=500_000)
    kept = pictures(1)[0]  # the same picture, as in a starved session
    keys = [
        number
        for number in range(120)
        if encoder.encode(kept, 1920 * number, key=number == 20).is_key
    ]
    assert keys == [0, 20, 70]


@pytest.mark.parametrize("codec", CODECS)
def test_decoding_can_start_at_a_key_frame(codec: VideoCodec) -> None:
    encoder = VideoEncoder(codec, FPS, bitrate=500_000)
    frames = pictures(12)
    packets = [bytes(encoder.encode(p, 1920 * n, key=n == 8).packet) for n, p in enumerate(frames)]
    late = decoder(codec)
    assert sum(len(late.decode(av.Packet(data))) for data in packets[8:]) == 4


@pytest.mark.parametrize("codec", CODECS)
def test_the_bitrate_is_followed(codec: VideoCodec) -> None:
    rng = np.random.default_rng(1)
    encoder = VideoEncoder(codec, FPS, bitrate=800_000)

    def kbps(first: int) -> float:
        size = 0
        for number in range(first, first + 75):
            noise = rng.normal(0, 12, (128, 128, 1))
            picture = np.clip(pictures(1, 128)[0] + noise, 0, 255).astype(np.uint8)
            encoded = encoder.encode(picture, 1920 * number)
            size += encoded.size if number >= first + 25 else 0
        return size * 8 / 2 / 1000

    high = kbps(0)
    encoder.set_bitrate(300_000)
    low = kbps(75)
    assert low < 0.6 * high, (low, high)
    encoder.set_bitrate(1_200_000)
    assert kbps(150) > 2 * low


def test_a_change_of_size_starts_anew_with_a_key_frame() -> None:
    encoder = VideoEncoder("H264", FPS, bitrate=500_000)
    assert encoder.encode(pictures(1)[0], 0).is_key
    assert encoder.encode(pictures(1, 128)[0], 1920).is_key
    with pytest.raises(ConfigError, match="even"):
        encoder.encode(np.zeros((33, 33, 3), np.uint8), 3840)
    with pytest.raises(ConfigError, match="codec"):
        VideoEncoder("AV1", FPS, bitrate=1)  # type: ignore[arg-type]


def test_sound_survives_opus() -> None:
    encoder = OpusEncoder()
    reader = av.CodecContext.create("libopus", "r")
    assert isinstance(reader, av.AudioCodecContext)
    tone = (8000 * np.sin(np.arange(50 * BLOCK_SAMPLES) * 0.06)).astype(np.int16)
    power = []
    for start in range(0, len(tone), BLOCK_SAMPLES):
        packet = encoder.encode(tone[start : start + BLOCK_SAMPLES], start)
        assert packet.pts == start
        for frame in reader.decode(av.Packet(bytes(packet))):
            power.append(float(np.abs(frame.to_ndarray().astype(float)).mean()))
    assert len(power) == 50
    assert min(power[5:]) > 0
