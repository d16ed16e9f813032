"""The scenes of an evaluation and what is measured on each."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from pipelines.evaluation.face import (
    GESTURES,
    blink_measures,
    gesture_measures,
    pose_measures,
    quiet_measures,
)
from pipelines.evaluation.lips import lip_measures
from pipelines.evaluation.log import FrameLog
from pipelines.evaluation.parts import Pair, Pictures, Stage, windows
from pipelines.evaluation.regressor import MouthRegressor
from pipelines.evaluation.stability import Slope, drift_measures, join_measures, pool
from pipelines.evaluation.streams import UNIT_SAMPLES, quiet_track, watch_plan
from pipelines.evaluation.variants import VARIANTS
from pipelines.motion import FPS, FRAMES_PER_UNIT
from pipelines.probe import correlation, lag_ms, probed_labels
from pipelines.train.augment import NON_SPEECH
from pipelines.train.tracks import UNIT_S, Track, make_track
from rtgen.types import SpeechState

__all__ = ["Plan", "event_scenes", "quiet_scenes", "speech_scenes", "variant_scenes"]

FloatArray = npt.NDArray[np.float32]
Floats = npt.NDArray[np.float64]
Readings = dict[str, FloatArray]

_Posed = tuple[Readings, Readings, npt.NDArray[np.int8]]

_COMBINE: dict[str, Callable[[Floats], np.floating]] = {
    "longest_blink_ms": np.max,
    "blinks_held_at_cuts": np.sum,
    "cuts": np.sum,
    "transition_worst": np.max,
}
ROOM_RMS = 0.006  # about -44 dB of full scale
_GESTURE_EVERY = 20  # units
_HEAD_S, _TAIL_S = 120.0, 60.0  # looked at without a gap at both ends of a long stream
_SPARSE = 5  # units: of the rest every fifth is looked at


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How much is shown.

    Attributes:
        seed: of the first stream; further streams count up.
        seeds: streams of dialogue.
        minutes: length of each.
        quiet_s: seconds of each scene without speech.
        gesture_rounds: times that every gesture is asked for.
        variant_s: seconds of speech played in every variant.
        clip_s: seconds of the side-by-side clip.
    """

    seed: int = 7
    seeds: int = 5
    minutes: float = 10.0
    quiet_s: float = 30.0
    gesture_rounds: int = 3
    variant_s: float = 40.0
    clip_s: float = 30.0


@dataclass(slots=True)
class _Sums:
    """Values of the same measure from several streams."""

    values: dict[str, list[float]] = field(default_factory=dict)

    def add(self, measures: dict[str, float]) -> None:
        for name, value in measures.items():
            self.values.setdefault(name, []).append(value)

    def results(self) -> dict[str, float]:
        """The mean over streams; the worst, or the sum, where one stream's fault is a fault."""
        out = {}
        for name, values in self.values.items():
            known = np.array([value for value in values if not math.isnan(value)])
            combine = _COMBINE.get(name, np.mean)
            out[name] = float(combine(known)) if len(known) else math.nan
        return out


def readings_of(stage: Stage, log: FrameLog) -> Readings:
    """The probe's readings by name."""
    return {name: log.readings[:, i] for i, name in enumerate(stage.probe.names)}


def labels_of(track: Track, start: int, stop: int) -> Readings:
    """What was asked for, by the names of the readings."""
    face = track.face
    part = slice(start, stop)
    return probed_labels(face.weights[part], face.pose[part], face.gaze[part])


