from __future__ import annotations

import copy
import pickle

import numpy as np
import numpy.typing as npt
import pytest

import pipelines.motion as motion
from pipelines.motion import (
    CONTROL_NAMES,
    EVENTS,
    EXPRESSION_UNITS,
    IDLE,
    LISTENING,
    SPEAKING,
    THINKING,
    MotionController,
    controls_to_weights,
)
from rtgen.errors import ConfigError, ShapeError

Array = npt.NDArray[np.float32]
COLUMN = {name: index for index, name in enumerate(CONTROL_NAMES)}


def drive(
    controller: MotionController,
    states: list[int],
    events: dict[int, str] | None = None,
    seed: int = 0,
) -> Array:
    """Steps a controller through `states` with random loudness; returns [4 * units, K]."""
    energy = np.random.default_rng(seed).uniform(0, 1.2, (len(states), 4)).astype(np.float32)
    events = events or {}
    return np.concatenate(
        [controller.step(s, events.get(i), energy[i]) for i, s in enumerate(states)]
    )


MIXED = [IDLE] * 9 + [LISTENING] * 21 + [THINKING] * 7 + [SPEAKING] * 40 + [LISTENING] * 12


def test_equal_seeds_give_equal_bits_and_others_do_not() -> None:
    one, two, other = (drive(MotionController(seed), MIXED) for seed in (5, 5, 6))
    assert np.array_equal(one, two)
    assert not np.array_equal(one, other)
    assert one.shape == (4 * len(MIXED), len(CONTROL_NAMES))
    assert one.dtype == np.float32


def replay_is_equal(snapshot: object) -> bool:
    """Whether a controller that goes on, returns to a snapshot and goes on again repeats itself."""
    controller = MotionController(3)
    drive(controller, MIXED[:50], {40: "smile", 48: "nod"})
    saved = snapshot(controller)  # type: ignore[operator]
    first = drive(controller, MIXED[50:], {2: "shake"})
    controller.restore(saved)
    return np.array_equal(first, drive(controller, MIXED[50:], {2: "shake"}))


def test_restore_then_replay_is_bit_equal() -> None:
    assert replay_is_equal(MotionController.snapshot)


def test_planted_shallow_snapshot_is_caught() -> None:
    assert not replay_is_equal(lambda controller: copy.copy(controller._state))


def test_restored_state_moves_to_another_controller_of_the_same_seed() -> None:
    one, two = MotionController(3), MotionController(3)
    drive(one, MIXED)
    two.restore(one.snapshot())
    assert np.array_equal(drive(one, MIXED), drive(two, MIXED))


def past_changes(smooth: bool) -> bool:
    """Whether another future changes the controls before it; `smooth` plants a centred filter."""
    runs = []
    for tail, seed in ((SPEAKING, 1), (THINKING, 2)):
        states = MIXED[:30] + [tail] * 10
        controller = MotionController(8)
        past = drive(controller, states[:30])
        future = drive(controller, states[30:], {0: "nod"} if seed == 2 else {}, seed)
        controls = np.concatenate([past, future])
        if smooth:
            controls[1:-1] = (controls[:-2] + controls[1:-1] + controls[2:]) / 3.0
        runs.append(controls[: 4 * 30])
    return not np.array_equal(runs[0], runs[1])


def test_the_future_does_not_change_the_past() -> None:
    assert not past_changes(smooth=False)


def test_planted_centred_filter_is_caught_as_not_causal() -> None:
    assert past_changes(smooth=True)


def blinks_of(blink: Array) -> tuple[list[int], list[int]]:
    """First frame and length in frames of every blink."""
    closed = np.concatenate([[False], blink > 0.0, [False]])
    edges = np.flatnonzero(closed[1:] != closed[:-1])
    return edges[::2].tolist(), (edges[1::2] - edges[::2]).tolist()


def blinks_are_natural(state: int, low: float, high: float, minutes: int = 10) -> bool:
    """Rate within low..high a minute, each within 400 ms, starts 1.2 s apart, eyes close."""
    controls = drive(MotionController(11), [state] * (375 * minutes))
    blink = controls[:, COLUMN["blink"]]
    starts, lengths = blinks_of(blink)
    peaks = [blink[a : a + n].max() for a, n in zip(starts, lengths, strict=True)]
    rate = len(starts) / minutes
    gaps = np.diff(starts) / motion.FPS
    is_short = max(lengths) / motion.FPS <= 0.4
    return low <= rate <= high and is_short and gaps.min() >= 1.2 and min(peaks) > 0.7


