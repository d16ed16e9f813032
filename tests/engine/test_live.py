"""Live sessions under a virtual clock: what is heard and shown when, interrupts, changes."""

from __future__ import annotations

import base64
from dataclasses import replace

import numpy as np
import pytest

from pipelines.avatar import AvatarConditioner
from rtgen.errors import ConfigError, StreamClosed
from rtgen.types import (
    Finished,
    SetAvatar,
    SetQuality,
    SetState,
    Speak,
    SpeechState,
    Started,
    Stop,
    TriggerEvent,
    Unit,
)
from tests.engine.drive import Stage, pictures, same
from tests.sound import silence, tone
from tests.toy_pipeline import LIVE, toy_pipeline

UNIT_S = 0.16
RATE = 48_000


def content(units: list[Unit]) -> list[Unit]:
    """Units as if they were of the first generation."""
    return [replace(unit, generation=0) for unit in units]


def test_at_most_lead_units_exist_beyond_the_one_on_screen() -> None:
    with Stage() as stage:
        units = stage.waiting()
        assert [unit.index for unit in units] == [0, 1]
        assert stage.waiting() == []
        stage.session.ack(units[0])
        stage.clock.advance(1.0)
        assert [unit.index for unit in stage.waiting()] == [2]


def test_without_speech_there_is_silence_and_the_base_state() -> None:
    with Stage(replace(LIVE, state=SpeechState.LISTENING)) as stage:
        units = stage.show(5)
    assert not any(unit.audio.any() for unit in units)
    assert {unit.state for unit in units} == {SpeechState.LISTENING}
    assert [unit.index for unit in units] == list(range(5))


def test_speech_is_heard_from_the_next_unit_not_yet_begun() -> None:
    with Stage() as stage:
        begun = stage.waiting()  # units 0 and 1
        pcm = tone(0.4)
        assert stage.session.push_audio(pcm, RATE) == len(pcm)
        for unit in begun:
            stage.session.ack(unit)
        units = stage.show(6)
    heard = np.concatenate([unit.audio for unit in units])
    assert not any(unit.audio.any() for unit in begun)
    np.testing.assert_array_equal(heard[: len(pcm)], pcm)
    assert not heard[len(pcm) :].any()
    # The sound ends at 0.4 s, so speaking lasts until 0.7 s: units that start before that.
    speaking = [unit.state is SpeechState.SPEAKING for unit in units]
    assert speaking == [True, True, True, True, True, False]


def test_a_unit_is_begun_when_its_time_comes_near() -> None:
    with Stage() as stage:
        for unit in stage.waiting():
            stage.session.ack(unit)  # shown now: unit 2 is due in 160 ms, unit 3 in 320 ms
        # On a clock that stands still making takes no time: 40 ms ahead is enough.
        stage.clock.advance(0.119)
        assert stage.waiting() == []
        stage.session.push_audio(tone(1.0), RATE)  # still in time for unit 2
        stage.clock.advance(0.001)
        (unit,) = stage.waiting()
        assert unit.index == 2
        assert unit.audio.all() or unit.audio.any()
        stage.clock.advance(0.159)
        assert stage.waiting() == []
        stage.clock.advance(0.001)
        assert [unit.index for unit in stage.waiting()] == [3]


def test_a_unit_that_comes_too_late_is_counted() -> None:
    with Stage() as stage:
        stage.show(3)
        assert stage.session.stats().late == 0
        stage.clock.advance(10 * UNIT_S)
        stage.show(1)
        assert stage.session.stats().late == 1


def after_stop(*, begun_ahead: bool) -> tuple[list[Unit], list[Unit]]:
    """Units shown before and after an interrupt in speech, with units in the making or without."""
    with Stage() as stage:
        stage.session.push_audio(tone(3.0), RATE)
        before = stage.show(4)
        if begun_ahead:
            stage.clock.advance(2 * UNIT_S)
            assert [unit.index for unit in stage.waiting()] == [4, 5]
        stage.session.control(Stop())
        return before, stage.show(5)


def test_an_interrupt_goes_back_to_the_unit_on_screen() -> None:
    before, after = after_stop(begun_ahead=True)
    assert [unit.index for unit in after] == [4, 5, 6, 7, 8]
    assert {unit.generation for unit in before} == {0}
    assert {unit.generation for unit in after} == {1}
    assert not any(unit.audio[240:].any() for unit in after)  # 5 ms of fade, then silence
    assert {unit.state for unit in after} == {SpeechState.IDLE}


def test_after_an_interrupt_it_is_as_if_nothing_had_been_begun() -> None:
    before, after = after_stop(begun_ahead=True)
    other_before, never_begun = after_stop(begun_ahead=False)
    assert same(before, other_before)
    assert same(after, never_begun)


