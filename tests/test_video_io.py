"""Writing of MP4 files: equal lengths, sync to the sample and frame, colours, and full disks."""

from __future__ import annotations

import os
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import pytest
from av.video.reformatter import Colorspace

from pipelines.video_io import Frames, Int16, VideoWriter, check_output, partial_path
from rtgen.errors import ConfigError, MediaError, ShapeError, StreamClosed
from tests.media import click_train, decode, disk_of

RATE = 48000
SIZE = 32
UNIT = 7680
AAC_FRAME = Fraction(1024, RATE)


def flashes_and_clicks(units: int, *, fps: int = 25) -> tuple[Frames, Int16]:
    """Dark frames with a white one every fifth of a second, and a click at the same instant."""
    frames = np.full((units * 4, SIZE, SIZE, 3), 16, np.uint8)
    frames[:: fps // 5] = 235
    clicks = click_train(RATE, units * 4 / fps)
    return frames, (clicks * 32767).astype(np.int16)


def write(path: Path, units: int, *, late_samples: int = 0, fps: int = 25) -> None:
    frames, sound = flashes_and_clicks(units, fps=fps)
    sound = np.roll(sound, late_samples)
    samples = len(sound) // units
    with VideoWriter(path, width=SIZE, height=SIZE, fps=fps) as writer:
        for n in range(units):
            writer.write(frames[4 * n : 4 * n + 4], sound[n * samples : (n + 1) * samples])
        assert not path.exists()
        assert writer.finish() == path


def lags(path: Path) -> list[int]:
    """Samples by which each click is heard after its flash is seen."""
    times, brightness, sound = decode(path)
    found = []
    for time, level in zip(times, brightness, strict=True):
        at = int(time * RATE)
        if level > 120 and at + 2400 < len(sound):
            near = np.abs(sound[max(0, at - 2400) : at + 2400])
            found.append(max(0, at - 2400) + int(near.argmax()) - at)
    return found


@pytest.mark.parametrize(("units", "fps"), [(1, 25), (7, 25), (40, 25), (6, 20)])
def test_flashes_and_clicks_line_up_to_the_sample(tmp_path: Path, units: int, fps: int) -> None:
    path = tmp_path / "sync.mp4"
    write(path, units, fps=fps)
    found = lags(path)
    assert set(found) == {0}


def test_sound_that_is_late_by_the_encoder_delay_fails_the_sync_test(tmp_path: Path) -> None:
    path = tmp_path / "late.mp4"
    write(path, 7, late_samples=1024)
    assert set(lags(path)[1:]) == {1024}


@pytest.mark.parametrize("units", [1, 2, 7, 40])
def test_picture_and_sound_are_equally_long(tmp_path: Path, units: int) -> None:
    path = tmp_path / "length.mp4"
    write(path, units)
    times, _, sound = decode(path)
    assert times == [Fraction(n, 25) for n in range(4 * units)]
    assert abs(Fraction(len(sound), RATE) - Fraction(4 * units, 25)) < AAC_FRAME
    with av.open(str(path)) as container:
        for stream in container.streams:
            assert stream.duration is not None
            assert stream.time_base is not None
            assert stream.start_time == 0
            assert abs(stream.duration * stream.time_base - Fraction(4 * units, 25)) < AAC_FRAME


def test_the_index_stands_before_the_media(tmp_path: Path) -> None:
    path = tmp_path / "fast.mp4"
    write(path, 2)
    data = path.read_bytes()
    assert 0 < data.index(b"moov") < data.index(b"mdat")


def test_the_streams_are_h264_420_and_aac_48_khz(tmp_path: Path) -> None:
    path = tmp_path / "codecs.mp4"
    write(path, 1)
    with av.open(str(path)) as container:
        video, audio = container.streams.video[0], container.streams.audio[0]
        assert (video.codec_context.name, video.pix_fmt) == ("h264", "yuv420p")
        assert video.average_rate == 25
        assert (audio.codec_context.name, audio.sample_rate) == ("aac", RATE)


@pytest.mark.parametrize(("height", "matrix"), [(32, 6), (720, 1)])
def test_the_matrix_tag_is_the_one_used_and_fits_the_size(
    tmp_path: Path, height: int, matrix: int
) -> None:
    colour = np.array([200, 60, 40], np.uint8)
    path = tmp_path / "colour.mp4"
    with VideoWriter(path, width=64, height=height, fps=25) as writer:
        writer.write(np.tile(colour, (1, height, 64, 1)), np.zeros(1920, np.int16))
        writer.finish()
    with av.open(str(path)) as container:
        context = container.streams.video[0].codec_context
        assert (context.colorspace, context.color_primaries, context.color_trc) == (matrix, 1, 1)
        assert context.color_range == 1
        picture = next(container.decode(video=0))
        tagged = Colorspace.ITU709 if matrix == 1 else Colorspace.ITU601
        other = Colorspace.ITU601 if matrix == 1 else Colorspace.ITU709
        errors = [
            np.abs(
                picture.to_ndarray(format="rgb24", src_colorspace=space)[8, 8].astype(int) - colour
            ).max()
            for space in (tagged, other)
        ]
    assert errors[0] <= 4
    assert errors[1] > 8  # the wrong matrix is seen


def test_equal_input_gives_equal_times_sound_and_pictures(tmp_path: Path) -> None:
    """Not equal bytes: x264 was seen to choose another byte in one of a thousand 32x32 clips."""
    write(tmp_path / "a.mp4", 3)
    write(tmp_path / "b.mp4", 3)
    one, two = decode(tmp_path / "a.mp4"), decode(tmp_path / "b.mp4")
    assert one[0] == two[0]
    np.testing.assert_allclose(one[1], two[1], atol=1)
    np.testing.assert_array_equal(one[2], two[2])


def test_another_input_gives_another_file(tmp_path: Path) -> None:
    write(tmp_path / "a.mp4", 3)
    write(tmp_path / "b.mp4", 3, late_samples=1)
    assert not np.array_equal(decode(tmp_path / "a.mp4")[2], decode(tmp_path / "b.mp4")[2])


def test_only_the_whole_file_gets_the_name_and_no_temporary_stays(tmp_path: Path) -> None:
    path = tmp_path / "talk.mp4"
    path.write_bytes(b"older")
    frames, sound = flashes_and_clicks(1)
    with VideoWriter(path, width=SIZE, height=SIZE, fps=25) as writer:
        writer.write(frames, sound)
        assert path.read_bytes() == b"older"
        assert len(list(tmp_path.iterdir())) == 2
    assert path.read_bytes() == b"older"
    assert list(tmp_path.iterdir()) == [path]


def test_a_partial_file_is_playable_and_named_so(tmp_path: Path) -> None:
    path = tmp_path / "talk.mp4"
    frames, sound = flashes_and_clicks(1)
    with VideoWriter(path, width=SIZE, height=SIZE, fps=25) as writer:
        writer.write(frames, sound)
        kept = writer.finish(partial_path(path))
    assert kept == tmp_path / "talk.partial.mp4"
    assert list(tmp_path.iterdir()) == [kept]
    assert len(decode(kept)[0]) == 4


def test_the_file_has_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    write(tmp_path / "talk.mp4", 1)
    (tmp_path / "other").touch()
    assert (tmp_path / "talk.mp4").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_wrong_shapes_and_unequal_lengths_are_refused(tmp_path: Path) -> None:
    frames, sound = flashes_and_clicks(1)
    with VideoWriter(tmp_path / "x.mp4", width=SIZE, height=SIZE, fps=25) as writer:
        with pytest.raises(ShapeError, match="4 frames need 7680 samples of sound, got 7679"):
            writer.write(frames, sound[:-1])
        with pytest.raises(ShapeError, match="frames must be uint8"):
            writer.write(frames.astype(np.float32), sound)
        with pytest.raises(ShapeError, match="frames must be uint8"):
            writer.write(frames[:, :16], sound)
        with pytest.raises(ShapeError, match="audio must be int16"):
            writer.write(frames, sound.astype(np.float32))
        writer.write(frames, sound)
        writer.finish()
        with pytest.raises(StreamClosed):
            writer.write(frames, sound)
        with pytest.raises(StreamClosed):
            writer.finish()
    with pytest.raises(ConfigError, match="even width and height, got 31x32"):
        VideoWriter(tmp_path / "y.mp4", width=31, height=32, fps=25)


def test_a_file_without_a_picture_is_not_made(tmp_path: Path) -> None:
    with (
        VideoWriter(tmp_path / "x.mp4", width=SIZE, height=SIZE, fps=25) as writer,
        pytest.raises(MediaError, match="no picture"),
    ):
        writer.finish()
    assert list(tmp_path.iterdir()) == []


def test_an_existing_output_is_replaced_only_when_asked(tmp_path: Path) -> None:
    taken = tmp_path / "talk.mp4"
    taken.touch()
    with pytest.raises(MediaError, match="--force"):
        check_output(taken, overwrite=False)
    assert check_output(taken, overwrite=True) == taken


def test_an_interrupt_could_not_replace_the_input(tmp_path: Path) -> None:
    source = partial_path(tmp_path / "talk.mp4")
    source.touch()
    with pytest.raises(MediaError, match="same file"):
        check_output(tmp_path / "talk.mp4", overwrite=False, source=source)


def test_unusable_outputs_are_one_clear_error(tmp_path: Path) -> None:
    source = tmp_path / "talk.mp4"
    source.touch()
    (tmp_path / "link.mp4").symlink_to(source)
    (tmp_path / "loop.mp4").symlink_to(tmp_path / "loop.mp4")
    os.mkfifo(tmp_path / "pipe.mp4")
    (tmp_path / "folder.mp4").mkdir()
    for name, said in {
        "folder.mp4": "this is a folder",
        "talk.avi": "ends in .mp4, got '.avi'",
        "talk": "got 'no extension'",
        "talk.mp4": "same file",
        "link.mp4": "same file",
        "./talk.mp4": "same file",
        "loop.mp4": "not a usable",
        "pipe.mp4": "device or pipe",
        "nowhere/talk.mp4": "does not exist",
        "talk.mp4/x.mp4": "does not exist",
        "nul\0.mp4": "null",
        "x" * 300 + ".mp4": "not a usable",
    }.items():
        with pytest.raises(MediaError, match=said):
            check_output(tmp_path / name, overwrite=True, source=source)


@pytest.mark.skipif(not Path("/proc/self").is_dir(), reason="needs a folder that refuses files")
def test_a_folder_that_refuses_files_is_one_clear_error() -> None:
    with pytest.raises(MediaError, match=r"cannot (create a file|be written)"):
        write(check_output("/proc/self/talk.mp4", overwrite=True), 1)


def write_noise(path: Path) -> None:
    frames = np.random.default_rng(0).integers(0, 256, (4, 64, 64, 3), dtype=np.uint8)
    with VideoWriter(path, width=64, height=64, fps=25) as writer:
        for _ in range(20):
            writer.write(frames, np.zeros(UNIT, np.int16))
        writer.finish()


def test_a_full_disk_is_a_clear_error_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "talk.mp4"
    write_noise(path)
    size = path.stat().st_size
    path.unlink()
    # While frames are written, while the index is, and in the very last byte.
    for limit in (20_000, size - 2000, size - 1):
        with (
            disk_of(limit),
            pytest.raises(MediaError, match=r"talk.mp4: cannot be written on \(File too large\)"),
        ):
            write_noise(path)
        assert list(tmp_path.iterdir()) == []
    with disk_of(size):
        write_noise(path)
    assert path.stat().st_size == size
