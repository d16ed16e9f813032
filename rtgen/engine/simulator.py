"""The engine without networks: the real scheduler, pacing, cost model and ladder in virtual time.

One denoiser that nothing interrupts, one decoder served by earliest deadline, and clients that
show units on time, stall when one is late, and go on from there. It answers how many sessions fit,
and it is what admission asks before it takes one more.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal

from rtgen.engine.cost_model import CONDITION, DECODE, CostModel, Profile
from rtgen.engine.ladder import Ladder, Move
from rtgen.engine.load import Demand, response_ns, utilization
from rtgen.engine.pacing import MARGIN_NS, Pacer
from rtgen.engine.scheduler import Action, Costs, Forward, Row, decide
from rtgen.engine.trace import Decision

_Kind = Literal["join", "leave", "wake", "denoised", "decoded", "show"]
Policy = Callable[[int, Sequence[Row], Sequence[Row], Costs], Action]


@dataclass(frozen=True, slots=True, kw_only=True)
class Visit:
    """A session in a simulation.

    Attributes:
        rungs: demands by rung of the ladder, the first is what was asked for.
        join_ns: when it comes.
        leave_ns: when it goes; None: it stays.
        is_live: keeps time; otherwise it takes what is left, without end.
    """

    rungs: tuple[Demand, ...]
    join_ns: int = 0
    leave_ns: int | None = None
    is_live: bool = True


@dataclass(slots=True)
class Outcome:
    """How one session fared.

    Attributes:
        chunks: delivered.
        late: chunks that were not there when they had to be shown.
        stall_ns: time that the picture stood still.
        first_ns: from joining to the first delivery; None if there was none.
        responses_ns: per chunk, from its beginning to its delivery.
        forwards: of the denoiser, in which it had a row.
        moves: of the ladder.
        late_at_ns: when late chunks were delivered.
    """

    chunks: int = 0
    late: int = 0
    stall_ns: int = 0
    first_ns: int | None = None
    responses_ns: list[int] = field(default_factory=list)
    forwards: int = 0
    moves: list[Move] = field(default_factory=list)
    late_at_ns: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Report:
    """What a simulation came to.

    Attributes:
        visits: one outcome for each visit, in order.
        busy_ns: time that the denoiser worked.
        decode_busy_ns: time that the decoder worked.
        forwards: of the denoiser.
        rows: of all forwards.
        most_queued: longest queue in front of the decoder.
    """

    visits: list[Outcome]
    busy_ns: int = 0
    decode_busy_ns: int = 0
    forwards: int = 0
    rows: int = 0
    most_queued: int = 0

    def miss_rate(self, visits: Sequence[Visit]) -> float:
        """Share of the live sessions' chunks that were late."""
        live = [out for out, visit in zip(self.visits, visits, strict=True) if visit.is_live]
        chunks = sum(out.chunks for out in live)
        return sum(out.late for out in live) / chunks if chunks else 0.0


class _Guest:
    """A visit under way."""

    def __init__(self, seq: int, visit: Visit, start_ns: int) -> None:
        self.seq, self.visit, self.demand = seq, visit, visit.rungs[0]
        demand = self.demand
        self.pacer = Pacer(
            Fraction(demand.unit_ns, 10**9), demand.lead, demand.units_per_chunk, start_ns
        )
        self.created_ns = self.since_ns = start_ns
        self.left = 0  # noisy forwards left of the running chunk
        self.owes_clean = False
        self.begun = self.delivered = self.shown = 0
        self.under_way: list[tuple[int, int, Demand]] = []  # (index, begun at, what)
        self.due_ns: int | None = None  # of the next unit to be shown
        self.out = Outcome()

    def may_begin(self) -> bool:
        ahead = self.begun + self.demand.units_per_chunk - self.shown
        return ahead <= self.demand.lead if self.visit.is_live else len(self.under_way) < 2


