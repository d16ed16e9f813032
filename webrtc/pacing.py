"""When sound and pictures are due: one clock for both, free of I/O.

Positions are samples at 48 kHz on the output clock, which runs with the machine's monotonic clock
and never slips: RTP timestamps are made from positions, so a receiver sees true time. A caller that
comes late gets at most a few ticks at once; what lies further back is skipped, and the content
waits instead (see `webrtc.playout`). So a stall makes a gap, never a burst, and no delay stays.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from rtgen.errors import ConfigError
from rtgen.types import OUTPUT_RATE

BLOCK_SAMPLES = OUTPUT_RATE // 50
"""Samples of one packet of sound: 20 ms, what Opus is fed with."""
MAX_BEHIND = 2 * BLOCK_SAMPLES
"""Samples that are caught up with; more is skipped."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Something is due.

    Attributes:
        kind: a block of sound, or a picture.
        position: its first sample on the output clock.
        due_ns: when it was due, by the caller's clock.
    """

    kind: Literal["audio", "video"]
    position: int
    due_ns: int


class Pacer:
    """The time table of one connection.

    Args:
        start_ns: time of position 0, by any monotonic clock.

    Attributes:
        skipped: samples that were skipped because the caller came too late.
    """

    def __init__(self, start_ns: int) -> None:
        self._start_ns = start_ns
        self._audio = self._video = 0
        self._samples_per_frame: int | None = None
        self.skipped = 0

    @property
    def samples_per_frame(self) -> int | None:
        """Samples from one picture to the next; None while no picture is due."""
        return self._samples_per_frame

    def set_samples_per_frame(self, samples: int) -> None:
        """Pictures are due at multiples of `samples`, from the next block of sound on.

        Raises:
            ConfigError: not positive.
        """
        if samples < 1:
            raise ConfigError(f"a picture must last at least one sample, got {samples}")
        self._samples_per_frame = samples
        self._video = next_multiple(self._audio, samples)

    def time_ns(self, position: int) -> int:
        """When a position is due."""
        return self._start_ns + position * 10**9 // OUTPUT_RATE

    def next_ns(self) -> int:
        """When the next tick is due."""
        return self.time_ns(self._audio if self._frame_is_later() else self._video)

    def due(self, now_ns: int) -> list[Tick]:
        """Ticks that are due, in order; sound before the picture of the same position.

        Each is returned once. At most `MAX_BEHIND` samples and one block lie between the oldest
        and now.
        """
        reached = (now_ns - self._start_ns) * OUTPUT_RATE // 10**9
        if reached - self._audio > MAX_BEHIND:
            behind = self._audio
            self._audio = reached // BLOCK_SAMPLES * BLOCK_SAMPLES
            self.skipped += self._audio - behind
            if self._samples_per_frame is not None:
                self._video = next_multiple(self._audio, self._samples_per_frame)
        ticks = []
        while min(self._audio, self._next_video()) <= reached:
            if self._frame_is_later():
                ticks.append(Tick("audio", self._audio, self.time_ns(self._audio)))
                self._audio += BLOCK_SAMPLES
            else:
                assert self._samples_per_frame is not None
                ticks.append(Tick("video", self._video, self.time_ns(self._video)))
                self._video += self._samples_per_frame
        return ticks

    def _next_video(self) -> float:
        return float("inf") if self._samples_per_frame is None else self._video

    def _frame_is_later(self) -> bool:
        return self._audio <= self._next_video()


def next_multiple(position: int, step: int) -> int:
    """The smallest multiple of `step` that is not below `position`."""
    return -(-position // step) * step
