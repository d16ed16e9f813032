"""Blinks, head, gestures and stillness."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from pipelines.evaluation.log import REGIONS, FrameLog
from pipelines.motion import FPS, FRAMES_PER_UNIT, STATES

__all__ = ["GESTURES", "blink_measures", "gesture_measures", "pose_measures", "quiet_measures"]

FloatArray = npt.NDArray[np.float32]
Readings = Mapping[str, FloatArray]

BLINK = 0.5  # lid closure that counts as shut
LONGEST_BLINK_MS = 400.0
_NEAR = 3  # frames between an asked and a seen blink that are one
_CUT_S = (0.16, 0.8)  # before and after a cut: where a held blink would be
_LEAST_STATE_S = 3.0
_EVENT_S = 1.2
_SETTLE_S = 0.16  # a gesture may need one unit more than its time to be gone
_EARLY = 2 * FRAMES_PER_UNIT

# Gesture -> reading that shows it. Looks are read from the head: eyes that were turned already go
# where a picture shows no more of it, and the truth's gaze is not read back there either.
GESTURES = {
    "smile": "smile",
    "nod": "pitch",
    "shake": "yaw",
    "look_left": "yaw",
    "look_right": "yaw",
    "surprised": "brow",
}


def shut_runs(blink: FloatArray) -> npt.NDArray[np.int64]:
    """First frame and length of every run of shut lids, [n, 2]."""
    shut = np.concatenate([[False], blink > BLINK, [False]])
    edges = np.flatnonzero(np.diff(shut.astype(np.int8)))
    return np.stack([edges[::2], edges[1::2] - edges[::2]], 1)


def blink_measures(
    seen: FloatArray, asked: FloatArray, cuts_s: list[float], start: int = 0
) -> dict[str, float]:
    """Blinks of a stretch.

    Args:
        seen: [F] lid closure as read.
        asked: [F] as the labels have it.
        cuts_s: times of barge-ins in the track.
        start: first frame of the stretch.

    Returns:
        blinks_per_minute and its truth, longest_blink_ms, blinks_missed and blinks_extra (shares
        of the asked ones; a blink shown twice is one extra), blinks_held_at_cuts (count of blinks
        of 400 ms and more within 160 ms before to 800 ms after a cut).
    """
    runs, wanted = shut_runs(seen), shut_runs(asked)
    minutes = len(seen) / FPS / 60
    free = list(runs[:, 0])
    missed = 0
    for begin in wanted[:, 0]:
        near = [other for other in free if abs(other - begin) <= _NEAR]
        if near:
            free.remove(min(near, key=lambda other: abs(other - begin)))
        else:
            missed += 1
    held = 0
    for begin, length in runs[runs[:, 1] * 1000 / FPS >= LONGEST_BLINK_MS]:
        times = ((begin + start) / FPS, (begin + start + length) / FPS)
        held += any(times[0] < cut + _CUT_S[1] and times[1] > cut - _CUT_S[0] for cut in cuts_s)
    return {
        "blinks_per_minute": len(runs) / minutes,
        "blinks_per_minute_truth": len(wanted) / minutes,
        "longest_blink_ms": float(runs[:, 1].max(initial=0) * 1000 / FPS),
        "blinks_missed": missed / max(len(wanted), 1),
        "blinks_extra": len(free) / max(len(wanted), 1),
        "blinks_held_at_cuts": float(held),
    }


def pose_measures(seen: Readings, shown: Readings, state: npt.NDArray[np.int8]) -> dict[str, float]:
    """Variance of the head's angles over the truth's, by state.

    Args:
        seen: [F] yaw, pitch, roll read from the model's pictures.
        shown: the same from the truth's pictures.
        state: [F].

    Returns:
        `{angle}_var_ratio_{state}` for each state shown for 3 s or more.
    """
    out = {}
    for index, name in enumerate(STATES):
        part = state == index
        if part.sum() < _LEAST_STATE_S * FPS:
            continue
        for angle in ("yaw", "pitch", "roll"):
            true = float(shown[angle][part].var())
            out[f"{angle}_var_ratio_{name}"] = float(seen[angle][part].var()) / max(true, 1e-9)
    return out


def quiet_measures(seen: FrameLog, shown: FrameLog, jaw: int) -> dict[str, float]:
    """Motion without speech, over the truth's.

    Args:
        seen: of the model's pictures.
        shown: of the truth's pictures.
        jaw: column of the jaw among the readings.

    Returns:
        face_motion and mouth_motion, mean change from frame to frame over the truth's; jaw_open,
        mean reading of the jaw above the truth's; jaw_motion, mean change of it per frame.
    """
    out = {}
    for region in ("face", "mouth"):
        column = REGIONS.index(region)
        moved, true = (float(np.nanmean(log.change[:, column])) for log in (seen, shown))
        out[f"{region}_motion"] = moved / max(true, 1e-6)
    opening, true_opening = seen.readings[:, jaw], shown.readings[:, jaw]
    out["jaw_open"] = float(np.nanmean(opening) - np.nanmean(true_opening))
    out["jaw_motion"] = float(np.nanmean(np.abs(np.diff(opening))))
    out["jaw_motion_truth"] = float(np.nanmean(np.abs(np.diff(true_opening))))
    return out


def gesture_measures(
    seen: Readings, asked: Readings, rest: Readings, starts: dict[int, str]
) -> dict[str, tuple[float, float]]:
    """How much of each gesture shows early, and how much is left after its time.

    The same motion without gestures is known exactly, so the difference is the gesture alone.

    Args:
        seen: [F] as read.
        asked: [F] labels with gestures.
        rest: [F] labels of the same seed without gestures.
        starts: first frame of each gesture -> its name.

    Returns:
        By name, (early, left), worst occurrence: the projection of what is seen in the first two
        units on what was asked there (1 is all of it), and the mean size in the 0.6 s after its
        time, over the asked peak.
    """
    out: dict[str, tuple[float, float]] = {}
    for begin, name in starts.items():
        reading = GESTURES[name]
        effect = seen[reading] - rest[reading]
        wanted = asked[reading] - rest[reading]
        early = slice(begin, begin + _EARLY)
        shape = wanted[early]
        shows = float(effect[early] @ shape / max(float(shape @ shape), 1e-9))
        over = begin + round((_EVENT_S + _SETTLE_S) * FPS)
        rest_of = effect[over : over + round(0.6 * FPS)]
        peak = float(np.abs(wanted[begin : begin + round(_EVENT_S * FPS)]).max())
        left = float(np.abs(rest_of).mean()) / max(peak, 1e-9) if len(rest_of) else 0.0
        early_so_far, left_so_far = out.get(name, (shows, left))
        out[name] = min(shows, early_so_far), max(left, left_so_far)
    return out
