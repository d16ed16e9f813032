"""Blinks, head, gestures and stillness, each with the fault that it is there to catch."""

from __future__ import annotations

import numpy as np
import pytest

from pipelines.evaluation.face import (
    GESTURES,
    blink_measures,
    gesture_measures,
    pose_measures,
    quiet_measures,
)
from pipelines.evaluation.log import FrameLog
from pipelines.evaluation.streams import UNIT_SAMPLES, quiet_track
from pipelines.motion import FPS
from rtgen.types import SpeechState
from tests.evaluation.scenes import Floats, labels, toy_probe

MINUTE = 60 * FPS


def blinks(*runs: tuple[int, int]) -> Floats:
    lid = np.zeros(MINUTE, np.float32)
    for start, length in runs:
        lid[start : start + length] = 1
    return lid


def test_blinks_are_counted_and_timed() -> None:
    asked = blinks((100, 4), (500, 6), (1490, 10))
    found = blink_measures(asked, asked, [])
    assert found["blinks_per_minute"] == pytest.approx(3)
    assert found["longest_blink_ms"] == 400
    assert found["blinks_missed"] == found["blinks_extra"] == 0
    assert blink_measures(blinks(), blinks(), [])["longest_blink_ms"] == 0


def test_double_blinks_are_extra_and_lost_ones_missed() -> None:
    asked = blinks((100, 4), (500, 4))
    double = blinks((100, 3), (105, 3), (500, 3), (505, 3))
    assert blink_measures(double, asked, [])["blinks_extra"] == 1
    assert blink_measures(double, asked, [])["blinks_per_minute"] == pytest.approx(4)
    lost = blink_measures(blinks((100, 4)), asked, [])
    assert lost["blinks_missed"] == 0.5
    late = blink_measures(blinks((110, 4), (510, 4)), asked, [])
    assert (late["blinks_missed"], late["blinks_extra"]) == (1, 1)


def test_lids_held_at_a_cut_are_counted_and_elsewhere_not() -> None:
    held = blinks((100, 12))
    assert blink_measures(held, blinks(), [4.1])["blinks_held_at_cuts"] == 1
    assert blink_measures(held, blinks(), [20.0])["blinks_held_at_cuts"] == 0
    assert blink_measures(blinks((100, 5)), blinks(), [4.1])["blinks_held_at_cuts"] == 0
    assert blink_measures(held, blinks(), [24.1], start=500)["blinks_held_at_cuts"] == 1


def test_a_head_of_half_size_has_a_quarter_of_the_variance() -> None:
    rng = np.random.default_rng(0)
    shown = {n: rng.standard_normal(400).astype(np.float32) for n in ("yaw", "pitch", "roll")}
    state = np.repeat(np.array([0, 2], np.int8), [180, 220])
    assert set(pose_measures(shown, shown, state).values()) == {1.0}
    small = {**shown, "yaw": shown["yaw"] * np.float32(0.5)}
    found = pose_measures(small, shown, state)
    assert found["yaw_var_ratio_idle"] == pytest.approx(0.25)
    assert found["pitch_var_ratio_speaking"] == pytest.approx(1)
    assert "yaw_var_ratio_listening" not in found


def quiet_log(change: float, jaw: Floats) -> FrameLog:
    log = FrameLog.empty(len(jaw), toy_probe())
    rng = np.random.default_rng(1)
    log.change[:] = change * rng.uniform(0.5, 1.5, log.change.shape)
    log.readings[:] = 0
    log.readings[:, 0] = jaw
    return log


def test_a_frozen_and_a_trembling_face_are_both_seen() -> None:
    still = np.zeros(100, np.float32)
    true = quiet_log(1.0, still)
    assert quiet_measures(true, true, 0)["face_motion"] == 1
    assert quiet_measures(quiet_log(0.0, still), true, 0)["face_motion"] == 0
    assert quiet_measures(quiet_log(1.5, still), true, 0)["mouth_motion"] == pytest.approx(1.5)
    tremble = (0.05 * np.random.default_rng(0).standard_normal(100)).astype(np.float32)
    found = quiet_measures(quiet_log(1.0, tremble + np.float32(0.1)), true, 0)
    assert found["jaw_motion"] > 0.03
    assert found["jaw_motion_truth"] == 0
    assert found["jaw_open"] == pytest.approx(0.1, abs=0.02)


STARTS = {4 + 20 * i: name for i, name in enumerate(GESTURES)}
AUDIO = np.zeros(130 * UNIT_SAMPLES, np.float32)
ASKED = labels(quiet_track(AUDIO, 5, SpeechState.IDLE, STARTS))
REST = labels(quiet_track(AUDIO, 5, SpeechState.IDLE))
FRAMES = {4 * unit: name for unit, name in STARTS.items()}


def test_each_gesture_shows_and_goes() -> None:
    found = gesture_measures(ASKED, ASKED, REST, FRAMES)
    assert set(found) == set(GESTURES)
    for name, (early, left) in found.items():
        assert early == pytest.approx(1), name
        assert left < 0.02, name


def test_missing_late_turned_and_lasting_gestures_are_seen() -> None:
    none = gesture_measures(REST, ASKED, REST, FRAMES)
    assert all(early == 0 for early, _ in none.values())
    late = {n: REST[n] + np.roll(ASKED[n] - REST[n], 8) for n in ASKED}
    found = gesture_measures(late, ASKED, REST, FRAMES)
    assert all(early < 0.5 for early, _ in found.values())
    turned = {n: REST[n] - (ASKED[n] - REST[n]) for n in ASKED}
    assert gesture_measures(turned, ASKED, REST, FRAMES)["nod"][0] == pytest.approx(-1)
    stays = ASKED["smile"].copy()
    stays[26:] = stays[26]
    assert gesture_measures({**ASKED, "smile": stays}, ASKED, REST, FRAMES)["smile"][1] > 0.5
