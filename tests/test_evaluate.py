"""The avatar's measures, on labels and pictures whose answer is known."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from pipelines.evaluate import (
    PROBED,
    blink_measures,
    closure_rate,
    mouth_measures,
    probed_labels,
    stability_measures,
)
from pipelines.motion import CONTROL_NAMES
from pipelines.train.tracks import Track
from pipelines.train.visemes import FACE_UNITS, LEAD_S, FaceTrack, mouth_weights
from rtgen.types import SpeechState

FPS = 25
FRAMES = 400
# "pa pa pa ...": lips meet every 400 ms, between open vowels, from second 4 to 12.
SEGMENTS = [
    segment
    for i in range(20)
    for segment in (
        (4 + 0.4 * i, 4.1 + 0.4 * i, "PP"),
        (4.1 + 0.4 * i, 4.4 + 0.4 * i, "aa"),
    )
]


def track() -> Track:
    """Four seconds of silence, eight of speech, four of silence."""
    state = np.full(FRAMES, SpeechState.IDLE, np.int8)
    state[100:300] = SpeechState.SPEAKING
    controls = np.zeros((FRAMES, len(CONTROL_NAMES)), np.float32)
    return Track(
        audio=np.zeros(640 * FRAMES, np.float32),
        face=FaceTrack.from_parts(mouth_weights(SEGMENTS, FRAMES), controls, state),
        event=np.zeros(FRAMES, np.int8),
        segments=SEGMENTS,
        cuts=[],
        texts=["papa"],
        voices=["none"],
        seed=0,
    )


def labels(of: Track) -> dict[str, npt.NDArray[np.float32]]:
    return probed_labels(of.face.weights, of.face.pose)


def test_labels_measured_against_themselves_are_perfect() -> None:
    of = track()
    asked = labels(of)
    assert set(asked) == set(PROBED)
    measures = mouth_measures(asked, asked, of)
    assert measures["jaw_r"] == pytest.approx(1)
    assert measures["lag_ms"] == pytest.approx(0, abs=1e-6)
    assert measures["jaw_std_ratio"] == pytest.approx(1)
    assert measures["closures"] == 1
    assert measures["silence_motion"] == pytest.approx(measures["silence_motion_truth"])


@pytest.mark.parametrize("late", [-2, 2, 4])
def test_late_lips_show_as_lag(late: int) -> None:
    of = track()
    asked = labels(of)
    seen = {name: np.roll(value, late) for name, value in asked.items()}
    measures = mouth_measures(seen, asked, of)
    assert measures["lag_ms"] == pytest.approx(40 * late, abs=4)


def test_lips_160_ms_late_miss_their_closures() -> None:
    of = track()
    assert closure_rate(np.roll(labels(of)["jaw"], 4), of) < 0.3


def test_half_the_opening_halves_the_amplitude_and_keeps_the_rest() -> None:
    of = track()
    asked = labels(of)
    seen = {name: value * np.float32(0.5) for name, value in asked.items()}
    measures = mouth_measures(seen, asked, of)
    assert measures["jaw_std_ratio"] == pytest.approx(0.5)
    assert measures["jaw_r"] == pytest.approx(1)
    assert measures["closures"] == 1


def test_lips_that_never_close_have_no_closures() -> None:
    of = track()
    jaw = np.maximum(labels(of)["jaw"], 0.3).astype(np.float32)
    assert closure_rate(jaw, of) == 0


def test_a_trembling_mouth_in_silence_is_seen() -> None:
    of = track()
    asked = labels(of)
    rng = np.random.default_rng(0)
    tremble = (0.05 * rng.standard_normal(FRAMES)).astype(np.float32)
    trembling = (asked["jaw"] + tremble).astype(np.float32)
    measures = mouth_measures({**asked, "jaw": trembling}, asked, of)
    assert measures["silence_motion"] > measures["silence_motion_truth"] + 0.03


def test_closures_are_looked_for_where_the_lips_lead_the_sound() -> None:
    of = track()
    jaw = labels(of)["jaw"]
    shut = [int(((a + b) / 2 - LEAD_S) * FPS) for a, b, v in SEGMENTS if v == "PP"]
    assert max(jaw[frame] for frame in shut) < 0.1
    assert jaw.argmax() not in shut
    assert FACE_UNITS[FACE_UNITS.index("jawOpen")] == "jawOpen"


def test_blinks_are_counted_and_timed() -> None:
    blink = np.zeros(60 * FPS, np.float32)
    for start, length in ((100, 4), (500, 6), (1490, 10)):
        blink[start : start + length] = 1
    measures = blink_measures(blink)
    assert measures["blinks_per_minute"] == pytest.approx(3)
    assert measures["longest_blink_ms"] == 400
    assert blink_measures(np.zeros(100, np.float32))["longest_blink_ms"] == 0


def pictures(seed: int = 0) -> npt.NDArray[np.uint8]:
    rng = np.random.default_rng(seed)
    base = rng.integers(60, 180, (256, 256, 3))
    drift = rng.integers(-2, 3, (120, 1, 1, 1))
    return (base[None] + drift).clip(0, 255).astype(np.uint8)


def test_a_steady_picture_is_stable() -> None:
    measures = stability_measures(pictures())
    assert measures["backdrop_psnr_last"] > 35
    assert abs(measures["luma_change"]) < 1
    assert measures["detail_ratio"] == pytest.approx(1, abs=0.01)
    assert 0.7 < measures["join_ratio"] < 1.4


def test_fading_blur_and_jumps_at_joins_are_seen() -> None:
    fading = pictures().astype(np.float32)
    fading += np.linspace(0, 20, len(fading))[:, None, None, None]
    measures = stability_measures(fading.clip(0, 255).astype(np.uint8))
    assert measures["luma_change"] > 10
    assert measures["backdrop_psnr_last"] < 30

    flat = pictures()
    flat[80:] = flat[80:].mean((1, 2), keepdims=True).astype(np.uint8)
    assert stability_measures(flat)["detail_ratio"] < 0.2

    jumps = pictures()[:1].repeat(120, 0).astype(np.int16)
    jumps += (np.arange(120) // 4 % 2 * 6)[:, None, None, None]
    jumps += (np.arange(120) % 2)[:, None, None, None]
    assert stability_measures(jumps.clip(0, 255).astype(np.uint8))["join_ratio"] > 3