@pytest.mark.parametrize("forgotten", ["restore", "nothing"])
def test_the_interrupt_oracle_sees_what_is_not_taken_back(
    forgotten: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if forgotten == "restore":
        monkeypatch.setattr(AvatarConditioner, "restore", lambda self, state: None)
    _, after = after_stop(begun_ahead=True)
    _, never_begun = after_stop(begun_ahead=False)
    assert same(after, never_begun) == (forgotten == "nothing")


@pytest.mark.parametrize("ticks", range(1, 9))
def test_an_interrupt_is_exact_at_every_step_of_a_unit(ticks: int) -> None:
    with Stage() as stage:
        stage.session.push_audio(tone(3.0), RATE)
        stage.show(4)
        stage.clock.advance(2 * UNIT_S)
        for _ in range(ticks):
            stage.engine.tick()
        stage.session.control(Stop())
        after = stage.show(5)
    assert same(after, after_stop(begun_ahead=False)[1])


def test_units_of_an_older_generation_are_not_delivered_and_cannot_be_acknowledged() -> None:
    with Stage() as stage:
        stage.session.push_audio(tone(3.0), RATE)
        old = stage.waiting()
        stage.session.control(Stop())
        stage.session.ack(old[1])  # too late: it is of generation 0
        assert [unit.index for unit in stage.waiting()] == [0, 1]
        assert stage.session.stats().dropped == 2


def test_speech_pushed_after_an_interrupt_is_kept() -> None:
    with Stage() as stage:
        stage.session.push_audio(tone(2.0, hz=200), RATE)
        stage.show(3)
        stage.session.control(Stop())
        new = tone(0.32, hz=300)
        stage.session.push_audio(new, RATE)
        after = stage.show(3)
    heard = np.concatenate([unit.audio for unit in after])
    np.testing.assert_array_equal(heard[240 : len(new)], new[240:])
    assert not heard[len(new) :].any()


def test_interrupts_in_a_row_keep_the_session_alive() -> None:
    with Stage() as stage:
        for generation in range(1, 21):
            stage.session.push_audio(tone(1.0), RATE)
            stage.show(1 + generation % 3)
            stage.waiting()
            stage.session.control(Stop())
            stage.session.control(Stop())
            (unit,) = stage.show(1)
            assert unit.generation == 2 * generation
        assert stage.session.stats().units > 40


def test_turns_are_reported_once_with_where_they_were_cut() -> None:
    with Stage() as stage:
        stage.show(1)
        stage.session.push_audio(tone(5.0), RATE)
        stage.show(3)
        stage.session.control(Stop())
        stage.show(4)
        stage.session.control(Stop())
        events = [e for e in stage.session.poll_events() if isinstance(e, Started | Finished)]
    assert events == [
        Started(generation=0, position_s=0.16),
        Finished(generation=1, position_s=0.64, interrupted=True),
    ]


def test_a_turn_that_was_never_announced_is_not_reported_as_cut() -> None:
    with Stage() as stage:
        stage.session.push_audio(tone(5.0), RATE)
        stage.session.control(Stop())
        stage.show(4)
        assert stage.session.poll_events() == []


def test_speak_queues_whole_utterances() -> None:
    with Stage() as stage:
        for hz in (200.0, 300.0):
            sound = tone(0.32, 16_000, hz).astype("<i2").tobytes()
            assert base64.b64encode(sound)
            stage.session.control(Speak(audio=sound, sample_rate=16_000))
        stage.show(6)
        events = [e for e in stage.session.poll_events() if isinstance(e, Started | Finished)]
        assert [event.position_s for event in events] == [0.0, 0.32, 0.32, 0.64]
        with pytest.raises(ConfigError, match="no voice"):
            stage.session.control(Speak(text="hello"))
        long = np.zeros(121 * 16_000, "<i2").tobytes()
        with pytest.raises(ConfigError, match="do not fit"):
            stage.session.control(Speak(audio=long, sample_rate=16_000))


def test_a_live_session_takes_only_so_much_sound() -> None:
    with Stage() as stage:
        minute = silence(60.0)
        assert stage.session.push_audio(minute, RATE) == len(minute)
        assert stage.session.push_audio(minute, RATE) == len(minute)
        assert stage.session.push_audio(minute, RATE) == 0
        stage.show(1)
        assert stage.session.push_audio(minute, RATE) == 7680


def test_a_change_of_state_drops_nothing_and_takes_effect_at_the_next_unit() -> None:
    with Stage() as stage:
        begun = stage.waiting()
        stage.session.control(SetState(state=SpeechState.THINKING))
        for unit in begun:
            stage.session.ack(unit)
        after = stage.show(2)
        stage.session.push_audio(tone(0.16), RATE)
        speaking = stage.show(3)
        base = stage.show(1)
    assert [unit.state for unit in begun] == [SpeechState.IDLE] * 2
    assert [unit.generation for unit in after] == [0, 0]
    assert [unit.state for unit in after] == [SpeechState.THINKING] * 2
    assert [unit.state for unit in speaking] == [SpeechState.SPEAKING] * 3
    assert base[0].state is SpeechState.THINKING


def test_a_gesture_starts_with_the_next_unit_and_survives_an_interrupt() -> None:
    def shown(*, gesture: bool, interrupted: bool) -> list[Unit]:
        with Stage() as stage:
            stage.show(2)
            if gesture:
                stage.session.control(TriggerEvent(event="nod"))
            if interrupted:
                stage.clock.advance(2 * UNIT_S)
                stage.waiting()
                stage.session.control(Stop())
            return content(stage.show(4))

    plain = shown(gesture=False, interrupted=False)
    nod = shown(gesture=True, interrupted=False)
    assert not np.array_equal(nod[0].frames, plain[0].frames)
    assert same(shown(gesture=True, interrupted=True), nod)


def test_more_gestures_than_fit_are_refused() -> None:
    with Stage() as stage:
        for _ in range(8):
            stage.session.control(TriggerEvent(event="smile"))
        with pytest.raises(ConfigError, match="gestures wait"):
            stage.session.control(TriggerEvent(event="smile"))


def test_another_avatar_comes_with_the_next_unit() -> None:
    with Stage() as stage:
        stage.show(2)
        stage.session.control(SetAvatar(avatar="bo"))
        changed = stage.show(3)
        with pytest.raises(ConfigError, match="avatar must be one of"):
            stage.session.control(SetAvatar(avatar="nobody"))
        assert len(stage.show(1)) == 1
    with Stage(replace(LIVE, avatar="bo")) as stage:
        fresh = stage.show(3)
    assert [unit.index for unit in changed] == [2, 3, 4]
    assert np.array_equal(pictures(changed), pictures(fresh))


def test_an_interrupt_right_after_a_change_of_avatar_keeps_the_new_one() -> None:
    with Stage() as stage:
        stage.show(1)
        stage.clock.advance(UNIT_S)
        assert [unit.index for unit in stage.waiting()] == [1]  # begun with the old avatar
        stage.session.control(SetAvatar(avatar="bo"))
        stage.clock.advance(UNIT_S)
        assert [unit.index for unit in stage.waiting()] == [2]
        stage.session.control(Stop())
        after = stage.show(3)
    with Stage(replace(LIVE, avatar="bo")) as stage:
        fresh = stage.show(3)
    assert [unit.index for unit in after] == [1, 2, 3]
    assert np.array_equal(pictures(after), pictures(fresh))


def test_another_quality_comes_with_the_next_unit() -> None:
    def shown(steps: int | None) -> list[Unit]:
        with Stage() as stage:
            first = stage.show(2)
            if steps is not None:
                stage.session.control(SetQuality(num_inference_steps=steps))
            return first + stage.show(2)

    two, one = shown(None), shown(1)
    assert same(two[:2], one[:2])
    assert same(shown(2), two)
    assert not np.array_equal(two[2].frames, one[2].frames)
    with Stage() as stage, pytest.raises(ConfigError, match="runs with"):
        stage.session.control(SetQuality(num_inference_steps=7))


def test_sound_at_odd_moments_changes_no_bit_of_what_was_begun() -> None:
    with Stage() as stage:
        quiet = stage.show(4)
    with Stage() as stage:
        first = stage.show(4)
        stage.session.push_audio(tone(0.5), RATE)
        stage.show(2)
    assert same(quiet, first)


def test_pictures_are_refused_where_the_model_takes_none() -> None:
    with Stage() as stage, pytest.raises(ConfigError, match="not driven by pictures"):
        stage.session.push_frame(np.zeros((8, 8, 3), np.uint8))


def test_a_unit_of_another_session_cannot_be_acknowledged() -> None:
    with Stage() as stage, Stage() as other:
        (unit,) = other.show(1)
        with pytest.raises(ConfigError, match="not delivered here"):
            stage.session.ack(unit)


def test_a_closed_session_takes_nothing_more() -> None:
    with Stage() as stage:
        stage.show(1)
        stage.session.close()
        stage.session.close()
        assert stage.session.next_unit() is None
        for call in (
            lambda: stage.session.push_audio(tone(0.1), RATE),
            lambda: stage.session.control(Stop()),
            stage.session.end_audio,
            lambda: stage.session.wait_audio_room(1.0),
        ):
            with pytest.raises(StreamClosed):
                call()


def test_a_live_session_needs_a_lead_of_a_chunk() -> None:
    pipeline = toy_pipeline(frames_per_chunk=3)
    with pytest.raises(ConfigError, match="lead of at least one chunk"):
        Stage(LIVE, pipeline)


def test_chunks_of_two_units_are_interrupted_in_their_middle() -> None:
    with Stage(LIVE, toy_pipeline(frames_per_chunk=2)) as stage:
        stage.session.push_audio(tone(3.0), RATE)
        first = stage.waiting()
        assert [unit.index for unit in first] == [0, 1]
        stage.session.ack(first[0])
        stage.session.control(Stop())
        stage.clock.advance(UNIT_S)
        after = stage.waiting()
        assert [unit.index for unit in after] == [1, 2]
        assert not any(unit.audio[240:].any() for unit in after)
