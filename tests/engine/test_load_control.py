"""What the engine measures, whom it lets in, and how quality follows the load."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pipelines.avatar import AvatarPipeline
from rtgen.engine.admission import Capacity
from rtgen.engine.calibrate import free_bytes, measure, model_facts, paying, restricted, safe_sizes
from rtgen.engine.client import EngineSession
from rtgen.engine.cost_model import CONDITION, DECODE
from rtgen.engine.engine import Engine
from rtgen.engine.lanes import inline_lanes, thread_lanes
from rtgen.engine.load import Demand
from rtgen.engine.metrics import MAX_NOTICES, EngineMetrics
from rtgen.engine.trace import changed, load_trace, save_trace
from rtgen.errors import ConfigError
from rtgen.types import Grant, QualityChanged, Refusal, SessionSpec, SetQuality
from tests.engine.crowd import Client, Crowd, tiled_pipeline
from tests.engine.drive import opened, quick_profile
from tests.sound import tone
from tests.toy_pipeline import LIVE, OFFLINE


@pytest.mark.parametrize("merge", [False, True])
def test_the_start_finds_shapes_times_and_safe_sizes(merge: bool) -> None:
    pipeline, lanes = tiled_pipeline(merge), inline_lanes()
    facts = model_facts(pipeline, lanes)
    assert (facts.default_steps, facts.merges) == (2, merge)
    sizes = safe_sizes(pipeline, 2, lanes)
    assert sizes == (1, 2)
    profile = measure(pipeline, facts, sizes, lanes)
    shapes = {"1", "1+1"} if merge else {"1"}
    assert set(profile.forward_ns) == {*shapes, CONDITION, DECODE}
    assert all(min(times.values()) > 0 for times in profile.forward_ns.values())
    session = pipeline.open(SessionSpec())
    assert profile.session_bytes > session.nbytes > 0
    demand = facts.demand(None, pipeline.format)
    noisy = ("1+1", "1") if merge else ("1", "1")
    clean = None if merge else "1"
    assert demand == Demand(
        noisy=noisy, clean=clean, units_per_chunk=1, unit_ns=160_000_000, lead=2
    )


def test_sizes_that_do_not_pay_or_are_not_safe_are_left_out() -> None:
    assert paying({1: 10, 2: 20, 3: 27, 4: 36, 8: 64}) == {1: 10, 3: 27, 8: 64}
    profile = restricted(quick_profile(max_batch=4), (1, 2))
    assert set(profile.forward_ns["1"]) == {1, 2}
    assert set(profile.forward_ns[DECODE]) == {1}


def test_free_memory_is_known_here() -> None:
    free = free_bytes(torch.device("cpu"))
    assert (free is None) == (not Path("/proc/meminfo").exists())
    assert free is None or free > 2**20


def engine_with(capacity: Capacity | None = None, *, decode_ms: float = 0.5) -> Engine:
    profile = quick_profile(max_batch=1)
    forward_ns = {**profile.forward_ns, DECODE: {1: round(decode_ms * 1e6)}}
    return Engine(
        tiled_pipeline(False),
        lanes=inline_lanes(),
        max_sessions=4,
        profile=replace(profile, forward_ns=forward_ns),
        capacity=capacity,
    )


def test_a_refusal_names_the_constraint_and_when_to_ask_again() -> None:
    with engine_with(decode_ms=100) as engine:
        session = opened(engine, LIVE)
        answer = engine.reserve(LIVE)
        assert isinstance(answer, Refusal)
        assert "decode" in answer.reason
        assert answer.retry_after_s > 0
        opened(engine, OFFLINE)  # takes what is left
        session.close()
        opened(engine, LIVE)
        assert engine.metrics.counts()["rtgen_engine_refused_total"] == 1
        assert [notice.kind for notice in engine.metrics.notices()] == ["refused"]


def test_a_model_that_cannot_be_measured_leaves_no_thread(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def planted(*_: object) -> None:
        raise ArithmeticError("planted")

    monkeypatch.setattr(AvatarPipeline, "open", planted)
    before = threading.active_count()
    with pytest.raises(ArithmeticError, match="planted"):
        Engine(tiled_pipeline(False), lanes=thread_lanes(), max_sessions=2)
    assert threading.active_count() == before


def test_memory_admits_by_bytes() -> None:
    with engine_with(Capacity(memory_bytes=250_000)) as engine:
        opened(engine, OFFLINE)
        opened(engine, OFFLINE)
        answer = engine.reserve(OFFLINE)
        assert isinstance(answer, Refusal)
        assert "memory" in answer.reason


def test_of_many_who_ask_at_once_no_more_get_in_than_fit() -> None:
    granted: list[EngineSession] = []
    gate = threading.Barrier(8)

    def ask(engine: Engine) -> None:
        gate.wait()
        answer = engine.reserve(LIVE)
        if isinstance(answer, Grant):
            granted.append(answer.session)

    with engine_with(Capacity(memory_bytes=200_000)) as engine:
        threads = [threading.Thread(target=ask, args=(engine,)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(granted) == 2


def qualities(client: Client) -> list[tuple[int, bool]]:
    events = client.session.poll_events()
    return [
        (event.num_inference_steps, event.degraded)
        for event in events
        if isinstance(event, QualityChanged)
    ]


def test_quality_goes_down_after_a_late_unit_and_comes_back() -> None:
    with Crowd() as crowd:
        floor = crowd.join(replace(LIVE, num_inference_steps=2, min_inference_steps=2))
        client = crowd.join(LIVE)
        crowd.play(0.6)
        assert qualities(client) == []
        crowd.clock.advance(0.6)  # the engine stood still
        crowd.play(0.2)
        assert qualities(client) == [(1, True)]
        crowd.play(3.0)
        assert qualities(client) == [(2, False)]
        assert qualities(floor) == []
        notices = crowd.engine.metrics.notices()
        assert [notice.kind for notice in notices if notice.kind == "rung"] == ["rung"] * 2


def test_a_client_that_asks_for_less_is_not_degraded() -> None:
    with Crowd() as crowd:
        client = crowd.join(LIVE)
        crowd.play(0.4)
        client.session.control(SetQuality(num_inference_steps=1))
        crowd.play(0.4)
        crowd.clock.advance(0.6)
        crowd.play(0.4)
        assert qualities(client) == []
        assert len(client.shown) >= 4


def test_a_floor_above_what_is_asked_for_is_an_error() -> None:
    with pytest.raises(ConfigError, match="min_inference_steps"):
        SessionSpec(num_inference_steps=1, min_inference_steps=2)
    assert SessionSpec(min_inference_steps=2).num_inference_steps is None


def test_decisions_recorded_live_are_replayed_exactly(tmp_path: Path) -> None:
    with Crowd() as crowd:
        for seed in range(3):
            client = crowd.join(replace(LIVE, seed=seed))
            client.session.push_audio(tone(0.4), 48_000)
            crowd.play(0.1)
        crowd.join(OFFLINE).session.push_audio(tone(0.5), 48_000)
        crowd.play(0.5)
        trace = list(crowd.trace)
    save_trace(tmp_path / "trace", trace)
    assert len(trace) > 20
    assert list(changed(load_trace(tmp_path / "trace"))) == []


def test_notices_are_bounded() -> None:
    metrics = EngineMetrics()
    for number in range(MAX_NOTICES + 5):
        metrics.note("rung", number, "")
    assert metrics.notices()[0].at_ns == 5
    assert metrics.counts() == {"rtgen_engine_rung_total": MAX_NOTICES + 5}
