"""Slow, obvious versions of pacing and playout: one sample, one tick at a time."""

from __future__ import annotations

from collections import deque

import numpy as np

from rtgen.types import Pcm16, Unit
from webrtc.joins import FADE_SAMPLES
from webrtc.pacing import BLOCK_SAMPLES, MAX_BEHIND

FALL = [0.5 + 0.5 * np.cos(np.pi * (n + 0.5) / FADE_SAMPLES) for n in range(FADE_SAMPLES)]


class SlowPacer:
    """Walks over every position of a finite stretch."""

    def __init__(self, step: int | None) -> None:
        self.step = step
        self.walked = 0

    def due(self, reached: int) -> list[tuple[str, int]]:
        pending = [
            (kind, position)
            for position in range(self.walked, reached + 1)
            for kind, step in (("audio", BLOCK_SAMPLES), ("video", self.step))
            if step and position % step == 0
        ]
        self.walked = max(self.walked, reached + 1)
        oldest = min((p for kind, p in pending if kind == "audio"), default=reached)
        if reached - oldest > MAX_BEHIND:
            first = reached // BLOCK_SAMPLES * BLOCK_SAMPLES
            pending = [tick for tick in pending if tick[1] >= first]
        return pending


class SlowPlayout:
    """Gives out sample after sample; pictures are looked up by the sample they start with."""

    def __init__(self) -> None:
        self.generation = 0
        self.waiting: deque[Unit] = deque()
        self.now: Unit | None = None
        self.index = 0  # next sample of `now`
        self.not_before = self.cursor = 0
        self.end = -1  # behind the last unit
        self.came_from: dict[int, tuple[Unit, int]] = {}
        self.last = self.quiet = self.loud = 0
        self.has_played = False
        self.is_silent = True
        self.shown: int | None = None

    def put(self, unit: Unit) -> None:
        if unit.generation >= self.generation:
            self.waiting.append(unit)

    def interrupt(self) -> None:
        self.generation += 1
        self.waiting.clear()
        self.now, self.end, self.not_before = None, -1, 0

    def audio(self, position: int) -> tuple[Pcm16, list[int]]:
        """The block, and indices of the units that start in it."""
        given = max(self.cursor, self.not_before)
        if position > given and self.now is not None:
            step = len(self.now.audio) // len(self.now.frames)
            self.not_before = given + -(-(position - given) // step) * step
        self.cursor = position + BLOCK_SAMPLES
        out: list[int] = []
        started: list[int] = []
        for at in range(position, position + BLOCK_SAMPLES):
            if self.now is None and self.waiting:
                first = self.waiting[0]
                step = len(first.audio) // len(first.frames)
                if at % step == 0 or at == self.end:
                    self.now, self.index, self.not_before = self.waiting.popleft(), 0, at
                    started.append(self.now.index)
            if self.now is not None and at >= self.not_before:
                self.came_from[at] = (self.now, self.index)
                out.append(self._loud(int(self.now.audio[self.index])))
                self.index += 1
                if self.index == len(self.now.audio):
                    self.now, self.end = None, at + 1
            else:
                out.append(self._quiet())
        return np.array(out, np.int16), started

    def video(self, position: int) -> int | None:
        """Value of the picture's pixels."""
        if position in self.came_from:
            unit, index = self.came_from[position]
            if unit.generation >= self.generation or self.shown is None:
                step = len(unit.audio) // len(unit.frames)
                self.shown = int(unit.frames[index // step, 0, 0, 0])
        return self.shown

    def _loud(self, sample: int) -> int:
        if self.is_silent:
            self.is_silent, self.loud = False, 0 if self.has_played else FADE_SAMPLES
            self.has_played = True
        if self.loud < FADE_SAMPLES:
            sample = round(sample * FALL[FADE_SAMPLES - 1 - self.loud])
        self.loud += 1
        self.last = sample
        return sample

    def _quiet(self) -> int:
        if not self.is_silent:
            self.is_silent, self.quiet = True, 0
        self.quiet += 1
        return round(self.last * FALL[self.quiet - 1]) if self.quiet <= FADE_SAMPLES else 0
