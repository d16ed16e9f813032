"""Whose forward runs next: `decide`, a pure function of integers and ids.

One forward is the quantum; nothing interrupts it. Live sessions come by earliest deadline, a batch
is as large as it may be without making its head late (the predictor's cut), and its rows may stand
at different steps and positions. Offline work runs only in time that no live session needs, and
never while one is starting.

Everything that it knows comes in, and all that it says goes out, so the same code runs under the
machine's clock, in simulations and inside admission, and a recorded call can be repeated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

LATE_PERIODS = 2
"""A session later than this many of its periods is anchored anew."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Predicted times, as they are now.

    Attributes:
        forward_ns: per (shape, batch size); size 1 of a shape is there if any is.
        sizes: allowed batch sizes per shape, ascending, 1 first.
    """

    forward_ns: Mapping[tuple[str, int], int]
    sizes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def allowed(self, shape: str) -> tuple[int, ...]:
        """Batch sizes of a shape; an unknown one runs alone."""
        return self.sizes.get(shape, (1,))

    def ns(self, shape: str, size: int) -> int:
        """Time of one forward of `size` rows; an unknown shape counts as the costliest known."""
        known = self.forward_ns.get((shape, size))
        if known is None:
            alone = (ns for (_, rows), ns in self.forward_ns.items() if rows == 1)
            known = max(alone, default=0) * size
        return known

    def largest(self, shape: str, rows: int) -> int:
        """The largest allowed batch that so many rows fill."""
        return max(size for size in self.allowed(shape) if size <= rows)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One session as the scheduler sees it: the forward that is due, and what depends on it.

    Attributes:
        seq: order of admission; names the session, and breaks ties.
        shape: of its next forward; only rows of one shape share one.
        release_ns: earliest time for it.
        due_ns: when the chunk must leave the denoiser; for offline rows without meaning.
        forwards: forwards until then, the next one included.
        setup_ns: conditioning that comes before the next forward.
        period_ns: playing time of a chunk.
        is_starting: nothing of the session was delivered yet.
        served: forwards so far, for fairness among offline rows.
    """

    seq: int
    shape: str
    release_ns: int = 0
    due_ns: int = 0
    forwards: int = 1
    setup_ns: int = 0
    period_ns: int = 1
    is_starting: bool = False
    served: int = 0


@dataclass(frozen=True, slots=True)
class Forward:
    """Run one forward of these rows (by `seq`), live ones in front."""

    live: tuple[int, ...]
    offline: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Sleep:
    """Nothing is to be done before `until_ns`, or before something happens if None."""

    until_ns: int | None


Action = Forward | Sleep


def decide(now_ns: int, live: Sequence[Row], offline: Sequence[Row], costs: Costs) -> Action:
    """What the denoiser does next.

    Args:
        now_ns: of the clock that the rows' times are of.
        live: sessions with a deadline that have a forward to run now or at a known time.
        offline: sessions without one that could run a forward now.
        costs: predicted times.
    """
    ready = sorted(
        (row for row in live if row.release_ns <= now_ns),
        key=lambda row: (anchored_due_ns(row, now_ns), row.due_ns, row.seq),
    )
    filler = sorted(offline, key=lambda row: (row.served, row.seq))
    if any(row.is_starting for row in live):
        filler = []
    if ready:
        batch = _cut(now_ns, ready, costs)
        return Forward(_names(batch), _names(_riders(now_ns, batch, live, filler, costs)))
    if filler and (piece := _slice(now_ns, filler, live, costs)):
        return Forward((), _names(piece))
    return Sleep(min((row.release_ns for row in live), default=None))


def anchored_due_ns(row: Row, now_ns: int) -> int:
    """When a row's chunk is due; one that is late beyond help is due in a period from now.

    It is not first for ever, which would make all others late: it gives way to those that can be
    on time, and is made no faster afterwards to catch up.
    """
    if now_ns - row.due_ns < LATE_PERIODS * row.period_ns:
        return row.due_ns
    return now_ns + row.period_ns


