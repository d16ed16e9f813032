"""The non-verbal part of the face as explicit controls, streamed one unit at a time.

Blinks, gaze, head motion, expression and breathing are too sparse for a small model to time by
itself, so they are generated here and given to it as conditioning. The same class animates the
training tracks and the live stream. One unit is `FRAMES_PER_UNIT` pixel frames at `FPS`.

Head motion is white noise through two critically damped second-order stages (four equal poles):
smooth to the third derivative, causal, and stationary. All randomness of unit n comes from a
Philox generator keyed by the seed with n in its counter, so the state below is everything a
rollback has to restore.

Axes: gaze x and yaw are positive towards the right edge of the picture, gaze y is positive
upwards, pitch is positive downwards (a nod starts positive), roll is a tilt in the picture plane.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from rtgen.errors import ConfigError, ShapeError

__all__ = [
    "CONTROL_NAMES",
    "EVENTS",
    "EXPRESSION_UNITS",
    "FPS",
    "FRAMES_PER_UNIT",
    "IDLE",
    "LISTENING",
    "SPEAKING",
    "STATES",
    "THINKING",
    "MotionController",
    "MotionState",
    "controls_to_weights",
]

Array = npt.NDArray[np.float32]

FPS = 25
FRAMES_PER_UNIT = 4

STATES = ("idle", "listening", "speaking", "thinking")
IDLE, LISTENING, SPEAKING, THINKING = range(4)
EVENTS = ("smile", "nod", "shake", "look_left", "look_right", "surprised")
CONTROL_NAMES = (
    "blink", "gaze_x", "gaze_y", "yaw", "pitch", "roll", "smile", "brow", "wide", "breath",
)  # fmt: skip
EXPRESSION_UNITS = (
    "browInnerUp", "browOuterUpLeft", "browOuterUpRight", "cheekSquintLeft", "cheekSquintRight",
    "eyeBlinkLeft", "eyeBlinkRight", "eyeSquintLeft", "eyeSquintRight", "eyeWideLeft",
    "eyeWideRight", "mouthSmileLeft", "mouthSmileRight",
)  # fmt: skip

_C = {name: index for index, name in enumerate(CONTROL_NAMES)}
_POSE_SCALE = 0.8
_EYE_COMPENSATION = 0.8  # share of the head's turn that the eyes take back
_POLES = 4
# Correlation times in seconds: slow and fast part of yaw, pitch and roll, then smile and brow.
_TAU = np.array([1.1, 0.45, 0.9, 0.28, 1.3, 0.5, 1.0, 0.8])
# Radians (or units of expression) of each noise by state: idle, listening, speaking, thinking.
_AMPLITUDE = np.array(
    [
        [0.050, 0.050, 0.050, 0.050],
        [0.000, 0.000, 0.050, 0.012],
        [0.022, 0.022, 0.022, 0.022],
        [0.000, 0.000, 0.030, 0.008],
        [0.022, 0.022, 0.022, 0.022],
        [0.000, 0.000, 0.018, 0.006],
        [0.020, 0.030, 0.020, 0.010],
        [0.080, 0.060, 0.080, 0.080],
    ]
)
_BLINK_GAP_S = 1.2
_BLINK_MEAN_S = (2.4, 3.4, 2.2, 2.6)  # mean wait after the gap, by state
_BLINK_DOWN, _BLINK_UP = 2.0, 3.6  # frames
_GAZE_AMPLITUDE = (0.16, 0.03, 0.07, 0.05)
_GAZE_AWAY = (0.75, 0.25, 0.45, 1.0)  # chance that a saccade leaves the camera
_GAZE_KERNEL = np.array([0.25, 0.35, 0.25, 0.15])
_THINK_GAZE = (0.18, 0.12)
_NOD_HZ, _NOD_SIZE, _NOD_S = 1.7, 0.05, 1.4
_BREATH_HZ, _BREATH_SIZE = 0.26, 0.02
_EVENT_S = 1.2
_BLEND_POLE = math.exp(-1.0 / (FPS * 0.15))
_ENERGY_POLE = math.exp(-1.0 / (FPS * 0.07))


def _noise_filter() -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Pole and gain of each noise channel: gain makes the filtered white noise unit variance.

    Four poles at rate w have the autocorrelation curvature -w^2/5 at lag zero; a Gaussian kernel
    of width tau has -1/(2 tau^2). Equating the two gives w.
    """
    pole = np.exp(-math.sqrt(2.5) / (_TAU * FPS))
    taps = np.arange(3000)[:, None]
    # Impulse response of four cascaded y += (1 - p)(x - y): binomial(n + 3, 3) p^n (1 - p)^4.
    response = (taps + 1) * (taps + 2) * (taps + 3) / 6.0 * pole**taps * (1.0 - pole) ** _POLES
    gain: npt.NDArray[np.float64] = 1.0 / np.sqrt((response**2).sum(0))
    return pole, gain


