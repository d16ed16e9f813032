"""Scenes shown by the toy avatar: the same frames on both sides, resumed, pictured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from pipelines.evaluation.log import FrameLog
from pipelines.evaluation.parts import Pair, Pictures, Stage, windows
from pipelines.evaluation.regressor import MouthRegressor, regress
from pipelines.evaluation.streams import (
    UNIT_SAMPLES,
    generate,
    quiet_track,
    truth,
    watch_plan,
)
from pipelines.evaluation.variants import VARIANTS, write_variant
from pipelines.motion import CONTROL_NAMES
from pipelines.train.tracks import Track
from rtgen.types import SpeechState
from tests.evaluation.scenes import speech_track, toy_probe, toy_renderer
from tests.media import decode
from tests.toy_pipeline import toy_pipeline


def stage(folder: Path, key: str = "key") -> Stage:
    (folder / "parts").mkdir(exist_ok=True)
    return Stage(toy_pipeline(), toy_renderer(), toy_probe(), folder / "parts", key)


def short_track(units: int = 12) -> Track:
    rng = np.random.default_rng(0)
    audio = (0.05 * rng.standard_normal(units * UNIT_SAMPLES)).astype(np.float32)
    return quiet_track(audio, 3, SpeechState.SPEAKING, {2: "nod"})


def test_units_not_watched_change_nothing_in_those_that_are() -> None:
    track = short_track()
    whole = dict(generate(toy_pipeline(), track))
    watch = watch_plan(12, 2, 3, 4)
    some = dict(generate(toy_pipeline(), track, watch=watch))
    assert sorted(some) == [0, 1, 4, 8, 9, 10, 11]
    for unit, frames in some.items():
        np.testing.assert_array_equal(frames, whole[unit])


def test_truth_is_the_labels_latents_decoded() -> None:
    track, pipeline = short_track(), toy_pipeline()
    shown = dict(truth(pipeline, track.face.labels(), toy_renderer()))
    assert sorted(shown) == list(range(12))
    rows = torch.from_numpy(track.face.labels()[20:24])
    latents = toy_renderer()(rows).reshape(1, 1, 16, 2, 2)
    slow = pipeline.decoder(None).network(latents)[0].clamp(-1, 1)
    np.testing.assert_allclose(shown[5] / 127.5 - 1, slow.permute(0, 2, 3, 1).numpy(), atol=1 / 127)


def test_the_session_repeats_the_controls_of_a_quiet_track() -> None:
    track = short_track()
    nod = track.face.controls[:, CONTROL_NAMES.index("pitch")]
    plain = quiet_track(track.audio, 3, SpeechState.SPEAKING)
    rest = plain.face.controls[:, CONTROL_NAMES.index("pitch")]
    assert np.abs(nod - rest)[:8].max() == 0
    assert np.abs(nod - rest)[8:38].max() > 0.05


def count_runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    runs: list[int] = []
    real = Stage._look

    def counted(self: Stage, *args: object) -> Pair:
        runs.append(1)
        return real(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(Stage, "_look", counted)
    return runs


def test_a_part_is_made_once_and_again_for_another_model_or_scene(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs, track = count_runs(monkeypatch), short_track()
    first = stage(tmp_path).pair("part", track)
    again = stage(tmp_path).pair("part", track)
    assert len(runs) == 1
    np.testing.assert_array_equal(first.seen.readings, again.seen.readings)
    stage(tmp_path, key="other weights").pair("part", track)
    stage(tmp_path, key="other weights").pair("part", replace(track, audio=track.audio * 0))
    assert len(runs) == 3


def test_both_sides_of_a_pair_hold_the_same_frames(tmp_path: Path) -> None:
    watch = watch_plan(12, 2, 2, 5)
    pair = stage(tmp_path).pair("part", short_track(), watch)
    np.testing.assert_array_equal(pair.seen.seen, pair.shown.seen)
    np.testing.assert_array_equal(pair.seen.seen, np.repeat(watch, 4))


def test_sheet_and_clip_show_the_truth_beside_the_model(tmp_path: Path) -> None:
    track = speech_track()
    shows = Pictures(track, tmp_path, seconds=2.4)
    stage(tmp_path).pair("part", track, watch_plan(100, 15, 0, 100), shows)
    times, _, sound = decode(tmp_path / "clip.mp4")
    assert len(times) == 60
    assert len(sound) == pytest.approx(2.4 * 48000, abs=2048)
    with Image.open(tmp_path / "sheet.png") as sheet:
        assert sheet.size == (8 * 192, 5 * (2 * 192 + 40))
    with_files = Pictures(track, tmp_path, seconds=2.4)
    key = (tmp_path / "clip.key").read_text()
    assert with_files.is_done(key)
    assert not with_files.is_done("another")


def test_a_regressed_mouth_changes_speech_and_nothing_else(tmp_path: Path) -> None:
    track = speech_track()
    net = MouthRegressor(toy_pipeline().config.mel).eval().requires_grad_(False)
    weights = regress(net, track.audio, track.face.weights)
    moved = np.abs(weights - track.face.weights).max(0) > 0
    assert 0 < moved.sum() < weights.shape[1]
    log = stage(tmp_path).heard("heard", track, net, watch_plan(100, 10, 0, 100))
    assert log.seen.sum() == 40


@pytest.mark.parametrize("name", ["8 kHz", "stereo", "Opus", "-12 dB"])
def test_a_variant_sounds_like_the_original_at_the_same_time(tmp_path: Path, name: str) -> None:
    from pipelines.audio_reader import AudioReader

    time = np.arange(32000) / 16000
    tone = (0.3 * np.sin(2 * np.pi * 440 * time) * (time > 1)).astype(np.float32)
    path = write_variant(tone, VARIANTS[name], tmp_path / "sound")
    with AudioReader(path) as reader:
        heard = np.concatenate(list(reader.blocks())) / 32768
        channels = reader.info.channels
    assert channels == VARIANTS[name].channels
    loud = np.abs(heard) > 0.2 * np.abs(heard).max()
    assert loud.argmax() / 48000 == pytest.approx(1, abs=0.005)
    gain = 10 ** (VARIANTS[name].gain_db / 20)
    assert heard[60000:90000].std() == pytest.approx(0.3 * gain / 2**0.5, rel=0.1)


def test_a_variant_is_shown_from_its_first_unit_to_its_last(tmp_path: Path) -> None:
    log = stage(tmp_path).variant("file", short_track(), VARIANTS["Opus"])
    assert isinstance(log, FrameLog)
    assert log.seen.all()


def test_windows_are_the_stretches_without_gaps() -> None:
    log = FrameLog.empty(2000, toy_probe())
    for start, stop in ((0, 600), (700, 720), (1500, 2000)):
        log.detail[start:stop] = 1
    assert list(windows(log)) == [(0, 600), (1500, 2000)]
