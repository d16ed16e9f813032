"""Speech out of an endless microphone; free of I/O.

Only speech is passed on: the pauses between are where a backlog drains, so neither a clock that
differs nor a stall makes the mouth lag more and more. What is passed on starts a little before the
level rose, and is held until a whole unit is there, because a live unit takes what has come.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

import numpy as np

from rtgen.errors import ConfigError
from rtgen.types import Pcm16

FULL_SCALE = 32768.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GateConfig:
    """When a microphone is passed on; levels are RMS in dB of full scale, times seconds.

    Attributes:
        open_db: a block above it starts speech.
        close_db: blocks below it end speech, after `hang_s`.
        hang_s: for which speech goes on when it is quiet.
        lead_in_s: passed on from before the start.
        hold_s: collected at a start before anything is passed on.
    """

    open_db: float = -42.0
    close_db: float = -48.0
    hang_s: float = 0.5
    lead_in_s: float = 0.1
    hold_s: float = 0.2

    def __post_init__(self) -> None:
        if self.close_db > self.open_db:
            raise ConfigError(
                f"close_db must not exceed open_db, got {self.close_db} and {self.open_db}"
            )
        if min(self.hang_s, self.lead_in_s, self.hold_s) < 0 or self.hold_s < self.lead_in_s:
            raise ConfigError("times must not be negative, and hold_s not below lead_in_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gated:
    """What comes out of the gate for one block.

    Attributes:
        pcm: speech to pass on, int16 [samples]; empty for none.
        is_end: whether the utterance ends behind it.
    """

    pcm: Pcm16
    is_end: bool = False


class MicrophoneGate:
    """One microphone.

    Attributes:
        level_db: of the last block, dB of full scale; None before the first.
        is_open: whether there is speech.
    """

    def __init__(self, config: GateConfig | None = None) -> None:
        self._config = GateConfig() if config is None else config
        self._held: deque[Pcm16] = deque()
        self._held_s = 0.0
        self._quiet_s = 0.0
        self._is_passing = False
        self.level_db: float | None = None
        self.is_open = False

    def push(self, pcm: Pcm16, sample_rate: int) -> Gated:
        """Takes a block, int16 [samples], usually 20 ms."""
        config, seconds = self._config, len(pcm) / sample_rate
        self.level_db = level_db(pcm)
        self._held.append(pcm)
        self._held_s += seconds
        if self.level_db >= config.open_db:
            self.is_open = True
        self._quiet_s = 0.0 if self.level_db >= config.close_db else self._quiet_s + seconds
        if not self.is_open:
            while self._held and self._held_s - len(self._held[0]) / sample_rate >= (
                config.lead_in_s
            ):
                self._held_s -= len(self._held.popleft()) / sample_rate
            return Gated(pcm=pcm[:0])
        is_end = self._quiet_s >= config.hang_s
        if not (self._is_passing or is_end or self._held_s >= config.hold_s):
            return Gated(pcm=pcm[:0])
        out = np.concatenate(self._held)
        self._held.clear()
        self._held_s = 0.0
        self.is_open = self._is_passing = not is_end
        return Gated(pcm=out, is_end=is_end)

    def reset(self) -> None:
        """Forgets what was held; the next block starts anew."""
        self._held.clear()
        self._held_s = self._quiet_s = 0.0
        self.is_open = self._is_passing = False
        self.level_db = None


def level_db(pcm: Pcm16) -> float:
    """RMS in dB of full scale, at least -96."""
    if not len(pcm):
        return -96.0
    rms = math.sqrt(float(np.mean(pcm.astype(np.float64) ** 2))) / FULL_SCALE
    return max(20 * math.log10(rms), -96.0) if rms > 0 else -96.0