_POLE, _GAIN = _noise_filter()


@dataclass(slots=True, kw_only=True)
class MotionState:
    """Everything a `MotionController` carries from one unit to the next."""

    unit: int = 0
    noise: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros((_POLES, len(_TAU))))
    blend: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros((2, len(STATES))))
    energy: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros(2))
    last_state: int = -1
    blink_age: float = -1.0
    blink_gap: float = 0.0
    blink_wait: float = 1.0
    gaze: npt.NDArray[np.float64] = field(default_factory=lambda: np.zeros((4, 2)))
    gaze_wait: float = 0.0
    gaze_side: float = 1.0
    nod_age: float = -1.0
    nod_wait: float = 0.0
    breath_phase: float = 0.0
    event_age: npt.NDArray[np.float64] = field(default_factory=lambda: np.full(len(EVENTS), -1.0))
    event_again: npt.NDArray[np.bool_] = field(default_factory=lambda: np.zeros(len(EVENTS), bool))


class MotionController:
    """A causal generator of the non-verbal controls of one face.

    Args:
        seed: two controllers with one seed and the same inputs give equal bits.
    """

    def __init__(self, seed: int) -> None:
        if not 0 <= seed < 2**63:
            raise ConfigError(f"seed must lie in 0..2^63-1, got {seed}")
        self.seed = seed
        rng = np.random.Generator(np.random.Philox(key=seed, counter=[0, 1, 0, 0]))
        warm = rng.standard_normal((1000, len(_TAU)))
        self._state = MotionState(
            blink_wait=float(rng.exponential()),
            nod_wait=float(rng.uniform(0.5, 1.5)),
            breath_phase=float(rng.random()),
            gaze_side=1.0 if rng.random() < 0.5 else -1.0,
        )
        for row in warm:  # start in the stationary distribution, not at rest
            self._filter(row)

    def snapshot(self) -> MotionState:
        """Returns an independent copy of the state, to be given to `restore`."""
        return copy.deepcopy(self._state)

    def restore(self, state: MotionState) -> None:
        """Continues from `state` (copied): the same inputs then give the same bits."""
        self._state = copy.deepcopy(state)

    def step(self, state: int, event: str | None, energy: npt.ArrayLike) -> Array:
        """Returns the controls of the next unit.

        Args:
            state: index into `STATES`, constant over the unit.
            event: one of `EVENTS` that starts with this unit, or None. An event lasts 1.2 s; the
                same event given while it still runs starts again when it is over.
            energy: [4], loudness of each frame as `SpeechEnergy` gives it, 0..1.3.

        Returns:
            [4, K] float32, columns as `CONTROL_NAMES`: blink, smile, brow, wide in 0..1, angles
            in radians, breath as the lift of the chest in decimetres.

        Raises:
            ConfigError: unknown state or event.
            ShapeError: energy is not [4].
        """
        levels = np.asarray(energy, dtype=np.float64)
        if levels.shape != (FRAMES_PER_UNIT,):
            raise ShapeError(f"energy must be [{FRAMES_PER_UNIT}], got {list(levels.shape)}")
        if not 0 <= state < len(STATES):
            raise ConfigError(f"state must be 0..{len(STATES) - 1} ({STATES}), got {state}")
        s = self._state
        if event is not None:
            if event not in EVENTS:
                raise ConfigError(f"event must be one of {EVENTS}, got {event!r}")
            index = EVENTS.index(event)
            if s.event_age[index] < 0.0:
                s.event_age[index] = 0.0
            else:
                s.event_again[index] = True
        if s.last_state < 0:
            s.blend[:, state] = 1.0
        elif s.last_state != state:
            s.gaze_wait = min(s.gaze_wait, 0.12)  # the eyes answer a change of state at once
        s.last_state = state
        rng = np.random.Generator(np.random.Philox(key=self.seed, counter=[0, 0, s.unit, 0]))
        normals = rng.standard_normal((FRAMES_PER_UNIT, len(_TAU) + 2))
        uniforms = rng.random((FRAMES_PER_UNIT, 8))
        rows = [
            self._frame(state, float(levels[i]), normals[i], uniforms[i])
            for i in range(FRAMES_PER_UNIT)
        ]
        s.unit += 1
        return np.stack(rows).astype(np.float32)

    def _frame(
        self,
        state: int,
        energy: float,
        normal: npt.NDArray[np.float64],
        uniform: npt.NDArray[np.float64],
    ) -> npt.NDArray[np.float64]:
        """Returns the controls [K] of one frame and moves the state on by it."""
        s = self._state
        target = np.zeros(len(STATES))
        target[state] = 1.0
        for stage in s.blend:
            stage += (1.0 - _BLEND_POLE) * (target - stage)
            target = stage
        blend = s.blend[1]
        s.energy[0] += (1.0 - _ENERGY_POLE) * (energy - s.energy[0])
        s.energy[1] += (1.0 - _ENERGY_POLE) * (s.energy[0] - s.energy[1])
        loud = float(s.energy[1])
        noise = self._filter(normal[: len(_TAU)]) * (_AMPLITUDE @ blend)
        listening, speaking, thinking = blend[LISTENING], blend[SPEAKING], blend[THINKING]

        out = np.zeros(len(CONTROL_NAMES))
        out[_C["blink"]] = self._blink(state, uniform)
        eyes = self._gaze(state, normal[len(_TAU) :], uniform[2:6])
        yaw = noise[0] + noise[1] + 0.03 * s.gaze_side * thinking
        pitch = noise[2] + noise[3] + 0.035 * loud * speaking - 0.03 * thinking
        pitch += self._nod(state, uniform[6]) * listening
        roll = noise[4] + noise[5] + 0.045 * listening
        event = self._events()
        head = np.array([yaw, pitch, roll]) * _POSE_SCALE + event[:3]
        out[_C["gaze_x"]] = eyes[0] - _EYE_COMPENSATION * head[0] + event[3]
        out[_C["gaze_y"]] = eyes[1] + _EYE_COMPENSATION * head[1]
        out[_C["yaw"] : _C["roll"] + 1] = head + [event[7], 0.0, 0.0]
        stress = min(max(1.1 * loud - 0.35, 0.0), 1.0)
        smile = 0.10 + 0.14 * listening + 0.04 * speaking + noise[6] + event[4]
        brow = 0.45 * stress * speaking + 0.12 * (listening + thinking) + max(noise[7], 0.0)
        out[_C["smile"]] = min(max(smile, 0.0), 1.0)
        out[_C["brow"]] = min(max(brow + event[5], 0.0), 1.0)
        out[_C["wide"]] = event[6]
        s.breath_phase = (s.breath_phase + _BREATH_HZ / FPS) % 1.0
        out[_C["breath"]] = _BREATH_SIZE * math.sin(2.0 * math.pi * s.breath_phase)
        return out

    def _filter(self, white: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Feeds one frame of white noise [8] through the poles; returns unit variance [8]."""
        value = white
        for stage in self._state.noise:
            stage += (1.0 - _POLE) * (value - stage)
            value = stage
        return value * _GAIN

    def _blink(self, state: int, uniform: npt.NDArray[np.float64]) -> float:
        """Closure 0..1: waits a gap plus an exponential time, which runs slower in listening."""
        s = self._state
        if s.blink_age < 0.0:
            s.blink_gap -= 1.0 / FPS
            if s.blink_gap <= 0.0:
                s.blink_wait -= 1.0 / (FPS * _BLINK_MEAN_S[state])
            if s.blink_wait > 0.0:
                return 0.0
            s.blink_age = uniform[0]  # the onset falls anywhere inside the frame
            s.blink_wait = -math.log(1.0 - uniform[1])
        age = s.blink_age
        lid = age / _BLINK_DOWN if age < _BLINK_DOWN else 1.0 - (age - _BLINK_DOWN) / _BLINK_UP
        s.blink_age += 1.0
        if s.blink_age >= _BLINK_DOWN + _BLINK_UP:
            s.blink_age = -1.0
            s.blink_gap = _BLINK_GAP_S
        return min(max(1.15 * lid, 0.0), 1.0)

    def _gaze(
        self, state: int, normal: npt.NDArray[np.float64], uniform: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.float64]:
        """Direction of the eyes [2] against the camera before the head's turn is taken back."""
        s = self._state
        s.gaze[1:] = s.gaze[:-1].copy()
        s.gaze_wait -= 1.0 / FPS
        if s.gaze_wait <= 0.0:
            s.gaze_wait = 0.5 + 1.3 * uniform[0]
            away = uniform[1] < _GAZE_AWAY[state]
            s.gaze[0] = normal * (_GAZE_AMPLITUDE[state] * np.array([1.0, 0.5])) * away
            if state == THINKING:
                s.gaze_side = s.gaze_side if uniform[2] < 0.75 else -s.gaze_side
                s.gaze[0] += [s.gaze_side * _THINK_GAZE[0], _THINK_GAZE[1]]
            s.gaze[0] = np.clip(s.gaze[0], -0.35, 0.35)
        return np.asarray(_GAZE_KERNEL @ s.gaze)

    def _nod(self, state: int, uniform: float) -> float:
        """Pitch of the listener's nod in radians; a new one starts every 1.6 to 3.2 s."""
        s = self._state
        s.nod_wait -= 1.0 / FPS
        if s.nod_wait <= 0.0:
            s.nod_wait = 1.6 + 1.6 * uniform
            s.nod_age = 0.0 if state == LISTENING else -1.0
        if s.nod_age < 0.0:
            return 0.0
        age = s.nod_age
        s.nod_age = age + 1.0 / FPS if age < _NOD_S else -1.0
        envelope = math.exp(-(((age - 0.3) / 0.5) ** 2))
        return _NOD_SIZE * envelope * math.sin(2.0 * math.pi * _NOD_HZ * age)

    def _events(self) -> npt.NDArray[np.float64]:
        """Sum of running events: yaw, pitch, roll, gaze x, smile, brow, wide, yaw of a look."""
        s = self._state
        total = np.zeros(8)
        for index, name in enumerate(EVENTS):
            if s.event_age[index] < 0.0:
                continue
            s.event_age[index] += 1.0 / FPS
            total += _event_offsets(name, float(s.event_age[index]))
            if s.event_age[index] >= _EVENT_S:
                s.event_age[index] = 0.0 if s.event_again[index] else -1.0
                s.event_again[index] = False
        return total


def _event_offsets(name: str, age: float) -> npt.NDArray[np.float64]:
    """Offsets [8] (order of `MotionController._events`) of an event `age` seconds after it began.

    Smooth, and zero at both ends.
    """
    rise = min(max(age / 0.20, 0.0), 1.0)
    fall = min(max((_EVENT_S - age) / 0.35, 0.0), 1.0)
    window = (rise * rise * (3.0 - 2.0 * rise)) * (fall * fall * (3.0 - 2.0 * fall))
    wave = window * math.sin(2.0 * math.pi * 1.75 * age)
    out = np.zeros(8)
    if name == "smile":
        out[4] = 0.55 * window
    elif name == "nod":
        out[1] = 0.11 * wave
    elif name == "shake":
        out[0] = 0.14 * wave
    elif name == "surprised":
        out[5], out[6], out[1] = 0.75 * window, 0.8 * window, -0.03 * window
    else:
        side = -1.0 if name == "look_left" else 1.0
        out[3], out[7] = side * 0.22 * window, side * 0.10 * window
    return out


def controls_to_weights(controls: npt.ArrayLike) -> tuple[Array, Array, Array, Array]:
    """Returns the non-mouth part of the face that the controls mean, frame by frame.

    Args:
        controls: [F, K], columns as `CONTROL_NAMES`.

    Returns:
        weights [F, U] in 0..1 over `EXPRESSION_UNITS` (the smile is the resting mouth's; speech
        adds its own), pose [F, 3] (yaw, pitch, roll) in radians, gaze [F, 2] (x, y) in radians,
        breath [F]; all float32.

    Raises:
        ShapeError: controls is not [F, K].
    """
    c = np.asarray(controls, dtype=np.float32)
    if c.ndim != 2 or c.shape[1] != len(CONTROL_NAMES):
        raise ShapeError(f"controls must be [F, {len(CONTROL_NAMES)}], got {list(c.shape)}")
    blink, smile, brow, wide = (c[:, _C[n]] for n in ("blink", "smile", "brow", "wide"))
    outer = 0.22 + 0.5 * brow
    cheek = 0.35 * np.maximum(smile - 0.1, 0.0)
    lid = 0.06 * (1.0 - wide) + blink
    squint = 0.08 + 0.6 * np.maximum(smile - 0.1, 0.0)
    mouth = 0.10 + smile
    columns = [
        0.28 + 0.6 * brow, outer, outer, cheek, cheek, lid, lid, squint, squint, wide, wide,
        mouth, mouth,
    ]  # fmt: skip
    weights = np.clip(np.stack(columns, 1), 0.0, 1.0).astype(np.float32)
    pose = c[:, _C["yaw"] : _C["roll"] + 1].copy()
    gaze = c[:, _C["gaze_x"] : _C["gaze_y"] + 1].copy()
    return weights, pose, gaze, c[:, _C["breath"]].copy()
