"""The mel front end: unit by unit equals the whole track; it looks 120 ms ahead and no further."""

from __future__ import annotations

import numpy as np
import pytest

from pipelines.audio import FloatArray, MelConfig, MelFrontEnd, mel_filters, tokens_of_track
from rtgen.errors import ConfigError, ShapeError

CONFIG = MelConfig()


def noise(count: int, seed: int = 0) -> FloatArray:
    return (0.1 * np.random.default_rng(seed).standard_normal(count)).astype(np.float32)


def stream(audio: FloatArray, front: MelFrontEnd | None = None) -> FloatArray:
    front = front or MelFrontEnd(CONFIG)
    padded = np.concatenate([audio, np.zeros(CONFIG.lookahead, np.float32)])
    units = len(audio) // CONFIG.unit
    size = CONFIG.unit + CONFIG.lookahead
    return np.stack([front.step(padded[i * CONFIG.unit :][:size]) for i in range(units)])


def test_streamed_units_equal_the_whole_track() -> None:
    audio = noise(7 * CONFIG.unit)
    np.testing.assert_allclose(stream(audio), tokens_of_track(audio, CONFIG), atol=1e-4)


def test_a_history_off_by_one_hop_is_noticed() -> None:
    audio = noise(7 * CONFIG.unit)
    late = np.concatenate([np.zeros(CONFIG.hop, np.float32), audio])[: len(audio)]
    assert np.abs(stream(late) - tokens_of_track(audio, CONFIG)).max() > 0.1


@pytest.mark.parametrize(("offset", "reaches"), [(1700, True), (1920, False)])
def test_look_ahead_is_a_hundred_and_twenty_milliseconds(offset: int, reaches: bool) -> None:
    """A row's taper is zero at its rim, so the probe is a burst, not one sample."""
    audio = noise(4 * CONFIG.unit)
    changed = audio.copy()
    start = 2 * CONFIG.unit + offset
    changed[start : start + 200] += 0.5
    before, after = tokens_of_track(audio, CONFIG), tokens_of_track(changed, CONFIG)
    assert (not np.array_equal(before[1], after[1])) is reaches
    assert np.array_equal(before[0], after[0])


def test_snapshot_and_restore_replay_bit_for_bit() -> None:
    audio = noise(6 * CONFIG.unit)
    front = MelFrontEnd(CONFIG)
    stream(audio[: 3 * CONFIG.unit], front)
    state = front.snapshot()
    first = stream(audio[3 * CONFIG.unit :], front)
    front.restore(state)
    np.testing.assert_array_equal(first, stream(audio[3 * CONFIG.unit :], front))


def test_filters_follow_the_mel_formula() -> None:
    filters = mel_filters(64, 16000, 512)
    assert filters.shape == (257, 64)
    assert (filters.sum(0) > 0).all()
    peaks = filters.argmax(0) * 16000 / 512
    mels = np.linspace(2595 * np.log10(1 + 50 / 700), 2595 * np.log10(1 + 7800 / 700), 66)[1:-1]
    assert np.abs(peaks - 700 * (10 ** (mels / 2595) - 1)).max() <= 16000 / 512


def test_wrong_sizes_are_refused_with_the_numbers() -> None:
    with pytest.raises(ShapeError, match="4480"):
        MelFrontEnd(CONFIG).step(np.zeros(100, np.float32))
    with pytest.raises(ConfigError, match="multiple of the hop"):
        MelConfig(unit=2561)
    with pytest.raises(ConfigError, match="rows"):
        MelConfig(num_tokens=2)
