"""Runs a media server until it is told to stop: `rtgen serve`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import ssl
from collections.abc import AsyncIterator, Callable
from typing import Protocol

from aiohttp import web

from rtgen.errors import ConfigError
from rtgen.frame_link import SupervisedService
from webrtc.config import ServerConfig
from webrtc.server import MediaServer

logger = logging.getLogger(__name__)


class StartedService(SupervisedService, Protocol):
    """A service that this process starts and ends."""

    async def start(self) -> None:
        """Returns at once."""

    async def until_ready(self) -> None:
        """Waits until sessions are granted; raises why they never will be."""

    async def close(self) -> None:
        """Ends it; may be called again."""


async def serve(
    make_service: Callable[[], StartedService],
    config: ServerConfig,
    on_ready: Callable[[str], None],
    stop: asyncio.Event | None = None,
) -> None:
    """Serves until `stop` is set, or SIGTERM or SIGINT comes; then drains.

    Args:
        make_service: called in the event loop.
        config: of the server.
        on_ready: called with the URL once sessions are granted.
        stop: another way to end it, for tests.

    Raises:
        ConfigError: the address cannot be listened on, or the certificate cannot be used.
        RtgenError: the service does not start.
    """
    stop = asyncio.Event() if stop is None else stop
    service = make_service()
    server = MediaServer(service, config)
    runner = web.AppRunner(server.app, access_log=None, shutdown_timeout=2.0)
    await runner.setup()
    try:
        # The server answers "not ready" while the model warms up.
        url = await _listen(runner, config)
        await service.start()
        async with _signals(stop):
            ready = asyncio.create_task(service.until_ready())
            stopped = asyncio.create_task(stop.wait())
            await asyncio.wait({ready, stopped}, return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                ready.result()
                on_ready(url)
                await stopped
            ready.cancel()
            stopped.cancel()
        logger.info("draining %d sessions", server.hub.active)
        await server.hub.drain()
    finally:
        await runner.cleanup()
        await service.close()


async def _listen(runner: web.AppRunner, config: ServerConfig) -> str:
    context: ssl.SSLContext | None = None
    if config.tls_cert is not None and config.tls_key is not None:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            context.load_cert_chain(config.tls_cert, config.tls_key)
        except (OSError, ssl.SSLError) as error:
            raise ConfigError(f"the certificate {config.tls_cert} cannot be used: {error}") from (
                error
            )
    try:
        await web.TCPSite(runner, config.host, config.port, ssl_context=context).start()
    except OSError as error:
        raise ConfigError(
            f"cannot listen on {config.host}:{config.port} ({error.strerror}); choose --port"
        ) from error
    port = runner.addresses[0][1]
    name = f"[{config.host}]" if ":" in config.host else config.host
    suffix = "" if config.token is None else f"#token={config.token}"
    return f"{'http' if context is None else 'https'}://{name}:{port}/{suffix}"


@contextlib.asynccontextmanager
async def _signals(stop: asyncio.Event) -> AsyncIterator[None]:
    loop = asyncio.get_running_loop()
    names = (signal.SIGTERM, signal.SIGINT)
    try:
        for name in names:
            loop.add_signal_handler(name, stop.set)
    except (RuntimeError, ValueError, NotImplementedError):
        # Not the main thread, or not Unix: then Ctrl-C raises KeyboardInterrupt as ever.
        logger.debug("signals cannot be handled here")
    try:
        yield
    finally:
        for name in names:
            with contextlib.suppress(RuntimeError, ValueError, NotImplementedError):
                loop.remove_signal_handler(name)
