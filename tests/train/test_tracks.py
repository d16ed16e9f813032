from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

pytest.importorskip("scipy", reason="needs the train extra")

from pipelines.motion import EVENTS, LISTENING, SPEAKING, STATES, MotionController
from pipelines.speech_energy import SpeechEnergy
from pipelines.train.speech import TEST_VOICES, is_available
from pipelines.train.texts import TEST_SENTENCES
from pipelines.train.tracks import UNIT_S, Track, make_track
from pipelines.train.visemes import FACE_UNITS, face_weights
from rtgen.errors import ConfigError

SECONDS = 24.0
NUM_FRAMES = 600


@pytest.fixture(scope="module")
def tracks() -> list[Track]:
    missing = [p for p in ("espeak", "festival", "flite") if not is_available(p)]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    return [make_track("train", SECONDS, seed) for seed in range(6)]


def mouth_of(track: Track) -> npt.NDArray[np.float32]:
    """The mouth without the smile: [F, units of speech]."""
    columns = [i for i, name in enumerate(FACE_UNITS) if name.startswith(("jaw", "mouth"))]
    rest = face_weights(np.zeros_like(track.face.weights), track.face.controls)
    return np.clip(track.face.weights - rest, 0.0, 1.0)[:, columns]


def test_parts_have_equal_length(tracks: list[Track]) -> None:
    for track in tracks:
        assert len(track.face) == len(track.event) == NUM_FRAMES
        assert track.audio.shape == (NUM_FRAMES * 640,)
        assert np.abs(track.audio).max() <= 1.0


def is_unit_aligned(values: npt.NDArray[np.int8]) -> bool:
    units = values.reshape(-1, 4)
    return bool((units == units[:, :1]).all())


def test_state_and_event_are_constant_within_a_unit(tracks: list[Track]) -> None:
    for track in tracks:
        assert is_unit_aligned(track.face.state)
        assert is_unit_aligned(track.event)


def test_planted_frame_of_offset_is_caught(tracks: list[Track]) -> None:
    assert not all(is_unit_aligned(np.roll(track.face.state, 1)) for track in tracks)


def test_all_states_and_events_occur(tracks: list[Track]) -> None:
    states = np.concatenate([track.face.state for track in tracks])
    events = np.concatenate([track.event for track in tracks])
    assert set(states.tolist()) == set(range(len(STATES)))
    assert (states == SPEAKING).mean() > 0.35
    assert 0 < (events > 0).mean() < 0.1
    assert events.max() <= len(EVENTS)


def test_the_mouth_is_closed_a_fifth_of_the_time_and_at_times_while_speaking(
    tracks: list[Track],
) -> None:
    closed = np.concatenate([mouth_of(track).max(1) < 0.02 for track in tracks])
    states = np.concatenate([track.face.state for track in tracks])
    assert 0.2 <= closed.mean() <= 0.7
    assert closed[states == SPEAKING].mean() > 0.05
    assert not closed.all()


def test_the_mouth_moves_in_the_speaking_state_alone(tracks: list[Track]) -> None:
    for track in tracks:
        moving = mouth_of(track).max(1) > 0.1
        speaking = track.face.state == SPEAKING
        # Lips open ahead of the sound, whose unit is the first to speak, and close after it.
        near = np.convolve(speaking, np.ones(9), "same") > 0.0
        assert near[moving].all()
        assert speaking[moving].mean() > 0.97


def closes_after_cuts(tracks: list[Track], delay_frames: int = 0) -> bool:
    """Mouth at rest 120 ms after each barge-in, and the next unit listens."""
    checked = 0
    for track in tracks:
        mouth = np.roll(mouth_of(track), delay_frames, axis=0)
        always_speaking = (track.face.state == SPEAKING).all()
        for cut in track.cuts:
            first = int(np.ceil(cut * 25 + 3))
            if first + 12 > NUM_FRAMES:
                continue
            checked += 1
            unit = int(np.ceil(cut / UNIT_S)) * 4
            listens = track.face.state[unit] == LISTENING or always_speaking
            if mouth[first : first + 12].max() > 0.02 or not listens:
                return False
    assert checked >= 3
    return True


def test_the_mouth_closes_after_a_barge_in(tracks: list[Track]) -> None:
    assert closes_after_cuts(tracks)


def test_planted_late_mouth_is_caught(tracks: list[Track]) -> None:
    assert not closes_after_cuts(tracks, delay_frames=5)


def test_controls_are_those_of_a_live_stream(tracks: list[Track]) -> None:
    track = tracks[0]
    controller, meter = MotionController(track.seed), SpeechEnergy()
    for unit in range(NUM_FRAMES // 4):
        event = int(track.event[unit * 4])
        controls = controller.step(
            int(track.face.state[unit * 4]),
            EVENTS[event - 1] if event else None,
            meter.push(track.audio[unit * 2560 : (unit + 1) * 2560]),
        )
        assert np.array_equal(controls, track.face.controls[unit * 4 : unit * 4 + 4])


def test_the_jaw_follows_the_loudness(tracks: list[Track]) -> None:
    jaw, loud = [], []
    for track in tracks:
        speaking = track.face.state == SPEAKING
        energy = SpeechEnergy().push(track.audio)
        jaw.append(track.face.weights[speaking, FACE_UNITS.index("jawOpen")])
        loud.append(np.convolve(energy, np.ones(3) / 3, "same")[speaking])
    assert np.corrcoef(np.concatenate(jaw), np.concatenate(loud))[0, 1] > 0.4


def test_a_seed_reproduces_its_track(tracks: list[Track]) -> None:
    one, two = make_track("train", SECONDS, 3).arrays(), tracks[3].arrays()
    assert one.keys() == two.keys()
    for name, values in one.items():
        assert np.array_equal(values, two[name]), name
    assert not np.array_equal(one["audio"], tracks[2].arrays()["audio"])


def test_the_test_split_uses_held_out_voices_and_sentences(tracks: list[Track]) -> None:
    test = make_track("test", SECONDS, 0)
    assert set(test.voices) <= set(TEST_VOICES)
    assert set(test.texts) <= set(TEST_SENTENCES)
    for track in tracks:
        assert set(track.voices).isdisjoint(TEST_VOICES)
        assert set(track.texts).isdisjoint(TEST_SENTENCES)


def test_arrays_hold_plain_types(tracks: list[Track]) -> None:
    arrays = tracks[0].arrays()
    assert arrays["audio"].dtype == np.int16
    assert arrays["segments"].shape[1] == 3
    assert all(values.dtype != object for values in arrays.values())


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ConfigError, match="split must be one of"):
        make_track("validation", 10.0, 0)
    with pytest.raises(ConfigError, match="seconds must hold a unit"):
        make_track("train", 0.1, 0)
