"""Loudness of a voice per pixel frame, streamed: what drives nods and brows of a speaking face."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipelines.motion import FPS
from rtgen.errors import ShapeError

__all__ = ["EnergyState", "SpeechEnergy"]

Array = npt.NDArray[np.float32]

SAMPLE_RATE = 16000
SAMPLES_PER_FRAME = SAMPLE_RATE // FPS


@dataclass(slots=True, kw_only=True)
class EnergyState:
    """Everything a `SpeechEnergy` carries: level of loud speech and of the room, as RMS."""

    level: float = 0.1
    floor: float = 0.002


class SpeechEnergy:
    """Streaming loudness of speech per frame, 0..1.3, by its own slow level; 0 for room noise.

    The level rises towards loud frames in about 0.15 s and falls in 6 s, only while there is
    speech. The floor follows the quietest frames at once and rises by 3 dB a second; speech dips
    often enough to hold it down, a steady noise lets it up.
    """

    def __init__(self) -> None:
        self._state = EnergyState()

    def snapshot(self) -> EnergyState:
        """Returns an independent copy of the state, to be given to `restore`."""
        return copy.copy(self._state)

    def restore(self, state: EnergyState) -> None:
        """Continues from `state` (copied)."""
        self._state = copy.copy(state)

    def push(self, pcm: npt.ArrayLike) -> Array:
        """Returns the energy of each frame of `pcm`.

        Args:
            pcm: [F * 640] float samples at 16 kHz in -1..1.

        Returns:
            [F] float32 in 0..1.3.

        Raises:
            ShapeError: pcm is not a whole number of frames.
        """
        samples = np.asarray(pcm, dtype=np.float64)
        if samples.ndim != 1 or samples.size % SAMPLES_PER_FRAME:
            raise ShapeError(
                f"pcm must be one row of whole frames of {SAMPLES_PER_FRAME} samples, "
                f"got {list(samples.shape)}"
            )
        s = self._state
        rms = np.sqrt((samples.reshape(-1, SAMPLES_PER_FRAME) ** 2).mean(1))
        out = np.zeros(len(rms), np.float32)
        for i, value in enumerate(rms.tolist()):
            s.floor = min(max(min(value, s.floor * 10 ** (0.15 / FPS)), 0.001), 0.1)
            gate = min(max(value / s.floor / 2.0 - 1.0, 0.0), 1.0)
            if gate > 0.0:
                rate = 0.25 if value > s.level else 1.0 / (6.0 * FPS)
                s.level = max(s.level + rate * (value - s.level), 0.01)
            out[i] = min(gate * value / s.level, 1.3)
        return out
