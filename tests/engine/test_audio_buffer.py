from __future__ import annotations

import itertools
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest

from rtgen.engine.audio_buffer import (
    FADE_SAMPLES,
    FILTER_REACH,
    AudioBuffer,
    decimate,
    decimation_filter,
)
from rtgen.errors import MediaError
from rtgen.types import OUTPUT_RATE, Pcm16, UnitFormat
from tests.sound import blocks, tone

UNIT = UnitFormat(
    fps=Fraction(25), frames_per_unit=4, height=1, width=1, lookahead_samples=640, lead=2
)
SIZE = UNIT.output_samples


def noise(seconds: float, rate: int, seed: int = 0) -> Pcm16:
    """Loud noise below 3 kHz, int16; the same wave at every rate."""
    tones = round(3_000 * seconds)
    random = np.random.default_rng(seed).standard_normal((2, tones))
    size = round(seconds * rate)
    spectrum = np.zeros(size // 2 + 1, complex)
    spectrum[:tones] = (random[0] + 1j * random[1]) * size / 2
    wave = np.fft.irfft(spectrum, size)
    return np.rint(wave * 5_000 / np.sqrt(tones)).astype(np.int16)


def drain(buffer: AudioBuffer) -> Pcm16:
    """All that waits, unit by unit, without the silence after it."""
    taken = []
    while buffer.available:
        unit = buffer.take()
        taken.append(unit.pcm[: unit.pushed])
    return np.concatenate([*taken, np.zeros(0, np.int16)])


def pushed(pcm: Pcm16, rate: int, block: int, capacity_s: float = 10.0) -> AudioBuffer:
    buffer = AudioBuffer(UNIT, capacity_s)
    for part in blocks(pcm, block):
        assert buffer.push(part, rate) == part.shape[-1]
    buffer.end_utterance()
    return buffer


def delay_ms(heard: npt.NDArray[np.float64], truth: npt.NDArray[np.float64], rate: int) -> float:
    """By how much `heard` is later than `truth`, from the peak of their cross-correlation."""
    size = 2 * len(truth)
    product = np.fft.rfft(heard, size) * np.conj(np.fft.rfft(truth, size))
    lag = int(np.argmax(np.fft.irfft(product, size)))
    return (lag - size if lag > size // 2 else lag) / rate * 1e3


def test_sound_at_the_output_rate_passes_unchanged() -> None:
    pcm = noise(1.0, OUTPUT_RATE)
    np.testing.assert_array_equal(drain(pushed(pcm, OUTPUT_RATE, 480)), pcm)


@pytest.mark.parametrize("rate", [8_000, 11_025, 16_000, 22_050, 24_000, 44_100, 96_000])
def test_any_rate_keeps_length_and_alignment(rate: int) -> None:
    heard = drain(pushed(noise(2.0, rate), rate, rate // 50))
    truth = noise(2.0, OUTPUT_RATE)
    assert len(heard) == 2 * OUTPUT_RATE
    assert abs(delay_ms(heard.astype(float), truth.astype(float), OUTPUT_RATE)) < 0.1


def test_the_alignment_oracle_sees_two_milliseconds() -> None:
    truth = noise(2.0, OUTPUT_RATE).astype(float)
    assert delay_ms(np.roll(truth, 96), truth, OUTPUT_RATE) == pytest.approx(2.0)


@pytest.mark.parametrize("rate", [16_000, 44_100, 48_000])
def test_block_sizes_change_no_bit(rate: int) -> None:
    pcm = noise(3.0, rate)
    whole = drain(pushed(pcm, rate, len(pcm)))
    for block in (rate // 200, 137, 2 * rate):
        np.testing.assert_array_equal(drain(pushed(pcm, rate, block)), whole)


def test_the_block_oracle_sees_a_resampler_without_memory() -> None:
    pcm = noise(1.0, 44_100)
    whole = drain(pushed(pcm, 44_100, len(pcm)))
    parts = [drain(pushed(part, 44_100, len(part))) for part in blocks(pcm, 4_410)]
    assert not np.array_equal(np.concatenate(parts), whole)


def samples_after(minutes: int) -> int:
    """Output samples of so many minutes of 44.1 kHz; what is held back never grows."""
    buffer = AudioBuffer(UNIT, 12.0)
    block, total = noise(10.0, 44_100), 0
    for number in range(1, 6 * minutes + 1):
        assert buffer.push(block, 44_100) == len(block)
        assert 0 <= number * 10 * OUTPUT_RATE - total - buffer.available < 64
        while buffer.available >= SIZE:
            total += buffer.take().pushed
    buffer.end_utterance()
    return total + len(drain(buffer))


def test_two_minutes_of_44100_hz_do_not_drift() -> None:
    assert samples_after(2) == 120 * OUTPUT_RATE


@pytest.mark.slow
def test_an_hour_of_44100_hz_has_exactly_an_hours_samples() -> None:
    assert samples_after(60) == 3600 * OUTPUT_RATE


def test_the_models_copy_is_aligned_with_the_output() -> None:
    buffer = pushed(noise(2.0, OUTPUT_RATE), OUTPUT_RATE, 9_999)
    copies, pcm = [], []
    while buffer.available:
        unit = buffer.take()
        copies.append(decimate(unit.window, 3)[: UNIT.model_samples])
        pcm.append(unit.pcm)
    copy = np.concatenate(copies).astype(float)
    kept = np.concatenate(pcm)[::3].astype(float)  # no energy above 3 kHz: may be picked as it is
    assert abs(delay_ms(copy, kept, 16_000)) < 0.01
    # The first and last 2 ms hear the silence around the sound.
    np.testing.assert_allclose(copy[32:31_968], kept[32:31_968] / 32768, atol=1e-3)


def test_the_look_ahead_is_the_start_of_the_next_unit() -> None:
    buffer = pushed(noise(1.0, OUTPUT_RATE), OUTPUT_RATE, 4_800)
    first, second = (decimate(buffer.take().window, 3) for _ in range(2))
    assert len(first) == UNIT.model_samples + UNIT.lookahead_samples
    np.testing.assert_array_equal(first[UNIT.model_samples :], second[: UNIT.lookahead_samples])


def test_the_filter_passes_speech_and_stops_aliases() -> None:
    gain = np.abs(np.fft.rfft(decimation_filter(3), OUTPUT_RATE))
    assert np.all(np.abs(20 * np.log10(gain[:7_300])) < 0.1)
    assert np.all(20 * np.log10(gain[8_400:] + 1e-12) < -60)


def test_decimating_equals_the_sum_written_out() -> None:
    window = noise(0.05, OUTPUT_RATE)[: 2 * FILTER_REACH + 300]
    taps = decimation_filter(3)
    slow = [
        sum(float(window[3 * m + i]) * taps[i] for i in range(len(taps))) / 32768
        for m in range(100)
    ]
    np.testing.assert_array_equal(decimate(window, 3), np.array(slow, np.float32))


def test_channels_are_averaged() -> None:
    left, right = noise(0.5, OUTPUT_RATE, 1), noise(0.5, OUTPUT_RATE, 2)
    heard = drain(pushed(np.stack([left, right]), OUTPUT_RATE, 1_000))
    truth = (left.astype(int) + right) / 2
    assert np.abs(heard - truth).max() <= 0.5


@pytest.mark.parametrize("rate", [16_000, 44_100, 48_000, 96_000])
def test_a_push_is_accepted_as_far_as_there_is_room(rate: int) -> None:
    buffer, pcm = AudioBuffer(UNIT, 1.0), noise(3.0, rate)
    rest, heard = pcm, []
    for _ in range(100):
        rest = rest[buffer.push(rest, rate) :]
        assert buffer.available <= OUTPUT_RATE
        if not len(rest):
            break
        heard.append(buffer.take().pcm)
    buffer.end_utterance()
    heard.append(drain(buffer))
    np.testing.assert_array_equal(np.concatenate(heard), drain(pushed(pcm, rate, len(pcm))))


def test_silence_comes_where_nothing_was_pushed() -> None:
    buffer = AudioBuffer(UNIT, 1.0)
    buffer.push(noise(0.1, OUTPUT_RATE), OUTPUT_RATE)
    first, second = buffer.take(), buffer.take()
    assert (first.pushed, second.pushed) == (4_800, 0)
    assert not first.pcm[4_800:].any()
    assert not second.pcm.any()


def test_a_change_of_rate_completes_what_came_before() -> None:
    buffer = AudioBuffer(UNIT, 10.0)
    for rate in (44_100, 16_000, 48_000, 22_050):
        buffer.push(noise(1.0, rate), rate)
    buffer.end_utterance()
    assert buffer.available == 4 * OUTPUT_RATE


def test_marks_stand_where_utterances_start_and_end() -> None:
    buffer = AudioBuffer(UNIT, 2.0)
    for seconds in (0.1, 0.3):
        buffer.push(noise(seconds, OUTPUT_RATE), OUTPUT_RATE)
        buffer.end_utterance()
    marks = [(unit.starts, unit.ends) for unit in (buffer.take() for _ in range(4))]
    first, second = 4_800, 4_800 + 14_400
    assert marks == [
        ((0, first), (first,)),
        ((), ()),
        ((), (second - 2 * SIZE,)),
        ((), ()),
    ]


def test_an_interrupt_fades_the_cut_and_drops_the_rest() -> None:
    buffer, pcm = AudioBuffer(UNIT, 5.0), tone(2.0)
    buffer.push(pcm, OUTPUT_RATE)
    kept, _, _ = (buffer.take() for _ in range(3))
    buffer.interrupt(2)
    after = buffer.take()
    assert (buffer.available, after.pushed) == (0, 0)
    assert not after.pcm[FADE_SAMPLES:].any()
    fade, dropped = after.pcm[:FADE_SAMPLES].astype(float), pcm[SIZE : SIZE + FADE_SAMPLES]
    ramp = 0.5 + 0.5 * np.cos(np.pi * (np.arange(FADE_SAMPLES) + 0.5) / FADE_SAMPLES)
    np.testing.assert_allclose(fade, dropped * ramp, atol=0.5)
    # The model's history goes back too: its window starts with the end of the unit that stays.
    np.testing.assert_array_equal(after.window[:FILTER_REACH], kept.pcm[-FILTER_REACH:])


def test_speech_after_an_interrupt_starts_in_the_next_unit() -> None:
    buffer = AudioBuffer(UNIT, 5.0)
    buffer.push(tone(2.0), OUTPUT_RATE)
    buffer.take()
    buffer.interrupt(1)
    new = noise(0.2, 44_100, seed=5)
    buffer.push(new, 44_100)
    unit = buffer.take()
    clean = drain(pushed(new, 44_100, len(new)))
    np.testing.assert_array_equal(unit.pcm[FADE_SAMPLES:], clean[FADE_SAMPLES:SIZE])
    assert unit.starts == (0,)


def test_memory_does_not_grow_with_what_passes_through() -> None:
    buffer, block = AudioBuffer(UNIT, 1.0), noise(0.16, OUTPUT_RATE)
    sizes = set()
    for number in itertools.count():
        buffer.push(block, OUTPUT_RATE)
        buffer.end_utterance()
        buffer.take()
        if number > 10:
            sizes.add((len(buffer._history), len(buffer._starts), len(buffer._ends)))
        if number == 500:
            break
    assert sizes == {(3, 0, 0)}


@pytest.mark.parametrize(
    ("pcm", "rate"),
    [
        (np.zeros(8, np.float32), 48_000),
        (np.zeros((2, 2, 8), np.int16), 48_000),
        (np.zeros((0, 8), np.int16), 48_000),
        (np.zeros(8, np.int16), 999),
        (np.zeros(8, np.int16), -48_000),
    ],
)
def test_what_is_not_int16_sound_is_refused(pcm: Pcm16, rate: int) -> None:
    with pytest.raises(MediaError):
        AudioBuffer(UNIT, 1.0).push(pcm, rate)
