"""Speech that waits to be played: pushed at any rate, taken in units of exact length.

Everything is kept once, as int16 at `OUTPUT_RATE`. The model's copy is filtered and decimated from
the same samples when a unit is taken, so picture and sound cannot drift apart, and neither depends
on the sizes of the blocks that were pushed.
"""

from __future__ import annotations

import functools
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from rtgen.errors import MediaError
from rtgen.types import OUTPUT_RATE, Pcm16, UnitFormat

if TYPE_CHECKING:
    import av
    from av.audio.resampler import AudioResampler

FILTER_REACH = 96
"""Samples at `OUTPUT_RATE` that the decimation filter reads on either side (2 ms)."""
FADE_SAMPLES = OUTPUT_RATE // 200
"""Length of the fade over the cut of an interrupt (5 ms)."""


_SCALE = 2.0**22


@functools.cache
def decimation_filter(factor: int) -> npt.NDArray[np.float64]:
    """A low-pass of 2 * FILTER_REACH + 1 taps for taking every `factor`-th sample.

    A Kaiser window of beta 6.5 (about 65 dB) on the ideal low-pass; for factor 3 it is flat to
    7.3 kHz and shut at 8.4 kHz. The taps are whole multiples of 2**-22 and sum to 1, so sums of
    products with int16 are exact in float64: the same bits in any order of summation.
    """
    taps = np.arange(-FILTER_REACH, FILTER_REACH + 1)
    cutoff = 0.98 / factor
    kernel = np.sinc(cutoff * taps) * np.kaiser(len(taps), 6.5)
    whole = np.rint(kernel / kernel.sum() * _SCALE)
    whole[FILTER_REACH] += _SCALE - whole.sum()
    return whole / _SCALE


