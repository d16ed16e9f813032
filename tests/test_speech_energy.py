from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from pipelines.speech_energy import SAMPLES_PER_FRAME, EnergyState, SpeechEnergy
from rtgen.errors import ShapeError

Array = npt.NDArray[np.float64]


def syllables(seconds: float, loudness: float = 0.15, noise: float = 0.0005) -> Array:
    """Four bursts a second for 3 s in every 4 s, over room noise; 16 kHz."""
    rng = np.random.default_rng(0)
    time = np.arange(int(seconds * 25) * SAMPLES_PER_FRAME) / 16000
    swell = np.maximum(np.sin(2 * np.pi * 4.0 * time), 0.0) * (time % 4.0 < 3.0)
    return rng.standard_normal(len(time)) * (loudness * swell + noise)


def test_stream_equals_whole() -> None:
    sound = syllables(8.0)
    meter = SpeechEnergy()
    parts = [meter.push(sound[i : i + 2560]) for i in range(0, len(sound), 2560)]
    assert np.array_equal(np.concatenate(parts), SpeechEnergy().push(sound))


def test_restore_then_replay_is_bit_equal() -> None:
    sound = syllables(8.0)
    meter = SpeechEnergy()
    meter.push(sound[:64000])
    saved = meter.snapshot()
    first = meter.push(sound[64000:])
    meter.restore(saved)
    assert np.array_equal(meter.push(sound[64000:]), first)
    assert not np.array_equal(meter.push(sound[64000:]), first)  # without it the level has moved


@pytest.mark.parametrize("rms", [0.0, 0.0005, 0.002, 0.0035])
def test_room_noise_is_silence(rms: float) -> None:
    noise = np.random.default_rng(1).standard_normal(16000 * 10) * rms
    assert SpeechEnergy().push(noise).max() == 0.0


def test_a_loud_steady_noise_becomes_silence() -> None:
    noise = np.random.default_rng(1).standard_normal(16000 * 30) * 0.02
    assert SpeechEnergy().push(noise)[-125:].max() == 0.0


def test_energy_is_high_in_syllables_and_zero_in_pauses_at_any_gain() -> None:
    for gain in (0.25, 1.0, 4.0):
        energy = SpeechEnergy().push(syllables(24.0) * gain).reshape(-1, 100)[2:]
        assert 0.8 < np.percentile(energy[:, :75], 95) <= 1.3
        assert energy[:, 76:].max() == 0.0


def test_planted_fixed_level_depends_on_the_gain() -> None:
    meter = SpeechEnergy()
    sound = syllables(12.0) * 0.25
    peaks = []
    for i in range(0, len(sound), SAMPLES_PER_FRAME):
        meter.restore(EnergyState())
        peaks.append(meter.push(sound[i : i + SAMPLES_PER_FRAME])[0])
    assert np.percentile(peaks, 95) < 0.8


def test_a_part_of_a_frame_is_refused() -> None:
    with pytest.raises(ShapeError, match="whole frames of 640"):
        SpeechEnergy().push(np.zeros(700))
