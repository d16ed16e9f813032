"""Places, failures and ends: one session's trouble is nobody else's, and nothing is left behind."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from pipelines.avatar import AvatarPipeline, AvatarSession
from rtgen.engine.client import EngineSession
from rtgen.engine.clock import VirtualClock
from rtgen.engine.contract import UnitInput
from rtgen.engine.engine import Engine
from rtgen.engine.lanes import Lanes, inline_lanes, thread_lanes
from rtgen.errors import ConfigError, RtgenError, StreamClosed
from rtgen.types import ErrorEvent, Finished, Refusal, SessionSpec, Started, Unit
from tests.engine.drive import opened, quick_profile, same, settle
from tests.sound import blocks, tone
from tests.toy_pipeline import LIVE, OFFLINE, toy_pipeline

WAIT_S = 120.0


@contextmanager
def failing_forward(pipeline: AvatarPipeline, at: int) -> Iterator[None]:
    """Makes the denoiser's forward number `at` raise, from inside the last block."""
    count = 0

    def hook(*_: object) -> None:
        nonlocal count
        count += 1
        if count == at:
            raise ArithmeticError("planted in a block")

    block = pipeline.denoiser.blocks[-1]
    assert isinstance(block, nn.Module)
    handle = block.register_forward_pre_hook(hook)
    try:
        yield
    finally:
        handle.remove()


