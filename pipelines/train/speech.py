"""Offline synthesizers whose phones come with times: espeak-ng, festival and flite.

They are programs of the host, needed to make training data only, and run once per sentence, so
that speech is a pure function of text, voice, rate and pitch. Each reports its phones a little
early or late against its own sound; `_LABEL_SHIFT_S` aligns them to espeak-ng, as measured by the
correlation of the jaw with the loudness.
"""

from __future__ import annotations

import ctypes
import itertools
import json
import shutil
import subprocess
import sys
import tempfile
import wave
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.signal import resample_poly

from pipelines.train import espeak
from pipelines.train.visemes import ALPHABETS, Segment
from rtgen.errors import BackendUnavailable, ConfigError

__all__ = [
    "SAMPLE_RATE",
    "TEST_VOICES",
    "TRAIN_VOICES",
    "Speech",
    "has_pitch",
    "is_available",
    "sample_voice",
    "synthesize",
]

SAMPLE_RATE = 16000
_PEAK = 0.6
_TIMEOUT_S = 60.0

# Voice -> share of the training speech. A voice is "program:variant".
TRAIN_VOICES: dict[str, float] = {
    **dict.fromkeys(
        (
            "espeak:en-us", "espeak:en", "espeak:en-us+m1", "espeak:en-us+m2", "espeak:en-us+m3",
            "espeak:en-us+m5", "espeak:en-us+m7", "espeak:en+m4", "espeak:en-us+f1",
            "espeak:en-us+f2", "espeak:en-us+f3", "espeak:en-us+f4", "espeak:en-us+f5",
            "espeak:en+f2", "espeak:en-us+Andy", "espeak:en-us+linda", "espeak:en-us+steph",
            "espeak:en+david", "espeak:en-us+klatt2", "espeak:en-us+klatt4",
        ),
        0.44 / 20,
    ),
    "flite:rms": 0.07,
    "flite:slt": 0.07,
    "festival:slt": 0.04,
    "festival:kal": 0.03,
    "festival:ked": 0.06,
    "festival:ona": 0.07,
    "festival:lp": 0.05,
    "festival:pc": 0.05,
    "festival:lj": 0.03,
    "festival:mv": 0.03,
    "festival:dita": 0.03,
    "festival:machac": 0.03,
}  # fmt: skip
"""The recorded voices of other languages read English letters their own way: the phones are what
was said, so for lips they are speech like any other, of speakers that English offers too few of."""
TEST_VOICES: dict[str, float] = {"espeak:en-us+m6": 0.5, "flite:awb": 0.5}
_LABEL_SHIFT_S = {
    "espeak": 0.0, "festival:slt": 0.036, "festival:kal": 0.024, "festival:ked": 0.020,
    "festival:ona": 0.010, "festival:lp": 0.010, "festival:pc": 0.010, "festival:lj": 0.030,
    "festival:mv": 0.020, "festival:dita": 0.015, "festival:machac": 0.015, "flite:rms": 0.032,
    "flite:slt": 0.038, "flite:awb": 0.019,
}  # fmt: skip
# Voice -> its command and the alphabet of its phones.
_FESTIVAL_VOICES = {
    "slt": ("voice_cmu_us_slt_arctic_hts", "arpabet"),
    "kal": ("voice_kal_diphone", "arpabet"),
    "ked": ("voice_ked_diphone", "arpabet"),
    "ona": ("voice_upc_ca_ona_hts", "sampa"),
    "lp": ("voice_lp_diphone", "sampa"),
    "pc": ("voice_pc_diphone", "sampa"),
    "lj": ("voice_suo_fi_lj_diphone", "sampa"),
    "mv": ("voice_hy_fi_mv_diphone", "sampa"),
    "dita": ("voice_czech_dita", "sampa"),
    "machac": ("voice_czech_machac", "sampa"),
}
_STEERED = ("kal", "ked")  # festival voices with a rate and a pitch of their own
_FLITE_PITCH_HZ = {"rms": 95.0, "slt": 175.0, "awb": 115.0, "kal": 100.0}
_INSTALL = "`make system-packages` installs what the voices need"


@dataclass(frozen=True, slots=True, kw_only=True)
class Speech:
    """One spoken text.

    Attributes:
        samples: [N] float32 at 16 kHz, peak 0.6, silence at the end cut off.
        segments: (start_s, end_s, phone) in order; pauses may be missing.
        alphabet: key of `visemes.ALPHABETS` that the phones belong to.
    """

    samples: npt.NDArray[np.float32]
    segments: tuple[Segment, ...]
    alphabet: str


