"""Verdicts: a good run passes, every fault fails its own row, and what was not measured says so."""

from __future__ import annotations

import math

import pytest

from pipelines.evaluation.face import GESTURES
from pipelines.evaluation.table import Row, rows_of, text_of

GOOD: dict[str, float] = {
    "jaw_r": 0.9, "jaw_r_relative": 0.98, "jaw_r_regressor": 0.92, "jaw_std_ratio": 0.95,
    "lag_ms": 3.0, "lag_ms_end": 8.0, "minutes": 10.0, "seeds": 5.0,
    "closures": 0.9, "closures_truth": 1.0, "contacts": 0.85, "contacts_truth": 0.98,
    "vowels_shut": 0.02,
    **{f"{s}_{r}_motion": 0.9 for s in ("silence", "room_noise") for r in ("face", "mouth")},
    "blinks_per_minute": 15.0, "longest_blink_ms": 160.0, "blinks_held_at_cuts": 0.0,
    "cuts": 6.0, "blinks_missed": 0.0, "blinks_extra": 0.0,
    **{f"{a}_var_ratio_idle": 1.0 for a in ("yaw", "pitch", "roll")},
    **{f"event_early_{g}": 0.9 for g in GESTURES},
    **{f"event_left_{g}": 0.05 for g in GESTURES},
    **{f"{n}_{e}": v for n in ("lab_l", "lab_a", "lab_b", "identity")
       for e, v in (("low", -0.1), ("high", 0.2))},
    "backdrop_psnr": 45.0, "backdrop_change": 0.1, "join_ratio": 1.02, "join_ratio_truth": 1.0,
    "transition_ratio": 1.0, "transition_worst": 1.5, "transition_ratio_truth": 1.0,
    "variant_r_clean": 0.9, "variant_r_8 kHz": 0.87,
    "variant_lag_clean": 2.0, "variant_lag_8 kHz": 4.0, "denoise_cpu_ms": 20.0,
}  # fmt: skip


def failed(changes: dict[str, float]) -> list[str]:
    return [row.measure for row in rows_of({**GOOD, **changes}) if row.passed is False]


def test_a_good_run_passes_every_row() -> None:
    assert all(row.passed is True for row in rows_of(GOOD))


FAULTS = [
    ("jaw_r", 0.7, "jaw correlation"),
    ("jaw_r_relative", 0.8, "direct regressor"),
    ("jaw_std_ratio", 0.5, "amplitude"),
    ("lag_ms", 120.0, "lag"),
    ("lag_ms_end", 40.0, "lag"),
    ("closures", 0.5, "jaw shut"),
    ("contacts", 0.5, "lips pressed"),
    ("silence_face_motion", 0.0, "motion in silence"),
    ("room_noise_mouth_motion", 1.6, "motion in room noise"),
    ("blinks_per_minute", 40.0, "blinks"),
    ("longest_blink_ms", 440.0, "blinks"),
    ("blinks_held_at_cuts", 1.0, "blinks"),
    ("pitch_var_ratio_idle", 0.3, "variance"),
    ("event_early_nod", 0.1, "events"),
    ("event_left_smile", 0.6, "events"),
    ("lab_b_high", 0.7, "colour drift"),
    ("identity_low", -3.0, "identity drift"),
    ("backdrop_change", -1.0, "backdrop"),
    ("join_ratio", 1.3, "unit joins"),
    ("transition_worst", 3.0, "state transitions"),
    ("variant_r_8 kHz", 0.8, "sound as file"),
    ("variant_lag_8 kHz", 60.0, "sound as file"),
    ("denoise_cpu_ms", 30.0, "denoise passes"),
]


@pytest.mark.parametrize(("name", "value", "row"), FAULTS)
def test_a_fault_fails_its_row_alone(name: str, value: float, row: str) -> None:
    (found,) = failed({name: value})
    assert row in found


@pytest.mark.parametrize("name", [name for name, _, _ in FAULTS])
def test_what_was_not_measured_never_passes(name: str) -> None:
    row = next(row for fault, _, row in FAULTS if fault == name)
    found = [r for r in rows_of({**GOOD, name: math.nan}) if row in r.measure]
    assert found[0].passed is not True


def test_a_short_run_gives_no_verdict_on_drift() -> None:
    verdicts = {row.measure: row.passed for row in rows_of({**GOOD, "minutes": 1.0})}
    assert [m for m, passed in verdicts.items() if passed is None] == [
        m for m in verdicts if "lag at" in m or "drift" in m or "backdrop" in m
    ]


def test_the_text_holds_every_row_and_verdict() -> None:
    row = Row(measure="m", value="v" * 80, target="t", passed=False)
    text = text_of([row])
    assert text.count("\n") == 2
    assert "FAIL" in text
    assert row.document() == {"measure": "m", "value": "v" * 80, "target": "t", "passed": False}
