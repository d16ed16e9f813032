"""The bitrate of pictures from receiver reports, by loss alone; free of I/O.

The rule is that of Google congestion control's sender side (draft-ietf-rmcat-gcc-02, section 6):
below 2 % loss the rate grows by 8 % a second, above 10 % it shrinks by half the loss, between it
stays. aiortc has no transport-wide feedback, so there is no delay part.
"""

from __future__ import annotations

from dataclasses import dataclass

from rtgen.errors import ConfigError

LOW_LOSS, HIGH_LOSS = 0.02, 0.10
GROWTH_PER_S = 1.08


@dataclass(frozen=True, slots=True, kw_only=True)
class RateConfig:
    """Bounds in bits per second.

    Attributes:
        start: before the first report.
        least: never below.
        most: never above.
    """

    start: int = 900_000
    least: int = 150_000
    most: int = 1_500_000

    def __post_init__(self) -> None:
        if not 0 < self.least <= self.start <= self.most:
            raise ConfigError(
                f"need 0 < least <= start <= most, got {self.least}, {self.start}, {self.most}"
            )


class RateControl:
    """The target of one stream.

    Args:
        config: bounds.
        now_s: time, by any monotonic clock.
    """

    def __init__(self, config: RateConfig, now_s: float) -> None:
        self._config = config
        self._target = float(config.start)
        self._last_s = now_s

    @property
    def target(self) -> int:
        """Bits per second."""
        return int(self._target)

    def report(self, loss: float, now_s: float) -> int:
        """Takes a receiver report and returns the new target.

        Args:
            loss: share of packets lost since the report before, 0 to 1.
            now_s: when it came.
        """
        elapsed_s = min(max(now_s - self._last_s, 0.0), 5.0)
        self._last_s = now_s
        if loss > HIGH_LOSS:
            self._target *= 1 - 0.5 * loss
        elif loss < LOW_LOSS:
            self._target *= GROWTH_PER_S**elapsed_s
        self._target = min(max(self._target, self._config.least), self._config.most)
        return self.target