def test_blinks_over_ten_minutes_are_natural() -> None:
    assert blinks_are_natural(SPEAKING, 14.0, 20.0)
    assert blinks_are_natural(LISTENING, 10.0, 15.0)


def test_planted_slow_lids_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    assert blinks_are_natural(SPEAKING, 12.0, 22.0, minutes=3)
    monkeypatch.setattr(motion, "_BLINK_UP", 12.0)
    assert not blinks_are_natural(SPEAKING, 12.0, 22.0, minutes=3)


def test_a_blink_is_finished_when_the_state_changes_under_it() -> None:
    controller = MotionController(11)
    energy = np.zeros(4, np.float32)
    blink: list[float] = []
    for unit in range(600):
        blink += controller.step(unit % 4, None, energy)[:, COLUMN["blink"]].tolist()
    _, lengths = blinks_of(np.array(blink, np.float32))
    assert max(lengths) <= 10


SHOWN_BY = {
    "smile": ("smile", 0.3),
    "nod": ("pitch", 0.05),
    "shake": ("yaw", 0.05),
    "look_left": ("gaze_x", 0.15),
    "look_right": ("gaze_x", 0.15),
    "surprised": ("wide", 0.4),
}


@pytest.mark.parametrize("event", EVENTS)
def test_event_shows_within_two_units_and_is_gone_after_its_time(event: str) -> None:
    states = [SPEAKING] * 30
    change = drive(MotionController(4), states, {10: event}) - drive(MotionController(4), states)
    name, size = SHOWN_BY[event]
    assert np.abs(change[: 4 * 10]).max() == 0.0
    assert np.abs(change[4 * 10 : 4 * 12, COLUMN[name]]).max() >= size
    assert np.abs(change[4 * 10 + 32 :]).max() == 0.0


def test_events_look_to_their_side_of_the_picture() -> None:
    states = [LISTENING] * 12
    plain = drive(MotionController(4), states)
    for event, sign in (("look_left", -1.0), ("look_right", 1.0)):
        change = drive(MotionController(4), states, {4: event}) - plain
        assert np.sign(change[4 * 6, COLUMN["gaze_x"]]) == sign
        assert np.sign(change[4 * 6, COLUMN["yaw"]]) == sign


def test_a_repeated_event_runs_a_second_time_without_a_jump() -> None:
    states = [IDLE] * 30
    twice = drive(MotionController(4), states, {5: "smile", 8: "smile"})
    change = (twice - drive(MotionController(4), states))[:, COLUMN["smile"]]
    assert change[20:50].max() > 0.5
    assert change[52:82].max() > 0.5
    assert np.abs(np.diff(change)).max() < 0.2
    assert np.abs(change[84:]).max() == 0.0


def test_head_moves_as_much_as_a_live_head_and_smoothly() -> None:
    for state, low, high in ((IDLE, 0.02, 0.06), (LISTENING, 0.02, 0.06), (SPEAKING, 0.03, 0.08)):
        pose = drive(MotionController(21), [state] * 800)[:, COLUMN["yaw"] : COLUMN["roll"] + 1]
        assert low < pose[:, 0].std() < high
        assert 0.008 < pose[:, 1].std() < 0.05
        assert 0.008 < pose[:, 2].std() < 0.05
        assert np.abs(np.diff(pose, axis=0)).max() < 0.03  # 43 degrees a second


def test_a_change_of_state_does_not_jump() -> None:
    controls = drive(MotionController(9), MIXED * 6)
    step = np.abs(np.diff(controls, axis=0)).max(0)
    assert step[COLUMN["yaw"] : COLUMN["roll"] + 1].max() < 0.03
    assert step[COLUMN["smile"]] < 0.06
    assert step[[COLUMN["gaze_x"], COLUMN["gaze_y"]]].max() < 0.2


