"""The engine in a process of its own, replaced when it dies or hangs: `rtgen.types.Service`.

    RemoteService ---- GenerationProcess ---- ServiceLink ======= GenerationHost ---- Engine
    (state, restarts)  (one child)            (socket, slots)     (in the child)

While the child imports torch and warms up, the media process answers, with refusals. When it dies
its sessions fail with `LinkError`, and another one is started, or a warm spare takes over.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

from rtgen.engine.host_process import CHECK_S, GenerationProcess, HostConfig
from rtgen.errors import (
    BackendUnavailable,
    CheckpointError,
    ConfigError,
    LinkError,
    RtgenError,
    StreamClosed,
)
from rtgen.types import Grant, Refusal, Session, SessionSpec, UnitFormat

__all__ = ["HostConfig", "RemoteService", "State"]

logger = logging.getLogger(__name__)

T = TypeVar("T")
State = Literal["new", "starting", "ready", "restarting", "draining", "failed", "closed"]

STABLE_S = 60.0
"""A process that was ready for so long has shown that it works: failures are counted anew."""
MAX_BACKOFF_S = 10.0
RETRY_AFTER_S = 3.0
FAILED_RETRY_AFTER_S = 60.0
_FINAL = (ConfigError, CheckpointError, BackendUnavailable)
"""Errors of a start that another start would meet again."""


class RemoteService:
    """Sessions of an engine in another process; belongs to one event loop and its thread.

    Args:
        config: what to start.

    Attributes:
        restarts: processes that were replaced so far.
    """

    def __init__(self, config: HostConfig) -> None:
        self._config = config
        self._state: State = "new"
        self._failure: str | None = None
        self._error: RtgenError | None = None
        self._process: GenerationProcess | None = None
        self._spare: asyncio.Task[GenerationProcess] | None = None
        self._supervision: asyncio.Task[None] | None = None
        self._facts: tuple[UnitFormat, Mapping[str, Any]] | None = None
        self._waiters: set[asyncio.Future[None]] = set()
        self.restarts = 0

    async def __aenter__(self) -> RemoteService:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def state(self) -> State:
        """What it is doing."""
        return self._state

    @property
    def ready(self) -> bool:
        """Whether a warm process takes sessions now."""
        process = self._process
        return (
            self._state == "ready"
            and process is not None
            and process.healthy
            and not process.link.beat.draining
        )

    @property
    def healthy(self) -> bool:
        """Whether the process is there and makes progress; True while the first one starts."""
        if self._state in ("ready", "draining"):
            return self._process is not None and self._process.healthy
        return self._state == "starting"

    @property
    def failure(self) -> str | None:
        """Why it is not healthy, or why the last process ended; for people."""
        return self._failure

    @property
    def pid(self) -> int | None:
        """Of the process that serves, if there is one."""
        return None if self._process is None else self._process.pid

    @property
    def figures(self) -> Mapping[str, float]:
        """Metrics of the process that serves, by their full names; none while there is none."""
        return {} if self._process is None else self._process.link.beat.figures

    @property
    def format(self) -> UnitFormat:
        """Sizes of units.

        Raises:
            StreamClosed: no process was ready yet.
        """
        return self._known()[0]

    @property
    def description(self) -> Mapping[str, Any]:
        """What the pipeline says about itself; raises as `format`."""
        return self._known()[1]

    async def start(self) -> None:
        """Starts the process and returns at once; until it is ready, sessions are refused.

        Raises:
            StreamClosed: it was started before.
        """
        if self._state != "new":
            raise StreamClosed(f"the service is {self._state}; make a new one")
        self._launch("starting")

    async def until_ready(self) -> None:
        """Returns when sessions can be had.

        Raises:
            RtgenError: why none will: what the start failed of, in its own class.
            StreamClosed: the service is closed or drains.
        """
        while not self.ready:
            await self._until(lambda: self._state not in ("new", "starting", "restarting"))
            if self._state == "failed":
                assert self._error is not None
                raise self._error
            if self._state != "ready":
                raise StreamClosed(f"the service is {self._state}; make a new one")
            if not self.ready:  # it hangs, or is about to be replaced
                await asyncio.sleep(CHECK_S)

    async def reserve(self, spec: SessionSpec) -> Grant[Session] | Refusal:
        """Opens a session; see `rtgen.types.Service.reserve`.

        A process that starts, drains, failed or does not answer is a refusal.

        Raises:
            ConfigError: the pipeline can never serve this spec.
            StreamClosed: the service is closed, or was not started.
        """
        if self._state in ("new", "closed"):
            raise StreamClosed(f"the service is {self._state}; start it, or make a new one")
        if self._state == "failed":
            reason = f"generation has failed: {self._failure}"
            return Refusal(reason=reason, retry_after_s=FAILED_RETRY_AFTER_S)
        if self._state == "draining":
            reason = "the service is shutting down"
            return Refusal(reason=reason, retry_after_s=FAILED_RETRY_AFTER_S)
        if self._process is None or not self._process.healthy:
            reason = f"generation is not ready ({self._state}{self._because()})"
            return Refusal(reason=reason, retry_after_s=RETRY_AFTER_S)
        try:
            return await self._process.link.reserve(spec)
        except LinkError as error:
            return Refusal(reason=str(error), retry_after_s=RETRY_AFTER_S)

    async def restart(self) -> None:
        """Kills the process and starts another one; open sessions fail. Also after a failure.

        Raises:
            StreamClosed: the service is closed, or was not started.
        """
        if self._state in ("new", "closed"):
            raise StreamClosed(f"the service is {self._state}; start it, or make a new one")
        await self._halt(0.0, "was restarted")
        self.restarts += 1
        self._launch("restarting")

    async def drain(self, timeout_s: float) -> bool:
        """Refuses new sessions and waits until the open ones are closed.

        Returns:
            False if some were open after `timeout_s`.
        """
        if self._state not in ("closed", "failed"):
            self._set_state("draining")
        if self._process is None:
            return True
        try:
            async with asyncio.timeout(timeout_s):
                await self._process.link.wait_idle()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Ends all sessions and the process; may be called again."""
        self._set_state("closed")
        await self._halt(self._config.close_s, "was stopped by its service")

    # -- supervision

    def _launch(self, state: State) -> None:
        self._set_state(state)
        self._supervision = asyncio.create_task(self._supervise())

    async def _supervise(self) -> None:
        """Keeps a process running until it fails too often."""
        failures = 0
        while True:
            process: GenerationProcess | None = None
            try:
                process = await self._next_process()
            except _FINAL as error:
                self._give_up(error)
                return
            except RtgenError as error:
                reason = str(error)
            else:
                began_s = asyncio.get_running_loop().time()
                self._adopt(process)
                reason = await process.wait_ended()
                if asyncio.get_running_loop().time() - began_s > STABLE_S:
                    failures = 0
                self._process = None
            failures += 1
            is_last = failures > self._config.max_restarts or self._state == "draining"
            if is_last:
                self._give_up(LinkError(f"{reason}; it is not started again"))
            else:
                logger.warning("%s; starting another one", reason)
                self._failure = reason
                self.restarts += 1
                self._set_state("restarting")
            if process is not None:
                _fail_sessions(process, reason)
            if is_last:
                return
            if failures > 1:
                backoff_s = self._config.backoff_s * 2 ** (failures - 2)
                await asyncio.sleep(min(backoff_s, MAX_BACKOFF_S))

    async def _next_process(self) -> GenerationProcess:
        """The spare if it is well, or a new process, started."""
        spare, self._spare = self._spare, None
        if spare is not None:
            try:
                process = await asyncio.shield(spare)
                if process.is_running:
                    return process
                logger.warning("the spare generation process had ended")
            except RtgenError as error:
                logger.warning("the spare generation process did not start: %s", error)
            except asyncio.CancelledError:
                self._spare = spare  # whoever cancels this also ends the spare
                raise
        return await _started(self._config)

    def _adopt(self, process: GenerationProcess) -> None:
        self._process = process
        self._facts = (process.ready.format, process.ready.description)
        if self._state != "draining":
            self._set_state("ready")
        if self._config.spare:
            self._spare = asyncio.create_task(_started(self._config))
        logger.info("generation process %d is ready", process.pid)

    def _give_up(self, error: RtgenError) -> None:
        logger.error("generation has failed: %s", error)
        self._error, self._failure = error, str(error)
        self._set_state("failed")

    async def _halt(self, grace_s: float, reason: str) -> None:
        """Ends supervision, the process and the spare."""
        supervision, self._supervision = self._supervision, None
        if supervision is not None:
            await _cancelled(supervision)
        process, self._process = self._process, None
        if process is not None:
            await process.stop(grace_s, reason)
            _fail_sessions(process, f"the generation process {reason}")
        spare, self._spare = self._spare, None
        if spare is not None and (process := await _cancelled(spare)) is not None:
            await process.stop(grace_s, reason)

    # -- inside

    def _known(self) -> tuple[UnitFormat, Mapping[str, Any]]:
        if self._facts is None:
            raise StreamClosed("no generation process was ready yet; await until_ready()")
        return self._facts

    def _because(self) -> str:
        return f": {self._failure}" if self._failure else ""

    def _set_state(self, state: State) -> None:
        self._state = state
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)

    async def _until(self, predicate: Callable[[], bool]) -> None:
        while not predicate():
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.add(waiter)
            try:
                await waiter
            finally:
                self._waiters.discard(waiter)


async def _started(config: HostConfig) -> GenerationProcess:
    process = GenerationProcess(config)
    await process.start()
    return process


def _fail_sessions(process: GenerationProcess, reason: str) -> None:
    process.link.fail(LinkError(f"{reason}; open another session"))


async def _cancelled(task: asyncio.Task[T]) -> T | None:
    """Cancels a task and waits for its end; its result if it had ended well before."""
    task.cancel()
    await asyncio.wait({task})
    return None if task.cancelled() or task.exception() is not None else task.result()
