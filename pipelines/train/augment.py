"""Seeded changes to training sound that leave its timing alone, and sounds that are not speech."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
from scipy.signal import butter, fftconvolve, firwin2, oaconvolve, resample_poly, sosfilt

from pipelines.train.speech import SAMPLE_RATE, Speech
from rtgen.errors import ConfigError

__all__ = ["NON_SPEECH", "augment", "warp_vocal_tract"]

Samples = npt.NDArray[np.float32]


def warp_vocal_tract(speech: Speech, factor: float) -> Speech:
    """Returns the speech of a longer (`factor` < 1) or shorter vocal tract.

    The sound is resampled, so formants, pitch and speed change together and the segments' times
    with them; ask the synthesizer for a pitch and rate of 1 / factor to keep those.

    Raises:
        ConfigError: factor is outside 0.8..1.25.
    """
    if not 0.8 <= factor <= 1.25:
        raise ConfigError(f"factor must lie in 0.8..1.25, got {factor}")
    down = round(100 * factor)
    ratio = 100.0 / down
    return Speech(
        samples=resample_poly(speech.samples, 100, down).astype(np.float32),
        segments=tuple((a * ratio, b * ratio, phone) for a, b, phone in speech.segments),
        alphabet=speech.alphabet,
    )


def augment(samples: Samples, rng: np.random.Generator) -> Samples:
    """Returns a variant of a recording of the same length and timing.

    Each of these is drawn: a room (half of the time), a tilt of the spectrum of +-6 dB between
    100 Hz and 7 kHz, noise of 5 to 40 dB below the loud parts, a telephone-like limit at 3.4 to
    8 kHz (a third of the time), a gain of +-12 dB.

    Args:
        samples: [N] float32 at 16 kHz in -1..1.
        rng: drawn from.

    Returns:
        [N] float32, clipped to -1..1 as a sound card would.
    """
    out = samples.astype(np.float64)
    if rng.random() < 0.5:
        out = _room(out, rng)
    out = _tilt(out, rng.uniform(-6.0, 6.0))
    loud = np.sqrt(np.mean(out[np.abs(out) > 0.01] ** 2)) if (np.abs(out) > 0.01).any() else 0.05
    noise = _coloured_noise(len(out), rng)
    out = out + noise * (loud * 10.0 ** (-rng.uniform(5.0, 40.0) / 20.0))
    if rng.random() < 1 / 3:
        limit = rng.uniform(3400.0, 7900.0)
        out = sosfilt(butter(6, limit, fs=SAMPLE_RATE, output="sos"), out)
    out = out * 10.0 ** (rng.uniform(-12.0, 12.0) / 20.0)
    return np.clip(out, -1.0, 1.0).astype(np.float32)


def _room(samples: npt.NDArray[np.float64], rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """A small room: exponentially fading noise of 0.1 to 0.4 s behind the direct sound."""
    decay_s = rng.uniform(0.1, 0.4)
    count = int(decay_s * SAMPLE_RATE)
    tail = rng.standard_normal(count) * np.exp(-6.9 * np.arange(count) / count)
    tail[: int(0.003 * SAMPLE_RATE)] = 0.0
    tail *= rng.uniform(0.1, 0.5) / np.sqrt((tail**2).sum())
    tail[0] = 1.0
    return np.asarray(oaconvolve(samples, tail)[: len(samples)])


def _tilt(samples: npt.NDArray[np.float64], tilt_db: float) -> npt.NDArray[np.float64]:
    """Raises the top of the spectrum by `tilt_db` against the bottom, linear in octaves."""
    frequency = np.array([0.0, 100.0, 300.0, 1000.0, 3000.0, 7000.0, 8000.0])
    octaves = np.log2(np.clip(frequency, 100.0, 7000.0) / 100.0) / np.log2(70.0)
    taps = firwin2(129, frequency, 10.0 ** (tilt_db * (octaves - 0.5) / 20.0), fs=SAMPLE_RATE)
    return np.asarray(fftconvolve(samples, taps, mode="same"))


def _coloured_noise(num: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """Steady noise of unit RMS whose spectrum falls by 0 to 6 dB an octave."""
    spectrum = np.fft.rfft(rng.standard_normal(num))
    bins = np.arange(len(spectrum)) * SAMPLE_RATE / num
    spectrum *= np.maximum(bins, 50.0) ** -rng.uniform(0.0, 1.0)
    noise = np.fft.irfft(spectrum, num)
    return np.asarray(noise / (noise.std() + 1e-9))


def _tones(num: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """Music: chords of a few partials that change every quarter to half second."""
    out = np.zeros(num)
    at = 0
    while at < num:
        count = min(int(rng.uniform(0.25, 0.5) * SAMPLE_RATE), num - at)
        time = np.arange(count) / SAMPLE_RATE
        root = 110.0 * 2.0 ** (rng.integers(0, 25) / 12.0)
        for step in (0, 4, 7):
            for partial in (1, 2, 3):
                pitch = root * 2.0 ** (step / 12.0) * partial
                out[at : at + count] += np.sin(2 * np.pi * pitch * time) / partial
        out[at : at + count] *= np.exp(-3.0 * time) * np.minimum(1.0, time / 0.01)
        at += count
    return out


def _pulses(
    num: int, rng: np.random.Generator, gap_s: tuple[float, float], decay_s: float
) -> npt.NDArray[np.float64]:
    """Short bursts of noise: claps or keys."""
    out = np.zeros(num)
    at = 0
    while at < num:
        count = min(int(6 * decay_s * SAMPLE_RATE), num - at)
        envelope = np.exp(-np.arange(count) / (decay_s * SAMPLE_RATE))
        out[at : at + count] += rng.standard_normal(count) * envelope * rng.uniform(0.4, 1.0)
        at += int(rng.uniform(*gap_s) * SAMPLE_RATE)
    return out


def _breath(num: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """One breath: band-limited noise that swells and fades."""
    band = butter(2, (500.0, 4000.0), btype="band", fs=SAMPLE_RATE, output="sos")
    swell = np.sin(np.pi * np.arange(num) / num) ** 2
    return np.asarray(sosfilt(band, rng.standard_normal(num)) * swell)


def _hum(num: int, rng: np.random.Generator) -> npt.NDArray[np.float64]:
    """A machine: mains hum with harmonics over steady noise."""
    time = np.arange(num) / SAMPLE_RATE
    base = rng.choice([50.0, 60.0, 118.0])
    tones = np.sum([np.sin(2 * np.pi * base * k * time) / k for k in range(1, 6)], axis=0)
    return np.asarray(tones + 0.5 * _coloured_noise(num, rng))


NON_SPEECH: dict[str, Callable[[int, np.random.Generator], npt.NDArray[np.float64]]] = {
    "silence": lambda num, rng: np.zeros(num),
    "noise": _coloured_noise,
    "tones": _tones,
    "claps": lambda num, rng: _pulses(num, rng, (0.3, 0.8), 0.015),
    "typing": lambda num, rng: _pulses(num, rng, (0.08, 0.3), 0.004),
    "breath": _breath,
    "hum": _hum,
}
"""Name -> maker of that many samples of a sound during which a mouth stays closed."""
