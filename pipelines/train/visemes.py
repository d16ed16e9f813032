"""Phone segments to mouth shapes per frame, and the label container of a whole face.

Each phone belongs to a viseme, a set of face-unit weights. Neighbours blend by dominance (Cohen
and Massaro, "Modeling coarticulation in synthetic visual speech", 1993): every segment pulls with
an exponential that falls with the distance from its middle, and the mouth is the weighted mean.
Two things are not left to blending: lips that must touch (p b m, f v) reach their shape fully,
and pauses close the mouth. Articulators run ahead of the sound by `LEAD_S`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipelines.lips import MOUTH_NAMES
from pipelines.motion import CONTROL_NAMES, EXPRESSION_UNITS, FPS, controls_to_weights
from rtgen.errors import ConfigError, ShapeError

__all__ = [
    "ALPHABETS",
    "FACE_UNITS",
    "LEAD_S",
    "MOUTH_GAIN",
    "SILENCE",
    "VISEMES",
    "FaceTrack",
    "Segment",
    "face_weights",
    "mouth_of",
    "mouth_weights",
    "touching",
    "viseme_mouth",
    "weights_of_mouth",
    "viseme_segments",
]

Array = npt.NDArray[np.float32]
Segment = tuple[float, float, str]  # start and end in seconds, phone

LEAD_S = 0.040
MOUTH_GAIN = 1.4
_PAUSE_S = 0.12  # a shorter gap is part of speech
_CLOSE_S = 0.10  # time the mouth takes from speech to rest and back

SILENCE = "sil"
VISEMES = (
    SILENCE, "PP", "FF", "TH", "DD", "kk", "CH", "SS", "RR", "aa", "E", "I", "O", "U", "@",
)  # fmt: skip
_VOWELS = frozenset(("aa", "E", "I", "O", "U", "@", "RR"))
_SHUT = ("PP", "FF")

# Names without a side drive the left and the right unit alike.
_SHAPES: dict[str, dict[str, float]] = {
    SILENCE: {},
    "PP": {"mouthPress": 0.45, "mouthRollLower": 0.30, "mouthRollUpper": 0.22, "mouthClose": 0.04},
    "FF": {"mouthRollLower": 0.55, "mouthUpperUp": 0.22, "jawOpen": 0.05, "mouthShrugLower": 0.15},
    "TH": {"jawOpen": 0.13, "tongueOut": 0.35, "mouthLowerDown": 0.20, "mouthUpperUp": 0.10},
    "DD": {"jawOpen": 0.11, "mouthLowerDown": 0.22, "mouthUpperUp": 0.12, "mouthStretch": 0.10},
    "kk": {"jawOpen": 0.16, "mouthLowerDown": 0.14, "mouthUpperUp": 0.08},
    "CH": {"mouthFunnel": 0.55, "jawOpen": 0.09, "mouthPucker": 0.18, "mouthUpperUp": 0.10},
    "SS": {"jawOpen": 0.04, "mouthStretch": 0.24, "mouthLowerDown": 0.25, "mouthUpperUp": 0.14},
    "RR": {"mouthFunnel": 0.28, "mouthPucker": 0.30, "jawOpen": 0.14},
    "aa": {"jawOpen": 0.46, "mouthLowerDown": 0.30, "mouthUpperUp": 0.18, "mouthStretch": 0.06},
    "E": {"jawOpen": 0.26, "mouthLowerDown": 0.25, "mouthUpperUp": 0.16, "mouthStretch": 0.22},
    "I": {
        "jawOpen": 0.12, "mouthStretch": 0.34, "mouthSmile": 0.22, "mouthLowerDown": 0.18,
        "mouthUpperUp": 0.10,
    },
    "O": {"jawOpen": 0.32, "mouthFunnel": 0.46, "mouthPucker": 0.22},
    "U": {"jawOpen": 0.11, "mouthPucker": 0.72, "mouthFunnel": 0.30},
    "@": {"jawOpen": 0.17, "mouthLowerDown": 0.16, "mouthUpperUp": 0.08},
}  # fmt: skip
_SINGLE = frozenset(
    (
        "jawOpen", "mouthClose", "mouthFunnel", "mouthPucker", "mouthRollLower", "mouthRollUpper",
        "mouthShrugLower", "tongueOut",
    )
)  # fmt: skip


def _sides(name: str) -> tuple[str, ...]:
    return (name,) if name in _SINGLE else (name + "Left", name + "Right")


FACE_UNITS: tuple[str, ...] = tuple(
    sorted(
        {unit for shape in _SHAPES.values() for name in shape for unit in _sides(name)}
        | set(EXPRESSION_UNITS)
    )
)
"""Names of the driven ARKit units, the columns of every `weights` array."""


def _shape_table() -> npt.NDArray[np.float64]:
    table = np.zeros((len(VISEMES), len(FACE_UNITS)))
    for row, viseme in enumerate(VISEMES):
        for name, weight in _SHAPES[viseme].items():
            for unit in _sides(name):
                table[row, FACE_UNITS.index(unit)] = weight
    return table


_TABLE = _shape_table()
_MOUTH_UNITS = tuple(tuple(FACE_UNITS.index(unit) for unit in _sides(name)) for name in MOUTH_NAMES)

# One character of the International Phonetic Alphabet each.
_IPA_GROUPS = {
    "PP": "pbm", "FF": "fv", "TH": "θð", "DD": "tdnlɾɫ", "kk": "kgɡŋhxʔ", "CH": "ʃʒ", "SS": "sz",
    "RR": "ɹɚɝɜr", "aa": "aɑæʌɐ", "E": "ɛeɪᵻ", "I": "ijɨ", "O": "ɔoɒ", "U": "uʊw", "@": "ə",
}  # fmt: skip
_ARPABET_GROUPS = {
    SILENCE: "pau h# sil ssil brth", "PP": "p b m em", "FF": "f v", "TH": "th dh",
    "DD": "t d n l dx en el nx", "kk": "k g ng hh hv", "CH": "sh zh", "SS": "s z",
    "RR": "r er axr", "aa": "aa ae ah", "E": "eh ih", "I": "iy y", "O": "ao", "U": "uw uh w",
    "@": "ax", "aa E": "ay", "aa U": "aw", "E E": "ey", "O U": "ow", "O E": "oy", "DD CH": "ch jh",
}  # fmt: skip
# Phones of festival's Catalan, Czech, Finnish and Italian voices; their trilled r leaves the lips
# alone. A trailing 1 marks stress, a colon length.
_SAMPA_GROUPS = {
    SILENCE: "# _ pau", "PP": "p b m", "FF": "f v nf", "TH": "T D",
    "DD": "t d n l J L N r rr n~ t~ d~", "kk": "k g h ch ng n*", "CH": "S Z s~ z~ r~ r~*",
    "SS": "s z", "DD CH": "tS dZ c~ dz~", "DD SS": "ts dz c", "aa": "a @", "E": "e E", "I": "i j",
    "O": "o O 7", "U": "u w y", "@": "ax &",
}  # fmt: skip
ALPHABETS: dict[str, dict[str, tuple[str, ...]]] = {
    "ipa": {phone: (v,) for v, phones in _IPA_GROUPS.items() for phone in phones},
    "arpabet": {
        phone: tuple(v.split()) for v, phones in _ARPABET_GROUPS.items() for phone in phones.split()
    },
    "sampa": {
        phone + mark: tuple(v.split())
        for v, phones in _SAMPA_GROUPS.items()
        for phone in phones.split()
        for mark in ("", "1", ":")
    },
}
"""Phone -> its visemes in order: two for a diphthong or an affricate, which share its time."""


def viseme_segments(segments: Sequence[Segment], alphabet: str) -> list[Segment]:
    """Returns (start_s, end_s, viseme) rows for (start_s, end_s, phone) rows.

    Raises:
        ConfigError: alphabet is not a key of `ALPHABETS`, or a phone is not in it.
    """
    if alphabet not in ALPHABETS:
        raise ConfigError(f"alphabet must be one of {tuple(ALPHABETS)}, got {alphabet!r}")
    rows: list[Segment] = []
    for start, end, phone in segments:
        if phone not in ALPHABETS[alphabet]:
            raise ConfigError(f"phone {phone!r} is not in the {alphabet} table of visemes.py")
        parts = ALPHABETS[alphabet][phone]
        step = (end - start) / len(parts)
        rows += [(start + i * step, start + (i + 1) * step, v) for i, v in enumerate(parts)]
    return rows


def mouth_weights(
    segments: Sequence[Segment],
    num_frames: int,
    energy: npt.ArrayLike | None = None,
    *,
    lead_s: float = LEAD_S,
) -> Array:
    """Returns the mouth of every frame for viseme segments, at rest where there are none.

    Args:
        segments: (start_s, end_s, viseme), ordered, names from `VISEMES`; silence may be left out.
        num_frames: F at 25 fps; frame i is evaluated at (i + 0.5) / 25 s.
        energy: [F] loudness 0..1 of the voice, scales the opening; None means loudness 0.6.
        lead_s: how far the lips run ahead of the sound.

    Returns:
        [F, U] float32 in 0..1 over `FACE_UNITS`.

    Raises:
        ShapeError: energy is not [F].
    """
    loud = np.full(num_frames, 0.6) if energy is None else np.asarray(energy, dtype=np.float64)
    if loud.shape != (num_frames,):
        raise ShapeError(f"energy must be [{num_frames}], got {list(loud.shape)}")
    spoken = [(a - lead_s, b - lead_s, v) for a, b, v in segments if v != SILENCE]
    if not spoken:
        return np.zeros((num_frames, len(FACE_UNITS)), np.float32)
    time = ((np.arange(num_frames) + 0.5) / FPS)[:, None]  # [F, 1]
    start = np.array([a for a, _, _ in spoken])
    end = np.array([b for _, b, _ in spoken])
    viseme = np.array([VISEMES.index(v) for _, _, v in spoken])
    length = np.maximum(end - start, 0.02)
    middle = (start + end) / 2.0
    is_vowel = np.isin(viseme, [VISEMES.index(v) for v in _VOWELS])
    is_shut = np.isin(viseme, [VISEMES.index(v) for v in _SHUT])

    distance = np.abs(time - middle)  # [F, segments]
    strength = np.where(is_vowel, 1.0, np.where(is_shut, 1.6, 0.8))
    decay = np.where(is_vowel, 11.0, 18.0) * np.sqrt(0.09 / length)
    dominance = strength * np.exp(-decay * np.maximum(distance - length * 0.25, 0.0))
    mouth = dominance @ _TABLE[viseme] / (dominance.sum(1, keepdims=True) + 1e-6)
    mouth *= (0.72 + 0.45 * np.clip(loud, 0.0, 1.0))[:, None]
    mouth *= 1.0 - _rest(time, start, end)

    # Lips meet for at least one frame: the plateau is half a frame to each side of the middle.
    plateau = np.maximum(length * 0.25, 0.5 / FPS + 0.001)
    ramp = np.maximum(length, 0.06) * 0.75
    shut = np.clip(1.0 - (distance - plateau) / ramp, 0.0, 1.0) * is_shut
    strongest = shut.argmax(1)
    amount = shut.max(1, keepdims=True)
    mouth = mouth * (1.0 - amount) + _TABLE[viseme[strongest]] * amount
    return np.clip(mouth * MOUTH_GAIN, 0.0, 1.0).astype(np.float32)


def _rest(
    time: npt.NDArray[np.float64],
    start: npt.NDArray[np.float64],
    end: npt.NDArray[np.float64],
) -> npt.NDArray[np.float64]:
    """How far the mouth [F, 1] is in a pause: 0 in speech, 1 at rest, smooth between."""
    gap_start = np.concatenate([[-np.inf], np.maximum.accumulate(end)])
    gap_end = np.concatenate([start, [np.inf]])
    is_pause = gap_end - gap_start > _PAUSE_S
    depth = np.minimum(time - gap_start[is_pause], gap_end[is_pause] - time)
    depth = np.clip(depth / _CLOSE_S, 0.0, 1.0).max(1, keepdims=True)
    rest: npt.NDArray[np.float64] = depth * depth * (3.0 - 2.0 * depth)
    return rest


def face_weights(mouth: npt.ArrayLike, controls: npt.ArrayLike) -> Array:
    """Returns the whole face [F, U]: the mouth of speech plus the expression of the controls.

    Args:
        mouth: [F, U] over `FACE_UNITS`.
        controls: [F, K].
    """
    weights = np.array(mouth, dtype=np.float32)
    expression, _, _, _ = controls_to_weights(controls)
    if weights.shape != (len(expression), len(FACE_UNITS)):
        raise ShapeError(
            f"mouth must be [{len(expression)}, {len(FACE_UNITS)}], got {list(weights.shape)}"
        )
    columns = [FACE_UNITS.index(name) for name in EXPRESSION_UNITS]
    weights[:, columns] += expression
    return np.clip(weights, 0.0, 1.0)


def weights_of_mouth(mouth: npt.ArrayLike) -> Array:
    """Returns mouth controls [F, K] over `MOUTH_NAMES` as weights [F, U] over `FACE_UNITS`."""
    controls = np.asarray(mouth, dtype=np.float32)
    weights = np.zeros((len(controls), len(FACE_UNITS)), np.float32)
    for column, units in enumerate(_MOUTH_UNITS):
        weights[:, units] = controls[:, column, None]
    return weights


def viseme_mouth(viseme: str) -> Array:
    """Returns the mouth [K] over `MOUTH_NAMES` of a viseme held on its own."""
    row = _TABLE[VISEMES.index(viseme)] * MOUTH_GAIN
    return np.array([row[units[0]] for units in _MOUTH_UNITS], np.float32).clip(0.0, 1.0)


def mouth_of(face: FaceTrack) -> Array:
    """Returns what speech alone does to the mouth, [F, K] over `MOUTH_NAMES` in 0..1."""
    speech = face.weights - face_weights(np.zeros_like(face.weights), face.controls)
    return np.stack([speech[:, units[0]] for units in _MOUTH_UNITS], 1).clip(0.0, 1.0)


def touching(segments: Sequence[Segment], num_frames: int) -> Array:
    """Returns [F], 1 for frames in which p, b or m hold the lips together, else 0.

    Args:
        segments: (start_s, end_s, viseme), as for `mouth_weights`.
        num_frames: F at 25 fps.
    """
    time = (np.arange(num_frames) + 0.5) / FPS + LEAD_S
    shut = np.zeros(num_frames, np.float32)
    for start, end, viseme in segments:
        if viseme == "PP":
            reach = max(0.35 * (end - start), 0.5 / FPS + 0.002)
            shut[np.abs(time - (start + end) / 2) <= reach] = 1.0
    return shut


@dataclass(slots=True, kw_only=True)
class FaceTrack:
    """Labels of F frames of one face.

    Attributes:
        weights: [F, U] float32 in 0..1 over `FACE_UNITS`.
        pose: [F, 3] float32 yaw, pitch, roll in radians.
        gaze: [F, 2] float32 x to the right and y upwards in radians, relative to the head.
        breath: [F] float32 lift of the chest in decimetres.
        controls: [F, K] float32, what the expression, pose, gaze and breath were made from.
        state: [F] int8, index into `pipelines.motion.STATES`.
    """

    weights: Array
    pose: Array
    gaze: Array
    breath: Array
    controls: Array
    state: npt.NDArray[np.int8]

    def __post_init__(self) -> None:
        num_frames = len(self.state)
        want = {
            "weights": (num_frames, len(FACE_UNITS)),
            "pose": (num_frames, 3),
            "gaze": (num_frames, 2),
            "breath": (num_frames,),
            "controls": (num_frames, len(CONTROL_NAMES)),
        }
        for name, shape in want.items():
            if getattr(self, name).shape != shape:
                raise ShapeError(
                    f"{name} must be {list(shape)}, got {list(getattr(self, name).shape)}"
                )

    @classmethod
    def from_parts(
        cls, mouth: npt.ArrayLike, controls: npt.ArrayLike, state: npt.ArrayLike
    ) -> FaceTrack:
        """Builds the labels from the mouth [F, U], the controls [F, K] and the state [F]."""
        _, pose, gaze, breath = controls_to_weights(controls)
        return cls(
            weights=face_weights(mouth, controls),
            pose=pose,
            gaze=gaze,
            breath=breath,
            controls=np.asarray(controls, dtype=np.float32),
            state=np.asarray(state, dtype=np.int8),
        )

    def __len__(self) -> int:
        return len(self.state)

    def labels(self) -> Array:
        """Returns [F, U + 6] float32 of about unit scale: weights, 4 pose, 4 gaze, 20 breath."""
        parts = [self.weights, self.pose * 4.0, self.gaze * 4.0, self.breath[:, None] * 20.0]
        return np.concatenate(parts, axis=1).astype(np.float32)
