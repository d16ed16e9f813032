from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

import pipelines.train.visemes as visemes
from pipelines.motion import CONTROL_NAMES, EXPRESSION_UNITS
from pipelines.train.visemes import (
    FACE_UNITS,
    LEAD_S,
    VISEMES,
    FaceTrack,
    Segment,
    face_weights,
    mouth_weights,
    viseme_segments,
)
from rtgen.errors import ConfigError, ShapeError

Array = npt.NDArray[np.float32]
COLUMN = {name: index for index, name in enumerate(FACE_UNITS)}


def row(names: str, start_s: float = 0.5, length_s: float = 0.09) -> list[Segment]:
    """Segments of equal length, one a name."""
    return [
        (start_s + i * length_s, start_s + (i + 1) * length_s, name)
        for i, name in enumerate(names.split())
    ]


def closures_are_reached() -> bool:
    """Lips shut in every p b m and f v, wherever it falls between the frames."""
    for shift in np.arange(0.0, 0.04, 0.005):
        for length_s in (0.04, 0.07, 0.12):
            segments = row("aa PP aa FF E PP PP O FF", 0.5 + shift, length_s)
            mouth = mouth_weights(segments, 75, np.ones(75))
            for start, end, name in segments:
                if name not in ("PP", "FF"):
                    continue
                middle = (start + end) / 2.0 - LEAD_S
                frames = mouth[np.abs((np.arange(75) + 0.5) / 25 - middle) <= 0.0201]
                unit = "mouthPressLeft" if name == "PP" else "mouthRollLower"
                full = frames[:, COLUMN[unit]] > (0.6 if name == "PP" else 0.75)
                shut = frames[:, COLUMN["jawOpen"]] < 0.08
                if not (full & shut).any():
                    return False
    return True


def test_lips_close_fully_at_any_phase() -> None:
    assert closures_are_reached()


def test_planted_blended_closures_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visemes, "_SHUT", ())
    assert not closures_are_reached()


def measured_lead_s(lead_s: float) -> float:
    """Lead of the jaw over the open vowels of a random sentence, by cross-correlation."""
    rng = np.random.default_rng(0)
    segments: list[Segment] = []
    time = 0.5
    for _ in range(120):
        name = "aa" if rng.random() < 0.5 else "SS"
        length = rng.uniform(0.08, 0.16)
        segments.append((time, time + length, name))
        time += length
    num_frames = int((time + 0.5) * 25)
    jaw = mouth_weights(segments, num_frames, lead_s=lead_s)[:, COLUMN["jawOpen"]]
    fine = np.arange(0.3, time, 0.002)
    is_open = np.zeros(len(fine))
    for start, end, name in segments:
        is_open[(fine >= start) & (fine < end)] = name == "aa"
    leads = np.arange(-0.1, 0.2, 0.002)
    frame_times = (np.arange(num_frames) + 0.5) / 25
    match = [np.corrcoef(is_open, np.interp(fine - lead, frame_times, jaw))[0, 1] for lead in leads]
    return float(leads[int(np.argmax(match))])


def test_lips_lead_the_sound_by_forty_milliseconds() -> None:
    assert measured_lead_s(LEAD_S) == pytest.approx(0.040, abs=0.006)


@pytest.mark.parametrize("planted", [0.0, 0.08])
def test_planted_wrong_lead_is_caught(planted: float) -> None:
    assert measured_lead_s(planted) != pytest.approx(0.040, abs=0.02)


def closes_in_silence() -> bool:
    """Mouth at rest 120 ms after a voice that stops in an open vowel, and in a pause inside."""
    segments = [(0.5, 0.75, "aa"), (1.3, 1.5, "aa")]
    mouth = mouth_weights(segments, 75, np.ones(75))
    time = (np.arange(75) + 0.5) / 25
    quiet = (time < 0.35) | ((time > 0.87) & (time < 1.15)) | (time > 1.62)
    return bool(mouth[quiet].max() == 0.0 and mouth[:, COLUMN["jawOpen"]].max() > 0.4)


def test_silence_closes_the_mouth_within_120_ms() -> None:
    assert closes_in_silence()


def test_planted_mouth_that_stays_open_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(visemes, "_rest", lambda time, start, end: np.zeros_like(time))
    assert not closes_in_silence()


