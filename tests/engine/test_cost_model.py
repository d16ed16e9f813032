from __future__ import annotations

import json
import random

import pytest

from rtgen.engine.cost_model import (
    CONDITION,
    DECODE,
    STALE_RUNS,
    CostModel,
    Profile,
    affine_profile,
)
from rtgen.errors import ConfigError

MS = 1_000_000
SIZES = (1, 2, 4)


def profile() -> Profile:
    return affine_profile(frames=3, sizes=SIZES, base_ms=10, frame_ms=2, decode_ms=30)


def test_predictions_start_at_the_profile_with_a_margin() -> None:
    costs = CostModel(profile()).costs()
    assert costs.allowed("3") == SIZES
    for size in SIZES:
        plain = (10 + 6 * size) * MS
        assert plain < costs.ns("3", size) < 1.08 * plain


def test_a_lasting_change_is_followed_and_one_stall_is_not() -> None:
    cost = CostModel(profile())
    before = cost.costs().ns("3", 2)
    for _ in range(20):
        cost.observe("3", 2, 22 * MS)
    cost.observe("3", 2, 500 * MS)
    assert cost.costs().ns("3", 2) <= before
    for _ in range(40):
        cost.observe("3", 2, 44 * MS)
    assert cost.costs().ns("3", 2) == pytest.approx(44 * MS, rel=0.02)


def test_sizes_never_seen_follow_what_the_others_say() -> None:
    cost = CostModel(profile())
    before = cost.costs().ns("3", 4)
    for _ in range(30):
        cost.observe("3", 1, 32 * MS)
    assert cost.costs().ns("3", 4) == pytest.approx(2 * before, rel=0.02)


def test_a_prediction_carries_the_scatter_that_was_seen() -> None:
    steady, shaky, rng = CostModel(profile()), CostModel(profile()), random.Random(0)
    for _ in range(31):
        steady.observe("3", 1, 16 * MS)
        shaky.observe("3", 1, round(16 * MS * rng.gauss(1, 0.1)))
    assert steady.costs().ns("3", 1) == 16 * MS
    assert shaky.costs().ns("3", 1) > 17.5 * MS


def test_a_stale_profile_is_noticed_once_and_again_after_it_was_right() -> None:
    alarms: list[float] = []
    cost = CostModel(profile(), alarms.append)
    for _ in range(2 * STALE_RUNS):
        cost.observe("3", 1, 16 * MS)
    assert not cost.is_stale
    for _ in range(2 * STALE_RUNS):
        cost.observe("3", 1, 24 * MS)
    assert cost.is_stale
    assert alarms == [1.5]
    for _ in range(STALE_RUNS):
        cost.observe("3", 1, 16 * MS)
    assert not cost.is_stale
    for _ in range(STALE_RUNS):
        cost.observe("3", 1, 8 * MS)
    assert alarms == [1.5, 0.5]


def test_errors_are_those_of_the_prediction_before_the_run() -> None:
    cost = CostModel(profile())
    assert cost.error(0.5) is None
    for _ in range(100):
        cost.observe("3", 1, 20 * MS)
    assert cost.error(0.5) == 0.0
    assert cost.error(1.0) == pytest.approx(0.25)


def test_stages_are_predicted_too_and_unknown_names_are_ignored() -> None:
    cost = CostModel(profile())
    assert cost.stage_ns(DECODE) == pytest.approx(30 * MS, rel=0.08)
    for _ in range(20):
        cost.observe(DECODE, 1, 60 * MS)
        cost.observe("5", 1, 1)
        cost.observe("3", 3, 1)
        cost.observe(CONDITION, 1, 5)  # was too short to be measured: nothing to compare with
    assert cost.stage_ns(DECODE) == 60 * MS
    assert CostModel(Profile(device="", model="", forward_ns={})).stage_ns(DECODE) == 0


def test_a_profile_survives_json_and_a_wrong_one_is_an_error() -> None:
    kept = profile()
    assert Profile.from_dict(json.loads(json.dumps(kept.to_dict()))) == kept
    with pytest.raises(ConfigError, match="not a profile"):
        Profile.from_dict({"device": "cpu"})
    with pytest.raises(ConfigError, match="one row"):
        Profile(device="", model="", forward_ns={"1": {2: 5}})
    with pytest.raises(ConfigError, match="session_bytes"):
        Profile(device="", model="", forward_ns={}, session_bytes=-1)