def slack_ns(now_ns: int, live: Sequence[Row], costs: Costs) -> int | None:
    """Time that may be spent on something else before any live session gets late, None: any.

    Pessimistic: all sessions are taken to need the denoiser at once, in full batches one after the
    other, each to its chunk's end.
    """
    if not live:
        return None
    setup_ns = sum(row.setup_ns for row in live)
    least: int | None = None
    for row in live:
        size = costs.largest(row.shape, len(live))
        waves = -(-len(live) // size)
        need_ns = row.forwards * waves * costs.ns(row.shape, size) + setup_ns
        slack = row.due_ns - now_ns - need_ns
        least = slack if least is None else min(least, slack)
    return least


def _cut(now_ns: int, ready: Sequence[Row], costs: Costs) -> Sequence[Row]:
    """The largest batch in order of deadlines that keeps its head on time, if any does."""
    head = ready[0]
    alike = [row for row in ready if row.shape == head.shape]
    sizes = [size for size in costs.allowed(head.shape) if size <= len(alike)]
    for size in reversed(sizes):
        setup_ns = sum(row.setup_ns for row in alike[:size])
        done_ns = now_ns + setup_ns + head.forwards * costs.ns(head.shape, size)
        if done_ns <= head.due_ns:
            return alike[:size]
    return alike[: sizes[-1]]


def _riders(
    now_ns: int, batch: Sequence[Row], live: Sequence[Row], filler: Sequence[Row], costs: Costs
) -> Sequence[Row]:
    """Offline rows that ride in a live batch for what they add, if everyone's slack allows."""
    shape, rows = batch[0].shape, len(batch)
    alike = [row for row in filler if row.shape == shape]
    base_ns = costs.ns(shape, rows)
    slack = slack_ns(now_ns, live, costs)
    assert slack is not None
    for size in reversed(costs.allowed(shape)):
        guests = alike[: size - rows]
        if not rows < size <= rows + len(alike):
            continue
        extra_ns = costs.ns(shape, size) - base_ns + sum(row.setup_ns for row in guests)
        if extra_ns <= slack:
            return guests
    return ()


def _slice(
    now_ns: int, filler: Sequence[Row], live: Sequence[Row], costs: Costs
) -> Sequence[Row] | None:
    """The largest batch of offline rows that fits into the slack and a quarter of a period."""
    slack = slack_ns(now_ns, live, costs)
    head = filler[0]
    alike = [row for row in filler if row.shape == head.shape]
    quantum_ns = min((row.period_ns for row in live), default=0) // 4
    for size in reversed(costs.allowed(head.shape)):
        if size > len(alike):
            continue
        span_ns = costs.ns(head.shape, size) + sum(row.setup_ns for row in alike[:size])
        if slack is None or (span_ns <= slack and (size == 1 or span_ns <= quantum_ns)):
            return alike[:size]
    return None


def _names(rows: Sequence[Row]) -> tuple[int, ...]:
    return tuple(row.seq for row in rows)


@dataclass(frozen=True, slots=True)
class DecodeJob:
    """A chunk that waits for the decode lane.

    Attributes:
        seq: its session.
        due_ns: when it must be shown; None for an offline session.
    """

    seq: int
    due_ns: int | None


def decide_decode(
    now_ns: int,
    jobs: Sequence[DecodeJob],
    live_due_ns: Sequence[int],
    in_flight: int,
    decode_ns: int,
) -> int | None:
    """Whose chunk the decode lane takes next, None for nobody now.

    Live chunks go by deadline. An offline chunk goes only onto an empty lane, and only if every
    live session at work could still have its next chunk decoded after it.

    Args:
        now_ns: the time.
        jobs: the first waiting chunk of each session.
        live_due_ns: when each live session at work must show its next chunk.
        in_flight: chunks on the lane.
        decode_ns: predicted time of one.
    """
    urgent = [(job.due_ns, job.seq) for job in jobs if job.due_ns is not None]
    if urgent:
        return min(urgent)[1]
    if not jobs:
        return None
    if live_due_ns:
        spare_ns = min(live_due_ns) - now_ns - len(live_due_ns) * decode_ns
        if in_flight or spare_ns < decode_ns:
            return None
    return min(job.seq for job in jobs)
