"""Units made by hand."""

from __future__ import annotations

from fractions import Fraction

import numpy as np

from rtgen.types import OUTPUT_RATE, SpeechState, Unit


def unit(
    index: int, *, generation: int = 0, step: int = 1920, frames: int = 4, size: int = 2
) -> Unit:
    """A unit whose every sample and picture tells where it comes from.

    Sound: noise of its own. Picture f: all pixels are `4 * index + f`, modulo 256.
    """
    rng = np.random.default_rng((index, generation))
    pictures = np.zeros((frames, size, size, 3), np.uint8)
    for number in range(frames):
        pictures[number] = (4 * index + number) % 256
    return Unit(
        session="s",
        generation=generation,
        index=index,
        media_time=Fraction(index * frames * step, OUTPUT_RATE),
        frames=pictures,
        audio=rng.integers(1, 20000, frames * step).astype(np.int16),
        state=SpeechState.IDLE,
    )
