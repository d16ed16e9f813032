"""The generation process: started, watched, killed, replaced. Each start costs seconds."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import subprocess
import sys
import time
from collections.abc import Coroutine, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest

from rtgen.engine.engine import Engine
from rtgen.engine.host import HostConfig, RemoteService
from rtgen.engine.lanes import thread_lanes
from rtgen.errors import ConfigError, LinkError, StreamClosed
from rtgen.frame_link import SupervisedService
from rtgen.types import ErrorEvent, Grant, Refusal, Session, SessionSpec, Stop, Unit
from tests.engine.drive import opened, same, sound
from tests.sound import tone
from tests.toy_pipeline import LIVE, OFFLINE, toy_pipeline

ROOT = Path(__file__).resolve().parent.parent.parent
T = TypeVar("T")
TOY = HostConfig(factory="tests.toy_pipeline:toy_pipeline", backoff_s=0.0)
LIMIT_S = 280.0


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    """One loop for all tests that share a process."""
    with asyncio.Runner() as loop:
        yield loop


@pytest.fixture(scope="module")
def service(runner: asyncio.Runner) -> Iterator[RemoteService]:
    """A service with a toy pipeline, ready."""

    async def started() -> RemoteService:
        service = RemoteService(TOY)
        await service.start()
        assert service.state == "starting"
        assert isinstance(await service.reserve(LIVE), Refusal)
        await service.until_ready()
        return service

    service = runner.run(limited(started()))
    yield service
    pid = service.pid
    runner.run(limited(service.close()))
    assert pid is None or is_gone(pid)
    gc.collect()
    assert Path("/proc/self/maps").read_text().count("rtgen-frames") == 0


async def limited(work: Coroutine[Any, Any, T]) -> T:
    """Fails instead of hanging."""
    async with asyncio.timeout(LIMIT_S):
        return await work


def is_gone(pid: int) -> bool:
    """Whether there is no such process, dead ones that wait for their parent not counted."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    return True


async def granted(service: RemoteService, spec: SessionSpec) -> Session:
    """A session, as soon as there is a place."""
    await service.until_ready()
    answer = await service.reserve(spec)
    assert isinstance(answer, Grant), answer
    return answer.session


async def shown(session: Session, count: int) -> list[Unit]:
    """Takes and shows units."""
    units: list[Unit] = []
    async for unit in session.units():
        session.ack(unit)
        units.append(unit)
        if len(units) == count:
            break
    return units


async def rendered(service: RemoteService, spec: SessionSpec) -> list[Unit]:
    """A second of sound."""
    session = await granted(service, spec)
    assert session.push_audio(tone(1.0), 48_000) == 48_000
    session.end_audio()
    units = [unit async for unit in session.units()]
    await session.close()
    return units


def open_files() -> int:
    """Descriptors of this process."""
    return len(list(Path("/proc/self/fd").iterdir()))


async def until(service: RemoteService, *, healthy: bool) -> float:
    """Seconds until the service says that it is healthy, or is not."""
    began_s = time.monotonic()
    while service.healthy != healthy:  # noqa: ASYNC110 - as a health check over HTTP would ask
        await asyncio.sleep(0.02)
    return time.monotonic() - began_s


def test_units_of_another_process_equal_the_engine_s(
    runner: asyncio.Runner, service: RemoteService
) -> None:
    supervised: SupervisedService = service
    assert supervised.ready
    assert supervised.healthy
    assert supervised.format == toy_pipeline().format
    assert supervised.description == toy_pipeline().describe()
    units = runner.run(limited(rendered(service, OFFLINE)))
    assert supervised.figures["rtgen_engine_granted_total"] >= 1
    with Engine(toy_pipeline(), lanes=thread_lanes()) as alone:
        assert same(units, list(opened(alone, OFFLINE).render([tone(1.0)], 48_000)))
    np.testing.assert_array_equal(sound(units), tone(1.0))


def test_an_interrupt_goes_back_to_the_unit_on_screen(
    runner: asyncio.Runner, service: RemoteService
) -> None:
    async def work() -> None:
        session = await granted(service, LIVE)
        session.push_audio(tone(60.0), 48_000)
        before = await shown(session, 3)
        session.control(Stop())
        after = await shown(session, 2)
        assert [(u.generation, u.index) for u in before] == [(0, 0), (0, 1), (0, 2)]
        assert [(u.generation, u.index) for u in after] == [(1, 3), (1, 4)]
        await session.close()

    runner.run(limited(work()))


def test_a_stopped_process_is_unhealthy_until_it_goes_on(
    runner: asyncio.Runner, service: RemoteService
) -> None:
    async def work() -> None:
        assert service.pid is not None
        os.kill(service.pid, signal.SIGSTOP)
        try:
            assert await until(service, healthy=False) < 30.0
            assert not service.ready
            refusal = await service.reserve(LIVE)
            assert isinstance(refusal, Refusal)
        finally:
            os.kill(service.pid, signal.SIGCONT)
        await until(service, healthy=True)
        assert service.restarts == 0

    runner.run(limited(work()))


def test_a_killed_process_is_seen_at_once_and_replaced(
    runner: asyncio.Runner, service: RemoteService
) -> None:
    async def work() -> None:
        session = await granted(service, LIVE)
        pid = service.pid
        assert pid is not None
        await shown(session, 2)
        began_s = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        with pytest.raises(LinkError, match="killed by signal 9"):
            await shown(session, 1_000)
        assert time.monotonic() - began_s < 2.0
        event = [event async for event in session.events()][-1]
        assert isinstance(event, ErrorEvent)
        assert event.fatal
        with pytest.raises(LinkError, match="killed by signal 9"):
            session.push_audio(tone(0.1), 48_000)
        await session.close()
        assert service.state == "restarting"
        refusal = await service.reserve(LIVE)
        assert isinstance(refusal, Refusal)
        assert "killed by signal 9" in refusal.reason
        units = await rendered(service, OFFLINE)
        assert len(units) == 7
        assert service.restarts == 1
        assert service.pid != pid
        assert is_gone(pid)

    runner.run(limited(work()))


