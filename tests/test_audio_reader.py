"""Reading of speech files: alignment to the sample, laziness, and one clear error each."""

from __future__ import annotations

import os
import threading
import tracemalloc
from fractions import Fraction
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from pipelines.audio_reader import SAMPLE_RATE, AudioReader, check_audio
from rtgen.errors import MediaError
from tests.media import click_train, encode_audio, encode_picture_only, wav_bytes


def read(path: Path) -> npt.NDArray[np.int16]:
    with AudioReader(path) as reader:
        return np.concatenate(list(reader.blocks()))


def peaks(samples: npt.NDArray[np.int16], every: int) -> list[int]:
    """The loudest sample near each multiple of `every`, as its distance from that multiple."""
    level = np.abs(samples.astype(np.int32))
    half = every // 3
    return [
        int(level[max(0, at - half) : at + half].argmax()) - min(at, half)
        for at in range(0, len(samples) - half, every)
    ]


ENCODINGS = [
    ("a.wav", 44100, "pcm_s16le", "s16", "stereo"),
    ("b.wav", 96000, "pcm_f32le", "flt", "stereo"),
    ("c.mp3", 44100, "libmp3lame", "s16p", "stereo"),
    ("d.ogg", 48000, "libopus", "s16", "mono"),
    ("e.webm", 48000, "libopus", "flt", "stereo"),
    ("f.flac", 22050, "flac", "s16", "mono"),
    ("g.m4a", 44100, "aac", "fltp", "stereo"),
    ("h.mkv", 16000, "pcm_s16le", "s16", "5.1"),
]


