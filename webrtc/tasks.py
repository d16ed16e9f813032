"""Tasks of one session: held, cancelled by their owner, and never silent when they fail."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from rtgen.errors import RtgenError

logger = logging.getLogger(__name__)


class Tasks:
    """A group of tasks.

    Args:
        session: named in the log.
        on_failure: told in words why a task failed; cancelled tasks do not fail.
    """

    def __init__(self, session: str, on_failure: Callable[[str], object]) -> None:
        self._session, self._on_failure = session, on_failure
        self._tasks: set[asyncio.Task[None]] = set()

    def spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Starts a task."""
        task = asyncio.create_task(self._guard(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def cancel(self) -> list[asyncio.Task[None]]:
        """Cancels all and returns them; they may still be ending."""
        tasks = [*self._tasks]
        for task in tasks:
            task.cancel()
        return tasks

    async def _guard(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except RtgenError as error:
            self._on_failure(str(error))
        except Exception:
            # The boundary between sessions: whatever fails here ends this one and no other.
            logger.exception("a task failed", extra={"session": self._session})
            self._on_failure("internal error")
