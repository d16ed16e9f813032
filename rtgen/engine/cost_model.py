"""How long a forward will take: measured at start, corrected by what is seen since.

A `Profile` holds the measured times of one model on one device. A `CostModel` multiplies them by
how much slower or faster recent runs were, and adds what their scatter asks for. It looks at
medians, so one stalled run changes nothing; a lasting change is followed, and said once.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from rtgen.engine.scheduler import Costs
from rtgen.errors import ConfigError
from rtgen.timing import percentile

CONDITION, DECODE = "condition", "decode"
"""Names of the stages beside the denoiser's shapes."""
Z = 2.33
"""Standard deviations added to a prediction: 1 % of a normal scatter lies above."""
PRIOR_SCATTER = 0.03
"""Relative scatter until it is known."""
STALE_RATIO = 0.25
STALE_RUNS = 50
_BUCKET_RUNS = 31
_ENOUGH_RUNS = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """Undisturbed times of one model on one device, in nanoseconds.

    Attributes:
        device: where it was measured.
        model: what was measured.
        forward_ns: per shape of a pass ("1", "1+1": latent frames of its groups) and stage
            (`CONDITION`, `DECODE`: one chunk) and batch size; size 1 is always there.
        session_bytes: memory that a session holds on the device.
    """

    device: str
    model: str
    forward_ns: Mapping[str, Mapping[int, int]]
    session_bytes: int = 0

    def __post_init__(self) -> None:
        for name, times in self.forward_ns.items():
            if 1 not in times or min(times) < 1 or min(times.values()) < 0:
                raise ConfigError(
                    f"a profile has a time for one row of every shape and none below 0, got "
                    f"{dict(times)} for {name!r}"
                )
        if self.session_bytes < 0:
            raise ConfigError(f"session_bytes must not be negative, got {self.session_bytes}")

    def to_dict(self) -> dict[str, Any]:
        """As JSON values."""
        return {
            "device": self.device,
            "model": self.model,
            "forward_ns": {
                name: {str(size): ns for size, ns in times.items()}
                for name, times in self.forward_ns.items()
            },
            "session_bytes": self.session_bytes,
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Profile:
        """Reads what `to_dict` gave.

        Raises:
            ConfigError: a field is missing or wrong.
        """
        try:
            return cls(
                device=str(values["device"]),
                model=str(values["model"]),
                forward_ns={
                    str(name): {int(size): int(ns) for size, ns in times.items()}
                    for name, times in values["forward_ns"].items()
                },
                session_bytes=int(values["session_bytes"]),
            )
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ConfigError(f"not a profile as `to_dict` writes it: {error!r}") from error


def affine_profile(
    *,
    frames: int,
    sizes: tuple[int, ...],
    base_ms: float,
    frame_ms: float,
    decode_ms: float,
    device: str = "made up",
    session_bytes: int = 0,
) -> Profile:
    """A profile after the law base + frame_ms * latent frames of the batch, for simulations.

    Args:
        frames: latent frames of a chunk.
        sizes: allowed batch sizes, 1 among them.
        base_ms: of every forward, milliseconds.
        frame_ms: for each latent frame in it.
        decode_ms: of one chunk.
        device: name to print.
        session_bytes: memory of a session.
    """
    return Profile(
        device=device,
        model=f"{base_ms:g} ms + {frame_ms:g} ms a latent frame",
        forward_ns={
            str(frames): {
                size: round((base_ms + frame_ms * size * frames) * 1e6) for size in sizes
            },
            CONDITION: {1: 0},
            DECODE: {1: round(decode_ms * 1e6)},
        },
        session_bytes=session_bytes,
    )


@dataclass(slots=True)
class _Correction:
    """Recent measured / profiled times of one shape and size."""

    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=_BUCKET_RUNS))
    center: float = 1.0
    scatter: float = PRIOR_SCATTER

    def add(self, ratio: float) -> None:
        """Takes one run.

        The scatter is a relative standard deviation: 1.4826 times the median distance from the
        median, for a normal law.
        """
        self.ratios.append(ratio)
        center = median(self.ratios)
        spread = median(abs(ratio - center) for ratio in self.ratios)
        self.center = center
        self.scatter = min(1.4826 * spread / center, 1.0) if center else 0.0


