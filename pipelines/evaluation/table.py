"""Targets of the avatar, and the verdict on each."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pipelines.evaluation.face import LONGEST_BLINK_MS

__all__ = ["Row", "rows_of", "text_of"]

Measures = Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One line of the table.

    Attributes:
        measure: what is measured.
        value: what came out, for people.
        target: what is asked for.
        passed: None where this run cannot tell.
    """

    measure: str
    value: str
    target: str
    passed: bool | None

    def document(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def _all(*checks: bool | None) -> bool | None:
    """False if one fails, else None if one cannot tell, else True."""
    if any(check is False for check in checks):
        return False
    return None if any(check is None for check in checks) else True


def _within(value: float, low: float, high: float) -> bool | None:
    return None if math.isnan(value) else low <= value <= high


def _get(measures: Measures, name: str) -> float:
    return measures.get(name, math.nan)


def rows_of(measures: Measures) -> list[Row]:
    """The table of a run.

    Args:
        measures: by name, as `pipelines.evaluate` writes them; what is missing or NaN cannot pass.
    """
    return [
        *_lip_rows(measures),
        *_quiet_rows(measures),
        _blink_row(measures),
        *_pose_rows(measures),
        _event_row(measures),
        *_hold_rows(measures),
        *_sound_rows(measures),
    ]


def _lip_rows(m: Measures) -> list[Row]:
    jaw, relative = _get(m, "jaw_r"), _get(m, "jaw_r_relative")
    size, lag, later = _get(m, "jaw_std_ratio"), _get(m, "lag_ms"), _get(m, "lag_ms_end")
    rows = [
        Row(
            measure="jaw correlation",
            value=f"{jaw:.3f}",
            target=">= 0.80",
            passed=_within(jaw, 0.80, 1.0),
        ),
        Row(
            measure="jaw correlation over that of a direct regressor",
            value=f"{relative:.3f} (regressor {_get(m, 'jaw_r_regressor'):.3f})",
            target=">= 0.9",
            passed=_within(relative, 0.9, math.inf),
        ),
        Row(
            measure="jaw amplitude over the truth's",
            value=f"{size:.2f}",
            target="0.75 .. 1.25",
            passed=_within(size, 0.75, 1.25),
        ),
        Row(
            measure="lag at the start, at the end, ms",
            value=f"{lag:.0f}, {later:.0f} (after {_get(m, 'minutes'):.0f} min)",
            target="both within +-20, apart <= 20, after 10 min",
            passed=_all(
                _within(lag, -20, 20),
                _within(later, -20, 20),
                _within(later - lag, -20, 20),
                _long_enough(m),
            ),
        ),
    ]
    for name, what in (("closures", "jaw shut at p b m"), ("contacts", "lips pressed at p b m")):
        seen, true = _get(m, name), _get(m, f"{name}_truth")
        share = seen / true if true > 0 else math.nan
        rows.append(
            Row(
                measure=f"{what}, over the truth's",
                value=f"{share:.2f} ({seen:.2f} of {true:.2f})",
                target=">= 0.8",
                passed=_within(share, 0.8, math.inf),
            )
        )
    return rows


def _long_enough(m: Measures) -> bool | None:
    return True if _get(m, "minutes") >= 9.9 else None


def _quiet_rows(m: Measures) -> list[Row]:
    rows = []
    for scene in ("silence", "room noise"):
        key = scene.replace(" ", "_")
        face, mouth = _get(m, f"{key}_face_motion"), _get(m, f"{key}_mouth_motion")
        rows.append(
            Row(
                measure=f"motion in {scene} over the truth's: face, mouth",
                value=f"{face:.2f}, {mouth:.2f}",
                target="0.5 .. 1.2",
                passed=_all(_within(face, 0.5, 1.2), _within(mouth, 0.5, 1.2)),
            )
        )
    return rows


def _blink_row(m: Measures) -> Row:
    rate, longest = _get(m, "blinks_per_minute"), _get(m, "longest_blink_ms")
    held, cuts = _get(m, "blinks_held_at_cuts"), _get(m, "cuts")
    return Row(
        measure="blinks a minute; longest, ms; held at a cut",
        value=f"{rate:.1f}; {longest:.0f}; {held:.0f} of {cuts:.0f} cuts "
        f"(missed {_get(m, 'blinks_missed'):.2f}, extra {_get(m, 'blinks_extra'):.2f})",
        target="10 .. 25; < 400; none",
        passed=_all(
            _within(rate, 10, 25),
            None if math.isnan(longest) else longest < LONGEST_BLINK_MS,
            _within(held, 0, 0),
            _within(cuts, 1, math.inf) or None,
        ),
    )


def _pose_rows(m: Measures) -> list[Row]:
    rows = []
    ratios = {k: v for k, v in m.items() if "_var_ratio_" in k}
    by_state: dict[str, list[float]] = {}
    for name, value in ratios.items():
        by_state.setdefault(name.rsplit("_", 1)[1], []).append(value)
    for state, values in sorted(by_state.items()):
        rows.append(
            Row(
                measure=f"variance of yaw, pitch, roll, {state}, over the truth's",
                value=", ".join(f"{value:.2f}" for value in values),
                target="0.6 .. 1.5",
                passed=_all(*(_within(value, 0.6, 1.5) for value in values)),
            )
        )
    return rows


def _event_row(m: Measures) -> Row:
    early = {k.removeprefix("event_early_"): v for k, v in m.items() if "event_early_" in k}
    left = {k.removeprefix("event_left_"): v for k, v in m.items() if "event_left_" in k}
    return Row(
        measure="events: share shown within 2 units / left after their time",
        value=", ".join(f"{name} {early[name]:.2f}/{left[name]:.2f}" for name in early),
        target=">= 0.5 / <= 0.25 each",
        passed=_all(
            *(_within(value, 0.5, math.inf) for value in early.values()),
            *(_within(value, 0, 0.25) for value in left.values()),
            True if early else None,
        ),
    )


def _hold_rows(m: Measures) -> list[Row]:
    rows = []
    long, seeds = _long_enough(m), _get(m, "seeds")
    drifts = (
        ("colour drift L, a, b per 10 min", ("lab_l", "lab_a", "lab_b"), 0.5, "Lab"),
        ("identity drift per 10 min", ("identity",), 2.0, "% of the description's spread"),
    )
    for title, names, bound, unit in drifts:
        ends = [(_get(m, f"{n}_low"), _get(m, f"{n}_high")) for n in names]
        rows.append(
            Row(
                measure=title,
                value=", ".join(f"{low:+.2f} .. {high:+.2f}" for low, high in ends)
                + f" ({seeds:.0f} seeds)",
                target=f"95 % interval inside +-{bound} {unit}",
                passed=_all(*(_within(end, -bound, bound) for pair in ends for end in pair))
                if long
                else None,
            )
        )
    change, join = _get(m, "backdrop_change"), _get(m, "join_ratio")
    typical, worst = _get(m, "transition_ratio"), _get(m, "transition_worst")
    rows += [
        Row(
            measure="backdrop PSNR: first minute, largest change later, dB",
            value=f"{_get(m, 'backdrop_psnr'):.1f}, {change:+.2f}",
            target="within 0.5",
            passed=_within(change, -0.5, 0.5) if long else None,
        ),
        Row(
            measure="picture change at unit joins over inside units",
            value=f"{join:.3f} (truth {_get(m, 'join_ratio_truth'):.3f})",
            target="<= 1.15",
            passed=_within(join, 0, 1.15),
        ),
        Row(
            measure="change at state transitions: typical over the speaking median, worst over "
            "the larger of that and the truth's",
            value=f"{typical:.2f}, {worst:.2f} (truth typically "
            f"{_get(m, 'transition_ratio_truth'):.2f})",
            target="<= 2",
            passed=_all(_within(typical, 0, 2), _within(worst, 0, 2)),
        ),
    ]
    return rows


def _sound_rows(m: Measures) -> list[Row]:
    clean = _get(m, "variant_r_clean")
    names = [k.removeprefix("variant_r_") for k in m if k.startswith("variant_r_")]
    worse = {n: _get(m, f"variant_r_{n}") - clean for n in names if n != "clean"}
    lags = {n: _get(m, f"variant_lag_{n}") for n in names}
    cost = _get(m, "denoise_cpu_ms")
    return [
        Row(
            measure=f"sound as file: jaw less the clean value ({clean:.3f}) / lag, ms",
            value=", ".join(f"{n} {d:+.3f}/{lags[n]:.0f}" for n, d in worse.items()),
            target="each within 0.05 / 20",
            passed=_all(
                *(_within(d, -0.05, 0.05) for d in worse.values()),
                *(_within(lag, -20, 20) for lag in lags.values()),
                True if worse else None,
            ),
        ),
        Row(
            measure="denoise passes, CPU-ms a frame, one thread",
            value=f"{cost:.1f} (from the bench)" if cost == cost else "see the bench",
            target="<= 25",
            passed=_within(cost, 0, 25),
        ),
    ]


def text_of(rows: list[Row]) -> str:
    """The table for a terminal."""
    words = {True: "pass", False: "FAIL", None: "-"}
    cells = [[r.measure, r.value, r.target, words[r.passed]] for r in rows]
    cells = [["measure", "value", "target", ""], *cells]
    widths = [max(len(row[i]) for row in cells) for i in range(4)]
    widths[1] = min(widths[1], 60)
    lines = []
    for row in cells:
        padded = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines) + "\n"
