"""What is heard and seen at each position of the output clock: units, sample for sample.

Sound is the master. A unit is placed when a block of sound first reaches it: right behind the one
before, or, after a gap, at the next position of a picture. Its pictures follow the placement, so
sound and picture of one media time always carry one position. Where no unit is there in time, there
is silence and the last picture again, and what comes later is played later, whole. The same holds
when the clock skipped a stretch: what lay there is played behind it.

Free of I/O and clocks: positions come in, blocks and pictures go out. The queue is bounded by the
service's credits (`lead` units); `MAX_UNITS` is where that contract is broken.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace
from fractions import Fraction

import numpy as np

from rtgen.errors import ConfigError, StreamClosed
from rtgen.types import OUTPUT_RATE, Pcm16, Pixels, Unit
from webrtc.joins import Joiner
from webrtc.pacing import BLOCK_SAMPLES, next_multiple

MAX_UNITS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """20 ms of sound.

    Attributes:
        position: of its first sample.
        pcm: int16 [BLOCK_SAMPLES].
        generation: of the playout when it was cut.
        started: units whose first sample lies in it: now they are on the screen.
    """

    position: int
    pcm: Pcm16
    generation: int
    started: tuple[Unit, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """One frame to be shown.

    Attributes:
        position: when.
        rgb: uint8 [H, W, 3].
        media_time: exact seconds of the session's media time.
        generation: of the unit that it belongs to.
        is_repeat: whether no unit was there, and the last picture is shown again.
    """

    position: int
    rgb: Pixels
    media_time: Fraction
    generation: int
    is_repeat: bool


@dataclass(frozen=True, slots=True)
class _Placed:
    unit: Unit
    start: int

    @property
    def end(self) -> int:
        return self.start + len(self.unit.audio)

    @property
    def samples_per_frame(self) -> int:
        return len(self.unit.audio) // len(self.unit.frames)


class Playout:
    """The playout of one session.

    Attributes:
        generation: units of an older one are dropped.
        samples_per_frame: of the units; None before the first.
        dropped_units: units that came too late for their generation, or were interrupted.
    """

    def __init__(self) -> None:
        self.generation = 0
        self.samples_per_frame: int | None = None
        self.dropped_units = 0
        self._waiting: deque[Unit] = deque()
        self._placed: deque[_Placed] = deque()
        self._joiner = Joiner()
        self._cursor = 0  # end of the sound given out
        self._resume = 0  # sound before it was given out, or lies in a skipped stretch
        self._shown: Picture | None = None
        self._media_end = Fraction(0)

    @property
    def queued_units(self) -> int:
        """Units that wait to be played."""
        return len(self._waiting)

    @property
    def gaps(self) -> int:
        """Stretches of silence because no unit was there in time."""
        return self._joiner.gaps

    @property
    def gap_s(self) -> float:
        """Seconds of silence because no unit was there in time."""
        return self._joiner.gap_samples / OUTPUT_RATE

    @property
    def media_end(self) -> Fraction:
        """Media time up to which sound was given out, in seconds."""
        return self._media_end

    def put(self, unit: Unit) -> bool:
        """Adds a unit behind the others.

        Returns:
            Whether it will be played: False for one of an older generation.

        Raises:
            ConfigError: its sound is no whole number of samples per frame.
            StreamClosed: more units than a service may make ahead.
        """
        if unit.generation < self.generation:
            self.dropped_units += 1
            return False
        samples_per_frame, rest = divmod(len(unit.audio), len(unit.frames))
        if rest:
            raise ConfigError(
                f"{len(unit.audio)} samples do not divide into {len(unit.frames)} pictures"
            )
        if len(self._waiting) >= MAX_UNITS:
            raise StreamClosed(f"{MAX_UNITS} units wait already; the service ignores its credits")
        self.samples_per_frame = samples_per_frame
        self._waiting.append(unit)
        return True

    def interrupt(self) -> int:
        """Drops everything that was not given out, and returns the new generation."""
        self.generation += 1
        self.dropped_units += len(self._waiting)
        self._waiting.clear()
        self._drop_placed()
        return self.generation

    def rebase(self) -> None:
        """The output clock starts anew at 0; a unit that was being played is not taken up again."""
        self._drop_placed()
        self._cursor = 0

    def audio(self, position: int) -> Block:
        """The sound of [position, position + BLOCK_SAMPLES); positions ascend."""
        self._follow_clock(position)
        end = position + BLOCK_SAMPLES
        self._place(position, end)
        pieces: list[Pcm16] = []
        started: list[Unit] = []
        reached = position
        for placed in self._placed:
            first, last = max(placed.start, position, self._resume), min(placed.end, end)
            if first >= last:
                continue
            if first > reached:
                pieces.append(self._joiner.silence(first - reached))
            samples = placed.unit.audio[first - placed.start : last - placed.start]
            pieces.append(self._joiner.sound(samples))
            reached = last
            self._media_end = placed.unit.media_time + Fraction(last - placed.start, OUTPUT_RATE)
            if first == placed.start:
                started.append(placed.unit)
        if reached < end:
            pieces.append(self._joiner.silence(end - reached))
        self._cursor = end
        return Block(
            position=position,
            pcm=np.concatenate(pieces),
            generation=self.generation,
            started=tuple(started),
        )

    def video(self, position: int) -> Picture | None:
        """The picture of a position; the sound that holds it was asked for before.

        Returns:
            None before the first unit.
        """
        while self._placed and self._placed[0].end <= position:
            self._placed.popleft()
        if self._placed and max(self._placed[0].start, self._resume) <= position:
            placed = self._placed[0]
            unit, step = placed.unit, placed.samples_per_frame
            index = (position - placed.start) // step
            self._shown = Picture(
                position=position,
                rgb=unit.frames[index],
                media_time=unit.media_time + Fraction(index * step, OUTPUT_RATE),
                generation=unit.generation,
                is_repeat=False,
            )
        elif self._shown is not None:
            self._shown = replace(self._shown, position=position, is_repeat=True)
        return self._shown

    def _follow_clock(self, position: int) -> None:
        """Moves what was not given out behind a stretch that the clock skipped.

        By whole pictures, so that positions of pictures stay; the rest of a step is silence.
        """
        given = max(self._cursor, self._resume)
        current = next((p for p in self._placed if p.end > given), None)
        if position > given and current is not None:
            shift = next_multiple(position - given, current.samples_per_frame)
            self._resume = given + shift
            self._placed = deque(
                _Placed(p.unit, p.start + shift) for p in self._placed if p.end > given
            )
        self._cursor = max(self._cursor, position)

    def _place(self, position: int, end: int) -> None:
        while self._waiting:
            edge = self._placed[-1].end if self._placed else -1
            unit = self._waiting[0]
            step = len(unit.audio) // len(unit.frames)
            start = edge if edge >= position else next_multiple(position, step)
            if start >= end:
                return
            self._placed.append(_Placed(self._waiting.popleft(), start))

    def _drop_placed(self) -> None:
        self._placed.clear()
        self._resume = 0
        self._joiner.expect_silence()