def speech_scenes(
    stage: Stage, plan: Plan, net: MouthRegressor | None, pictures: Path | None
) -> dict[str, float]:
    """Dialogues in held-out voices and sentences: lips, blinks, head, joins, drift.

    Args:
        stage: shows and looks.
        plan: how much.
        net: the regressor to compare with, None for none.
        pictures: folder for sheet and clip of the first stream, None for none.
    """
    sums, slopes = _Sums(), dict[str, list[Slope]]()
    posed: list[_Posed] = []
    for index in range(plan.seeds):
        seed = plan.seed + index
        track = make_track("test", plan.minutes * 60, seed)
        head, tail = round(_HEAD_S / UNIT_S), round(_TAIL_S / UNIT_S)
        step = _SPARSE if plan.minutes > 3 else 1
        watch = watch_plan(len(track.face) // FRAMES_PER_UNIT, head, tail, step)
        shows = Pictures(track, pictures, plan.clip_s) if pictures and not index else None
        pair = stage.pair(f"stream_{seed}", track, watch, shows)
        spans = list(windows(pair.seen))
        for span in spans:
            sums.add(_stretch(stage, pair, track, span, posed))
        if len(spans) == 1:
            sums.add({"lag_ms_end": _last_lag(stage, pair, track, spans[0])})
        sums.add(join_measures(pair.seen, pair.shown, track.face.state))
        for name, value in drift_measures(pair.seen, pair.shown).items():
            if isinstance(value, Slope):
                slopes.setdefault(name, []).append(value)
            else:
                sums.add({name: value})
        if net is not None:
            sums.add(_against_regressor(stage, pair, track, spans[0], net))
    out = sums.results() | _pose(posed)
    for name, several in slopes.items():
        slope = pool(several)
        out |= {name: slope.value, f"{name}_low": slope.ends[0], f"{name}_high": slope.ends[1]}
    return out | {"seeds": float(plan.seeds), "minutes": plan.minutes}


def _stretch(
    stage: Stage, pair: Pair, track: Track, span: tuple[int, int], posed: list[_Posed]
) -> dict[str, float]:
    """Lips and blinks of frames that were looked at without a gap."""
    start, stop = span
    seen = readings_of(stage, pair.seen.part(start, stop))
    shown = readings_of(stage, pair.shown.part(start, stop))
    asked = labels_of(track, start, stop)
    posed.append((seen, shown, track.face.state[start:stop]))
    out = lip_measures(seen, shown, asked, track, start)
    out["lag_ms_end" if start else "lag_ms"] = out.pop("lag_ms")
    out |= blink_measures(seen["blink"], asked["blink"], track.cuts, start)
    out["cuts"] = float(sum(start <= cut * FPS < stop for cut in track.cuts))
    return out


def _against_regressor(
    stage: Stage, pair: Pair, track: Track, span: tuple[int, int], net: MouthRegressor
) -> dict[str, float]:
    """The jaw's correlation beside that of a mouth regressed from the same sound."""
    start, stop = span
    watch = np.zeros(len(track.face) // FRAMES_PER_UNIT, bool)
    watch[start // FRAMES_PER_UNIT : stop // FRAMES_PER_UNIT] = True
    log = stage.heard(f"heard_{track.seed}", track, net, watch)
    asked = labels_of(track, start, stop)["jaw"]
    heard, own = (
        correlation(readings_of(stage, of.part(start, stop))["jaw"], asked)
        for of in (log, pair.seen)
    )
    return {"jaw_r_regressor": heard, "jaw_r_relative": own / max(heard, 1e-6)}


def _last_lag(stage: Stage, pair: Pair, track: Track, span: tuple[int, int]) -> float:
    """Lag over the last third of a stream that is looked at from end to end."""
    start, stop = span[1] - (span[1] - span[0]) // 3, span[1]
    jaw = readings_of(stage, pair.seen.part(start, stop))["jaw"]
    return lag_ms(jaw, labels_of(track, start, stop)["jaw"], FPS)


def _pose(parts: list[_Posed]) -> dict[str, float]:
    """Pose measures over all stretches together."""
    seen, shown = (
        {name: np.concatenate([part[name] for part in side]) for name in ("yaw", "pitch", "roll")}
        for side in ([p[0] for p in parts], [p[1] for p in parts])
    )
    return pose_measures(seen, shown, np.concatenate([part[2] for part in parts]))


def quiet_scenes(stage: Stage, plan: Plan) -> dict[str, float]:
    """An idle face in digital silence and in room noise."""
    units = round(plan.quiet_s / UNIT_S)
    count = units * UNIT_SAMPLES
    rng = np.random.default_rng(plan.seed)
    noise = NON_SPEECH["noise"](count, rng) * ROOM_RMS
    sounds = {"silence": np.zeros(count), "room_noise": noise}
    out: dict[str, float] = {}
    for name, sound in sounds.items():
        track = quiet_track(sound.astype(np.float32), plan.seed, SpeechState.IDLE)
        pair = stage.pair(name, track)
        measures = quiet_measures(pair.seen, pair.shown, stage.probe.names.index("jaw"))
        out |= {f"{name}_{key}": value for key, value in measures.items()}
    return out


def event_scenes(stage: Stage, plan: Plan) -> dict[str, float]:
    """Every gesture on an idle face in silence, one after the other."""
    names = list(GESTURES) * plan.gesture_rounds
    starts = {4 + i * _GESTURE_EVERY: name for i, name in enumerate(names)}
    audio = np.zeros((4 + len(names) * _GESTURE_EVERY) * UNIT_SAMPLES, np.float32)
    track = quiet_track(audio, plan.seed, SpeechState.IDLE, starts)
    plain = quiet_track(audio, plan.seed, SpeechState.IDLE)
    pair = stage.pair("events", track)
    frames = len(track.face)
    found = gesture_measures(
        readings_of(stage, pair.seen),
        labels_of(track, 0, frames),
        labels_of(plain, 0, frames),
        {unit * FRAMES_PER_UNIT: name for unit, name in starts.items()},
    )
    out = {f"event_early_{name}": early for name, (early, _) in found.items()}
    return out | {f"event_left_{name}": left for name, (_, left) in found.items()}


def variant_scenes(stage: Stage, plan: Plan) -> dict[str, float]:
    """One dialogue played as files of several kinds to a speaking session."""
    track = make_track("test", plan.variant_s, plan.seed + 1000)
    # The session always speaks, so its truth differs in what is not the mouth; only lips count.
    asked = labels_of(track, 0, len(track.face))["jaw"]
    out = {}
    for name, variant in VARIANTS.items():
        log = stage.variant(f"file_{name.replace(' ', '_')}", track, variant)
        jaw = readings_of(stage, log)["jaw"]
        whole = ~np.isnan(jaw)
        out[f"variant_r_{name}"] = correlation(jaw[whole], asked[whole])
        out[f"variant_lag_{name}"] = lag_ms(jaw[whole], asked[whole], FPS)
    return out
