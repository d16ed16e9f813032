from __future__ import annotations

import threading

import pytest

from rtgen.errors import ConfigError
from rtgen.timing import StageTimer, percentile


def test_percentile_is_the_nearest_rank() -> None:
    values = [30.0, 10.0, 20.0, 40.0]
    assert [percentile(values, share) for share in (0.0, 0.25, 0.5, 0.75, 0.76, 1.0)] == [
        10.0, 10.0, 20.0, 30.0, 40.0, 40.0,
    ]  # fmt: skip
    with pytest.raises(ConfigError):
        percentile([], 0.5)
    with pytest.raises(ConfigError):
        percentile(values, 1.5)


def test_summary_adds_up_what_was_recorded() -> None:
    timer = StageTimer(capacity=3)
    for milliseconds in (1, 2, 3, 4):
        timer.record("decode", milliseconds * 10**6, milliseconds * 5 * 10**5)
    summary = timer.summary()["decode"]
    assert summary.count == 4
    assert (summary.wall_p50, summary.wall_p95, summary.wall_max) == (3.0, 4.0, 4.0)
    assert summary.cpu_mean == pytest.approx(1.5)  # of the three that are remembered
    assert summary.cpu_total == pytest.approx(5.0)  # of all


def test_a_stage_that_raises_is_recorded_too() -> None:
    timer = StageTimer()
    with pytest.raises(KeyError), timer.stage("denoise"):
        raise KeyError
    assert timer.summary()["denoise"].count == 1


def test_stages_of_two_threads_are_all_counted() -> None:
    timer = StageTimer()

    def work() -> None:
        for _ in range(200):
            with timer.stage("work"):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert timer.summary()["work"].count == 800


def test_reset_forgets_everything() -> None:
    timer = StageTimer()
    timer.record("decode", 1, 1)
    timer.reset()
    assert timer.summary() == {}
    with pytest.raises(ConfigError):
        StageTimer(capacity=0)
