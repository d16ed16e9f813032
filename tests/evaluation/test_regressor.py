"""The regressor learns a mouth that the sound gives away, and not one that it does not."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipelines.audio import MelConfig
from pipelines.evaluation.regressor import (
    SPOKEN,
    load_regressor,
    regress,
    save_regressor,
    train_regressor,
)
from pipelines.train.visemes import FACE_UNITS
from rtgen.errors import CheckpointError
from tests.evaluation.scenes import Floats

JAW = FACE_UNITS.index("jawOpen")
FRAMES = 400


def loudness_track(seed: int) -> tuple[Floats, Floats]:
    """Noise whose level is the jaw's opening: audio [F * 640] and weights [F, U]."""
    rng = np.random.default_rng(seed)
    jaw = np.convolve(rng.random(FRAMES), np.ones(5) / 5, "same")
    jaw = (jaw - jaw.min()) / (jaw.max() - jaw.min())
    audio = rng.standard_normal(640 * FRAMES) * np.repeat(0.2 * jaw**2, 640)
    weights = np.zeros((FRAMES, len(FACE_UNITS)), np.float32)
    weights[:, JAW] = jaw
    return audio.astype(np.float32), weights


def write(folder: Path, seed: int, *, shuffle: bool) -> None:
    (folder / "tracks").mkdir(exist_ok=True)
    audio, weights = loudness_track(seed)
    if shuffle:
        weights = np.random.default_rng(seed).permutation(weights)
    pcm = np.round(audio.clip(-1, 1) * 32767).astype(np.int16)
    np.savez(folder / "tracks" / f"train_{seed:04d}.npz", audio=pcm, weights=weights)


@pytest.mark.parametrize("shuffle", [False, True])
def test_it_learns_what_can_be_heard_only(tmp_path: Path, shuffle: bool) -> None:
    for seed in range(3):
        write(tmp_path, seed, shuffle=shuffle)
    net = train_regressor([tmp_path], MelConfig(), steps=100, batch=24)
    audio, weights = loudness_track(9)
    error = np.mean((regress(net, audio, weights)[:, JAW] - weights[:, JAW]) ** 2)
    share = error / weights[:, JAW].var()
    assert share > 0.8 if shuffle else share < 0.5


def test_it_survives_a_file_and_keeps_what_is_not_speech(tmp_path: Path) -> None:
    write(tmp_path, 0, shuffle=False)
    net = train_regressor([tmp_path], MelConfig(), steps=2)
    save_regressor(net, tmp_path / "deep" / "net.safetensors")
    again = load_regressor(tmp_path / "deep" / "net.safetensors", MelConfig())
    audio, weights = loudness_track(1)
    weights[:, FACE_UNITS.index("eyeBlinkLeft")] = 0.7
    out = regress(again, audio, weights)
    np.testing.assert_array_equal(out, regress(net, audio, weights))
    still = [i for i in range(len(FACE_UNITS)) if i not in SPOKEN]
    np.testing.assert_array_equal(out[:, still], weights[:, still])


def test_no_tracks_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no training tracks"):
        train_regressor([tmp_path], MelConfig())
