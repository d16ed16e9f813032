"""How the lips follow the sound.

Three readings of one stretch of speech are compared: `seen`, the probe on the model's pictures;
`shown`, the probe on the exact labels painted by the same decoder; `asked`, the labels themselves.
Time is judged against the labels, size and closing against what the decoder can show.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from pipelines.motion import FPS
from pipelines.probe import correlation, lag_ms
from pipelines.train.tracks import Track
from pipelines.train.visemes import LEAD_S, Segment
from rtgen.types import SpeechState

__all__ = ["closures", "lip_measures", "vowels_shut"]

FloatArray = npt.NDArray[np.float32]
Readings = Mapping[str, FloatArray]

CLOSED = 0.2  # share of the wide opening below which the jaw counts as shut
CONTACT = 0.5  # share of the true press above which the lips count as touching
_OPEN_VOWELS = ("aa", "E", "O")
_LEAST_VOWEL_S = 0.08


def lip_measures(
    seen: Readings, shown: Readings, asked: Readings, track: Track, start: int = 0
) -> dict[str, float]:
    """Measures of one stretch, F frames from frame `start` of the track.

    Args:
        seen: [F] by name, read from the model's pictures.
        shown: [F], read from the truth's pictures.
        asked: [F], the labels.
        track: whose segments and states are used.
        start: first frame of the stretch.

    Returns:
        jaw_r, jaw_r_truth and jaw_slope_truth (correlation and slope of `shown` over `asked`: what
        probe and decoder leave of the labels), pucker_r, press_r, lag_ms, jaw_std_ratio, closures
        and closures_truth by opening, contacts and contacts_truth by opening and lip press,
        vowels_shut (share of open vowels that look shut).
    """
    speaking = track.face.state[start : start + len(seen["jaw"])] == SpeechState.SPEAKING
    wide = {name: _wide(of["jaw"], speaking) for name, of in (("seen", seen), ("shown", shown))}
    press = _true_press(shown, track.segments, start)
    spread = float(shown["jaw"][speaking].std())
    return {
        "jaw_r": correlation(seen["jaw"], asked["jaw"]),
        "jaw_r_truth": correlation(shown["jaw"], asked["jaw"]),
        "jaw_slope_truth": _slope(shown["jaw"], asked["jaw"]),
        "pucker_r": correlation(seen["pucker"], asked["pucker"]),
        "press_r": correlation(seen["press"], asked["press"]),
        "lag_ms": lag_ms(seen["jaw"], asked["jaw"], FPS),
        "jaw_std_ratio": float(seen["jaw"][speaking].std()) / max(spread, 1e-6),
        "closures": closures(seen, track.segments, wide["seen"], start=start),
        "closures_truth": closures(shown, track.segments, wide["shown"], start=start),
        "contacts": closures(seen, track.segments, wide["seen"], press, start=start),
        "contacts_truth": closures(shown, track.segments, wide["shown"], press, start=start),
        "vowels_shut": vowels_shut(seen["jaw"], track.segments, wide["seen"], start=start),
    }


def _slope(a: FloatArray, b: FloatArray) -> float:
    """Slope of the regression of `a` on `b`; 0 where `b` does not vary."""
    spread = float(b.var())
    return float(np.mean((a - a.mean()) * (b - b.mean()))) / spread if spread > 1e-9 else 0.0


def _wide(jaw: FloatArray, speaking: npt.NDArray[np.bool_]) -> float:
    """The wide opening of a stretch: 90th percentile while speaking."""
    return float(np.percentile(jaw[speaking], 90)) if speaking.any() else float("nan")


def _around(segment: Segment, start: int, count: int) -> slice | None:
    """Frames whose centres lie within about 40 ms of where lips shape a segment's middle."""
    middle = ((segment[0] + segment[1]) / 2 - LEAD_S) * FPS - 0.5 - start
    first, last = max(0, round(middle) - 1), min(count, round(middle) + 2)
    return slice(first, last) if first < last else None


def _true_press(shown: Readings, segments: list[Segment], start: int) -> float:
    """How far the truth presses its lips at p, b, m: the median of the peaks."""
    places = [_around(s, start, len(shown["press"])) for s in segments if s[2] == "PP"]
    peaks = [float(shown["press"][place].max()) for place in places if place is not None]
    return float(np.median(peaks)) if peaks else float("nan")


def closures(
    of: Readings,
    segments: list[Segment],
    wide: float,
    press: float | None = None,
    *,
    start: int = 0,
) -> float:
    """Share of p, b and m at which the lips close, within 40 ms of their middle.

    Args:
        of: readings [F] with jaw and press.
        segments: of the whole track.
        wide: the wide opening of these readings.
        press: the truth's press at closures; if given, the lips must also press half as much.
        start: first frame of the readings.

    Returns:
        0..1, NaN where the stretch has none of them.
    """
    hits = []
    for segment in segments:
        place = _around(segment, start, len(of["jaw"])) if segment[2] == "PP" else None
        if place is not None:
            shut = float(of["jaw"][place].min()) < CLOSED * wide
            touches = press is None or float(of["press"][place].max()) > CONTACT * press
            hits.append(shut and touches)
    return float(np.mean(hits)) if hits else float("nan")


def vowels_shut(jaw: FloatArray, segments: list[Segment], wide: float, *, start: int = 0) -> float:
    """Share of long open vowels whose middle looks shut: a mouth that never opens has 1."""
    hits = []
    for begin, end, viseme in segments:
        middle = round(((begin + end) / 2 - LEAD_S) * FPS - 0.5) - start
        is_long = viseme in _OPEN_VOWELS and end - begin >= _LEAST_VOWEL_S
        if is_long and 0 <= middle < len(jaw):
            hits.append(not jaw[middle] >= CLOSED * max(wide, 0.1))
    return float(np.mean(hits)) if hits else float("nan")
