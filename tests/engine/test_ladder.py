from __future__ import annotations

from collections.abc import Mapping

import pytest

from rtgen.engine.ladder import CALM_CHUNKS, Ladder, Move
from rtgen.errors import ConfigError

PERIOD = 160
LOW, MIDDLE, CALM = 0.2 * PERIOD, 0.4 * PERIOD, 0.9 * PERIOD


def idle(_: Mapping[int, int]) -> float:
    return 0.1


def full(_: Mapping[int, int]) -> float:
    return 0.99


def ladder_of(*lowest: int) -> Ladder:
    ladder = Ladder()
    for seq, rung in enumerate(lowest):
        ladder.join(seq, rung)
    return ladder


def calm(ladder: Ladder, seq: int, chunks: int, load: object = idle) -> list[Move]:
    moves = [ladder.delivered(seq, int(CALM), PERIOD, load) for _ in range(chunks)]  # type: ignore[arg-type]
    return [move for move in moves if move is not None]


def test_a_chunk_with_little_time_left_moves_the_least_degraded_newest_session() -> None:
    ladder = ladder_of(2, 2, 2)
    assert ladder.delivered(0, int(LOW), PERIOD, full) == Move(2, 0, 1)
    assert ladder.delivered(0, int(LOW), PERIOD, full) == Move(1, 0, 1)
    assert ladder.delivered(0, -50, PERIOD, full) == Move(0, 0, 1)
    # All are one rung down and none has shown yet what that brings, but the first.
    assert ladder.delivered(0, int(LOW), PERIOD, full) == Move(0, 1, 2)
    assert ladder.delivered(0, int(MIDDLE), PERIOD, full) is None


def test_nobody_goes_below_its_floor() -> None:
    ladder = ladder_of(0, 1)
    assert ladder.delivered(0, -1, PERIOD, full) == Move(1, 0, 1)
    for _ in range(5):
        assert ladder.delivered(1, -1, PERIOD, full) is None
    assert ladder.rungs == {0: 0, 1: 1}


def test_quality_comes_back_after_calm_chunks_if_it_fits() -> None:
    ladder = ladder_of(2)
    ladder.delivered(0, -1, PERIOD, full)
    assert calm(ladder, 0, CALM_CHUNKS - 1) == []
    assert ladder.delivered(0, int(MIDDLE), PERIOD, idle) is None  # starts anew
    assert calm(ladder, 0, CALM_CHUNKS - 1) == []
    assert calm(ladder, 0, 1, full) == []
    assert calm(ladder, 0, CALM_CHUNKS) == [Move(0, 1, 0)]
    assert calm(ladder, 0, 3 * CALM_CHUNKS) == []


def test_the_most_degraded_session_comes_back_first() -> None:
    ladder = ladder_of(2, 2)
    for _ in range(3):
        ladder.delivered(1, -1, PERIOD, full)
    assert ladder.rungs == {0: 1, 1: 2}
    assert calm(ladder, 0, CALM_CHUNKS) == []
    assert calm(ladder, 1, CALM_CHUNKS) == [Move(1, 2, 1)]


def test_room_is_made_before_anyone_is_late() -> None:
    ladder = ladder_of(2, 2, 1)

    def load(rungs: Mapping[int, int]) -> float:
        return 1.3 - 0.1 * sum(rungs.values())

    assert ladder.make_room(load) == [Move(2, 0, 1), Move(1, 0, 1), Move(0, 0, 1)]
    assert ladder.make_room(load) == []
    assert len(ladder.make_room(lambda _: 2.0)) == 2
    assert ladder.rungs == {0: 2, 1: 2, 2: 1}


def test_a_load_near_the_limit_does_not_swing() -> None:
    ladder = ladder_of(1)

    def load(rungs: Mapping[int, int]) -> float:
        return 0.95 if rungs[0] == 0 else 0.7

    ladder.delivered(0, -1, PERIOD, load)
    assert calm(ladder, 0, 100, load) == []


def test_sessions_come_and_go() -> None:
    ladder = ladder_of(1)
    with pytest.raises(ConfigError, match="there already"):
        ladder.join(0, 1)
    with pytest.raises(ConfigError, match="no rung"):
        ladder.join(1, -1)
    ladder.leave(0)
    ladder.leave(0)
    assert ladder.delivered(0, -1, PERIOD, full) is None
    assert ladder.rungs == {}
