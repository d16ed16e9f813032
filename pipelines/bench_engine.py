"""How many sessions one denoiser serves on time (`rtgen bench engine`).

The engine's scheduler, admission and ladder in virtual time, on a profile like a GPU's: a forward
takes 10 ms and 2 ms for each latent frame in it, a chunk is three latent frames of 160 ms in four
steps and a clean pass, its decode takes 30 ms. Compared with one session per forward, first come
first served. With `--model` the profile of a model on this machine is measured too, and what
admission would take on it.

The last line on stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from pipelines.bench_avatar import conditions
from rtgen.engine.admission import Capacity, shortage
from rtgen.engine.cost_model import DECODE, CostModel, Profile, affine_profile
from rtgen.engine.load import Demand, utilization
from rtgen.engine.scheduler import Action, Costs, Forward, Row, Sleep, decide
from rtgen.engine.simulator import Policy, Report, Simulator, Visit
from rtgen.errors import ConfigError
from rtgen.timing import percentile

NS = 1_000_000_000
STEPS = (4, 3, 2)
"""Steps by rung of the ladder."""
MAX_MISS = 0.01
PROFILE = affine_profile(
    frames=3, sizes=tuple(range(1, 9)), base_ms=10, frame_ms=2, decode_ms=30, device="GPU-like"
)


def demand(steps: int) -> Demand:
    """A session with so many steps."""
    return Demand(noisy=("3",) * steps, clean="3", units_per_chunk=3, unit_ns=160_000_000, lead=6)


def visits(count: int, *, ladder: bool = False, seed: int = 0) -> list[Visit]:
    """Live sessions that join at random within two seconds."""
    rng = random.Random(seed)
    rungs = tuple(demand(steps) for steps in (STEPS if ladder else STEPS[:1]))
    return [Visit(rungs=rungs, join_ns=rng.randrange(2 * NS)) for _ in range(count)]


def first_come(now: int, live: Sequence[Row], offline: Sequence[Row], costs: Costs) -> Action:
    """One session per forward, in the order in which their work came."""
    ready = [row for row in live if row.release_ns <= now]
    if ready:
        return Forward((min(ready, key=lambda row: (row.release_ns, row.seq)).seq,))
    return Sleep(min((row.release_ns for row in live), default=None))


def capacity(policy: Policy, seconds: int, count: int = 1) -> tuple[int, float]:
    """The most sessions of which at most 1 % of the chunks are late, and the rate with one more.

    Args:
        policy: of the scheduler.
        seconds: virtual time.
        count: sessions that are known to fit.
    """
    while True:
        guests = visits(count + 1)
        rate = Simulator(PROFILE, guests, policy=policy).run(seconds * NS).miss_rate(guests)
        if rate > MAX_MISS:
            return count, rate
        count += 1


def admitted() -> int:
    """Sessions that admission takes."""
    return taken(demand(STEPS[0]), CostModel(PROFILE))[0]


def taken(one: Demand, cost: CostModel) -> tuple[int, str]:
    """The largest set of equal sessions that admission takes, and what refuses one more."""
    count, limit = 64, "places"
    while count and (found := shortage([one] * count, [], cost, Capacity())) is not None:
        count, limit = count - 1, found.constraint
    return count, limit


def one_too_many(count: int, seconds: int) -> dict[str, Any]:
    """A session more than can be served, with and without the ladder."""
    bare, rungs = visits(count), visits(count, ladder=True)
    plain = Simulator(PROFILE, bare).run(seconds * NS)
    eased = Simulator(PROFILE, rungs, ladder=True).run(seconds * NS)
    return {
        "sessions": count,
        "miss_rate": round(plain.miss_rate(bare), 4),
        "miss_rate_with_ladder": round(eased.miss_rate(rungs), 4),
        "moves": sum(len(out.moves) for out in eased.visits),
    }


def fresh_seeds(count: int, seconds: int) -> dict[str, Any]:
    """Late chunks of an admitted set with noise and joins that admission never saw."""
    late = chunks = 0
    for seed in (11, 12, 13):
        guests = visits(count, seed=seed)
        report = Simulator(PROFILE, guests, seed=seed).run(seconds * NS)
        late += sum(out.late for out in report.visits)
        chunks += sum(out.chunks for out in report.visits)
    return {"sessions": count, "seeds": 3, "chunks": chunks, "late": late}


def offline_beside(count: int, seconds: int) -> dict[str, Any]:
    """Four renders beside live sessions: what they add in misses and take of the idle time."""
    live = visits(count)
    render = Visit(rungs=(demand(STEPS[0]),), is_live=False)
    alone = Simulator(PROFILE, live).run(seconds * NS)
    both = [*live, *([render] * 4)]
    mixed = Simulator(PROFILE, both).run(seconds * NS)
    nominal = _nominal(PROFILE)
    load = utilization([demand(STEPS[0])] * count, nominal)
    rows = sum(out.forwards for out in mixed.visits[count:])
    best = nominal.largest("3", 8)
    row_s = nominal.ns("3", best) / best / NS
    return {
        "sessions": count,
        "load": round(load, 3),
        "added_late": _late(mixed) - _late(alone),
        "idle_used": round(rows * row_s / ((1 - load) * seconds), 3),
    }


def overload(count: int, seconds: int) -> dict[str, Any]:
    """Twice what is admitted; then half leave."""
    end_ns = seconds * NS
    guests = [
        replace(visit, leave_ns=None if place < count else end_ns)
        for place, visit in enumerate(visits(2 * count))
    ]
    report = Simulator(PROFILE, guests).run(end_ns + 10 * NS)
    spans = [ns / NS for out in report.visits for ns in out.responses_ns]
    stayed = report.visits[:count]
    last_late = max((at for out in stayed for at in out.late_at_ns), default=0)
    return {
        "sessions": 2 * count,
        "seconds": seconds,
        "chunk_s_p50": round(percentile(spans, 0.5), 3),
        "chunk_s_max": round(max(spans), 3),
        "longest_decode_queue": report.most_queued,
        "least_played": round(min(out.chunks for out in report.visits) * 0.48 / seconds, 3),
        "recovery_s": round(max(last_late - end_ns, 0) / NS, 3),
    }


def measured(model: Path) -> dict[str, Any]:
    """Profile of a model on this machine, and what admission takes on it (one at least)."""
    from pipelines.avatar import AvatarPipeline
    from rtgen.engine.lanes import inline_lanes
    from rtgen.engine.load_control import MAX_BATCH, prepare

    pipeline = AvatarPipeline.from_directory(model)
    cost, sizes, control = prepare(pipeline, inline_lanes(), MAX_BATCH, None, None, lambda _: None)
    one = control.facts.demand(None, pipeline.format)
    count, limit = taken(one, cost)
    decode = cost.stage_ns(DECODE) / one.period_ns
    return {
        "load_of_one": {
            "denoise": round(utilization([one], cost.costs()), 3),
            "decode": round(decode, 3),
        },
        "profile": cost.profile.to_dict(),
        "safe_batch_sizes": list(sizes),
        "admitted": count,
        "limited_by": limit,
    }


def table(document: dict[str, Any]) -> str:
    """The results as a Markdown table."""
    extra, beside = document["one_too_many"], document["offline_beside"]
    fresh, over = document["admitted"], document["overload"]
    first, batched = document["first_come"]["sessions"], document["batched"]["sessions"]
    rows = [
        ("sessions with at most 1 % late, one per forward", f"{first}"),
        ("the same, batched by deadline", f"{batched} ({batched / first:.1f}x)"),
        (f"{extra['sessions']} sessions: late chunks", f"{extra['miss_rate']:.1%}"),
        ("the same with the ladder", f"{extra['miss_rate_with_ladder']:.2%}"),
        (f"{fresh['sessions']} admitted, fresh seeds: late", f"{fresh['late']}/{fresh['chunks']}"),
        (f"renders beside {beside['load']:.0%} load: added late", f"{beside['added_late']}"),
        ("idle time that they use", f"{beside['idle_used']:.0%}"),
        (f"{over['sessions']} sessions: longest chunk", f"{over['chunk_s_max']:.2f} s"),
        ("on time again after half have left", f"{over['recovery_s']:.2f} s"),
    ]
    return "\n".join(["| measure | value |", "|---|---|", *(f"| {a} | {b} |" for a, b in rows)])


def simulate(seconds: int) -> dict[str, Any]:
    """All simulated parts; each plays `seconds` of virtual time, the overload 2.5 times that."""
    fits = admitted()
    one_by_one, its_next = capacity(first_come, seconds)
    batched, our_next = capacity(decide, seconds, fits)
    return {
        "profile": PROFILE.to_dict(),
        "first_come": {"sessions": one_by_one, "miss_rate_with_one_more": round(its_next, 4)},
        "batched": {"sessions": batched, "miss_rate_with_one_more": round(our_next, 4)},
        "one_too_many": one_too_many(batched + 1, seconds),
        "admitted": fresh_seeds(fits, seconds),
        "offline_beside": offline_beside(round(0.8 * batched), seconds),
        "overload": overload(fits, round(2.5 * seconds)),
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `rtgen bench engine`."""
    parser.add_argument("--seconds", type=int, default=120, help="virtual seconds of each run")
    parser.add_argument("--model", help="also measure this model here: a name or folder")
    parser.add_argument("--out", type=Path, help="also write the JSON document here")


def run(args: argparse.Namespace) -> int:
    """Simulates, prints the table and the JSON document."""
    from rtgen.assets import find_asset

    if args.seconds < 5:
        raise ConfigError(f"--seconds must be at least 5, got {args.seconds}")
    model = None if args.model is None else find_asset("model", args.model)
    document = {"bench": "engine", "seconds": args.seconds, **conditions()}
    document |= simulate(args.seconds)
    if model is not None:
        document["measured"] = measured(model)
    sys.stdout.write(table(document) + "\n")
    if args.out is not None:
        args.out.write_text(json.dumps(document, indent=1) + "\n")
    sys.stdout.write(json.dumps(document) + "\n")
    return 0


def _nominal(profile: Profile) -> Costs:
    """The profile's own times, without safety."""
    shapes = {name: times for name, times in profile.forward_ns.items() if name == "3"}
    return Costs(
        {(name, size): ns for name, times in shapes.items() for size, ns in times.items()},
        {name: tuple(sorted(times)) for name, times in shapes.items()},
    )


def _late(report: Report) -> int:
    return sum(out.late for out in report.visits)
