"""The frame log: colours, changes and backdrop of pictures that are known."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from pipelines.evaluation.log import FrameLog, FrameReader, lab_of
from rtgen.errors import CheckpointError
from tests.evaluation.scenes import toy_probe


def pictures(units: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    """[U, 4, 64, 64, 3] of noise."""
    rng = np.random.default_rng(seed)
    return rng.integers(60, 180, (units, 4, 64, 64, 3), dtype=np.uint8)


def logged(frames: npt.NDArray[np.uint8], units: list[int]) -> FrameLog:
    reader = FrameReader(4 * len(frames), toy_probe())
    for unit in units:
        reader.push(unit, frames[unit])
    return reader.log


def test_lab_of_known_colours() -> None:
    colours = np.array([[255, 255, 255], [0, 0, 0], [255, 0, 0], [119, 119, 119]], np.uint8)
    expected = np.array([[100, 0, 0], [0, 0, 0], [53.2, 80.1, 67.2], [50.0, 0, 0]])
    np.testing.assert_allclose(lab_of(colours), expected, atol=0.2)


def test_changes_are_those_of_whole_frames_across_units() -> None:
    frames = pictures(3)
    log = logged(frames, [0, 1, 2])
    flat = frames.reshape(12, 64, 64, 3).astype(float)
    slow = [np.abs(flat[i] - flat[i - 1]).mean() for i in range(1, 12)]
    np.testing.assert_allclose(log.change[1:, 0], slow, rtol=1e-5)
    assert np.isnan(log.change[0]).all()


def test_a_gap_has_no_change_and_is_not_seen() -> None:
    log = logged(pictures(4), [0, 1, 3])
    assert log.seen.tolist() == [True] * 8 + [False] * 4 + [True] * 4
    assert np.isnan(log.change[12]).all()
    assert not np.isnan(log.change[13]).any()


def test_brightness_and_backdrop_are_seen() -> None:
    frames = np.full((2, 4, 64, 64, 3), 100, np.uint8)
    frames[1] += 10
    log = logged(frames, [0, 1])
    assert log.lab[4, 0] - log.lab[0, 0] == pytest.approx(4.1, abs=0.3)
    assert log.backdrop[:4].max() == 0
    np.testing.assert_allclose(log.backdrop[4:], 100)


def test_a_log_survives_a_file_under_its_key_only(tmp_path: Path) -> None:
    log = logged(pictures(2), [0, 1])
    log.save(tmp_path / "log.npz", "one")
    again = FrameLog.load(tmp_path / "log.npz", "one")
    assert again is not None
    np.testing.assert_array_equal(again.readings, log.readings)
    np.testing.assert_array_equal(again.change, log.change)
    assert FrameLog.load(tmp_path / "log.npz", "two") is None
    assert FrameLog.load(tmp_path / "none.npz", "one") is None
    (tmp_path / "log.npz").write_bytes(b"PK\x03\x04 cut")
    with pytest.raises(CheckpointError, match="remove it"):
        FrameLog.load(tmp_path / "log.npz", "one")