def test_short_gaps_do_not_close_the_mouth() -> None:
    mouth = mouth_weights([(0.5, 0.7, "aa"), (0.78, 0.98, "aa")], 50, np.ones(50))
    assert mouth[13:22, COLUMN["jawOpen"]].min() > 0.3


def test_no_speech_is_a_closed_mouth() -> None:
    assert mouth_weights([], 10).max() == 0.0
    assert mouth_weights([(0.0, 0.4, "sil")], 10).max() == 0.0


def test_weights_are_a_slow_loop_over_frames_and_segments() -> None:
    """The vectorised blend against the formula written out for one frame at a time."""
    segments = row("aa SS E O DD U I", 0.2, 0.1)
    fast = mouth_weights(segments, 30, np.full(30, 0.5))
    for frame in range(4, 19):  # inside speech, away from the pauses
        time, total, slow = (frame + 0.5) / 25, 0.0, np.zeros(len(FACE_UNITS))
        for start, end, name in segments:
            vowel = name in "aa E O U I"
            rate = (11.0 if vowel else 18.0) * (0.09 / (end - start)) ** 0.5
            far = max(abs(time - (start + end) / 2 + LEAD_S) - (end - start) / 4, 0.0)
            pull = (1.0 if vowel else 0.8) * np.exp(-rate * far)
            alone = visemes._TABLE[VISEMES.index(name)]
            slow, total = slow + pull * alone, total + pull
        if segments[0][0] - LEAD_S < time < segments[-1][1] - LEAD_S:
            expected = slow / total * (0.72 + 0.45 * 0.5) * 1.4
            np.testing.assert_allclose(fast[frame], expected, atol=1e-4)


def test_louder_speech_opens_wider() -> None:
    quiet, loud = (mouth_weights(row("aa E aa"), 30, np.full(30, e)) for e in (0.1, 1.0))
    assert loud[:, COLUMN["jawOpen"]].max() > 1.3 * quiet[:, COLUMN["jawOpen"]].max()
    assert 0.5 < loud[:, COLUMN["jawOpen"]].max() < 0.7


def test_both_alphabets_agree_on_a_word() -> None:
    ipa = viseme_segments(row("m aɪ".replace("aɪ", "a ɪ")), "ipa")
    arpabet = viseme_segments([(0.5, 0.59, "m"), (0.59, 0.77, "ay")], "arpabet")
    for one, two in zip(ipa, arpabet, strict=True):
        assert one == pytest.approx(two)


def test_unknown_phones_and_alphabets_are_refused() -> None:
    with pytest.raises(ConfigError, match="phone 'qq'"):
        viseme_segments([(0.0, 0.1, "qq")], "arpabet")
    with pytest.raises(ConfigError, match="alphabet must be one of"):
        viseme_segments([], "klingon")
    with pytest.raises(ShapeError, match=r"energy must be \[10\]"):
        mouth_weights([], 10, np.zeros(9))


def test_face_is_mouth_plus_expression() -> None:
    controls = np.zeros((30, len(CONTROL_NAMES)), np.float32)
    controls[:, CONTROL_NAMES.index("smile")] = 0.3
    mouth = mouth_weights(row("I I I"), 30)
    face = face_weights(mouth, controls)
    assert face[0, COLUMN["mouthSmileLeft"]] == pytest.approx(0.4)
    assert face[15, COLUMN["mouthSmileLeft"]] > 0.6
    assert np.array_equal(face[:, COLUMN["jawOpen"]], mouth[:, COLUMN["jawOpen"]])
    assert set(EXPRESSION_UNITS) <= set(FACE_UNITS)
    assert len(set(FACE_UNITS)) == len(FACE_UNITS)


def test_labels_hold_every_channel_at_about_unit_scale() -> None:
    controls = np.full((8, len(CONTROL_NAMES)), 0.02, np.float32)
    track = FaceTrack.from_parts(np.zeros((8, len(FACE_UNITS))), controls, np.full(8, 2))
    labels = track.labels()
    assert labels.shape == (8, len(FACE_UNITS) + 6)
    assert labels.dtype == np.float32
    assert labels[0, -6:] == pytest.approx([0.08] * 5 + [0.4])
    assert track.state.dtype == np.int8


def test_face_track_refuses_parts_of_another_length() -> None:
    with pytest.raises(ShapeError, match="mouth must be"):
        FaceTrack.from_parts(
            np.zeros((7, len(FACE_UNITS))), np.zeros((8, len(CONTROL_NAMES))), np.zeros(8)
        )
