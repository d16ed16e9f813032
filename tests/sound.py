"""Test sounds."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from rtgen.types import OUTPUT_RATE, Pcm16


def tone(seconds: float, rate: int = OUTPUT_RATE, hz: float = 220.0) -> Pcm16:
    """A loud vibrating tone, int16 [samples]."""
    t = np.arange(round(seconds * rate)) / rate
    wave = 0.4 * np.sin(2 * np.pi * hz * t) * (0.6 + 0.4 * np.sin(2 * np.pi * 3.0 * t))
    return np.asarray(np.rint(wave * 32767), dtype=np.int16)


def silence(seconds: float, rate: int = OUTPUT_RATE) -> Pcm16:
    """Zeros, int16 [samples]."""
    return np.zeros(round(seconds * rate), np.int16)


def blocks(pcm: Pcm16, size: int) -> Iterator[Pcm16]:
    """A recording in blocks of `size` samples."""
    for start in range(0, pcm.shape[-1], size):
        yield pcm[..., start : start + size]
