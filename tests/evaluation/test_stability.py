"""Drift, joins and transitions on logs whose answer is planted."""

from __future__ import annotations

import copy

import numpy as np
import pytest

from pipelines.evaluation.log import FrameLog
from pipelines.evaluation.stability import Slope, drift_measures, join_measures, pool, slope_of
from pipelines.motion import FPS
from rtgen.types import SpeechState
from tests.evaluation.scenes import toy_probe

TEN_MINUTES = 600 * FPS


def steady_log(frames: int = TEN_MINUTES, seed: int = 0) -> FrameLog:
    """A stream that varies and goes nowhere."""
    rng = np.random.default_rng(seed)
    log = FrameLog.empty(frames, toy_probe())
    log.lab[:] = [60, 15, 20] + rng.standard_normal((frames, 3))
    log.description[:] = rng.standard_normal(log.description.shape)
    log.backdrop[:] = 2.0
    log.detail[:] = 5.0
    log.change[:] = rng.uniform(0.9, 1.1, log.change.shape)
    log.readings[:] = 0
    return log


def made_log(shown: FrameLog, seed: int = 1) -> FrameLog:
    """The same with small errors, as a good model has them."""
    rng = np.random.default_rng(seed)
    seen = copy.deepcopy(shown)
    for name in ("lab", "description"):
        value = getattr(seen, name)
        setattr(seen, name, value + 0.1 * rng.standard_normal(value.shape).astype(np.float32))
    return seen


def slope(found: dict[str, Slope | float], name: str) -> Slope:
    value = found[name]
    assert isinstance(value, Slope)
    return value


def test_a_steady_stream_does_not_drift() -> None:
    shown = steady_log()
    found = drift_measures(made_log(shown), shown)
    for name, bound in (("lab_l", 0.5), ("lab_a", 0.5), ("lab_b", 0.5), ("identity", 2.0)):
        low, high = slope(found, name).ends
        assert -bound < low < high < bound, name
        assert low < 0.05 * bound
        assert high > -0.05 * bound
    assert found["backdrop_change"] == pytest.approx(0, abs=0.01)
    assert found["detail_ratio"] == pytest.approx(1)


def test_planted_drifts_are_found_in_their_size() -> None:
    shown = steady_log()
    seen = made_log(shown)
    ramp = np.linspace(0, 1, TEN_MINUTES, dtype=np.float32)
    seen.lab[:, 0] += 2 * ramp
    spread = np.sqrt(shown.description.var(0).sum())
    seen.description[:, 0] += 0.3 * spread * ramp
    seen.backdrop *= 1 + ramp
    seen.detail *= 1 - 0.5 * ramp
    found = drift_measures(seen, shown)
    assert slope(found, "lab_l").value == pytest.approx(2, abs=0.05)
    assert slope(found, "lab_l").ends[0] > 1.9
    assert abs(slope(found, "lab_a").value) < 0.05
    assert slope(found, "identity").value == pytest.approx(30, abs=2)
    assert found["backdrop_change"] == pytest.approx(-2.9, abs=0.4)
    assert found["detail_ratio"] == pytest.approx(0.5, abs=0.02)


def test_motion_that_the_truth_has_too_is_no_drift() -> None:
    shown = steady_log()
    shown.lab[:, 1] += np.linspace(0, 5, TEN_MINUTES, dtype=np.float32)
    found = drift_measures(made_log(shown), shown)
    assert abs(slope(found, "lab_a").value) < 0.05


def test_sparse_looks_are_enough_for_drift() -> None:
    shown = steady_log()
    seen = made_log(shown)
    seen.lab[:, 2] -= np.linspace(0, 1, TEN_MINUTES, dtype=np.float32)
    unseen = np.arange(TEN_MINUTES) // 4 % 5 != 0
    for log in (seen, shown):
        for name in ("lab", "description", "backdrop", "detail", "readings"):
            getattr(log, name)[unseen] = np.nan
    found = drift_measures(seen, shown)
    assert slope(found, "lab_b").value == pytest.approx(-1, abs=0.1)


def test_slope_interval_covers_the_truth_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    times = np.arange(0, 600, 10, dtype=np.float64)
    hits = 0
    for _ in range(400):
        low, high = slope_of(times, 1.5 * times / 600 + rng.normal(size=60)).ends
        hits += low < 1.5 < high
    # 95 % of 400 are 380; 4 standard deviations of the binomial are 17.
    assert 363 <= hits <= 397


def test_seeds_that_disagree_widen_the_pooled_interval() -> None:
    agree = pool([Slope(0.1, 0.1), Slope(0.12, 0.1), Slope(0.11, 0.1)])
    apart = pool([Slope(2.0, 0.1), Slope(-2.0, 0.1), Slope(0.3, 0.1)])
    assert agree.half < 0.05
    assert apart.half > 3
    assert pool([Slope(0.2, 0.3)]) == pytest.approx(Slope(0.2, 0.3))


def states(frames: int) -> np.ndarray[tuple[int], np.dtype[np.int8]]:
    state = np.full(frames, SpeechState.SPEAKING, np.int8)
    state[100:140] = SpeechState.LISTENING
    return state


def test_even_change_has_no_joins_and_no_jumps() -> None:
    found = join_measures(steady_log(400), steady_log(400, seed=2), states(400))
    assert found["join_ratio"] == pytest.approx(1, abs=0.03)
    assert found["transition_ratio"] == pytest.approx(1, abs=0.15)
    assert found["transition_worst"] < 1.3


def test_jumps_at_joins_and_at_changes_of_state_are_seen() -> None:
    shown, log = steady_log(400), steady_log(400)
    log.change[::4] *= 1.5
    found = join_measures(log, shown, states(400))
    assert found["join_ratio"] == pytest.approx(1.5, abs=0.06)
    assert found["join_ratio_truth"] == pytest.approx(1, abs=0.03)
    log = steady_log(400)
    log.change[140] *= 4
    assert join_measures(log, shown, states(400))["transition_worst"] > 3.5


def test_a_turn_of_the_head_that_was_asked_for_is_no_jump() -> None:
    shown, log = steady_log(400), steady_log(400)
    shown.change[140] *= 5
    log.change[140] *= 5
    assert join_measures(log, shown, states(400))["transition_worst"] < 1.3


def test_a_stream_without_a_change_of_state_has_no_verdict_on_it() -> None:
    still = np.full(400, SpeechState.SPEAKING, np.int8)
    assert "transition_worst" not in join_measures(steady_log(400), steady_log(400), still)
