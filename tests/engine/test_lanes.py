from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from rtgen.engine.lanes import InlineLane, Lane, ThreadLane, inline_lanes, thread_lanes
from rtgen.errors import ConfigError, StreamClosed

WAIT_S = 30.0  # of tests that would hang otherwise


def failing() -> None:
    raise ArithmeticError("planted")


@pytest.mark.parametrize("make", [InlineLane, lambda: ThreadLane("test")])
def test_results_and_errors_travel_in_the_future(make: Callable[[], Lane]) -> None:
    lane = make()
    assert lane.submit(divmod, 7, 2).result(WAIT_S) == (3, 1)
    failed = lane.submit(failing)
    with pytest.raises(ArithmeticError, match="planted"):
        failed.result(WAIT_S)
    assert lane.submit(int, "5").result(WAIT_S) == 5  # the lane goes on
    lane.close()
    lane.close()
    with pytest.raises(StreamClosed):
        lane.submit(int)


def test_a_thread_lane_runs_jobs_in_order_and_leaves_no_thread() -> None:
    before = threading.active_count()
    lane, order = ThreadLane("test", depth=3), list[int]()
    futures = [lane.submit(order.append, number) for number in range(20)]
    lane.close()
    assert order == list(range(20))
    assert all(future.done() for future in futures)
    assert threading.active_count() == before


def test_a_full_lane_makes_the_submitter_wait() -> None:
    lane = ThreadLane("test", depth=2)
    gate, third = threading.Event(), threading.Event()
    lane.submit(gate.wait, WAIT_S)
    lane.submit(gate.wait, WAIT_S)
    assert lane.free == 0

    def submit() -> None:
        lane.submit(int)
        third.set()

    thread = threading.Thread(target=submit)
    thread.start()
    assert not third.wait(0.05)  # the third waits for a place
    gate.set()
    assert third.wait(WAIT_S)
    thread.join()
    lane.close()
    assert lane.free == 2


def test_closing_wakes_a_submitter_that_waits() -> None:
    lane, gate, refused = ThreadLane("test", depth=1), threading.Event(), threading.Event()
    lane.submit(gate.wait, WAIT_S)

    def submit() -> None:
        try:
            lane.submit(int)
        except StreamClosed:
            refused.set()
            gate.set()

    thread = threading.Thread(target=submit)
    thread.start()
    lane.close()
    thread.join()
    assert refused.is_set()


def test_two_lanes_run_at_the_same_time() -> None:
    lanes = thread_lanes()
    here, there = threading.Event(), threading.Event()

    def meet(mine: threading.Event, other: threading.Event) -> bool:
        mine.set()
        return other.wait(WAIT_S)

    first = lanes.denoise.submit(meet, here, there)
    second = lanes.decode.submit(meet, there, here)
    assert first.result(WAIT_S)
    assert second.result(WAIT_S)
    lanes.close()


def test_intra_op_threads_of_a_lane_are_its_own() -> None:
    ours = torch.get_num_threads()
    one, two = (
        ThreadLane("one", intra_op_threads=1),
        ThreadLane("two", intra_op_threads=2),
    )
    assert one.submit(torch.get_num_threads).result(WAIT_S) == 1
    assert two.submit(torch.get_num_threads).result(WAIT_S) == 2
    assert torch.get_num_threads() == ours
    later = ThreadLane("later")  # a thread that sets nothing gets the process's number
    assert later.submit(torch.get_num_threads).result(WAIT_S) == ours
    for lane in (one, two, later):
        lane.close()


def test_lanes_refuse_wrong_sizes() -> None:
    for wrong in ({"depth": 0}, {"intra_op_threads": 0}):
        with pytest.raises(ConfigError):
            ThreadLane("test", **wrong)


def test_inline_lanes_have_no_threads() -> None:
    before = threading.active_count()
    lanes = inline_lanes()
    assert lanes.denoise.submit(threading.current_thread).result() is threading.current_thread()
    assert threading.active_count() == before
    lanes.close()