def test_a_service_drains_and_closes(runner: asyncio.Runner, service: RemoteService) -> None:
    """The last of those that share a process."""

    async def work() -> None:
        session = await granted(service, LIVE)
        assert not await service.drain(0.05)
        assert not service.ready
        assert service.healthy
        assert isinstance(await service.reserve(LIVE), Refusal)
        await shown(session, 1)
        await session.close()
        assert await service.drain(10.0)
        await service.close()
        await service.close()
        assert service.state == "closed"
        with pytest.raises(StreamClosed, match="closed"):
            await service.reserve(LIVE)
        with pytest.raises(StreamClosed, match="closed"):
            await service.until_ready()

    runner.run(limited(work()))


def test_a_hung_session_gets_its_process_replaced_by_the_spare() -> None:
    config = replace(
        TOY,
        factory="tests.engine.faulty:hanging",
        unhealthy_after_s=2.0,
        hang_s=6.0,
        spare=True,
    )

    async def work() -> None:
        async with RemoteService(config) as service:
            await service.until_ready()
            assert service._spare is not None
            spare = await asyncio.shield(service._spare)
            session = await granted(service, replace(LIVE, seed=99))
            began_s = time.monotonic()
            with pytest.raises(LinkError, match="no progress"):
                await shown(session, 1)
            assert time.monotonic() - began_s < 60.0
            await service.until_ready()
            assert service.pid == spare.pid
            assert len(await rendered(service, OFFLINE)) == 7

    asyncio.run(limited(work()))


def test_a_process_told_to_end_serves_its_sessions_first() -> None:
    async def work() -> None:
        async with RemoteService(replace(TOY, max_restarts=0)) as service:
            session = await granted(service, OFFLINE)
            assert service.pid is not None
            os.kill(service.pid, signal.SIGTERM)
            while service.ready:  # noqa: ASYNC110 - the process says that it drains
                await asyncio.sleep(0.01)
            refusal = await service.reserve(LIVE)
            assert isinstance(refusal, Refusal)
            assert "no more sessions" in refusal.reason
            session.push_audio(tone(1.0), 48_000)
            session.end_audio()
            assert len([unit async for unit in session.units()]) == 7
            await session.close()
            with pytest.raises(LinkError, match="exited with status 0"):
                await service.until_ready()

    asyncio.run(limited(work()))


@pytest.mark.parametrize(
    ("factory", "arguments", "error", "match"),
    [
        ("tests.engine.faulty:refuses", {"text": "no such model"}, ConfigError, "no such model"),
        ("tests.engine.nothing:here", {}, ConfigError, "not to be found"),
        ("json:loads", {"text": ""}, ConfigError, "does not take these arguments"),
        ("tests.engine.faulty:dies", {"status": 7}, LinkError, "exited with status 7"),
    ],
)
def test_a_start_that_fails_says_why(
    factory: str, arguments: dict[str, Any], error: type[Exception], match: str
) -> None:
    config = replace(TOY, factory=factory, arguments=arguments, max_restarts=0)

    async def work() -> None:
        before = open_files()
        async with RemoteService(config) as service:
            with pytest.raises(error, match=match):
                await service.until_ready()
            assert open_files() == before
            assert service.state == "failed"
            assert not service.healthy
            refusal = await service.reserve(LIVE)
            assert isinstance(refusal, Refusal)
            assert match in refusal.reason
            with pytest.raises(StreamClosed, match="no generation process"):
                service.format  # noqa: B018

    asyncio.run(limited(work()))


PARENT = """
import asyncio, sys
from rtgen.engine.host import HostConfig, RemoteService

async def work():
    service = RemoteService(HostConfig(factory="tests.toy_pipeline:toy_pipeline"))
    await service.start()
    await service.until_ready()
    print(service.pid, flush=True)
    await asyncio.sleep(600)

asyncio.run(work())
"""


def test_a_killed_parent_leaves_no_process_and_no_segment() -> None:
    shared = Path("/dev/shm")
    before = sorted(shared.iterdir()) if shared.is_dir() else []
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert parent.stdout is not None
    assert parent.stderr is not None
    child = int(parent.stdout.readline())
    assert not is_gone(child)
    parent.kill()
    parent.wait()
    for _ in range(1_000):
        if is_gone(child):
            break
        time.sleep(0.01)
    assert is_gone(child)
    assert (sorted(shared.iterdir()) if shared.is_dir() else []) == before
    assert parent.stderr.read() == b""
    parent.stdout.close()
    parent.stderr.close()


@pytest.mark.parametrize(
    ("values", "match"),
    [
        ({"factory": "nothing"}, "module:name"),
        ({"factory": ":open"}, "module:name"),
        ({"arguments": {"x": object()}}, "JSON"),
        ({"arguments": {"x": float("nan")}}, "JSON"),
        ({"max_sessions": 0}, "max_sessions"),
        ({"hang_s": 1.0}, "must exceed"),
        ({"start_timeout_s": float("nan")}, "positive"),
        ({"max_restarts": -1}, "at least 0"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(values: dict[str, Any], match: str) -> None:
    with pytest.raises(ConfigError, match=match):
        HostConfig(**({"factory": "a:b"} | values))