class Simulator:
    """Runs visits through the engine's own decisions.

    Args:
        profile: what forwards and decodes really take, but for the noise.
        visits: the sessions; their numbers here are their `seq`.
        seed: of the noise.
        noise: relative standard deviation of all times.
        policy: who runs next.
        ladder: whether sessions with several rungs use them.
        spikes: forward number -> factor on its time.
        prebuffer_ns: from a client's first delivery to its first picture.
        learn: whether the cost model is corrected by what forwards take.
    """

    def __init__(
        self,
        profile: Profile,
        visits: Sequence[Visit],
        *,
        seed: int = 0,
        noise: float = 0.03,
        policy: Policy = decide,
        ladder: bool = False,
        spikes: Mapping[int, float] | None = None,
        prebuffer_ns: int = MARGIN_NS,
        learn: bool = True,
    ) -> None:
        self.visits = visits
        self.cost = CostModel(profile)
        self._learn = learn
        self.trace: list[Decision] | None = None
        self._profile = profile
        self._random = random.Random(seed)
        self._noise, self._spikes = noise, dict(spikes or {})
        self._policy, self._prebuffer_ns = policy, prebuffer_ns
        self._ladder = Ladder() if ladder else None
        self._guests: dict[int, _Guest] = {}
        self._events: list[tuple[int, int, str, int]] = []
        self._number = 0
        self._now = 0
        self._running: tuple[int, ...] = ()
        self._decoding: int | None = None
        self._queue: list[tuple[int, int]] = []  # (deadline, seq) of chunks to be decoded
        self._wake_ns: int | None = None
        self.report = Report([Outcome() for _ in visits])

    def record(self) -> list[Decision]:
        """Keeps every decision from now on; returns the list that they go into."""
        self.trace = []
        return self.trace

    def run(self, duration_ns: int) -> Report:
        """Plays all visits until `duration_ns`."""
        for seq, visit in enumerate(self.visits):
            self._at(visit.join_ns, "join", seq)
            if visit.leave_ns is not None:
                self._at(visit.leave_ns, "leave", seq)
        while self._events and self._events[0][0] <= duration_ns:
            self._now, _, kind, seq = heapq.heappop(self._events)
            getattr(self, f"_on_{kind}")(seq)
            if not self._events or self._events[0][0] > self._now:
                self._dispatch()
        return self.report

    def _at(self, when_ns: int, kind: _Kind, seq: int) -> None:
        self._number += 1
        heapq.heappush(self._events, (when_ns, self._number, kind, seq))

    # -- events

    def _on_join(self, seq: int) -> None:
        visit = self.visits[seq]
        guest = _Guest(seq, visit, self._now)
        guest.out = self.report.visits[seq]
        guest.owes_clean = guest.demand.clean is not None  # of its reference
        self._guests[seq] = guest
        if self._ladder is not None and visit.is_live:
            self._ladder.join(seq, len(visit.rungs) - 1)
            self._moved(self._ladder.make_room(self._load))
        self._expect()

    def _on_leave(self, seq: int) -> None:
        self._guests.pop(seq, None)
        self._queue = [item for item in self._queue if item[1] != seq]
        heapq.heapify(self._queue)
        if self._ladder is not None:
            self._ladder.leave(seq)
        self._expect()

    def _on_wake(self, _: int) -> None:
        self._wake_ns = None

    def _on_denoised(self, _: int) -> None:
        for seq in self._running:
            guest = self._guests.get(seq)
            if guest is None:
                continue
            guest.since_ns = self._now
            if not guest.left:
                guest.owes_clean = False
                continue
            guest.left -= 1
            if not guest.left:
                guest.owes_clean = guest.demand.clean is not None
                index = guest.begun - guest.demand.units_per_chunk
                deadline = guest.pacer.due_ns(index) if guest.visit.is_live else 2**62
                heapq.heappush(self._queue, (deadline, seq))
        self._running = ()
        self._decode()

    def _on_decoded(self, seq: int) -> None:
        self._decoding = None
        guest = self._guests.get(seq)
        if guest is not None and guest.under_way:
            self._deliver(guest)
        self._decode()

    def _on_show(self, seq: int) -> None:
        guest = self._guests.get(seq)
        if guest is None or guest.due_ns is None or guest.due_ns > self._now:
            return
        if guest.delivered > guest.shown:
            self._show(guest)

    # -- what they do

    def _show(self, guest: _Guest) -> None:
        guest.pacer.show(guest.shown, self._now)
        guest.shown += 1
        guest.due_ns = self._now + guest.demand.unit_ns
        self._at(guest.due_ns, "show", guest.seq)

    def _deliver(self, guest: _Guest) -> None:
        index, begun_ns, demand = guest.under_way.pop(0)
        out, now = guest.out, self._now
        guest.delivered += demand.units_per_chunk
        out.chunks += 1
        headroom_ns = guest.pacer.deliver(index, now)
        out.responses_ns.append(now - begun_ns)
        if out.first_ns is None:
            out.first_ns = now - guest.created_ns
        if not guest.visit.is_live:
            return
        if guest.due_ns is None:
            guest.due_ns = now + self._prebuffer_ns
            self._at(guest.due_ns, "show", guest.seq)
        elif now > guest.due_ns:  # the picture has stood still since then
            out.late += 1
            out.late_at_ns.append(now)
            out.stall_ns += now - guest.due_ns
            self._show(guest)
        self._climb(guest, headroom_ns)

    def _climb(self, guest: _Guest, headroom_ns: int) -> None:
        if self._ladder is None:
            return
        period_ns = guest.demand.period_ns
        move = self._ladder.delivered(guest.seq, headroom_ns, period_ns, self._load)
        self._moved([] if move is None else [move])

    def _moved(self, moves: Sequence[Move]) -> None:
        for move in moves:
            self._guests[move.seq].out.moves.append(move)

    def _load(self, rungs: Mapping[int, int]) -> float:
        demands = [
            guest.visit.rungs[rungs.get(seq, 0)]
            for seq, guest in self._guests.items()
            if guest.visit.is_live
        ]
        return utilization(demands, self.cost.costs())

    def _decode(self) -> None:
        self.report.most_queued = max(self.report.most_queued, len(self._queue))
        if self._decoding is None and self._queue:
            _, self._decoding = heapq.heappop(self._queue)
            span_ns = self._span(self._profile.forward_ns[DECODE][1])
            self.report.decode_busy_ns += span_ns
            self._at(self._now + span_ns, "decoded", self._decoding)

    def _dispatch(self) -> None:
        if self._running:
            return
        costs = self.cost.costs()
        rows = [(guest, row) for guest in self._guests.values() if (row := self._row(guest))]
        live = [row for guest, row in rows if guest.visit.is_live]
        offline = [row for guest, row in rows if not guest.visit.is_live]
        action = self._policy(self._now, live, offline, costs)
        if self.trace is not None:
            self.trace.append(Decision(self._now, tuple(live), tuple(offline), costs, action))
        if isinstance(action, Forward):
            self._forward((*action.live, *action.offline))
        elif action.until_ns is not None and action.until_ns != self._wake_ns:
            self._wake_ns = action.until_ns
            self._at(max(action.until_ns, self._now + 1), "wake", -1)

    def _row(self, guest: _Guest) -> Row | None:
        demand, release_ns, setup_ns = guest.demand, guest.since_ns, 0
        if guest.left:
            shape, forwards = demand.noisy[-guest.left], guest.left
            index = guest.begun - demand.units_per_chunk
        elif guest.owes_clean and demand.clean is not None:
            shape, forwards, index = demand.clean, 1 + len(demand.noisy), guest.begun
        elif guest.may_begin():
            shape, forwards, index = demand.noisy[0], len(demand.noisy), guest.begun
            setup_ns = self.cost.stage_ns(CONDITION)
            release_ns = guest.pacer.begin_ns(index) if guest.visit.is_live else 0
        else:
            return None
        return Row(
            seq=guest.seq,
            shape=shape,
            release_ns=release_ns,
            due_ns=guest.pacer.due_ns(index) - MARGIN_NS - self.cost.stage_ns(DECODE),
            forwards=forwards,
            setup_ns=setup_ns,
            period_ns=demand.period_ns,
            is_starting=guest.visit.is_live and not guest.delivered,
            served=guest.out.forwards,
        )

    def _forward(self, rows: tuple[int, ...]) -> None:
        span_ns = 0
        for seq in rows:
            guest = self._guests[seq]
            guest.out.forwards += 1
            if not guest.left and not guest.owes_clean:
                span_ns += self._begin(guest)
        first = self._guests[rows[0]]
        shape = first.demand.noisy[-first.left] if first.left else first.demand.clean
        assert shape is not None
        forward_ns = self._span(self._profile.forward_ns[shape][len(rows)])
        forward_ns = round(forward_ns * self._spikes.get(self.report.forwards, 1.0))
        if self._learn:
            self.cost.observe(shape, len(rows), forward_ns)
        self.report.forwards += 1
        self.report.rows += len(rows)
        self.report.busy_ns += span_ns + forward_ns
        self._running = rows
        self._at(self._now + span_ns + forward_ns, "denoised", -1)

    def _begin(self, guest: _Guest) -> int:
        if self._ladder is not None and guest.visit.is_live:
            guest.demand = guest.visit.rungs[self._ladder.rungs[guest.seq]]
        guest.pacer.begin(guest.begun, self._now)
        guest.under_way.append((guest.begun, self._now, guest.demand))
        guest.left = len(guest.demand.noisy)
        guest.begun += guest.demand.units_per_chunk
        return self._span(self._profile.forward_ns[CONDITION][1])

    def _expect(self) -> None:
        """Tells the pacers what the load predicts, as the engine does."""
        live = [guest for guest in self._guests.values() if guest.visit.is_live]
        span_ns = response_ns(
            [guest.demand for guest in live], self.cost.costs(), self.cost.stage_ns(DECODE)
        )
        for guest in live:
            guest.pacer.expected_ns = span_ns if len(live) > 1 else 0

    def _span(self, mean_ns: int) -> int:
        return round(mean_ns * max(0.5, self._random.gauss(1.0, self._noise)))