def sample_voice(rng: np.random.Generator, *, held_out: bool) -> str:
    """Returns a voice: of `TEST_VOICES` if `held_out`, else of `TRAIN_VOICES`, by their shares."""
    voices = TEST_VOICES if held_out else TRAIN_VOICES
    shares = np.array(list(voices.values()))
    return list(voices)[rng.choice(len(voices), p=shares / shares.sum())]


def has_pitch(voice: str) -> bool:
    """Tells whether `synthesize` can change a voice's pitch apart from its rate."""
    program, _, variant = voice.partition(":")
    return program != "festival" or variant in _STEERED


def is_available(program: str) -> bool:
    """Tells whether a synthesizer ("espeak", "festival" or "flite") can be used on this host."""
    if program == "espeak":
        try:
            ctypes.CDLL(espeak.LIBRARY)
        except OSError:
            return False
        return True
    return shutil.which(program) is not None


def synthesize(text: str, voice: str, *, rate: float = 1.0, pitch: float = 1.0) -> Speech:
    """Returns `text` spoken by `voice`.

    Args:
        text: one or a few English sentences.
        voice: "program:variant" as in `TRAIN_VOICES` and `TEST_VOICES`.
        rate: speed against the voice's own, 0.6..1.6.
        pitch: pitch against the voice's own, 0.6..1.6. Of festival's voices only `kal` and `ked`
            have a pitch control; for the others rate and pitch change together through
            resampling and `pitch` must stay 1 (`has_pitch`).

    Raises:
        BackendUnavailable: the program or its voice is missing.
        ConfigError: an argument is out of range or the voice unknown.
    """
    if not (0.6 <= rate <= 1.6 and 0.6 <= pitch <= 1.6):
        raise ConfigError(f"rate and pitch must lie in 0.6..1.6, got {rate} and {pitch}")
    program, _, variant = voice.partition(":")
    if program == "espeak":
        samples, sample_rate, segments = _espeak(text, variant, rate, pitch)
        alphabet = "ipa"
    elif program == "festival" and variant in _FESTIVAL_VOICES:
        samples, sample_rate, segments = _festival(text, variant, rate, pitch)
        alphabet = _FESTIVAL_VOICES[variant][1]
    elif program == "flite" and variant in _FLITE_PITCH_HZ:
        samples, sample_rate, segments = _flite(text, variant, rate, pitch)
        alphabet = "arpabet"
    else:
        known = (*TRAIN_VOICES, *TEST_VOICES)
        raise ConfigError(f"unknown voice {voice!r}; known are {known}")
    shift = _LABEL_SHIFT_S[program if program in _LABEL_SHIFT_S else voice]
    if len(samples) == 0:
        raise BackendUnavailable(f"{voice} returned no sound for {text!r}; check its installation")
    divisor = np.gcd(SAMPLE_RATE, sample_rate)
    wave_16k = resample_poly(samples, SAMPLE_RATE // divisor, sample_rate // divisor)
    wave_16k = wave_16k / (np.abs(wave_16k).max() + 1e-6) * _PEAK
    loud = np.nonzero(np.abs(wave_16k) > 0.004)[0]
    wave_16k = wave_16k[: loud[-1] + 400] if len(loud) else wave_16k[:400]
    duration = len(wave_16k) / SAMPLE_RATE
    shifted = tuple(
        (max(a + shift, 0.0), min(b + shift, duration), phone)
        for a, b, phone in segments
        if a + shift < duration and b + shift > 0.0
    )
    return Speech(samples=wave_16k.astype(np.float32), segments=shifted, alphabet=alphabet)


def _espeak(
    text: str, variant: str, rate: float, pitch: float
) -> tuple[npt.NDArray[np.float64], int, list[Segment]]:
    """Runs espeak-ng in a process of its own; returns samples in -1..1, their rate, phones."""
    words_per_minute, height = round(160 * rate), min(round(50 + 70 * np.log2(pitch)), 99)
    command = [sys.executable, "-I", "-S", espeak.__file__, variant, str(words_per_minute)]
    header, _, sound = _run([*command, str(height)], text.encode()).partition(b"\n")
    result = json.loads(header)
    sample_rate = int(result["sample_rate"])
    segments: list[Segment] = []
    for (start, name), (end, _) in itertools.pairwise(result["phones"]):
        # "aɪ" or "tʃ" come as one event: its parts share the time, marks are not phones.
        parts = [c for c in name if c in ALPHABETS["ipa"]]
        edges = np.linspace(start, end, len(parts) + 1) / sample_rate
        segments += [(float(edges[i]), float(edges[i + 1]), c) for i, c in enumerate(parts)]
    return np.frombuffer(sound, np.int16) / 32768.0, sample_rate, segments


def _run(command: list[str], text: bytes = b"") -> bytes:
    """Returns the standard output of a synthesizer that is given `text`."""
    try:
        done = subprocess.run(
            command, input=text, check=True, capture_output=True, timeout=_TIMEOUT_S
        )
    except FileNotFoundError as error:
        raise BackendUnavailable(f"{command[0]} is needed; install the package of it") from error
    except subprocess.CalledProcessError as error:
        detail = error.stderr.decode("utf-8", "replace").strip()
        raise BackendUnavailable(f"{' '.join(command)} failed: {detail}; {_INSTALL}") from error
    except subprocess.TimeoutExpired as error:
        raise BackendUnavailable(f"{command[0]} took more than {_TIMEOUT_S} s") from error
    return done.stdout


def _read_wave(path: Path, program: str) -> tuple[npt.NDArray[np.float64], int]:
    if not path.exists():
        raise BackendUnavailable(f"{program} wrote no sound; check that its voice is installed")
    with wave.open(str(path)) as file:
        data = np.frombuffer(file.readframes(file.getnframes()), np.int16)
        return data / 32768.0, file.getframerate()


def _ends_to_segments(lines: Sequence[tuple[float, str]], scale: float) -> list[Segment]:
    """Turns (end_s, phone) rows into segments, times multiplied by `scale`."""
    starts = [0.0, *(end for end, _ in lines)]
    return [(starts[i] * scale, end * scale, phone) for i, (end, phone) in enumerate(lines)]


def _festival(
    text: str, variant: str, rate: float, pitch: float
) -> tuple[npt.NDArray[np.float64], int, list[Segment]]:
    """Runs festival; speed by duration for the steered voices, by resampling for the others."""
    is_steered = variant in _STEERED
    if pitch != 1.0 and not is_steered:
        raise ConfigError(f"festival:{variant} has no pitch control; pitch must be 1, got {pitch}")
    with tempfile.TemporaryDirectory() as folder:
        script, sound, phones = (Path(folder) / n for n in ("say.scm", "say.wav", "say.seg"))
        quoted = text.replace("\\", " ").replace('"', " ")
        stretch = 1.0 / rate if is_steered else 1.0
        script.write_text(
            f"({_FESTIVAL_VOICES[variant][0]})\n(Parameter.set 'Duration_Stretch {stretch:.3f})\n"
            + (
                f"(set! int_lr_params '((target_f0_mean {105 * pitch:.0f}) (target_f0_std 14) "
                "(model_f0_mean 170) (model_f0_std 34)))\n"
                if is_steered
                else ""
            )
            + f'(set! spoken (utt.synth (Utterance Text "{quoted}")))\n'
            f'(utt.save.wave spoken "{sound}" \'riff)\n(utt.save.segs spoken "{phones}")\n'
        )
        _run(["festival", "-b", str(script)])
        samples, sample_rate = _read_wave(sound, "festival")
        rows = [line.split() for line in phones.read_text().splitlines()]
    lines = [(float(row[0]), row[2]) for row in rows if len(row) == 3]
    if is_steered:
        return samples, sample_rate, _ends_to_segments(lines, 1.0)
    # Played faster or slower: 100 Hz steps keep the resampling ratio small.
    played_rate = round(sample_rate * rate / 100) * 100
    return samples, played_rate, _ends_to_segments(lines, sample_rate / played_rate)


def _flite(
    text: str, variant: str, rate: float, pitch: float
) -> tuple[npt.NDArray[np.float64], int, list[Segment]]:
    """Runs flite, whose `-psdur` prints phone:end pairs."""
    with tempfile.TemporaryDirectory() as folder:
        sound = Path(folder) / "say.wav"
        output = _run(
            [
                "flite", "-voice", variant, "-psdur",
                "--setf", f"duration_stretch={1.0 / rate:.3f}",
                "--setf", f"int_f0_target_mean={_FLITE_PITCH_HZ[variant] * pitch:.1f}",
                "-t", text, "-o", str(sound),
            ]
        )  # fmt: skip
        samples, sample_rate = _read_wave(sound, "flite")
    pairs = [token.rsplit(":", 1) for token in output.decode().split()]
    return samples, sample_rate, _ends_to_segments([(float(end), p) for p, end in pairs], 1.0)
