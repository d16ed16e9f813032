"""Whether a stream holds: colour, identity, backdrop, joins of units, changes of state."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pipelines.evaluation.log import REGIONS, FrameLog
from pipelines.motion import FPS, FRAMES_PER_UNIT
from rtgen.types import SpeechState

__all__ = ["Slope", "drift_measures", "join_measures", "pool", "slope_of"]

FloatArray = npt.NDArray[np.float32]
Floats = npt.NDArray[np.float64]

BLOCK_S = 10.0  # measures are averaged over blocks, taken as independent of each other
SPAN_S = 600.0  # slopes are given per ten minutes
_BEST_PSNR = 60.0  # dB; finer differences are below one level in a thousand pixels
_MINUTE = 60 * FPS

# Two-sided 95 % points of Student's t by degrees of freedom; beyond the table the last holds.
_T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13)


class Slope(NamedTuple):
    """A change per ten minutes with the half width of its 95 % interval."""

    value: float
    half: float

    @property
    def ends(self) -> tuple[float, float]:
        """The interval."""
        return self.value - self.half, self.value + self.half


def _t95(freedom: int) -> float:
    if freedom < 1:
        return float("inf")
    return _T95[freedom - 1] if freedom <= len(_T95) else 1.96 + 2.5 / freedom


def slope_of(times_s: Floats, values: Floats) -> Slope:
    """Least-squares slope over blocks, per ten minutes.

    Args:
        times_s: [n] seconds.
        values: [n], one per block.
    """
    if len(times_s) < 3:
        return Slope(float("nan"), float("inf"))
    centred = times_s - times_s.mean()
    spread = float(centred @ centred)
    gain = float(centred @ values) / spread
    rest = values - values.mean() - gain * centred
    error = np.sqrt(float(rest @ rest) / (len(values) - 2) / spread)
    return Slope(gain * SPAN_S, float(_t95(len(values) - 2) * error * SPAN_S))


def pool(slopes: list[Slope]) -> Slope:
    """Slopes of several seeds as one.

    With three seeds and more the interval is that of their mean (Student's t over seeds, so that
    what differs from seed to seed is in it), else the average of their own.
    """
    values = np.array([slope.value for slope in slopes])
    if len(slopes) < 3:
        return Slope(float(values.mean()), float(np.mean([slope.half for slope in slopes])))
    error = values.std(ddof=1) / np.sqrt(len(values))
    return Slope(float(values.mean()), float(_t95(len(values) - 1) * error))


def _blocks(values: FloatArray, seen: npt.NDArray[np.bool_]) -> tuple[Floats, Floats]:
    """Times [n] and means [n, ...] of the blocks of which something was seen."""
    size = round(BLOCK_S * FPS)
    times, means = [], []
    for start in range(0, len(values), size):
        part = slice(start, start + size)
        if seen[part].sum() >= FPS:
            times.append((np.flatnonzero(seen[part]).mean() + start) / FPS)
            means.append(values[part][seen[part]].mean(0, dtype=np.float64))
    return np.array(times), np.array(means)


def drift_measures(seen: FrameLog, shown: FrameLog) -> dict[str, Slope | float]:
    """Drift of one stream against the truth's pictures of the same moments.

    Args:
        seen: of the model's pictures.
        shown: of the truth's; both hold the same frames.

    Returns:
        lab_l, lab_a, lab_b: slopes of the face's mean colour less the truth's, per ten minutes;
        identity: slope of the distance between the mean descriptions of the two, in % of how
        much the description of the truth varies by itself; identity_distance: its mean, in %;
        backdrop_psnr: of the first minute, dB; backdrop_change: largest difference of a later
        minute to it, dB; detail_ratio: the face's detail over the truth's, last block.
    """
    both = seen.seen & shown.seen
    out: dict[str, Slope | float] = {}
    times, colour = _blocks(seen.lab - shown.lab, both)
    for i, name in enumerate(("lab_l", "lab_a", "lab_b")):
        out[name] = slope_of(times, colour[:, i])
    _, moved = _blocks(seen.description - shown.description, both)
    spread = float(np.sqrt(shown.description[both].var(0).sum()))
    distance = 100 * np.linalg.norm(moved, axis=1) / max(spread, 1e-9)
    out["identity"] = slope_of(times, distance)
    out["identity_distance"] = float(distance.mean())
    minutes = [_psnr(seen.backdrop[i : i + _MINUTE]) for i in range(0, len(seen), _MINUTE)]
    # A last minute that is shorter than ten seconds says nothing.
    minutes = minutes[: max(1, (len(seen) + _MINUTE - round(BLOCK_S * FPS)) // _MINUTE)]
    out["backdrop_psnr"] = minutes[0]
    later = [minute - minutes[0] for minute in minutes[1:]]
    out["backdrop_change"] = max(later, key=abs) if later else float("nan")
    _, detail = _blocks(seen.detail / shown.detail, both)
    out["detail_ratio"] = float(detail[-1])
    return out


def _psnr(errors: FloatArray) -> float:
    """Of squared errors of 8-bit pixels, at most `_BEST_PSNR`."""
    mean = float(np.nanmean(errors))
    return min(_BEST_PSNR, 10 * float(np.log10(65025 / max(mean, 1e-9))))


def join_measures(seen: FrameLog, shown: FrameLog, state: npt.NDArray[np.int8]) -> dict[str, float]:
    """Jumps at the joins of units and at changes of state.

    A head that is asked to move fast at a change of state is no jump, so a change is judged
    against the larger of what is usual while speaking and what the truth does at that moment.

    Args:
        seen: of the model's pictures, F frames.
        shown: of the truth's pictures.
        state: [F].

    Returns:
        join_ratio: mean change of the picture at joins over that inside units, and its truth;
        transition_ratio: median change of the face at a change of state over the median while
        speaking, and its truth; transition_worst: largest change there over the larger of that
        median and the truth's change.
    """
    face = seen.change[:, REGIONS.index("face")]
    true_face = shown.change[:, REGIONS.index("face")]
    valid = ~np.isnan(face) & ~np.isnan(true_face)
    turns = np.flatnonzero((np.diff(state, prepend=state[:1]) != 0) & valid)
    speaking = (state == SpeechState.SPEAKING) & valid
    out = {"join_ratio": _join_ratio(seen), "join_ratio_truth": _join_ratio(shown)}
    if not len(turns) or not speaking.any():
        return out
    usual, true_usual = float(np.median(face[speaking])), float(np.median(true_face[speaking]))
    return out | {
        "transition_ratio": float(np.median(face[turns])) / max(usual, 1e-9),
        "transition_ratio_truth": float(np.median(true_face[turns])) / max(true_usual, 1e-9),
        "transition_worst": float((face[turns] / np.maximum(true_face[turns], usual)).max()),
    }


def _join_ratio(log: FrameLog) -> float:
    """Mean change of the picture at joins of units over that inside them."""
    picture = log.change[:, REGIONS.index("picture")]
    valid = ~np.isnan(picture)
    joins = np.arange(len(log)) % FRAMES_PER_UNIT == 0
    return float(picture[valid & joins].mean()) / max(float(picture[valid & ~joins].mean()), 1e-9)