def decimate(window: Pcm16, factor: int) -> npt.NDArray[np.float32]:
    """The model's copy of a stretch of sound.

    Args:
        window: int16 [FILTER_REACH + n + FILTER_REACH] at `OUTPUT_RATE`, n a multiple of `factor`.
        factor: `OUTPUT_RATE` over the model's rate.

    Returns:
        float32 [n / factor] in about [-1, 1]; sample m stands at the time of sample
        FILTER_REACH + factor * m of the window.
    """
    samples = window.astype(np.float64) / 32768.0
    if factor == 1:
        return samples[FILTER_REACH:-FILTER_REACH].astype(np.float32)
    spans = np.lib.stride_tricks.sliding_window_view(samples, 2 * FILTER_REACH + 1)
    kept = spans[: len(window) - 2 * FILTER_REACH : factor]
    return (kept @ decimation_filter(factor)).astype(np.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class TakenAudio:
    """The sound of one unit.

    Attributes:
        pcm: int16 [output_samples].
        window: int16, `pcm` with what `decimate` needs around it, look-ahead included.
        pushed: samples at the start of `pcm` that had been pushed; silence follows them.
        starts: offsets into `pcm` at which an utterance starts, ascending.
        ends: offsets at which one ends, ascending.
    """

    pcm: Pcm16
    window: Pcm16
    pushed: int
    starts: tuple[int, ...] = ()
    ends: tuple[int, ...] = ()


class AudioBuffer:
    """A bounded queue of samples; not thread-safe, its session locks it.

    A push that does not fit is accepted in part: the pusher keeps the rest and tries again. The
    sound of the last `lead` units is remembered, so that an interrupt can go back to it.

    Args:
        unit_format: lengths and rates of a unit.
        capacity_s: seconds of sound that may wait.
    """

    def __init__(self, unit_format: UnitFormat, capacity_s: float) -> None:
        self._format = unit_format
        self._factor = OUTPUT_RATE // unit_format.model_rate
        self._ring = np.zeros(round(capacity_s * OUTPUT_RATE), np.int16)
        self._read = self._written = 0  # samples since the start
        self._starts: deque[int] = deque()
        self._ends: deque[int] = deque()
        self._open = False  # an utterance has started and not ended
        self._input: _Resampled | None = None
        self._history: deque[Pcm16] = deque(maxlen=unit_format.lead + 1)
        self._fade = np.zeros(0, np.int16)

    @property
    def available(self) -> int:
        """Samples that wait."""
        return self._written - self._read

    @property
    def room(self) -> int:
        """Samples at `OUTPUT_RATE` that would be accepted now."""
        held = self._input.held if self._input else 0
        return len(self._ring) - self.available - held

    @property
    def is_open(self) -> bool:
        """Whether an utterance has started and not ended, in the order of pushes."""
        return self._open

    @property
    def unit_need(self) -> int:
        """Samples that must wait for a unit to be taken whole, with its look-ahead."""
        return self._format.output_samples + self._reach

    @property
    def _reach(self) -> int:
        return self._format.lookahead_samples * self._factor + FILTER_REACH

    def push(self, pcm: Pcm16, sample_rate: int) -> int:
        """Appends sound and opens an utterance if none is open.

        Args:
            pcm: int16 [samples] or [channels, samples]; channels are averaged.
            sample_rate: Hz. At another rate than before, what came before is completed first.

        Returns:
            Samples per channel that were accepted, from the first on.

        Raises:
            MediaError: another dtype or shape, or a rate out of range.
        """
        if pcm.dtype != np.int16 or pcm.ndim not in (1, 2) or (pcm.ndim == 2 and not len(pcm)):
            raise MediaError(
                f"sound must be int16 [samples] or [channels, samples], got {pcm.dtype} "
                f"{list(pcm.shape)}"
            )
        if not 1_000 <= sample_rate <= 384_000:
            raise MediaError(f"sample_rate must be 1000 to 384000, got {sample_rate}")
        if self._input is None or self._input.sample_rate != sample_rate:
            self._complete()
            self._input = _Resampled(sample_rate)
        accepted = min(pcm.shape[-1], self.room * sample_rate // OUTPUT_RATE)
        if accepted == 0:
            return 0
        if not self._open:
            self._open = True
            self._starts.append(self._written)
        mono = pcm[..., :accepted]
        if mono.ndim == 2:
            mono = np.rint(mono.mean(0)).astype(np.int16)
        self._append(self._input.push(mono))
        return accepted

    def end_utterance(self) -> None:
        """Completes what was pushed; the next push starts another utterance."""
        self._complete()
        if self._open:
            self._open = False
            self._ends.append(self._written)

    def take(self) -> TakenAudio:
        """Takes the next unit; where nothing was pushed there is silence.

        A fade that an interrupt left is mixed into its start.
        """
        size = self._format.output_samples
        before = self._history[-1][-FILTER_REACH:] if self._history else ()
        window = np.zeros(FILTER_REACH + size + self._reach, np.int16)
        window[FILTER_REACH - len(before) : FILTER_REACH] = before
        waiting = self._peek(size + self._reach)
        window[FILTER_REACH : FILTER_REACH + len(waiting)] = waiting
        if len(self._fade):
            head = window[FILTER_REACH : FILTER_REACH + len(self._fade)]
            mixed = head.astype(np.int32) + self._fade
            head[:] = np.clip(mixed, -32768, 32767)
            self._fade = self._fade[:0]
        pcm = window[FILTER_REACH : FILTER_REACH + size].copy()
        pushed = min(self.available, size)
        start = self._read
        self._read += pushed
        self._history.append(pcm)
        return TakenAudio(
            pcm=pcm,
            window=window,
            pushed=pushed,
            starts=_passed(self._starts, start, self._read, inclusive=False),
            ends=_passed(self._ends, start, self._read, inclusive=True),
        )

    def interrupt(self, units: int) -> None:
        """Drops all that waits, and takes back the last units as if they had never been taken.

        Of the dropped sound the first 5 ms stay, fading, for the start of the next unit: cutting
        speech dead clicks.

        Args:
            units: taken units to take back, at most `lead`.
        """
        dropped = [self._history.pop() for _ in range(min(units, len(self._history)))]
        tail = dropped[-1][:FADE_SAMPLES] if dropped else self._peek(FADE_SAMPLES)
        ramp = 0.5 + 0.5 * np.cos(np.pi * (np.arange(len(tail)) + 0.5) / FADE_SAMPLES)
        self._fade = np.rint(tail * ramp).astype(np.int16)
        self._read = self._written
        self._starts.clear()
        self._ends.clear()
        self._open = False
        self._input = None

    def _complete(self) -> None:
        if self._input is not None:
            self._append(self._input.finish())
            self._input = None

    def _append(self, samples: Pcm16) -> None:
        at = self._written % len(self._ring)
        first = min(len(samples), len(self._ring) - at)
        self._ring[at : at + first] = samples[:first]
        self._ring[: len(samples) - first] = samples[first:]
        self._written += len(samples)

    def _peek(self, size: int) -> Pcm16:
        size = min(size, self.available)
        at = self._read % len(self._ring)
        first = min(size, len(self._ring) - at)
        return np.concatenate([self._ring[at : at + first], self._ring[: size - first]])


def _passed(marks: deque[int], start: int, end: int, *, inclusive: bool) -> tuple[int, ...]:
    """Removes the marks before `end` (or at it) and returns them as offsets from `start`."""
    found = []
    while marks and (marks[0] < end or (inclusive and marks[0] == end)):
        found.append(marks.popleft() - start)
    return tuple(found)


class _Resampled:
    """A stream of mono sound on its way to `OUTPUT_RATE`."""

    def __init__(self, sample_rate: int) -> None:
        self.sample_rate = sample_rate
        self._pushed = self._produced = 0
        self._resampler: AudioResampler | None = None
        if sample_rate != OUTPUT_RATE:
            import av

            self._resampler = av.AudioResampler(format="flt", layout="mono", rate=OUTPUT_RATE)

    @property
    def held(self) -> int:
        """Samples at `OUTPUT_RATE` that are still to come from what was pushed."""
        return -(-self._pushed * OUTPUT_RATE // self.sample_rate) - self._produced

    def push(self, mono: Pcm16) -> Pcm16:
        """Resamples as much of [samples] as can be finished now."""
        self._pushed += len(mono)
        if self._resampler is None:
            self._produced += len(mono)
            return mono
        import av

        frame = av.AudioFrame.from_ndarray(
            (mono.astype(np.float32) / 32768)[None], format="flt", layout="mono"
        )
        frame.sample_rate = self.sample_rate
        return self._converted(self._resampler.resample(frame))

    def finish(self) -> Pcm16:
        """The last samples; the length in all is the exact one, rounded up."""
        if self._resampler is None or not self._pushed:
            return np.zeros(0, np.int16)
        return self._converted(self._resampler.resample(None))

    def _converted(self, frames: list[av.AudioFrame]) -> Pcm16:
        parts = [frame.to_ndarray()[0] for frame in frames]
        samples = np.concatenate([*parts, np.zeros(0, np.float32)])[: self.held]
        self._produced += len(samples)
        return np.clip(np.rint(samples * 32768), -32768, 32767).astype(np.int16)
