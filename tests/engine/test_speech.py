from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from rtgen.engine.audio_buffer import AudioBuffer
from rtgen.engine.speech import SpeechTracker, last_speech
from rtgen.types import OUTPUT_RATE, Finished, Pcm16, ServerEvent, Started, UnitFormat
from tests.sound import blocks, silence, tone

UNIT = UnitFormat(fps=Fraction(25), frames_per_unit=4, height=1, width=1)
SIZE = UNIT.output_samples


def states(pcm: Pcm16, units: int, block: int = SIZE) -> list[bool]:
    """Whether the face speaks, unit by unit, when `pcm` is pushed in blocks and then ended."""
    buffer, tracker = AudioBuffer(UNIT, 30.0), SpeechTracker()
    for part in blocks(pcm, block):
        buffer.push(part, OUTPUT_RATE)
    buffer.end_utterance()
    return [tracker.follow(n * SIZE, buffer.take(), 0)[0] for n in range(units)]


def test_speech_is_found_by_its_level() -> None:
    assert last_speech(silence(0.16)) is None
    assert last_speech(tone(0.16)) == SIZE
    assert last_speech((tone(0.16) * 0.001).astype(np.int16)) is None
    assert last_speech(np.concatenate([tone(0.03), silence(0.13)])) == 1920


def test_speaking_lasts_300_ms_longer_than_the_sound() -> None:
    # The tone ends at 160 ms; a unit that starts before 460 ms still speaks.
    assert states(tone(0.16), 5) == [True, True, True, False, False]
    # Ending at 100 ms it is over at 400 ms, between units 2 and 3.
    assert states(tone(0.10), 5) == [True, True, True, False, False]
    # Ending at 20 ms it is over exactly when unit 2 starts.
    assert states(tone(0.02), 5) == [True, True, False, False, False]


def test_a_short_pause_is_part_of_the_speech_and_a_long_one_is_not() -> None:
    short = np.concatenate([tone(0.32), silence(0.30), tone(0.32)])
    assert states(short, 6) == [True] * 6
    long = np.concatenate([tone(0.16), silence(1.12), tone(0.16)])
    assert states(long, 9) == [True, True, True, False, False, False, False, False, True]


def test_packet_sizes_change_no_state() -> None:
    pcm = np.concatenate([silence(0.3), tone(0.4), silence(0.7), tone(0.2)])
    expected = states(pcm, 15)
    assert True in expected
    assert False in expected
    for block in (240, 960, 9_600, 96_000):
        assert states(pcm, 15, block) == expected


def events(pushes: dict[int, Pcm16], units: int, *, end: bool) -> list[ServerEvent]:
    """Turns when sounds are pushed before given units, each one ended or left open."""
    buffer, tracker = AudioBuffer(UNIT, 30.0), SpeechTracker()
    found: list[ServerEvent] = []
    for n in range(units):
        if n in pushes:
            buffer.push(pushes[n], OUTPUT_RATE)
            if end:
                buffer.end_utterance()
        if buffer.is_open and not buffer.available and tracker.is_starved(n * SIZE):
            buffer.end_utterance()
        found += tracker.follow(n * SIZE, buffer.take(), 7)[1]
    return found


def turn(start_s: float, end_s: float) -> list[ServerEvent]:
    return [
        Started(generation=7, position_s=start_s),
        Finished(generation=7, position_s=end_s, interrupted=False),
    ]


def test_a_turn_starts_and_ends_where_its_sound_does() -> None:
    assert events({1: tone(0.5)}, 8, end=True) == turn(0.16, 0.66)
    assert events({0: tone(0.16), 1: tone(0.16)}, 4, end=True) == turn(0.0, 0.16) + turn(0.16, 0.32)


def test_a_turn_that_is_never_ended_ends_when_nothing_comes_any_more() -> None:
    assert events({0: tone(0.2)}, 10, end=False) == turn(0.0, 0.2)


def test_a_gap_shorter_than_the_hangover_makes_no_new_turn() -> None:
    pushes = {0: tone(0.16), 2: tone(0.16)}  # nothing for unit 1
    assert events(pushes, 10, end=False) == turn(0.0, 0.48)


@pytest.mark.parametrize("milliseconds", [5, 20, 60, 200])
def test_packets_of_any_size_are_one_turn(milliseconds: int) -> None:
    buffer, tracker = AudioBuffer(UNIT, 30.0), SpeechTracker()
    found: list[ServerEvent] = []
    packets = list(blocks(tone(2.0), milliseconds * 48))
    for n in range(20):
        due = (n + 1) * 160 // milliseconds + 1
        while packets and len(packets) > 2000 // milliseconds - due:
            buffer.push(packets.pop(0), OUTPUT_RATE)
        if buffer.is_open and not buffer.available and tracker.is_starved(n * SIZE):
            buffer.end_utterance()
        found += tracker.follow(n * SIZE, buffer.take(), 7)[1]
    assert [event.type for event in found] == ["started", "finished"]


def test_after_an_interrupt_nobody_speaks() -> None:
    buffer, tracker = AudioBuffer(UNIT, 30.0), SpeechTracker()
    buffer.push(tone(1.0), OUTPUT_RATE)
    assert tracker.follow(0, buffer.take(), 0)[0]
    buffer.interrupt(0)
    tracker.interrupt(SIZE)
    assert not tracker.follow(SIZE, buffer.take(), 1)[0]
