"""Scripted dialogues: the sound a face hears itself make, and the labels of every frame.

A script is a row of turns. In each the face first listens, idles or thinks in silence, then
speaks one to three texts, now and then with a pause filled by something that is not speech. A
fifth of the turns end in a barge-in: the voice stops in the middle of a word and the face listens.
Some tracks stay in the speaking state throughout, as a recording that is played to the face does.

The controls come from the `MotionController` that also runs live, stepped unit by unit with the
loudness of this sound, so that what is learned is what is met.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pipelines.motion import (
    EVENTS,
    FPS,
    FRAMES_PER_UNIT,
    IDLE,
    LISTENING,
    SPEAKING,
    THINKING,
    MotionController,
)
from pipelines.speech_energy import SpeechEnergy
from pipelines.train.augment import NON_SPEECH, warp_vocal_tract
from pipelines.train.speech import SAMPLE_RATE, has_pitch, sample_voice, synthesize
from pipelines.train.texts import sample_text
from pipelines.train.visemes import VISEMES, FaceTrack, Segment, mouth_weights, viseme_segments
from rtgen.errors import ConfigError

__all__ = ["SPLITS", "UNIT_S", "Track", "make_track"]

SPLITS = ("train", "test")
UNIT_S = FRAMES_PER_UNIT / FPS
_UNIT_SAMPLES = SAMPLE_RATE * FRAMES_PER_UNIT // FPS
_FADE_SAMPLES = 320  # an interrupted voice is faded over 20 ms, as playout does
_BARGE_IN = 0.2
_ALWAYS_SPEAKING = 0.15
_EVENT_RATE = 0.03  # chance of an event at each unit


@dataclass(slots=True, kw_only=True)
class Track:
    """One dialogue with its labels.

    Attributes:
        audio: [F * 640] float32 at 16 kHz, the face's own voice and the sounds around it.
        face: labels of the F frames.
        event: [F] int8, 0 or 1 + index into `EVENTS`; an event is marked on the four frames of
            the unit that it starts with.
        segments: (start_s, end_s, viseme) of all speech, in order.
        cuts: times in seconds at which a barge-in stopped the voice.
        texts: what was said, one entry an utterance.
        voices: who said it.
        seed: what `make_track` was given.
    """

    audio: npt.NDArray[np.float32]
    face: FaceTrack
    event: npt.NDArray[np.int8]
    segments: list[Segment]
    cuts: list[float]
    texts: list[str]
    voices: list[str]
    seed: int

    def arrays(self) -> dict[str, npt.NDArray[np.generic]]:
        """Returns the track as named arrays for an npz file; audio is int16."""
        return {
            "audio": np.round(np.clip(self.audio, -1.0, 1.0) * 32767.0).astype(np.int16),
            "weights": self.face.weights,
            "pose": self.face.pose,
            "gaze": self.face.gaze,
            "breath": self.face.breath,
            "controls": self.face.controls,
            "state": self.face.state,
            "event": self.event,
            "segments": np.array(
                [(a, b, VISEMES.index(v)) for a, b, v in self.segments], np.float32
            ).reshape(-1, 3),
            "cuts": np.array(self.cuts, np.float32),
            "texts": np.array(self.texts, dtype=np.str_),
            "voices": np.array(self.voices, dtype=np.str_),
            "seed": np.array(self.seed, np.int64),
        }


@dataclass(slots=True)
class _Script:
    """A timeline under construction; times in seconds."""

    speech: npt.NDArray[np.float64]  # the voice alone
    sound: npt.NDArray[np.float64]  # everything else
    state: npt.NDArray[np.int8]  # of each unit
    segments: list[Segment] = field(default_factory=list)
    cuts: list[float] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    voices: list[str] = field(default_factory=list)

    @property
    def length_s(self) -> float:
        return len(self.speech) / SAMPLE_RATE

    def set_state(self, start_s: float, end_s: float, state: int) -> None:
        """Sets the units that begin in [start_s, end_s)."""
        first = int(np.ceil(start_s / UNIT_S - 1e-9))
        self.state[max(first, 0) : int(np.ceil(end_s / UNIT_S - 1e-9))] = state

    def add_sound(self, start_s: float, length_s: float, rng: np.random.Generator) -> None:
        """Adds a sound that is not speech; silence is the most frequent one."""
        names = list(NON_SPEECH)
        name = "silence" if rng.random() < 0.4 else names[rng.integers(len(names))]
        at = int(start_s * SAMPLE_RATE)
        count = min(int(length_s * SAMPLE_RATE), len(self.sound) - at)
        if count < _FADE_SAMPLES:
            return
        made = NON_SPEECH[name](count, rng)
        peak = 10.0 ** rng.uniform(-2.0, -0.5)
        made *= peak / (np.abs(made).max() + 1e-6)
        ramp = np.linspace(0.0, 1.0, _FADE_SAMPLES)
        made[:_FADE_SAMPLES] *= ramp
        made[-_FADE_SAMPLES:] *= ramp[::-1]
        self.sound[at : at + count] += made

    def say(self, start_s: float, voice: str, rng: np.random.Generator, *, held_out: bool) -> float:
        """Adds one utterance, cut short in a fifth of the cases; returns its end."""
        text = sample_text(rng, held_out=held_out)
        warp = rng.uniform(0.9, 1.12) if not held_out else 1.0
        pitch = float(rng.uniform(0.85, 1.2)) if has_pitch(voice) else 1.0
        speech = synthesize(text, voice, rate=float(rng.uniform(0.82, 1.2)), pitch=pitch)
        speech = warp_vocal_tract(speech, warp)
        samples = speech.samples.astype(np.float64) * 10.0 ** rng.uniform(-0.35, 0.1)
        segments = viseme_segments(speech.segments, speech.alphabet)
        at = int(start_s * SAMPLE_RATE)
        is_cut = rng.random() < _BARGE_IN
        count = min(len(samples), len(self.speech) - at)
        if is_cut:
            count = min(count, int(rng.uniform(0.35, 0.9) * len(samples)))
        if count <= _FADE_SAMPLES:
            return self.length_s
        samples = samples[:count]
        if is_cut:
            samples[-_FADE_SAMPLES:] *= np.linspace(1.0, 0.0, _FADE_SAMPLES)
        self.speech[at : at + count] += samples
        end_s = start_s + count / SAMPLE_RATE
        self.segments += [
            (a + start_s, min(b + start_s, end_s), v) for a, b, v in segments if a + start_s < end_s
        ]
        self.texts.append(text)
        self.voices.append(voice)
        if is_cut:
            self.cuts.append(end_s)
        return end_s


def make_track(split: str, seconds: float, seed: int) -> Track:
    """Returns a dialogue; its content depends on the arguments alone.

    Args:
        split: "train", or "test" for the held-out voices and sentences.
        seconds: length, cut down to whole units.
        seed: 0..2^63-1.

    Raises:
        ConfigError: unknown split, or less than one unit.
        BackendUnavailable: a synthesizer is missing.
    """
    if split not in SPLITS:
        raise ConfigError(f"split must be one of {SPLITS}, got {split!r}")
    num_units = int(seconds / UNIT_S + 1e-9)
    if num_units < 1:
        raise ConfigError(f"seconds must hold a unit of {UNIT_S} s, got {seconds}")
    rng = np.random.default_rng([seed, SPLITS.index(split)])
    script = _Script(
        speech=np.zeros(num_units * _UNIT_SAMPLES),
        sound=np.zeros(num_units * _UNIT_SAMPLES),
        state=np.zeros(num_units, np.int8),
    )
    _write_script(script, rng, held_out=split == "test")
    if rng.random() < _ALWAYS_SPEAKING and split == "train":
        script.state[:] = SPEAKING
    room = rng.standard_normal(len(script.speech)) * 10.0 ** rng.uniform(-4.0, -2.7)
    audio = np.clip(script.speech + script.sound + room, -1.0, 1.0).astype(np.float32)
    return _label(script, audio, seed, rng)


def _write_script(script: _Script, rng: np.random.Generator, *, held_out: bool) -> None:
    """Fills the timeline with turns up to its end."""
    time = 0.0
    voice = sample_voice(rng, held_out=held_out)
    after_cut = False
    while time < script.length_s:
        wait = rng.uniform(1.8, 5.0) if time > 0.0 else rng.uniform(0.4, 1.2)
        waiting = LISTENING if after_cut or rng.random() < 0.55 else IDLE
        script.set_state(time, time + wait, waiting)
        if rng.random() < 0.5:
            script.add_sound(time, wait, rng)
        time += wait
        if rng.random() < 0.5:
            pause = rng.uniform(0.3, 1.6)
            script.set_state(time, time + pause, THINKING)
            time += pause
        if rng.random() < 0.3:
            voice = sample_voice(rng, held_out=held_out)
        time, after_cut = _speak(script, time, voice, rng, held_out=held_out)


def _speak(
    script: _Script, start_s: float, voice: str, rng: np.random.Generator, *, held_out: bool
) -> tuple[float, bool]:
    """Adds one to three utterances; returns the end and whether they were interrupted."""
    # The state may turn to speaking up to a unit before the first sound, never after it.
    time = start_s
    for _ in range(rng.integers(1, 4)):
        if time >= script.length_s:
            break
        begin = time
        num_cuts = len(script.cuts)
        time = script.say(time, voice, rng, held_out=held_out)
        script.set_state(begin - rng.uniform(1.0, 1.6) * UNIT_S, time, SPEAKING)
        if len(script.cuts) > num_cuts:
            return time, True
        pause = rng.uniform(0.05, 0.5) if rng.random() < 0.8 else rng.uniform(0.8, 2.2)
        script.set_state(time, time + pause, SPEAKING)
        if pause > 0.5:
            script.add_sound(time + 0.1, pause - 0.2, rng)
        time += pause
    return time, False


def _label(
    script: _Script, audio: npt.NDArray[np.float32], seed: int, rng: np.random.Generator
) -> Track:
    """Runs the controller over the sound and puts mouth and controls together."""
    num_units = len(script.state)
    energy = SpeechEnergy().push(audio).reshape(num_units, FRAMES_PER_UNIT)
    controller = MotionController(seed)
    event = np.zeros(num_units, np.int8)
    rows = []
    for unit in range(num_units):
        if rng.random() < _EVENT_RATE:
            event[unit] = 1 + rng.integers(len(EVENTS))
        name = EVENTS[event[unit] - 1] if event[unit] else None
        rows.append(controller.step(int(script.state[unit]), name, energy[unit]))
    num_frames = num_units * FRAMES_PER_UNIT
    loud = SpeechEnergy().push(script.speech)
    loud = np.convolve(np.pad(loud, 1, mode="edge"), np.full(3, 1.0 / 3.0), mode="valid")
    mouth = mouth_weights(script.segments, num_frames, loud)
    state = np.repeat(script.state, FRAMES_PER_UNIT)
    return Track(
        audio=audio,
        face=FaceTrack.from_parts(mouth, np.concatenate(rows), state),
        event=np.repeat(event, FRAMES_PER_UNIT),
        segments=script.segments,
        cuts=script.cuts,
        texts=script.texts,
        voices=script.voices,
        seed=seed,
    )
