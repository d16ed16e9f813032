"""A session in company has the same bits as alone: joins, leaves, interrupts, failures, renders."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from rtgen.engine.engine import Engine
from rtgen.engine.lanes import thread_lanes
from rtgen.errors import RtgenError, StreamClosed
from rtgen.models.denoiser import CausalDenoiser
from rtgen.sampling import stream as stream_module
from rtgen.sampling.passes import StreamPass, forward_rows
from rtgen.types import SessionSpec, SetAvatar, SetQuality, Stop, Unit
from tests.engine.crowd import Client, Crowd, rows_per_forward, tiled_pipeline
from tests.engine.drive import opened, quick_profile, same, settle
from tests.sound import tone
from tests.toy_pipeline import LIVE, OFFLINE

UNITS = 12
WAIT_S = 120.0


def speaking(crowd: Crowd, seed: int = 3) -> Client:
    client = crowd.join(replace(LIVE, seed=seed))
    client.session.push_audio(tone(1.2, hz=100.0 + 10 * seed), 48_000)
    return client


def alone(*, merge: bool = False) -> list[Unit]:
    with Crowd(merge=merge) as crowd:
        client = speaking(crowd)
        crowd.play(2.0)
        return client.shown[:UNITS]


def in_company(*, merge: bool = False) -> tuple[list[Unit], list[int]]:
    """The same session while others join at odd times, change, are interrupted, and leave."""
    with (
        Crowd(merge=merge) as crowd,
        rows_per_forward(tiled_pipeline(merge).denoiser) as rows,
    ):
        early = speaking(crowd, seed=5)
        crowd.play(0.3)
        client = speaking(crowd)
        crowd.play(0.26)
        others = [speaking(crowd, seed=seed) for seed in (6, 7)]
        render = crowd.join(OFFLINE)
        render.session.push_audio(tone(1.0), 48_000)
        crowd.play(0.4)
        others[0].session.control(Stop())
        others[1].session.control(SetQuality(num_inference_steps=1))
        crowd.play(0.3)
        crowd.leave(early)
        others[0].session.control(SetAvatar(avatar="bo"))
        crowd.play(0.3)
        crowd.leave(others[1])
        crowd.play(1.0)
        return client.shown[:UNITS], rows


@pytest.mark.parametrize("merge", [False, True])
def test_a_session_has_the_same_bits_alone_and_in_company(merge: bool) -> None:
    shown, rows = in_company(merge=merge)
    assert len(shown) == UNITS
    assert same(shown, alone(merge=merge))
    assert max(rows) >= 3


def test_the_company_test_sees_rows_that_are_mixed_up(monkeypatch: pytest.MonkeyPatch) -> None:
    def swapped(denoiser: CausalDenoiser, rows: Sequence[StreamPass]) -> Tensor:
        return forward_rows(denoiser, rows).roll(1, 0)

    monkeypatch.setattr(stream_module, "forward_rows", swapped)
    assert not same(in_company()[0], alone())


@contextmanager
def spoiled(crowd: Crowd, victim: Client, spoil: Callable[[Tensor, int], Tensor]) -> Iterator[None]:
    """Spoils the denoiser's output whenever a row of `victim` is in the batch."""
    (slot,) = (slot for slot in crowd.engine._slots if slot.core is victim.session.core)
    assert slot.pipeline is not None
    cache = slot.pipeline.stream.cache

    def hook(_module: nn.Module, _args: Any, kwargs: dict[str, Any], output: Tensor) -> Tensor:
        for row, item in enumerate(kwargs["caches"]):
            if item.cache is cache:
                return spoil(output.clone(), row)
        return output

    handle = tiled_pipeline(False).denoiser.register_forward_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def raising(_output: Tensor, _row: int) -> Tensor:
    raise ArithmeticError("planted")


def nan(output: Tensor, row: int) -> Tensor:
    output[row] = torch.nan
    return output


@pytest.mark.parametrize("spoil", [raising, nan])
def test_a_poisoned_row_is_taken_out_of_its_batch(
    spoil: Callable[[Tensor, int], Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    with Crowd() as crowd, caplog.at_level(logging.CRITICAL):
        clients = [speaking(crowd, seed=seed) for seed in (3, 5, 6, 7)]
        crowd.play(0.5)
        with spoiled(crowd, clients[2], spoil):
            crowd.play(0.5)
        crowd.play(1.2)
        with pytest.raises((StreamClosed, RtgenError)):
            list(clients[2].session.units())
        assert crowd.engine.metrics.counts()["rtgen_engine_failed_total"] == 1
        assert same(clients[0].shown[:UNITS], alone())
        assert all(len(client.shown) > 12 for client in (clients[1], clients[3]))


def test_offline_rows_wait_for_a_session_that_starts() -> None:
    with Crowd() as crowd:
        render = crowd.join(OFFLINE)
        render.session.push_audio(tone(1.0), 48_000)
        settle(crowd.engine)
        first = len(crowd.trace)
        crowd.join(LIVE)
        settle(crowd.engine)
        for decision in crowd.trace[first:]:
            if any(row.is_starting for row in decision.live):
                assert not getattr(decision.action, "offline", ())


def test_renders_share_forwards_and_none_is_left_behind() -> None:
    with (
        Crowd() as crowd,
        rows_per_forward(tiled_pipeline(False).denoiser) as rows,
    ):
        clients = [crowd.join(SessionSpec(service_class="offline", seed=s)) for s in range(3)]
        for client in clients:
            client.session.push_audio(tone(1.0), 48_000)
            client.session.end_audio()
        settle(crowd.engine)
        made = [len(client.session.core._outbox.units) for client in clients]
        assert made == [4, 4, 4]  # the credits of each
        assert max(rows) == 3


def test_memory_and_places_come_back_when_sessions_go() -> None:
    with Crowd() as crowd:
        for _ in range(3):
            clients = [speaking(crowd, seed=seed) for seed in range(6)]
            crowd.play(0.4)
            for client in clients:
                crowd.leave(client)
        assert crowd.engine._slots == []
        assert crowd.engine.metrics.counts()["rtgen_engine_load_ratio"] == 0


def test_clients_of_both_classes_are_served_at_once_on_threads() -> None:
    profile = quick_profile(max_batch=4)
    with Engine(
        tiled_pipeline(False), lanes=thread_lanes(), max_sessions=4, profile=profile
    ) as engine:
        specs = [LIVE, *(replace(OFFLINE, seed=seed) for seed in range(3))]
        made: list[list[int]] = [[] for _ in specs]

        def watch(spec: SessionSpec, indices: list[int]) -> None:
            session = opened(engine, spec)
            session.push_audio(tone(0.9), 48_000)
            session.end_audio()
            while len(indices) < 6:
                unit = session.next_unit(WAIT_S)
                assert unit is not None
                session.ack(unit)
                indices.append(unit.index)
            session.close()

        threads = [
            threading.Thread(target=watch, args=(spec, indices))
            for spec, indices in zip(specs, made, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert made == [list(range(6))] * 4