def test_thinking_looks_up_and_aside_and_listening_at_the_camera() -> None:
    think = drive(MotionController(2), [THINKING] * 300)[20:]
    listen = drive(MotionController(2), [LISTENING] * 300)[20:]

    def direction(controls: Array) -> Array:
        x = controls[:, COLUMN["gaze_x"]] + controls[:, COLUMN["yaw"]]
        return np.stack([x, controls[:, COLUMN["gaze_y"]] - controls[:, COLUMN["pitch"]]], 1)

    assert np.median(np.abs(direction(think)[:, 0])) > 0.12
    assert np.median(direction(think)[:, 1]) > 0.08
    assert np.abs(np.median(direction(listen), axis=0)).max() < 0.04


def test_a_listener_nods_and_others_do_not() -> None:
    def band(state: int) -> float:
        pitch = drive(MotionController(31), [state] * 600)[:, COLUMN["pitch"]]
        power = np.abs(np.fft.rfft(pitch - pitch.mean())) ** 2
        frequency = np.fft.rfftfreq(len(pitch), 1.0 / motion.FPS)
        return float(power[(frequency > 1.2) & (frequency < 2.2)].sum())

    assert band(LISTENING) > 10.0 * band(IDLE)


def test_breathing_has_its_rate() -> None:
    breath = drive(MotionController(1), [IDLE] * 600)[:, COLUMN["breath"]]
    power = np.abs(np.fft.rfft(breath))
    assert np.fft.rfftfreq(len(breath), 1.0 / motion.FPS)[power.argmax()] == pytest.approx(
        0.26, 0.02
    )


def test_controls_keep_their_ranges() -> None:
    events = {i: EVENTS[i % 6] for i in range(0, 500, 3)}
    controls = drive(MotionController(17), MIXED * 6, events)
    for name in ("blink", "smile", "brow", "wide"):
        assert controls[:, COLUMN[name]].min() >= 0.0
        assert controls[:, COLUMN[name]].max() <= 1.0
    assert np.abs(controls[:, COLUMN["gaze_x"] : COLUMN["roll"] + 1]).max() < 0.6


def test_the_state_does_not_grow() -> None:
    controller = MotionController(1)
    drive(controller, MIXED)
    size = len(pickle.dumps(controller.snapshot()))
    drive(controller, MIXED * 8)
    grown = len(pickle.dumps(controller.snapshot())) - size
    assert grown < 20  # a number in another notation, no list of anything


def test_weights_of_each_frame_depend_on_that_frame_alone() -> None:
    controls = drive(MotionController(1), MIXED)
    whole = controls_to_weights(controls)
    for i in (0, 77, len(controls) - 1):
        for all_frames, one in zip(whole, controls_to_weights(controls[i : i + 1]), strict=True):
            assert np.array_equal(all_frames[i : i + 1], one)
    assert whole[0].shape == (len(controls), len(EXPRESSION_UNITS))
    assert whole[0].min() >= 0.0
    assert whole[0].max() <= 1.0


def test_resting_face_and_full_blink() -> None:
    controls = np.zeros((2, len(CONTROL_NAMES)), np.float32)
    controls[1, COLUMN["blink"]] = 1.0
    weights = dict(zip(EXPRESSION_UNITS, controls_to_weights(controls)[0].T.tolist(), strict=True))
    assert weights["eyeBlinkLeft"] == pytest.approx([0.06, 1.0])
    assert weights["mouthSmileRight"] == pytest.approx([0.10, 0.10])
    assert weights["browInnerUp"] == pytest.approx([0.28, 0.28])


def test_wrong_arguments_are_refused() -> None:
    controller = MotionController(0)
    with pytest.raises(ShapeError, match=r"energy must be \[4\], got \[3\]"):
        controller.step(IDLE, None, np.zeros(3))
    with pytest.raises(ConfigError, match="state must be"):
        controller.step(4, None, np.zeros(4))
    with pytest.raises(ConfigError, match="event must be one of"):
        controller.step(IDLE, "dance", np.zeros(4))
    with pytest.raises(ConfigError, match="seed"):
        MotionController(-1)
    with pytest.raises(ShapeError, match="controls must be"):
        controls_to_weights(np.zeros((4, 3)))