@contextmanager
def failing_method(owner: type[Any], name: str, at: int) -> Iterator[None]:
    """Makes call number `at` of a method raise."""
    original, count = getattr(owner, name), 0

    def planted(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count == at:
            raise ArithmeticError(f"planted in {name}")
        return original(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(owner, name, planted)
        yield


FAILURES: dict[str, Callable[[AvatarPipeline], Any]] = {
    "open": lambda pipeline: failing_method(AvatarPipeline, "open", 1),
    "begin": lambda pipeline: failing_method(AvatarSession, "begin", 3),
    "first forward": lambda pipeline: failing_forward(pipeline, 1),
    "late forward": lambda pipeline: failing_forward(pipeline, 8),
    "decode": lambda pipeline: failing_method(AvatarSession, "decode", 3),
}


@pytest.mark.parametrize("where", FAILURES)
@pytest.mark.parametrize("make_lanes", [inline_lanes, thread_lanes])
def test_a_failure_ends_its_session_and_frees_the_place(
    where: str, make_lanes: Callable[[], Lanes], caplog: pytest.LogCaptureFixture
) -> None:
    pipeline, before = toy_pipeline(), threading.active_count()
    with Engine(pipeline, lanes=make_lanes()) as engine:
        session = opened(engine, OFFLINE)
        with (
            FAILURES[where](pipeline),
            caplog.at_level(logging.CRITICAL),
            pytest.raises(StreamClosed, match="planted"),
        ):
            list(session.render(blocks(tone(1.0), 4_800), 48_000))
        events = session.poll_events()
        last = events[-1]
        assert isinstance(last, ErrorEvent)
        assert last.fatal
        turns = [event for event in events if isinstance(event, Started | Finished)]
        assert [turn.type for turn in turns] in ([], ["started", "finished"])
        again = opened(engine, OFFLINE)
        units = list(again.render(blocks(tone(1.0), 4_800), 48_000))
    assert len(units) == 7
    assert threading.active_count() == before


def test_an_error_of_ours_reaches_the_client_as_it_is() -> None:
    pipeline = toy_pipeline()
    with Engine(pipeline, lanes=inline_lanes()) as engine:
        session = opened(engine, OFFLINE)
        block = pipeline.denoiser.blocks[-1]
        handle = block.register_forward_hook(lambda *args: args[2] * torch.nan)
        try:
            with pytest.raises(RtgenError, match="NaN") as caught:
                list(session.render([tone(1.0)], 48_000))
        finally:
            handle.remove()
        assert not isinstance(caught.value, StreamClosed)


def test_units_made_before_a_failure_can_still_be_taken() -> None:
    pipeline = toy_pipeline()
    with Engine(pipeline, lanes=inline_lanes()) as engine:
        session = opened(engine, OFFLINE)
        session.push_audio(tone(1.0), 48_000)
        session.end_audio()
        with failing_method(AvatarSession, "decode", 3):
            settle(engine)
        for index in (0, 1):
            unit = session.next_unit()
            assert unit is not None
            assert unit.index == index
        with pytest.raises(StreamClosed, match="planted"):
            session.next_unit()


def test_a_full_engine_refuses_with_a_reason_and_frees_the_place_on_close() -> None:
    with Engine(toy_pipeline(), lanes=inline_lanes()) as engine:
        session = opened(engine, LIVE)
        answer = engine.reserve(LIVE)
        assert isinstance(answer, Refusal)
        assert "1 places" in answer.reason
        assert answer.retry_after_s > 0
        session.close()
        opened(engine, LIVE)


def test_a_spec_that_can_never_be_served_is_an_error() -> None:
    with Engine(toy_pipeline(), lanes=inline_lanes()) as engine:
        with pytest.raises(ConfigError, match="avatar must be one of"):
            engine.reserve(SessionSpec(avatar="nobody"))
        with pytest.raises(ConfigError, match="steps"):
            engine.reserve(SessionSpec(num_inference_steps=9))
    with pytest.raises(StreamClosed):
        engine.reserve(LIVE)


def interleaved(*, fail_second: bool) -> list[Unit]:
    """Units of a render that shares the engine with another one, which may fail."""
    pcm, other = tone(1.0), tone(1.0, hz=330.0)
    begin = AvatarSession.begin

    def planted(self: AvatarSession, inputs: Sequence[UnitInput]) -> None:
        if fail_second and self.spec.seed == 9 and self.stream.position == 3:
            raise ArithmeticError("planted")
        begin(self, inputs)

    with (
        pytest.MonkeyPatch.context() as patch,
        Engine(
            toy_pipeline(), lanes=inline_lanes(), max_sessions=2, profile=quick_profile()
        ) as engine,
    ):
        patch.setattr(AvatarSession, "begin", planted)
        first = opened(engine, OFFLINE)
        second = opened(engine, SessionSpec(service_class="offline", seed=9))
        second.push_audio(other, 48_000)
        second.end_audio()
        units = list(first.render(blocks(pcm, 4_800), 48_000))
        theirs: list[Unit] = []
        try:
            theirs.extend(second.units())
        except StreamClosed:
            assert fail_second
        assert len(theirs) == (2 if fail_second else 7)
    return units


def test_company_changes_no_bit() -> None:
    with Engine(toy_pipeline(), lanes=inline_lanes()) as engine:
        alone = list(opened(engine, OFFLINE).render(blocks(tone(1.0), 4_800), 48_000))
    assert same(interleaved(fail_second=False), alone)


def test_a_failure_next_door_changes_no_bit() -> None:
    with Engine(toy_pipeline(), lanes=inline_lanes()) as engine:
        alone = list(opened(engine, OFFLINE).render(blocks(tone(1.0), 4_800), 48_000))
    assert same(interleaved(fail_second=True), alone)


def test_the_most_urgent_session_is_served_first() -> None:
    clock = VirtualClock()
    with Engine(
        toy_pipeline(),
        lanes=inline_lanes(),
        clock=clock,
        max_sessions=2,
        profile=quick_profile(),
    ) as engine:
        sessions = [opened(engine, LIVE) for _ in range(2)]
        settle(engine)
        for session, delay_s in zip(sessions, (0.05, 0.0), strict=True):
            clock.advance(delay_s)
            for unit in iter(session.core.pop_unit, None):
                session.ack(unit)
            clock.advance(0.05)
        # The first was shown 50 ms before the second, so its next unit is due first.
        clock.advance(1.0)
        order: list[str] = []
        while engine.tick():
            for session in sessions:
                if session.core.has_unit_or_end() and session.id not in order:
                    order.append(session.id)
    assert order == [session.id for session in sessions]


def test_closing_wakes_a_client_that_waits() -> None:
    before = threading.active_count()
    engine = Engine(toy_pipeline(), lanes=thread_lanes())
    session = opened(engine, OFFLINE)
    results: list[Unit | None] = []
    thread = threading.Thread(target=lambda: results.append(session.next_unit(WAIT_S)))
    thread.start()
    session.close()
    thread.join()
    engine.close()
    engine.close()
    assert results == [None]
    assert threading.active_count() == before


def test_an_engine_closes_in_the_middle_of_its_work() -> None:
    before = threading.active_count()
    engine = Engine(toy_pipeline(), lanes=thread_lanes())
    session = opened(engine, OFFLINE)
    session.push_audio(tone(3.0), 48_000)
    assert session.next_unit(WAIT_S) is not None
    engine.close()
    assert session.next_unit() is None
    assert threading.active_count() == before


def test_a_client_that_breaks_off_leaves_nothing_behind() -> None:
    before = threading.active_count()

    def broken(session: EngineSession) -> None:
        for unit in session.render(blocks(tone(3.0), 4_800), 48_000):
            if unit.index == 2:
                raise KeyboardInterrupt

    for make_lanes in (inline_lanes, thread_lanes):
        with pytest.raises(KeyboardInterrupt):
            with Engine(toy_pipeline(), lanes=make_lanes()) as engine:
                broken(opened(engine, OFFLINE))
        assert threading.active_count() == before


def test_sessions_one_after_the_other_are_alike() -> None:
    with Engine(toy_pipeline(), lanes=thread_lanes()) as engine:
        runs = []
        for _ in range(5):
            session = opened(engine, OFFLINE)
            runs.append(list(session.render(blocks(tone(0.5), 4_800), 48_000)))
            session.close()
    assert all(same(run, runs[0]) for run in runs)
    assert np.array_equal(runs[0][0].audio, tone(0.5)[:7680])
