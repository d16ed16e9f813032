"""One generation process: started, watched and ended by the media process.

A child that dies is noticed by the end of its socket, one that hangs by missing signs of life.
Nothing here imports torch, and nothing blocks the loop.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rtgen.engine.host_link import ServiceLink
from rtgen.engine.host_messages import Ready, Shutdown, Start, StartFailed
from rtgen.engine.host_session import rebuilt_error
from rtgen.engine.host_wire import encode, read_message
from rtgen.errors import ConfigError, LinkError
from rtgen.frame_link import FrameLink, FrameReader, SlotLayout, open_segment

CHECK_S = 0.25
REAP_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostConfig:
    """What to start, and how long to wait for it.

    Attributes:
        factory: "module:name" or "module:Class.method", called in the child; returns a pipeline.
        arguments: of the factory, by name; JSON values.
        max_sessions: places of the engine.
        intra_op_threads: of each lane, and of OpenMP in the child.
        slots_per_session: units of one session that may lie between the processes.
        warm_units: made before the process counts as ready.
        start_timeout_s: from the start to the first warm units.
        unhealthy_after_s: without progress, until `healthy` says no.
        hang_s: without progress, until the process is killed and replaced.
        close_s: for a graceful end, until the process is killed.
        drain_s: how long sessions go on when the child gets SIGTERM.
        max_restarts: in a row, without a minute of work between them.
        backoff_s: before the second restart in a row; doubled for each further one, up to 10 s.
        spare: keep a second warm process that takes over at once; it takes its memory twice.
    """

    factory: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    max_sessions: int = 1
    intra_op_threads: int = 1
    slots_per_session: int = 4
    warm_units: int = 3
    start_timeout_s: float = 120.0
    unhealthy_after_s: float = 3.0
    hang_s: float = 15.0
    close_s: float = 10.0
    drain_s: float = 30.0
    max_restarts: int = 5
    backoff_s: float = 0.5
    spare: bool = False

    def __post_init__(self) -> None:
        module, _, name = self.factory.partition(":")
        if not module or not name:
            raise ConfigError(f"factory must be 'module:name', got {self.factory!r}")
        try:
            json.dumps(dict(self.arguments), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"arguments must be JSON values: {error}") from error
        counts = ("max_sessions", "intra_op_threads", "slots_per_session", "warm_units")
        times = ("start_timeout_s", "unhealthy_after_s", "hang_s", "close_s", "drain_s")
        for name in counts:
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        for name in times:
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")
        if self.max_restarts < 0 or self.backoff_s < 0:
            raise ConfigError(
                f"max_restarts and backoff_s must be at least 0, got {self.max_restarts} and "
                f"{self.backoff_s}"
            )
        if self.hang_s <= self.unhealthy_after_s:
            raise ConfigError(
                f"hang_s ({self.hang_s}) must exceed unhealthy_after_s ({self.unhealthy_after_s})"
            )


class GenerationProcess:
    """One child, from its start to its end; belongs to one event loop.

    Make it in a thread that lives as long as it should: on Linux the child dies with that thread.

    Args:
        config: what to start.

    Raises:
        LinkError: the machine cannot start it.

    Attributes:
        pid: of the child.
        healthy: whether it makes progress.
    """

    def __init__(self, config: HostConfig) -> None:
        self._config = config
        self._socket, theirs = socket.socketpair()
        self._segment = open_segment()
        descriptors = (theirs.fileno(), self._segment)
        words = [*map(str, descriptors), str(os.getpid())]
        with theirs:
            try:
                self._child = subprocess.Popen(
                    [sys.executable, "-X", "faulthandler", "-m", "rtgen.engine.host_child", *words],
                    pass_fds=descriptors,
                    stdin=subprocess.DEVNULL,
                    stdout=2,  # nothing of it belongs into what this process prints
                    env=_environment(config),
                    process_group=0,  # Ctrl-C is for this process, which then ends the child
                )
            except OSError as error:
                self._socket.close()
                os.close(self._segment)
                raise LinkError(f"the generation process cannot be started: {error}") from error
        self.pid = self._child.pid
        self.healthy = True
        self._reason: str | None = None
        self._ready: Ready | None = None
        self._link: ServiceLink | None = None
        self._running: asyncio.Task[str] | None = None

    @property
    def ready(self) -> Ready:
        """What the child said about itself; only after `start`."""
        assert self._ready is not None
        return self._ready

    @property
    def link(self) -> ServiceLink:
        """The link to it; only after `start`."""
        assert self._link is not None
        return self._link

    @property
    def is_running(self) -> bool:
        """Whether it has started and not ended."""
        return self._running is not None and not self._running.done()

    async def start(self) -> None:
        """Waits until the child has made warm units; a child that fails is gone afterwards.

        Raises:
            RtgenError: what the child failed of, in its own class.
            LinkError: it died, broke the protocol, or was not ready in time.
        """
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                await self._handshake()
        except TimeoutError as error:
            limit_s = self._config.start_timeout_s
            raise LinkError(
                f"the generation process was not ready after {limit_s} s; raise start_timeout_s"
            ) from error
        except OSError as error:
            raise LinkError(f"the link to the generation process failed: {error}") from error
        finally:
            os.close(self._segment)
            if self._link is None:
                self._socket.close()
                self.kill("its start failed")
                await self._reap()
        self._running = asyncio.create_task(self._run())

    async def wait_ended(self) -> str:
        """Returns, when it has ended, how it did; what is open on its link is the caller's to fail.

        Cancelling this does not disturb it.
        """
        assert self._running is not None
        return await asyncio.shield(self._running)

    def kill(self, reason: str) -> None:
        """Kills the child; `reason` is what its sessions are told."""
        if self._child.poll() is None:
            self._reason = reason
            self._child.kill()

    async def stop(self, grace_s: float, reason: str) -> None:
        """Ends the child: asks it to, and kills it after `grace_s`; may be called again."""
        if self._running is None:
            self.kill(reason)
            return
        if not self._running.done() and grace_s > 0:
            self.link.send(Shutdown())
            await asyncio.wait({self._running}, timeout=grace_s)
        self.kill(reason)
        await self.wait_ended()

    async def _handshake(self) -> None:
        config = self._config
        reader, writer = await asyncio.open_unix_connection(sock=self._socket)
        start = Start(
            factory=config.factory,
            arguments=config.arguments,
            max_sessions=config.max_sessions,
            slots_per_session=config.slots_per_session,
            intra_op_threads=config.intra_op_threads,
            warm_units=config.warm_units,
            drain_s=config.drain_s,
            log_level=logging.getLogger().getEffectiveLevel(),
        )
        try:
            writer.write(encode(start))
            try:
                answer = await read_message(reader)
            except ConnectionError:
                answer = None
            if isinstance(answer, StartFailed):
                raise rebuilt_error(answer.error, answer.message)
            if answer is None:
                await self._reap()
                raise LinkError(f"the generation process {self._ending()} while it started")
            if not isinstance(answer, Ready):
                raise LinkError(f"expected Ready of the child, got {type(answer).__name__}")
            layout = SlotLayout.of(answer.format, answer.slots)
            frames = FrameReader(FrameLink(self._segment, layout))
            self._ready = answer
            self._link = ServiceLink(reader, writer, frames, answer.format)
        finally:
            if self._link is None:
                writer.close()

    async def _run(self) -> str:
        """Reads the link and watches for progress until the child is gone."""
        reading = asyncio.create_task(self.link.run())
        silent_s, beats = 0.0, 0
        while not (await asyncio.wait({reading}, timeout=CHECK_S))[0]:
            # Turns of this loop are counted, not seconds: a loop that was held up itself finds
            # the signs of life only after this.
            silent_s = silent_s + CHECK_S if self.link.beats == beats else 0.0
            beats = self.link.beats
            idle_s = max(silent_s, self.link.beat.stalled_s)
            self.healthy = idle_s < self._config.unhealthy_after_s
            if idle_s >= self._config.hang_s:
                self.kill(f"made no progress for {idle_s:.1f} s and was killed")
        self.healthy = False
        if (error := reading.exception()) is not None:
            self.kill(f"broke the link: {error}")
        await self._reap()
        return f"the generation process {self._ending()}"

    async def _reap(self) -> None:
        """Waits for the child's end, and sees to it."""
        for turn in itertools.count():
            if self._child.poll() is not None:
                return
            if turn == round(REAP_S / 0.01):
                self.kill("closed its link and was killed")
            await asyncio.sleep(0.01)

    def _ending(self) -> str:
        code = self._child.returncode
        if self._reason is not None:
            return self._reason
        return f"was killed by signal {-code}" if code < 0 else f"exited with status {code}"


def _environment(config: HostConfig) -> dict[str, str]:
    """The child's: modules are found where this process finds them; OpenMP is kept small."""
    path = [entry or os.getcwd() for entry in sys.path]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(path),
        "OMP_NUM_THREADS": str(config.intra_op_threads),
        "OMP_WAIT_POLICY": "passive",
    }
