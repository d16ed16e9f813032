"""Lip measures on labels whose answer is known, each with the fault that it is there to catch."""

from __future__ import annotations

import numpy as np
import pytest

from pipelines.evaluation.lips import closures, lip_measures, vowels_shut
from pipelines.train.visemes import LEAD_S
from tests.evaluation.scenes import FRAMES, SEGMENTS, Floats, labels, speech_track

TRACK = speech_track()
ASKED = labels(TRACK)
WIDE = 0.5


def measured(seen: dict[str, Floats]) -> dict[str, float]:
    return lip_measures(seen, ASKED, ASKED, TRACK)


def test_labels_measured_against_themselves_are_perfect() -> None:
    found = measured(ASKED)
    assert found["jaw_r"] == pytest.approx(1)
    assert found["lag_ms"] == pytest.approx(0, abs=1e-6)
    assert found["jaw_std_ratio"] == pytest.approx(1)
    assert found["jaw_slope_truth"] == pytest.approx(1)
    assert found["closures"] == found["closures_truth"] == 1
    assert found["contacts"] == found["contacts_truth"] == 1
    assert found["vowels_shut"] == 0


@pytest.mark.parametrize("late", [-2, 2, 3, 4])
def test_late_lips_show_as_lag(late: int) -> None:
    found = measured({name: np.roll(value, late) for name, value in ASKED.items()})
    assert found["lag_ms"] == pytest.approx(40 * late, abs=4)


def test_lips_160_ms_late_miss_their_closures() -> None:
    found = measured({name: np.roll(value, 4) for name, value in ASKED.items()})
    assert found["closures"] < 0.3
    assert found["contacts"] < 0.3


def test_half_the_opening_halves_the_amplitude_and_keeps_the_rest() -> None:
    found = measured({name: value * np.float32(0.5) for name, value in ASKED.items()})
    assert found["jaw_std_ratio"] == pytest.approx(0.5)
    assert found["jaw_r"] == pytest.approx(1)
    assert found["closures"] == 1


def test_a_decoder_that_flattens_is_seen_in_the_truth_and_not_held_against_the_model() -> None:
    flat = {name: value * np.float32(0.8) for name, value in ASKED.items()}
    found = lip_measures(flat, flat, ASKED, TRACK)
    assert found["jaw_slope_truth"] == pytest.approx(0.8)
    assert found["jaw_std_ratio"] == pytest.approx(1)


def test_lips_that_never_close_have_no_closures() -> None:
    jaw = np.maximum(ASKED["jaw"], 0.3).astype(np.float32)
    assert measured({**ASKED, "jaw": jaw})["closures"] == 0


def test_a_shut_jaw_with_slack_lips_closes_without_contact() -> None:
    found = measured({**ASKED, "press": ASKED["press"] * np.float32(0.2)})
    assert found["closures"] == 1
    assert found["contacts"] == 0


def test_swapped_words_lose_the_correlation() -> None:
    rng = np.random.default_rng(0)
    pieces = np.array_split(np.arange(100, 300), 25)
    order = np.concatenate([pieces[i] for i in rng.permutation(25)])
    jaw = ASKED["jaw"].copy()
    jaw[100:300] = ASKED["jaw"][order]
    assert measured({**ASKED, "jaw": jaw})["jaw_r"] < 0.8


def test_a_frozen_mouth_fails_everything() -> None:
    still = {name: np.zeros(FRAMES, np.float32) for name in ASKED}
    found = measured(still)
    assert found["jaw_r"] == 0
    assert found["jaw_std_ratio"] == 0
    assert found["vowels_shut"] == 1
    assert np.isnan(found["lag_ms"])


def test_a_stretch_is_measured_at_its_place_in_the_track() -> None:
    part = {name: value[80:320] for name, value in ASKED.items()}
    found = lip_measures(part, part, part, TRACK, start=80)
    assert found["closures"] == 1
    wrong = lip_measures(part, part, part, TRACK, start=84)
    assert wrong["closures"] < 0.3


def test_closures_are_looked_for_where_the_lips_lead_the_sound() -> None:
    shut = [int(((a + b) / 2 - LEAD_S) * 25) for a, b, v in SEGMENTS if v == "PP"]
    assert max(ASKED["jaw"][frame] for frame in shut) < 0.1
    assert np.isnan(closures(ASKED, [s for s in SEGMENTS if s[2] != "PP"], WIDE))
    assert vowels_shut(ASKED["jaw"], SEGMENTS, WIDE) == 0
