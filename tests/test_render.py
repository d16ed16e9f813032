"""Offline render: what stands in the file is what the engine made, whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest

from pipelines import render as render_module
from pipelines.audio_reader import AudioReader
from pipelines.render import RenderConfig, RenderJob, RenderReport, render
from pipelines.video_io import Frames, Int16, VideoWriter
from rtgen.engine.engine import Engine
from rtgen.engine.lanes import inline_lanes
from rtgen.errors import ConfigError, MediaError
from rtgen.progress import Progress
from rtgen.types import Grant, Pixels, SessionSpec
from tests.media import click_train, decode, wav_bytes
from tests.toy_pipeline import toy_pipeline, write_toy_model

RATE = 48000
UNIT = 7680


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy_model(tmp_path_factory.mktemp("toy") / "model")


def speech(path: Path, samples: int) -> Path:
    """A click train on a soft tone, 48 kHz mono."""
    sound = click_train(RATE, samples / RATE)
    sound = sound + 0.05 * np.sin(np.arange(len(sound)) * 0.05)
    path.write_bytes(wav_bytes(np.clip(sound, -1, 1), RATE))
    return path


def config(folder: Path, model: Path, **changes: object) -> RenderConfig:
    values: dict[str, object] = {
        "audio": folder / "speech.wav",
        "out": folder / "talk.mp4",
        "model": f"{model}{os.sep}",
        "device": "cpu",
        "dtype": "float32",
    }
    return RenderConfig(**{**values, **changes})  # type: ignore[arg-type]


def run_inline(wanted: RenderConfig) -> RenderReport:
    with RenderJob(wanted, lanes=inline_lanes()) as job:
        return job.run()


@pytest.mark.parametrize("samples", [1, UNIT - 1, UNIT, UNIT + 1, 3 * UNIT + 100])
def test_picture_and_sound_last_equally_long_whatever_the_length(
    tmp_path: Path, model: Path, samples: int
) -> None:
    speech(tmp_path / "speech.wav", samples)
    report = run_inline(config(tmp_path, model))
    units = -(-samples // UNIT)
    times, _, sound = decode(tmp_path / "talk.mp4")
    assert times == [Fraction(n, 25) for n in range(4 * units)]
    assert abs(len(sound) - units * UNIT) < 1024
    assert (report.num_frames, report.is_partial) == (4 * units, False)
    assert report.path == tmp_path / "talk.mp4"


def test_every_click_is_heard_at_its_sample_and_the_end_is_silent(
    tmp_path: Path, model: Path
) -> None:
    samples = 6 * UNIT + 3000
    speech(tmp_path / "speech.wav", samples)
    run_inline(config(tmp_path, model))
    sound = np.abs(decode(tmp_path / "talk.mp4")[2])
    for at in range(RATE // 5, samples - 2400, RATE // 5):
        assert int(sound[at - 2400 : at + 2400].argmax()) == 2400
    assert sound[samples + 1500 : 7 * UNIT - 1024].max() < 1e-3


def engine_frames(path: Path) -> Pixels:
    """What the engine makes of the recording, without any file."""
    spec = SessionSpec(service_class="offline")
    with Engine(toy_pipeline(), lanes=inline_lanes()) as engine, AudioReader(path) as reader:
        grant = engine.reserve(spec)
        assert isinstance(grant, Grant)
        units = list(grant.session.render(reader.blocks(), RATE))
    return np.concatenate([unit.frames for unit in units])


def test_the_writer_is_given_exactly_the_engines_frames(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = speech(tmp_path / "speech.wav", 8 * UNIT)
    written: list[Pixels] = []

    class Recorded(VideoWriter):
        def write(self, frames: Frames, audio: Int16) -> None:
            written.append(frames.copy())
            super().write(frames, audio)

    monkeypatch.setattr(render_module, "VideoWriter", Recorded)
    run_inline(config(tmp_path, model))
    frames = engine_frames(path)
    np.testing.assert_array_equal(np.concatenate(written), frames)
    # The toy's frames all differ, so that one in a wrong place would be found.
    assert all((frames[n] != frames[n - 1]).any() for n in range(1, len(frames)))


def test_threads_and_inline_lanes_make_the_same_bytes(tmp_path: Path, model: Path) -> None:
    speech(tmp_path / "speech.wav", 5 * UNIT)
    run_inline(config(tmp_path, model))
    report = render(config(tmp_path, model, out=tmp_path / "other.mp4"))
    assert report.num_frames == 20
    assert (tmp_path / "talk.mp4").read_bytes() == (tmp_path / "other.mp4").read_bytes()


@pytest.mark.parametrize(
    "changes",
    [{"seed": 1}, {"avatar": "bo"}, {"num_inference_steps": 1}, {"state": "thinking"}],
)
def test_every_choice_changes_the_picture(
    tmp_path: Path, model: Path, changes: dict[str, object]
) -> None:
    # Quiet enough that nobody is taken to speak, so that the base state shows.
    (tmp_path / "speech.wav").write_bytes(wav_bytes(np.zeros(2 * UNIT), RATE))
    run_inline(config(tmp_path, model))
    run_inline(config(tmp_path, model, out=tmp_path / "other.mp4", **changes))
    assert (tmp_path / "talk.mp4").read_bytes() != (tmp_path / "other.mp4").read_bytes()


def test_reading_keeps_step_with_writing(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "speech.wav").write_bytes(wav_bytes(np.zeros(20 * 8000), 8000))
    readers: list[AudioReader] = []

    class Watched(AudioReader):
        def __init__(self, path: str | Path) -> None:
            super().__init__(path)
            readers.append(self)

    monkeypatch.setattr(render_module, "AudioReader", Watched)
    ahead: list[float] = []

    def watch(progress: Progress) -> None:
        ahead.append(float(readers[0].decoded_s) - progress.done_s)

    with RenderJob(config(tmp_path, model, num_inference_steps=1)) as job:
        # A stop also ends the reading: the file is 20 s long.
        job.run(on_progress=watch, stop=lambda: len(ahead) == 12)
    assert max(ahead) < 7  # 4 s in the session, units under way, one packet
    assert float(readers[0].decoded_s) < 10


def test_a_stopped_render_is_a_playable_file_under_another_name(
    tmp_path: Path, model: Path
) -> None:
    speech(tmp_path / "speech.wav", 10 * UNIT)
    seen: list[Progress] = []
    with RenderJob(config(tmp_path, model)) as job:
        report = job.run(on_progress=seen.append, stop=lambda: len(seen) == 3)
    assert (report.is_partial, report.num_frames) == (True, 12)
    assert report.path == tmp_path / "talk.partial.mp4"
    assert not (tmp_path / "talk.mp4").exists()
    times, _, sound = decode(tmp_path / "talk.partial.mp4")
    assert len(times) == 12
    assert abs(len(sound) - 3 * UNIT) < 1024
    assert [progress.total_s for progress in seen] == [pytest.approx(1.6)] * 3


def test_a_stop_during_the_last_unit_changes_nothing(tmp_path: Path, model: Path) -> None:
    speech(tmp_path / "speech.wav", 2 * UNIT)
    seen: list[Progress] = []
    with RenderJob(config(tmp_path, model), lanes=inline_lanes()) as job:
        report = job.run(on_progress=seen.append, stop=lambda: len(seen) == 2)
    assert (report.is_partial, report.path) == (False, tmp_path / "talk.mp4")


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_whatever_ends_a_render_leaves_no_file_and_the_old_one(
    tmp_path: Path, model: Path, error: type[BaseException]
) -> None:
    speech(tmp_path / "speech.wav", 4 * UNIT)
    (tmp_path / "talk.mp4").write_bytes(b"older")

    def fail(_: Progress) -> None:
        raise error

    with RenderJob(config(tmp_path, model, overwrite=True)) as job, pytest.raises(error):
        job.run(on_progress=fail)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["speech.wav", "talk.mp4"]
    assert (tmp_path / "talk.mp4").read_bytes() == b"older"


def test_damage_that_is_found_late_leaves_no_file(
    tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speech(tmp_path / "speech.wav", 4 * UNIT)
    blocks = AudioReader.blocks

    def damaged(reader: AudioReader) -> Iterator[np.ndarray]:
        yield next(blocks(reader))
        raise MediaError("speech.wav: the file is damaged")

    monkeypatch.setattr(AudioReader, "blocks", damaged)
    with RenderJob(config(tmp_path, model)) as job, pytest.raises(MediaError, match="damaged"):
        job.run()
    assert [path.name for path in tmp_path.iterdir()] == ["speech.wav"]


def test_a_whole_render_replaces_an_existing_file(tmp_path: Path, model: Path) -> None:
    speech(tmp_path / "speech.wav", UNIT)
    (tmp_path / "talk.mp4").write_bytes(b"older")
    run_inline(config(tmp_path, model, overwrite=True))
    assert len(decode(tmp_path / "talk.mp4")[0]) == 4


def test_values_out_of_range_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    for changes in ({"seed": -1}, {"num_inference_steps": 0}, {"state": "asleep"}):
        with pytest.raises(ConfigError):
            config(tmp_path, tmp_path, **changes)
