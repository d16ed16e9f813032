from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("scipy", reason="needs the train extra")

from pipelines.speech_energy import SpeechEnergy
from pipelines.train.speech import (
    SAMPLE_RATE,
    TEST_VOICES,
    TRAIN_VOICES,
    Speech,
    has_pitch,
    is_available,
    sample_voice,
    synthesize,
)
from pipelines.train.texts import TEST_SENTENCES, TRAIN_SENTENCES, sample_text
from pipelines.train.visemes import FACE_UNITS, mouth_weights, viseme_segments
from rtgen.errors import BackendUnavailable, ConfigError

VOICES = (
    "espeak:en-us", "espeak:en-us+m6", "flite:rms", "flite:awb", "festival:lp", "festival:kal",
)  # fmt: skip
JAW = FACE_UNITS.index("jawOpen")


def need(voice: str) -> None:
    program = voice.partition(":")[0]
    if not is_available(program):
        pytest.skip(f"{program} is not installed")


def test_held_out_voices_and_sentences_are_never_trained_on() -> None:
    rng = np.random.default_rng(0)
    assert not set(TRAIN_VOICES) & set(TEST_VOICES)
    assert not set(TRAIN_SENTENCES) & set(TEST_SENTENCES)
    assert {sample_text(rng, held_out=False) for _ in range(600)}.isdisjoint(TEST_SENTENCES)
    assert {sample_text(rng, held_out=True) for _ in range(300)} == set(TEST_SENTENCES)
    assert {sample_voice(rng, held_out=True) for _ in range(50)} == set(TEST_VOICES)
    assert {sample_voice(rng, held_out=False) for _ in range(600)} == set(TRAIN_VOICES)


def test_there_are_enough_sentences() -> None:
    assert len(TEST_SENTENCES) == 25
    assert len(TRAIN_SENTENCES) >= 120


@pytest.mark.parametrize("voice", VOICES)
def test_speech_has_ordered_phones_within_its_sound(voice: str) -> None:
    need(voice)
    speech = synthesize("Big maps move people.", voice)
    duration = len(speech.samples) / SAMPLE_RATE
    assert 0.8 < duration < 3.0
    assert np.abs(speech.samples).max() == pytest.approx(0.6, abs=0.01)
    assert speech.samples.dtype == np.float32
    rows = viseme_segments(speech.segments, speech.alphabet)
    starts, ends = (np.array([r[i] for r in rows]) for i in (0, 1))
    assert (starts >= 0.0).all()
    assert (ends <= duration + 1e-9).all()
    assert (ends >= starts).all()
    assert (np.diff(starts) >= 0.0).all()
    # Big maps move people: b, m p, m, p p; an Italian reads the letters, and m a p s as it is.
    assert sum(name == "PP" for _, _, name in rows) == 6


def test_every_phone_of_the_training_voices_has_a_viseme() -> None:
    """All the letters, in voices of four other languages: an unknown phone would raise."""
    text = "Vexed jokes, quiz for whom: the big yellow fox jumped past a church, zing!"
    for voice in TRAIN_VOICES:
        if voice.startswith("festival"):
            need(voice)
            speech = synthesize(text, voice)
            names = {name for _, _, name in viseme_segments(speech.segments, speech.alphabet)}
            assert {"PP", "DD", "SS", "aa", "kk", "O", "I"} <= names, voice


def test_voices_without_pitch_say_so() -> None:
    assert has_pitch("espeak:en-us")
    assert has_pitch("festival:ked")
    assert not has_pitch("festival:ona")


@pytest.mark.parametrize("voice", ["espeak:en-us+f2", "flite:rms"])
def test_speech_does_not_depend_on_what_was_said_before(voice: str) -> None:
    need(voice)
    first = synthesize("Good morning to you all.", voice)
    synthesize("Something else, fifty six.", voice, rate=1.2, pitch=1.1)
    again = synthesize("Good morning to you all.", voice)
    assert np.array_equal(first.samples, again.samples)
    assert first.segments == again.segments


def loudness_lag_s(speeches: list[Speech], shift_s: float = 0.0) -> float:
    """How much the jaw of the labels has to be delayed to match the loudness best."""
    loud, jaws, span = [], [], np.arange(-0.1, 0.15, 0.005)
    for speech in speeches:
        sound = np.pad(speech.samples.astype(np.float64), (8000, 8000))
        segments = [
            (a + 0.5 + shift_s, b + 0.5 + shift_s, v)
            for a, b, v in viseme_segments(speech.segments, speech.alphabet)
        ]
        jaw = mouth_weights(segments, len(sound) // 640)[:, JAW]
        windows = np.lib.stride_tricks.sliding_window_view(sound, 400)[::80]
        level = np.log(np.sqrt((windows**2).mean(1)) + 1e-3)
        level = level[60:-60]
        time = (np.arange(len(windows))[60:-60] * 80 + 200) / SAMPLE_RATE
        frames = (np.arange(len(jaw)) + 0.5) / 25
        loud.append(level - level.mean())
        jaws.append(np.stack([np.interp(time - lag, frames, jaw) for lag in span]))
    joined = np.concatenate([j - j.mean(1, keepdims=True) for j in jaws], axis=1)
    match = [np.corrcoef(np.concatenate(loud), row)[0, 1] for row in joined]
    return float(span[int(np.argmax(match))])


@pytest.mark.parametrize("voice", VOICES[:5])
def test_labels_are_aligned_with_the_sound(voice: str) -> None:
    """All voices share one lag (lead of the lips less the rise of the vowel's loudness)."""
    need(voice)
    speeches = [synthesize(text, voice) for text in TRAIN_SENTENCES[::18]]
    assert loudness_lag_s(speeches) == pytest.approx(0.025, abs=0.011)
    assert loudness_lag_s(speeches, -0.04) != pytest.approx(0.025, abs=0.011)  # planted


def test_rate_and_pitch_change_the_speech() -> None:
    need("espeak:en-us")
    slow, fast = (
        synthesize("Seven small ships sailed south.", "espeak:en-us", rate=r) for r in (0.8, 1.2)
    )
    assert len(slow.samples) > 1.25 * len(fast.samples)


def test_speech_is_heard_as_speech() -> None:
    need("espeak:en-us")
    speech = synthesize("Open your mouth wide and say ah, said the dentist.", "espeak:en-us")
    sound = np.pad(speech.samples, (8000, 8000 + (-len(speech.samples)) % 640))
    energy = SpeechEnergy().push(sound[: len(sound) // 640 * 640])
    assert energy[:11].max() == 0.0
    assert 0.3 < energy[13:-14].mean() < 0.8


def test_unknown_voices_and_ranges_are_refused() -> None:
    with pytest.raises(ConfigError, match="unknown voice 'tape:one'"):
        synthesize("Hello.", "tape:one")
    with pytest.raises(ConfigError, match="rate and pitch"):
        synthesize("Hello.", "espeak:en-us", rate=3.0)
    with pytest.raises(ConfigError, match="no pitch control"):
        synthesize("Hello.", "festival:slt", pitch=1.2)


def test_a_missing_program_or_voice_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("PATH", "")
        with pytest.raises(BackendUnavailable, match="flite is needed"):
            synthesize("Hello.", "flite:rms")
    need("espeak:en-us")
    with pytest.raises(BackendUnavailable, match="no voice 'xx-none'"):
        synthesize("Hello.", "espeak:xx-none")
