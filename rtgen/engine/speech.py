"""When the face speaks, and when turns of speech start and end, unit by unit.

Sound counts as speech by its level, not by its arrival: packets of 5 ms and of 2 s give the same
states, and a pause shorter than the hangover is part of the speech.
"""

from __future__ import annotations

import numpy as np

from rtgen.engine.audio_buffer import TakenAudio
from rtgen.types import OUTPUT_RATE, Finished, Pcm16, Started

HANGOVER_SAMPLES = OUTPUT_RATE * 3 // 10
"""Speech goes on for 300 ms after its last loud block."""
BLOCK_SAMPLES = OUTPUT_RATE // 50
SPEECH_LEVEL = 32768 * 10 ** (-50 / 20)
"""RMS of a 20 ms block above which it is speech: 50 dB below full scale."""


def last_speech(pcm: Pcm16) -> int | None:
    """End of the last loud block of 20 ms as an offset into `pcm`, None if all is quiet."""
    loud = None
    for start in range(0, len(pcm), BLOCK_SAMPLES):
        block = pcm[start : start + BLOCK_SAMPLES].astype(np.float64)
        if np.sqrt(np.mean(block**2)) > SPEECH_LEVEL:
            loud = start + len(block)
    return loud


class SpeechTracker:
    """Follows the sound of one session. Positions are samples of media time."""

    def __init__(self) -> None:
        self._loud_end: int | None = None
        self._pushed_end = 0

    def is_starved(self, start: int) -> bool:
        """Whether nothing was pushed for longer than the hangover before sample `start`."""
        return start - self._pushed_end >= HANGOVER_SAMPLES

    def follow(
        self, start: int, taken: TakenAudio, generation: int
    ) -> tuple[bool, list[Started | Finished]]:
        """Takes note of the next unit.

        Args:
            start: its first sample.
            taken: its sound.
            generation: put into the events.

        Returns:
            Whether the face speaks in this unit, and the turns that start or end in it.
        """
        speaking = self._loud_end is not None and start - self._loud_end < HANGOVER_SAMPLES
        loud = last_speech(taken.pcm[: taken.pushed])
        if loud is not None:
            speaking, self._loud_end = True, start + loud
        marks: list[tuple[int, int, Started | Finished]] = []
        for offset in taken.ends:
            # At offset 0 the turn's sound lay before this unit, perhaps long before.
            end = start + offset if offset else self._pushed_end
            event = Finished(generation=generation, position_s=end / OUTPUT_RATE, interrupted=False)
            marks.append((offset, 0, event))
        for offset in taken.starts:
            position_s = (start + offset) / OUTPUT_RATE
            marks.append((offset, 1, Started(generation=generation, position_s=position_s)))
        if taken.pushed:
            self._pushed_end = start + taken.pushed
        return speaking, [event for _, _, event in sorted(marks, key=lambda mark: mark[:2])]

    def interrupt(self, position: int) -> None:
        """Forgets speech: from sample `position` on there is none."""
        self._loud_end = None
        self._pushed_end = min(self._pushed_end, position)
