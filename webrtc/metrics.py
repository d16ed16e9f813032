"""Counters, gauges and histograms in Prometheus' text format, for one event loop.

Labels never hold session ids, so the number of series is bounded by the code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Labels = tuple[tuple[str, str], ...]
SECONDS = (0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.5, 1.0, 1.5, 3.0, 10.0)


class Metrics:
    """All metrics of a server; a name belongs to one kind."""

    def __init__(self) -> None:
        self._help: dict[str, tuple[str, str]] = {}
        self._values: dict[str, dict[Labels, float]] = {}
        self._gauges: dict[str, Callable[[], float]] = {}
        self._histograms: dict[str, _Histogram] = {}

    def counter(self, name: str, text: str) -> None:
        """Declares a counter."""
        self._help[name] = ("counter", text)
        self._values[name] = {}

    def gauge(self, name: str, text: str, read: Callable[[], float]) -> None:
        """Declares a gauge that is read when it is asked for."""
        self._help[name] = ("gauge", text)
        self._gauges[name] = read

    def histogram(self, name: str, text: str, bounds: Sequence[float] = SECONDS) -> None:
        """Declares a histogram with ascending upper bounds."""
        self._help[name] = ("histogram", text)
        self._histograms[name] = _Histogram(bounds)

    def add(self, name: str, value: float = 1.0, **labels: str) -> None:
        """Raises a counter."""
        series, key = self._values[name], tuple(sorted(labels.items()))
        series[key] = series.get(key, 0.0) + value

    def observe(self, name: str, value: float) -> None:
        """Adds a value to a histogram."""
        self._histograms[name].observe(value)

    def value(self, name: str, **labels: str) -> float:
        """A counter's value with exactly these labels, 0 if it was never raised."""
        return self._values[name].get(tuple(sorted(labels.items())), 0.0)

    def text(self) -> str:
        """The exposition, version 0.0.4."""
        lines: list[str] = []
        for name, (kind, text) in self._help.items():
            lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
            if kind == "counter":
                series = self._values[name] or {(): 0.0}
                lines += [f"{name}{_braces(key)} {value:g}" for key, value in series.items()]
            elif kind == "gauge":
                lines.append(f"{name} {self._gauges[name]():g}")
            else:
                lines += self._histograms[name].lines(name)
        return "\n".join(lines) + "\n"


class _Histogram:
    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        index = next((i for i, bound in enumerate(self._bounds) if value <= bound), -1)
        self._counts[index] += 1
        self._sum += value

    def lines(self, name: str) -> list[str]:
        found, total = [], 0
        for bound, count in zip((*self._bounds, None), self._counts, strict=True):
            total += count
            label = "+Inf" if bound is None else f"{bound:g}"
            found.append(f'{name}_bucket{{le="{label}"}} {total}')
        return [*found, f"{name}_sum {self._sum:g}", f"{name}_count {total}"]


def _braces(labels: Labels) -> str:
    if not labels:
        return ""
    parts = (f'{key}="{_escaped(value)}"' for key, value in labels)
    return "{" + ",".join(parts) + "}"


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def server_metrics() -> Metrics:
    """The metrics of a media process, all but those that need the server to be read."""
    metrics = Metrics()
    metrics.counter("rtgen_sessions_total", "Sessions that were granted.")
    metrics.counter("rtgen_session_end_total", "Sessions that ended, by reason.")
    metrics.counter("rtgen_admission_rejected_total", "Offers that found no room, by reason.")
    metrics.counter("rtgen_http_requests_total", "Requests, by route and status.")
    metrics.counter("rtgen_frames_sent_total", "Pictures sent, repeats included.")
    metrics.counter("rtgen_frames_repeated_total", "Pictures shown again for want of a new one.")
    metrics.counter("rtgen_frames_dropped_total", "Pictures dropped before encoding.")
    metrics.counter("rtgen_playout_gaps_total", "Stretches of silence because nothing was there.")
    metrics.counter("rtgen_keyframes_total", "Key frames sent.")
    metrics.counter("rtgen_interrupts_total", "Interrupts asked for.")
    metrics.histogram("rtgen_ttff_seconds", "From the offer to the first picture sent.")
    metrics.histogram("rtgen_frame_lateness_seconds", "From a picture's time to its sending.")
    metrics.histogram("rtgen_encode_seconds", "Encoding of a picture.")
    metrics.histogram(
        "rtgen_interrupt_to_silence_seconds", "From an interrupt to the next sound sent."
    )
    return metrics