class CostModel:
    """Predicts times and learns from measured ones; any thread may call it.

    Args:
        profile: measured at start.
        on_stale: called with the ratio measured / profiled when the profile is found to be wrong
            by more than a quarter over 50 runs, and again after it has been right in between.
    """

    def __init__(self, profile: Profile, on_stale: Callable[[float], None] | None = None) -> None:
        self.profile = profile
        self._on_stale = on_stale
        self._lock = threading.Lock()
        self._corrections: dict[tuple[str, int], _Correction] = {}
        self._overall: deque[float] = deque(maxlen=STALE_RUNS)
        self._errors: deque[float] = deque(maxlen=512)
        self._is_stale = False
        self._center = 1.0
        self._sizes = {
            name: tuple(sorted(times))
            for name, times in profile.forward_ns.items()
            if name not in (CONDITION, DECODE)
        }
        self._costs: Costs | None = None

    @property
    def is_stale(self) -> bool:
        """Whether the profile no longer fits what is measured."""
        return self._is_stale

    @property
    def ratio(self) -> float:
        """How much slower than profiled recent runs were, all kinds together."""
        with self._lock:
            return self._center

    def error(self, share: float) -> float | None:
        """Relative error of the central prediction, as a percentile over recent runs."""
        with self._lock:
            errors = list(self._errors)
        return percentile(errors, share) if errors else None

    def costs(self) -> Costs:
        """All predictions as they are now, with their safety; a snapshot that never changes."""
        with self._lock:
            if self._costs is None:
                keys = ((name, size) for name, sizes in self._sizes.items() for size in sizes)
                self._costs = Costs({key: self._predict(*key, Z) for key in keys}, self._sizes)
            return self._costs

    def stage_ns(self, stage: str) -> int:
        """Predicted time of `CONDITION` or `DECODE` for one chunk, with its safety."""
        with self._lock:
            return self._predict(stage, 1, Z) if stage in self.profile.forward_ns else 0

    def observe(self, name: str, size: int, measured_ns: int) -> None:
        """Takes note of one run.

        Args:
            name: shape or stage.
            size: rows; sizes that the profile has not are ignored.
            measured_ns: what it took.
        """
        profiled = self.profile.forward_ns.get(name, {}).get(size)
        if not profiled:
            return
        alarm: float | None = None
        with self._lock:
            expected = self._predict(name, size, 0.0)
            if expected:
                self._errors.append(abs(measured_ns / expected - 1))
            ratio = measured_ns / profiled
            self._corrections.setdefault((name, size), _Correction()).add(ratio)
            self._overall.append(ratio)
            self._center = median(self._overall) if len(self._overall) >= _ENOUGH_RUNS else 1.0
            self._costs = None
            was_stale, overall = self._is_stale, self._center
            is_full = len(self._overall) == STALE_RUNS
            self._is_stale = is_full and abs(overall - 1) > STALE_RATIO
            if self._is_stale and not was_stale:
                alarm = overall
        if alarm is not None and self._on_stale is not None:
            self._on_stale(alarm)

    def _predict(self, name: str, size: int, z: float) -> int:
        """Profiled time, corrected by its own recent runs if there are enough, else by all."""
        profiled = self.profile.forward_ns[name][size]
        correction = self._corrections.get((name, size))
        if correction is None or len(correction.ratios) < _ENOUGH_RUNS:
            return round(profiled * self._center * (1 + z * PRIOR_SCATTER))
        return round(profiled * correction.center * (1 + z * correction.scatter))
