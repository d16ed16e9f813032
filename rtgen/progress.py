"""What a long command shows and hears: a progress line, and Ctrl-C as a request to finish.

Used by the command line only.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any, Self, TextIO

__all__ = ["Progress", "ProgressLine", "StopOnSignal"]

TERMINAL_PERIOD_S = 0.2
LOG_PERIOD_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """How far a render is.

    Attributes:
        done_s: seconds of video written.
        total_s: seconds there will be, or None where that is not known (sound from a pipe).
        wall_s: seconds since the first unit was asked for.
    """

    done_s: float
    total_s: float | None
    wall_s: float

    @property
    def real_time_factor(self) -> float:
        """Media seconds per wall second; above 1 is faster than real time."""
        return self.done_s / self.wall_s if self.wall_s > 0 else 0.0

    def __str__(self) -> str:
        factor = self.real_time_factor
        text = f"{self.done_s:.1f} s"
        if self.total_s is not None:
            left_s = (self.total_s - self.done_s) / factor if factor > 0 else 0.0
            percent = 100 * self.done_s / self.total_s
            text += f" of {self.total_s:.1f} s ({percent:.0f} %), {left_s:.0f} s left"
        return f"{text}, {factor:.2f}x real time"


class ProgressLine:
    """One line that is redrawn on a terminal, or a new line every five seconds elsewhere.

    Args:
        stream: where to write.
        clock: seconds, monotonic.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._is_terminal = stream.isatty()
        self._period_s = TERMINAL_PERIOD_S if self._is_terminal else LOG_PERIOD_S
        self._next_s = clock() + (0 if self._is_terminal else LOG_PERIOD_S)
        self._is_drawn = False

    def show(self, progress: Progress) -> None:
        """Shows a state, if enough time has passed since the last one."""
        now_s = self._clock()
        if now_s < self._next_s:
            return
        self._next_s = now_s + self._period_s
        if self._is_terminal:
            self._stream.write(f"\r\x1b[K{progress}")
            self._is_drawn = True
        else:
            self._stream.write(f"{progress}\n")
        self._stream.flush()

    def end(self) -> None:
        """Clears the line of a terminal."""
        if self._is_drawn:
            self._stream.write("\r\x1b[K")
            self._stream.flush()
            self._is_drawn = False


class StopOnSignal:
    """While entered, the first SIGINT or SIGTERM is a request and the second interrupts.

    The object is called to ask whether to stop. `signal_number` is the signal that came, 0 for
    none. Off the main thread, where Python takes no signals, nothing is changed.
    """

    def __init__(self) -> None:
        self.signal_number = 0
        self._before: dict[int, Any] = {}

    def __call__(self) -> bool:
        return self.signal_number != 0

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal_number:
            raise KeyboardInterrupt
        self.signal_number = number
        # Not through sys.stderr: the signal may have interrupted a write to it.
        line = b"rtgen: finishing the file; once more stops at once\n"
        os.write(2, b"\n" + line if os.isatty(2) else line)

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()
