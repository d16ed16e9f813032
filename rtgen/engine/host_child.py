"""The generation process: an engine behind one socket.

Started by `rtgen.engine.host` with two inherited descriptors, the socket and the frame link's
segment. It builds the pipeline, makes warm units, says so, and serves until it is told to stop,
until the other end is gone, or, after SIGTERM, until its sessions are closed.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import importlib
import inspect
import json
import logging
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rtgen.engine.host_messages import Message, Ready, Start, StartFailed
from rtgen.engine.host_wire import encode, read_message
from rtgen.errors import ConfigError, LinkError, RtgenError
from rtgen.types import OUTPUT_RATE, Refusal, SessionSpec

if TYPE_CHECKING:
    from rtgen.engine.contract import Pipeline
    from rtgen.engine.engine import Engine
    from rtgen.engine.host_lanes import Watch

logger = logging.getLogger("rtgen.engine.host_child")  # run as __main__

EXIT_START_FAILED = 2
EXIT_LINK_BROKEN = 3
_PR_SET_PDEATHSIG = 1
_ORPHAN_GRACE_S = 2.0


def main(words: Sequence[str]) -> int:
    """Serves one link and returns the exit status.

    Args:
        words: descriptors of the socket and of the segment, id of the parent process.
    """
    descriptor, segment, parent = (int(word) for word in words)
    sock = socket.socket(fileno=descriptor)
    _end_with_parent(sock, parent)
    return asyncio.run(_serve(sock, segment))


def _end_with_parent(sock: socket.socket, parent: int) -> None:
    """Makes sure that this process does not outlive the other, even if it hangs.

    Linux kills it with its parent; elsewhere, and where the loop hangs, a thread sees the socket's
    other end go.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(EXIT_LINK_BROKEN)
    threading.Thread(target=_watch_socket, args=(sock.fileno(),), daemon=True).start()


def _watch_socket(descriptor: int) -> None:
    poll = select.poll()
    poll.register(descriptor, 0)  # a hang-up is reported whatever is asked for
    poll.poll()
    time.sleep(_ORPHAN_GRACE_S)
    os._exit(EXIT_LINK_BROKEN)


async def _serve(sock: socket.socket, segment: int) -> int:
    from rtgen.engine.host_serve import GenerationHost
    from rtgen.frame_link import FrameLink, FrameWriter, SlotLayout

    reader, writer = await asyncio.open_unix_connection(sock=sock)
    try:
        start = await read_message(reader)
        if not isinstance(start, Start):
            raise LinkError(f"the first message must be Start, got {type(start).__name__}")
        logging.basicConfig(
            level=start.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
        )
        try:
            engine, watch = build_engine(start)
        except Exception as error:
            # Whatever a factory raises ends this process; the other side is told what it was.
            logger.exception("the generation process cannot start")
            await _send(writer, failure(error))
            return EXIT_START_FAILED
        layout = SlotLayout.of(engine.pipeline.format, start.max_sessions * start.slots_per_session)
        link = FrameLink(segment, layout, create=True)
        os.close(segment)
        host = GenerationHost(
            engine,
            watch,
            writer,
            FrameWriter(link, per_session=start.slots_per_session),
            drain_s=start.drain_s,
        )
        await _send(writer, ready(engine.pipeline, layout.count))
        await host.run(reader)
        return 0
    except (LinkError, OSError) as error:
        logger.error("the link to the media process broke: %s", error)
        return EXIT_LINK_BROKEN
    finally:
        writer.close()
        with contextlib.suppress(OSError):  # the other end may be gone
            await writer.wait_closed()


async def _send(writer: asyncio.StreamWriter, message: Message) -> None:
    writer.write(encode(message))
    await writer.drain()


def build_engine(start: Start) -> tuple[Engine, Watch]:
    """Makes the pipeline and an engine on watched thread lanes, and has it make warm units.

    Raises:
        ConfigError: the factory cannot be found, or does not take the arguments.
        RtgenError: what the factory or the warm-up failed of.
    """
    factory = find_factory(start.factory)
    try:
        inspect.signature(factory).bind(**start.arguments)
    except TypeError as error:
        raise ConfigError(f"{start.factory} does not take these arguments: {error}") from error
    from rtgen.engine.engine import Engine
    from rtgen.engine.host_lanes import Watch, watched
    from rtgen.engine.lanes import thread_lanes

    pipeline: Pipeline = factory(**start.arguments)
    watch = Watch()
    lanes = watched(thread_lanes(intra_op_threads=start.intra_op_threads), watch)
    engine = Engine(pipeline, lanes=lanes, max_sessions=start.max_sessions)
    warm_up(engine, start.warm_units)
    return engine, watch


def find_factory(name: str) -> Any:
    """What "module:name" or "module:Class.method" names.

    Raises:
        ConfigError: there is no such thing.
    """
    module, _, path = name.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in path.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"factory {name!r} is not to be found: {error}") from error
    return found


def warm_up(engine: Engine, units: int) -> None:
    """Makes units of silence, through every stage, and forgets the times they took.

    Raises:
        RtgenError: what the pipeline failed of.
    """
    answer = engine.reserve(SessionSpec(service_class="offline"))
    if isinstance(answer, Refusal):
        raise LinkError(f"the engine refuses its first session: {answer.reason}")
    session = answer.session
    silence = np.zeros(units * engine.pipeline.format.output_samples, np.int16)
    for _ in session.render([silence], OUTPUT_RATE):
        pass
    session.close()
    engine.timer.reset()


def ready(pipeline: Pipeline, slots: int) -> Ready:
    """Says that units can be had."""
    description = json.loads(json.dumps(pipeline.describe(), default=str))
    return Ready(format=pipeline.format, description=description, slots=slots)


def failure(error: Exception) -> StartFailed:
    """Says why the start failed."""
    if isinstance(error, RtgenError):
        return StartFailed(error=type(error).__name__, message=str(error))
    return StartFailed(error="RtgenError", message=f"internal error: {error!r}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
