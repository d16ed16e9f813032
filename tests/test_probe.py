"""The probe: it reads what is planted in pixels, and finds a planted lag."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from pipelines.evaluation.probe_fit import Samples, accuracy, fit, planted_lags, read
from pipelines.probe import PROBED, FaceProbe, correlation, crops_of, lag_ms, probed_labels
from pipelines.train.visemes import FACE_UNITS
from rtgen.errors import CheckpointError, ShapeError

Floats = npt.NDArray[np.float32]
JAW, BLINK = PROBED.index("jaw"), PROBED.index("blink")


def labels(count: int, seed: int) -> Floats:
    table = np.zeros((count, len(PROBED)), np.float32)
    table[:, [JAW, BLINK]] = np.random.default_rng(seed).random((count, 2))
    return table


def faces(truth: Floats, seed: int = 0) -> npt.NDArray[np.uint8]:
    """Grey frames with a dark mouth that opens by the jaw and eyes that pale by the blink."""
    rng = np.random.default_rng(seed)
    frames = rng.integers(120, 136, (len(truth), 256, 256, 1)).repeat(3, -1)
    for frame, row in zip(frames, truth, strict=True):
        frame[170 : 172 + round(36 * float(row[JAW])), 100:150] -= 80
        frame[100:112, 80:160] += round(90 * float(row[BLINK]))
    return frames.astype(np.uint8)


def samples(count: int, seed: int, *, shuffle: bool = False) -> Samples:
    truth = labels(count, seed)
    shown = crops_of(faces(truth, seed))
    if shuffle:
        truth = np.random.default_rng(3).permutation(truth)
    return Samples(shown, truth, np.arange(count) % 2 == 0)


@cache
def fitted(shuffle: bool) -> FaceProbe:
    return fit(
        samples(160, 1, shuffle=shuffle), samples(40, 2, shuffle=shuffle), steps=90, batch=16
    )


def test_the_probe_reads_what_was_drawn() -> None:
    truth = labels(80, 9)
    seen = fitted(False).measure(faces(truth, seed=5))
    for name, column in (("jaw", JAW), ("blink", BLINK)):
        assert correlation(seen[name], truth[:, column]) > 0.9
    stages = read(fitted(False), crops_of(faces(truth, seed=5)))
    np.testing.assert_allclose(stages[:, JAW], seen["jaw"], atol=1e-5)


def test_a_probe_fitted_to_shuffled_labels_reads_nothing() -> None:
    truth = labels(80, 9)
    seen = fitted(True).measure(faces(truth, seed=5))
    assert np.mean((seen["jaw"] - truth[:, JAW]) ** 2) > 0.6 * truth[:, JAW].var()


def test_accuracy_tells_a_flat_and_a_shifted_probe_from_a_good_one() -> None:
    truth = labels(400, 4)
    good = accuracy(truth, truth)["jaw"]
    assert good == {"r": 1.0, "slope": 1.0, "rmse": 0.0}
    flat = accuracy(truth * np.float32(0.5), truth)["jaw"]
    assert (flat["r"], flat["slope"]) == (1.0, 0.5)
    assert accuracy(truth + np.float32(0.1), truth)["jaw"]["rmse"] == pytest.approx(0.1)


def test_the_self_test_finds_the_lags_that_it_plants() -> None:
    rng = np.random.default_rng(0)
    truth = np.zeros((800, len(PROBED)), np.float32)
    truth[:, JAW] = np.convolve(rng.standard_normal(800), np.hanning(9), "same")
    seen = truth + np.float32(0.1) * rng.standard_normal(truth.shape).astype(np.float32)
    for planted, found in planted_lags(seen, truth).items():
        assert found == pytest.approx(40 * int(planted), abs=4)


def test_frames_of_another_size_are_resampled() -> None:
    drawn = faces(labels(2, 1))
    half = drawn[:, ::2, ::2]
    for whole, other in zip(crops_of(drawn), crops_of(half), strict=True):
        assert whole.shape == other.shape
        assert np.abs(whole.astype(int) - other).mean() < 12


def test_labels_come_in_the_order_of_the_names() -> None:
    weights = np.zeros((2, len(FACE_UNITS)), np.float32)
    weights[:, FACE_UNITS.index("jawOpen")] = 0.3
    found = probed_labels(weights, np.full((2, 3), 0.1, np.float32), np.zeros((2, 2), np.float32))
    assert tuple(found) == PROBED
    assert found["jaw"].tolist() == pytest.approx([0.3, 0.3])
    assert found["roll"].tolist() == pytest.approx([0.1, 0.1])


@pytest.mark.parametrize("planted", [-3, 0, 1, 2, 5])
def test_lag_finds_a_planted_shift(planted: int) -> None:
    rng = np.random.default_rng(0)
    smooth = np.convolve(rng.standard_normal(2000), np.hanning(9), "same").astype(np.float32)
    seen = np.roll(smooth, planted) + 0.1 * rng.standard_normal(2000).astype(np.float32)
    assert lag_ms(seen.astype(np.float32), smooth, 25) == pytest.approx(40 * planted, abs=3)


def test_lag_resolves_less_than_a_frame() -> None:
    rng = np.random.default_rng(1)
    fine = np.convolve(rng.standard_normal(8000), np.hanning(41), "same").astype(np.float32)
    assert lag_ms(fine[2:-10:4], fine[4:-8:4], 25) == pytest.approx(20, abs=3)


def test_a_still_reading_has_no_lag() -> None:
    still = np.zeros(100, np.float32)
    assert np.isnan(lag_ms(still, still, 25))


def test_probe_survives_a_file(tmp_path: Path) -> None:
    probe = fitted(False)
    probe.save(tmp_path / "probe.safetensors")
    again = FaceProbe.load(tmp_path / "probe.safetensors")
    assert again.names == PROBED
    drawn = faces(labels(4, 7))
    np.testing.assert_array_equal(again.measure(drawn)["jaw"], probe.measure(drawn)["jaw"])
    assert (tmp_path / "probe.safetensors").stat().st_size < 500_000


def test_bad_input_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no probe"):
        FaceProbe.load(tmp_path / "none.safetensors")
    (tmp_path / "bad.safetensors").write_bytes(b"no")
    with pytest.raises(CheckpointError, match="cannot read"):
        FaceProbe.load(tmp_path / "bad.safetensors")
    with pytest.raises(ShapeError, match="S, S, 3"):
        crops_of(np.zeros((2, 64, 32, 3), np.uint8))
