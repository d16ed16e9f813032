"""Lanes: where the engine's stages run, one job after the other.

A lane has a fixed number of places (its depth). Whoever submits a job holds a place until the job
has run, so a slow stage holds up the one before it and nothing piles up. What a job returns or
raises travels in its future.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, ParamSpec, Protocol, TypeVar

from rtgen.errors import ConfigError, StreamClosed

P = ParamSpec("P")
R = TypeVar("R")


class Lane(Protocol):
    """Runs jobs in the order they were submitted, one at a time."""

    @property
    def free(self) -> int:
        """Places that are free now; 0 means that `submit` would wait."""
        ...

    def submit(self, job: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        """Takes a job, waiting for a free place.

        Raises:
            StreamClosed: the lane is closed.
        """
        ...

    def close(self) -> None:
        """Lets jobs that were taken finish and ends the lane; may be called again."""
        ...


class InlineLane:
    """Runs a job at once in the thread that submits it: no concurrency, the same order always."""

    def __init__(self) -> None:
        self._closed = False

    @property
    def free(self) -> int:
        return 1

    def submit(self, job: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        if self._closed:
            raise StreamClosed("the lane is closed; make a new engine")
        future: Future[R] = Future()
        try:
            future.set_result(job(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - raised again by whoever asks the future
            future.set_exception(error)
        return future

    def close(self) -> None:
        self._closed = True


class ThreadLane:
    """Runs jobs in a thread of its own.

    Args:
        name: of the thread.
        depth: jobs that may be taken and not yet finished, the running one included.
        intra_op_threads: OpenMP threads of each torch operation in this lane, or None to leave
            torch's setting alone. On few cores use 1 for every lane: two pools of OpenMP threads
            on shared cores wait for each other at every operation.
    """

    def __init__(self, name: str, *, depth: int = 2, intra_op_threads: int | None = None) -> None:
        if depth < 1:
            raise ConfigError(f"depth must be at least 1, got {depth}")
        if intra_op_threads is not None and intra_op_threads < 1:
            raise ConfigError(f"intra_op_threads must be at least 1, got {intra_op_threads}")
        self._depth = depth
        self._places = threading.Condition()
        self._taken = 0
        self._closed = False
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        if intra_op_threads is not None:
            import torch

            self._pool.submit(_set_own_threads, intra_op_threads).result()
            # Setting the caller's own number again restores the default of later threads.
            torch.set_num_threads(torch.get_num_threads())

    @property
    def free(self) -> int:
        return self._depth - self._taken

    def submit(self, job: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> Future[R]:
        with self._places:
            while self._taken == self._depth and not self._closed:
                self._places.wait()
            if self._closed:
                raise StreamClosed("the lane is closed; make a new engine")
            self._taken += 1
            future = self._pool.submit(job, *args, **kwargs)
        future.add_done_callback(self._release)
        return future

    def close(self) -> None:
        with self._places:
            self._closed = True
            self._places.notify_all()
        self._pool.shutdown(wait=True)

    def _release(self, _: Future[Any]) -> None:
        with self._places:
            self._taken -= 1
            self._places.notify()


def _set_own_threads(count: int) -> None:
    """Sets the number of OpenMP threads of torch operations in the calling thread.

    In torch 2.13 with OpenMP each thread has its own number. `set_num_threads` sets the caller's
    and the default; a thread takes over the default at its first operation, even if it has set
    its own before. So that is provoked here by asking first.
    """
    import torch

    torch.get_num_threads()
    torch.set_num_threads(count)


@dataclass(frozen=True, slots=True, kw_only=True)
class Lanes:
    """The engine's lanes.

    Attributes:
        denoise: forwards of the denoiser, and the conditioning before them.
        decode: latents to finished units.
        threaded: whether the engine steps itself in a thread; otherwise whoever waits for a unit
            steps it.
    """

    denoise: Lane
    decode: Lane
    threaded: bool

    def close(self) -> None:
        """Closes both, the earlier stage first."""
        self.denoise.close()
        self.decode.close()


def inline_lanes() -> Lanes:
    """Lanes without threads: everything runs in the caller's, for tests and for profiles."""
    return Lanes(denoise=InlineLane(), decode=InlineLane(), threaded=False)


def thread_lanes(*, intra_op_threads: int | None = 1) -> Lanes:
    """One thread per stage: a unit is decoded while the next one is denoised.

    Args:
        intra_op_threads: see `ThreadLane`; the same for both.
    """
    return Lanes(
        denoise=ThreadLane("rtgen-denoise", depth=1, intra_op_threads=intra_op_threads),
        decode=ThreadLane("rtgen-decode", depth=2, intra_op_threads=intra_op_threads),
        threaded=True,
    )
