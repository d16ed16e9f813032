"""Joining sound and silence without clicks.

Free of clocks. Where sound stops, the last sample given out fades to zero; where it starts again,
it fades in. Nothing of what was cut off is given out. Between, samples are passed unchanged.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from rtgen.types import OUTPUT_RATE, Pcm16

FADE_SAMPLES = OUTPUT_RATE // 200
"""5 ms."""
_FALL = 0.5 + 0.5 * np.cos(np.pi * (np.arange(FADE_SAMPLES) + 0.5) / FADE_SAMPLES)


class Joiner:
    """One stream of samples, given out piece by piece.

    Attributes:
        gaps: stretches of silence within the sound that were not expected.
        gap_samples: their samples.
    """

    def __init__(self) -> None:
        self.gaps = self.gap_samples = 0
        self._last = 0
        self._is_silent = True
        self._is_expected = True  # before the first sound nothing is missing
        self._fall: npt.NDArray[np.float64] = np.zeros(0)
        self._rise: npt.NDArray[np.float64] = np.zeros(0)
        self._has_played = False

    def expect_silence(self) -> None:
        """The silence that follows is wanted: it is no gap."""
        self._is_expected = True

    def silence(self, count: int) -> Pcm16:
        """`count` samples in which there is no sound."""
        if not self._is_silent:
            self._is_silent = True
            self._fall = self._last * _FALL
            if not self._is_expected:
                self.gaps += 1
        if not self._is_expected:
            self.gap_samples += count
        pcm = np.zeros(count, np.int16)
        used = self._fall[:count]
        pcm[: len(used)] = np.rint(used)
        self._fall = self._fall[count:]
        return pcm

    def sound(self, samples: Pcm16) -> Pcm16:
        """Samples that follow, int16 [n]; a copy."""
        if self._is_silent:
            self._rise = _FALL[::-1] if self._has_played else np.zeros(0)
            self._is_silent = self._is_expected = False
            self._has_played = True
        pcm = samples.copy()
        used = self._rise[: len(pcm)]
        if len(used):
            pcm[: len(used)] = np.rint(pcm[: len(used)] * used)
            self._rise = self._rise[len(used) :]
        if len(pcm):
            self._last = int(pcm[-1])
        return pcm
