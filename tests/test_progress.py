"""The progress line on a terminal and in a log, and signals as requests."""

from __future__ import annotations

import io
import signal

import pytest

from rtgen import progress
from rtgen.progress import Progress, ProgressLine, StopOnSignal


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def progress_shown(stream: io.StringIO) -> list[str]:
    """What a line shows of ten seconds of progress, one state every half second."""
    now = [100.0]
    line = ProgressLine(stream, clock=lambda: now[0])
    for step in range(20):
        now[0] = 100 + step / 2
        line.show(Progress(done_s=step * 1.0, total_s=40.0, wall_s=step / 2))
    line.end()
    return stream.getvalue().replace("\r\x1b[K", "\n").splitlines()


def test_a_terminal_sees_every_state_and_a_log_one_in_five_seconds() -> None:
    seen = progress_shown(Terminal())
    assert seen[-1] == "19.0 s of 40.0 s (48 %), 10 s left, 2.00x real time"
    assert len([text for text in seen if text]) == 20
    assert progress_shown(io.StringIO()) == ["10.0 s of 40.0 s (25 %), 15 s left, 2.00x real time"]


def test_progress_of_a_pipe_has_no_end() -> None:
    assert str(Progress(done_s=3.0, total_s=None, wall_s=2.0)) == "3.0 s, 1.50x real time"
    assert str(Progress(done_s=0.0, total_s=None, wall_s=0.0)) == "0.0 s, 0.00x real time"


def test_signals_are_left_alone_outside_the_block() -> None:
    before = signal.getsignal(signal.SIGINT)
    with StopOnSignal() as stop:
        assert signal.getsignal(signal.SIGINT) != before
        assert not stop()
    assert signal.getsignal(signal.SIGINT) == before
    assert progress.TERMINAL_PERIOD_S < progress.LOG_PERIOD_S


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_and_the_second_interrupts(number: int) -> None:
    with StopOnSignal() as stop:
        signal.raise_signal(number)
        assert stop()
        assert stop.signal_number == number
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
