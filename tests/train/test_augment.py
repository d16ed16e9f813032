from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("scipy", reason="needs the train extra")

from pipelines.train.augment import NON_SPEECH, augment, warp_vocal_tract
from pipelines.train.speech import Speech
from rtgen.errors import ConfigError

Samples = npt.NDArray[np.float32]


def bursts() -> Samples:
    """Irregular noise bursts, 4 s at 16 kHz."""
    rng = np.random.default_rng(0)
    envelope = np.repeat(rng.random(40) ** 3, 1600)
    return (rng.standard_normal(64000) * envelope * 0.2).astype(np.float32)


def lag_samples(one: Samples, two: Samples) -> int:
    """Delay of the loudness of `two` against `one`, at 1 ms steps."""
    level = [np.log((x.astype(np.float64).reshape(-1, 16) ** 2).mean(1) + 1e-6) for x in (one, two)]
    level = [x - x.mean() for x in level]
    match = [float((level[0] * np.roll(level[1], -k)).sum()) for k in range(-80, 81)]
    return (int(np.argmax(match)) - 80) * 16


def test_variants_keep_length_and_timing() -> None:
    sound = bursts()
    for seed in range(12):
        variant = augment(sound, np.random.default_rng(seed))
        assert variant.shape == sound.shape
        assert variant.dtype == np.float32
        assert np.abs(variant).max() <= 1.0
        assert abs(lag_samples(sound, variant)) <= 5 * 16


def test_planted_delay_is_caught() -> None:
    assert lag_samples(bursts(), np.roll(bursts(), 160)) == 160


def test_variants_depend_on_the_seed_alone() -> None:
    one, two, other = (augment(bursts(), np.random.default_rng(s)) for s in (1, 1, 2))
    assert np.array_equal(one, two)
    assert not np.array_equal(one, other)


def test_silence_stays_finite() -> None:
    assert np.isfinite(augment(np.zeros(16000, np.float32), np.random.default_rng(0))).all()


def test_warp_moves_sound_and_times_together() -> None:
    sound = np.zeros(16000, np.float32)
    sound[8000:8400] = np.sin(np.arange(400) * 0.5)
    speech = Speech(samples=sound, segments=((0.5, 0.525, "m"),), alphabet="ipa")
    warped = warp_vocal_tract(speech, 1.1)
    loud = np.flatnonzero(np.abs(warped.samples) > 0.3)
    start, end, _ = warped.segments[0]
    assert loud[0] / 16000 == pytest.approx(start, abs=0.002)
    assert loud[-1] / 16000 == pytest.approx(end, abs=0.002)
    with pytest.raises(ConfigError, match="factor"):
        warp_vocal_tract(speech, 2.0)


@pytest.mark.parametrize("name", list(NON_SPEECH))
def test_other_sounds_have_their_length(name: str) -> None:
    for num in (400, 20011):
        sound = NON_SPEECH[name](num, np.random.default_rng(3))
        assert sound.shape == (num,)
        assert np.isfinite(sound).all()