@pytest.mark.parametrize(("name", "rate", "codec", "kind", "layout"), ENCODINGS)
def test_every_container_codec_rate_and_layout_arrives_at_the_sample(
    tmp_path: Path, name: str, rate: int, codec: str, kind: str, layout: str
) -> None:
    path = tmp_path / name
    encode_audio(path, click_train(rate, 2.0), rate, codec, kind, layout)
    samples = read(path)
    assert samples.dtype == np.int16
    # AAC and Opus fill their last frame.
    assert 0 <= len(samples) - 2 * SAMPLE_RATE <= 1024 * SAMPLE_RATE / rate
    # The first click has no room before it; 1 is the rounding of a peak between two samples.
    assert max(abs(offset) for offset in peaks(samples, SAMPLE_RATE // 5)[1:]) <= 1


def test_a_reader_that_ignored_encoder_delay_would_fail_the_alignment_test() -> None:
    late = np.roll((click_train(SAMPLE_RATE, 2.0) * 32767).astype(np.int16), 1024)
    assert max(abs(offset) for offset in peaks(late, SAMPLE_RATE // 5)[1:]) > 1


def test_sound_that_is_already_48_khz_mono_int16_is_passed_bit_exact(tmp_path: Path) -> None:
    samples = np.random.default_rng(1).integers(-32768, 32767, 12345, endpoint=True, dtype=np.int16)
    path = tmp_path / "exact.wav"
    path.write_bytes(wav_bytes(samples / 32767, SAMPLE_RATE))
    np.testing.assert_array_equal(read(path), np.rint(samples / 32767 * 32767).astype(np.int16))


@pytest.mark.parametrize("channels", [1, 2, 3, 7, 12])
def test_any_number_of_channels_is_mixed_to_one(tmp_path: Path, channels: int) -> None:
    path = tmp_path / "many.wav"
    path.write_bytes(wav_bytes(np.full((4800, channels), 0.25), SAMPLE_RATE))
    np.testing.assert_allclose(read(path), 0.25 * 32767, atol=2)


def test_the_sound_of_a_video_file_is_taken(tmp_path: Path) -> None:
    from pipelines.video_io import VideoWriter

    path = tmp_path / "video.mp4"
    with VideoWriter(path, width=32, height=32, fps=25) as writer:
        clicks = (click_train(SAMPLE_RATE, 1.0) * 32767).astype(np.int16)
        writer.write(np.zeros((25, 32, 32, 3), np.uint8), clicks)
        writer.finish()
    assert max(abs(offset) for offset in peaks(read(path), SAMPLE_RATE // 5)) <= 1


def test_reading_is_lazy_and_memory_does_not_grow_with_the_length(tmp_path: Path) -> None:
    path = tmp_path / "long.wav"
    path.write_bytes(wav_bytes(np.zeros(8000 * 300), 8000))  # 28.8 MB at 48 kHz int16
    with AudioReader(path) as reader:
        tracemalloc.start()
        blocks = reader.blocks()
        next(blocks)
        assert reader.decoded_s < 2
        total = sum(len(block) for block in blocks)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert total > 299 * SAMPLE_RATE
    assert peak < 2_000_000


def test_a_pipe_is_read_once_and_not_checked_beforehand(tmp_path: Path) -> None:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    data = wav_bytes(click_train(8000, 1.0), 8000)
    feeder = threading.Thread(target=path.write_bytes, args=(data,))
    assert check_audio(path) is None
    feeder.start()
    assert len(read(path)) == SAMPLE_RATE
    feeder.join()


def test_check_audio_says_what_the_file_is(tmp_path: Path) -> None:
    path = tmp_path / "speech.wav"
    path.write_bytes(wav_bytes(np.zeros((22050, 2)), 22050))
    info = check_audio(path)
    assert info is not None
    assert (info.container, info.codec, info.sample_rate, info.channels) == (
        "wav", "pcm_s16le", 22050, 2,
    )  # fmt: skip
    assert info.duration_s == Fraction(1)


@pytest.mark.parametrize("size", [0, 0x7FFFF024, 0xFFFFFFFF])
def test_a_wav_from_a_pipe_with_an_unknown_size_is_read(tmp_path: Path, size: int) -> None:
    data = bytearray(wav_bytes(np.zeros(8000), 8000))
    data[4:8] = data[40:44] = size.to_bytes(4, "little")
    path = tmp_path / "piped.wav"
    path.write_bytes(data)
    assert len(read(path)) == SAMPLE_RATE


def bad_files(folder: Path) -> dict[str, str]:
    """Writes files that cannot be used; returns what the error must say of each."""
    clicks = click_train(44100, 3.0)
    whole = wav_bytes(clicks, 44100)
    floats = np.zeros(48000, np.float32)
    (folder / "empty.wav").write_bytes(b"")
    (folder / "no_samples.wav").write_bytes(wav_bytes(np.zeros(0), 44100))
    (folder / "short.wav").write_bytes(whole[: len(whole) // 2])
    (folder / "text.wav").write_text("not a sound\n" * 40)
    (folder / "text.txt").write_text("not a sound\n" * 40)
    for name, value in (("nan", np.nan), ("infinite", -np.inf), ("scaled", 20345.0)):
        floats[24000] = value
        (folder / f"{name}.wav").write_bytes(wav_bytes(floats, 48000, "<f4"))
    (folder / "double.wav").write_bytes(wav_bytes(np.stack([floats, floats], 1), 48000, "<f8"))
    encode_picture_only(folder / "silent.mp4")
    noise = np.random.default_rng(0).uniform(-0.5, 0.5, 44100 * 3)
    encode_audio(folder / "x.m4a", noise, 44100, "aac", "fltp")
    encode_audio(folder / "x.flac", noise, 44100, "flac", "s16")
    encode_audio(folder / "x.mp3", noise, 44100, "libmp3lame", "s16p")
    for suffix in (".m4a", ".flac"):
        data = (folder / f"x{suffix}").read_bytes()
        (folder / f"cut{suffix}").write_bytes(data[: len(data) // 2])
    data = (folder / "x.mp3").read_bytes()
    middle = len(data) // 2
    (folder / "damaged.mp3").write_bytes(data[:middle] + bytes(4000) + data[middle + 4000 :])
    return {
        "missing.wav": "No such file",
        "": "this is a folder",
        "empty.wav": "is empty",
        "no_samples.wav": "",
        "short.wav": "cut short",
        "text.wav": "cannot be read",
        "text.txt": "has none",
        "nan.wav": "got nan at 0.5000 s",
        "infinite.wav": "got -inf at 0.5000 s",
        "scaled.wav": "got 20345 at 0.5000 s; scale",
        "double.wav": "got 20345 at 0.5000 s",
        "silent.mp4": "holds: video",
        "cut.m4a": "",
        "cut.flac": "",
        "damaged.mp3": "",
        "nul\0.wav": "null",
    }


def test_each_unusable_file_is_one_clear_error_in_both_passes(tmp_path: Path) -> None:
    for name, said in bad_files(tmp_path).items():
        for use in (check_audio, read):
            with pytest.raises(MediaError) as caught:
                use(tmp_path / name)
            message = str(caught.value)
            assert said in message, (name, message)
            assert name in message, (name, message)
            assert not any(word in message for word in ("Errno", "avcodec")), message


def test_the_files_that_the_bad_ones_were_made_from_are_good(tmp_path: Path) -> None:
    bad_files(tmp_path)
    for name in ("x.m4a", "x.flac", "x.mp3"):
        info = check_audio(tmp_path / name)
        assert info is not None
        assert info.duration_s >= 3


def test_floats_a_little_over_full_scale_are_clipped_not_refused(tmp_path: Path) -> None:
    path = tmp_path / "loud.wav"
    path.write_bytes(wav_bytes(np.array([0.0, 1.5, -1.5, 0.0] * 100), 48000, "<f4"))
    samples = read(path)
    assert (samples.max(), samples.min()) == (32767, -32768)


@pytest.mark.parametrize("name", ["list.m3u8", "session.sdp"])
def test_a_text_file_cannot_make_the_reader_open_an_address(tmp_path: Path, name: str) -> None:
    hls = "#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nhttp://127.0.0.1:9/a.ts\n"
    sdp = "v=0\no=- 0 0 IN IP4 127.0.0.1\ns=-\nc=IN IP4 127.0.0.1\nt=0 0\nm=audio 9 RTP/AVP 0\n"
    path = tmp_path / name
    path.write_text(hls if name.endswith("m3u8") else sdp)
    with pytest.raises(MediaError):
        check_audio(path)
