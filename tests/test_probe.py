"""The probe: it reads what is planted in pixels, and finds a planted lag."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from pipelines.probe import FaceProbe, correlation, features, lag_ms
from rtgen.errors import CheckpointError, ShapeError

NAMES = ("jaw", "blink")


def faces(labels: npt.NDArray[np.float32], seed: int = 0) -> npt.NDArray[np.uint8]:
    """Grey frames with a dark mouth that opens by `jaw` and eyes that pale by `blink`."""
    rng = np.random.default_rng(seed)
    frames = rng.integers(120, 136, (len(labels), 256, 256, 1)).repeat(3, -1)
    for frame, (jaw, blink) in zip(frames, labels, strict=True):
        frame[170 : 172 + round(36 * jaw), 100:150] -= 80
        frame[100:112, 80:160] += round(90 * blink)
    return frames.astype(np.uint8)


def labels(count: int, seed: int) -> npt.NDArray[np.float32]:
    return np.random.default_rng(seed).random((count, 2)).astype(np.float32)


def test_the_probe_reads_what_was_drawn() -> None:
    probe = FaceProbe.fit(faces(labels(200, 1)), labels(200, 1), NAMES)
    seen = probe.measure(faces(labels(80, 2), seed=5))
    for column, name in enumerate(NAMES):
        assert correlation(seen[name], labels(80, 2)[:, column]) > 0.98


def test_a_probe_fitted_to_shuffled_labels_reads_nothing() -> None:
    shuffled = np.random.default_rng(3).permutation(labels(200, 1))
    probe = FaceProbe.fit(faces(labels(200, 1)), shuffled, NAMES)
    seen = probe.measure(faces(labels(80, 2), seed=5))
    assert abs(correlation(seen["jaw"], labels(80, 2)[:, 0])) < 0.6


def test_both_ways_of_solving_agree() -> None:
    drawn, truth = faces(labels(60, 1)), labels(60, 1)
    few = FaceProbe.fit(drawn, truth, NAMES)
    x = features(drawn).astype(np.float64)
    x -= x.mean(0)
    y = truth - truth.mean(0)
    slow = np.linalg.solve(x.T @ x + 2.0 * np.eye(x.shape[1]), x.T @ y)
    np.testing.assert_allclose(few.weights, slow, atol=1e-5)


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


def test_probe_survives_a_file(tmp_path: Path) -> None:
    probe = FaceProbe.fit(faces(labels(50, 1)), labels(50, 1), NAMES)
    probe.save(tmp_path / "probe.safetensors")
    again = FaceProbe.load(tmp_path / "probe.safetensors")
    assert again.names == NAMES
    np.testing.assert_array_equal(again.weights, probe.weights)


def test_bad_input_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no probe"):
        FaceProbe.load(tmp_path / "none.safetensors")
    with pytest.raises(ShapeError, match="256"):
        features(np.zeros((2, 64, 64, 3), np.uint8))
