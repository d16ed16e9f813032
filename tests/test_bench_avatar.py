"""The avatar's bench: its fields, its arithmetic, and what it refuses. Its times are not tested."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from pipelines.bench_avatar import gflop_per_unit, measure_stages, no_cache_ratio, run_worker, table
from rtgen.cli import main
from rtgen.engine.contract import UnitInput
from rtgen.errors import BackendUnavailable, ConfigError
from rtgen.models.kv_cache import RollingKVCache
from rtgen.sampling.stream import run_passes
from rtgen.types import SessionSpec, SpeechState
from tests.toy_pipeline import toy_pipeline, write_toy_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_toy_model(tmp_path_factory.mktemp("bench") / "toy")


def test_a_run_has_every_stage_and_both_first_frames(model: Path) -> None:
    run = measure_stages(model, "float32", units=3)
    assert set(run["cpu_ms_per_frame"]) == {"condition", "noisy", "clean", "decode"}
    assert all(value >= 0 for value in run["cpu_ms_per_frame"].values())
    assert run["first_frame_cold_s"] > 0
    assert run["first_frame_warm_s"] > 0
    assert run["peak_rss_mib"] > 50
    assert run["real_time_factor"] > 0
    json.dumps(run)


def test_with_and_without_cache_do_the_same_work() -> None:
    assert no_cache_ratio(toy_pipeline(), repeats=1) > 0


def test_a_cache_that_forgets_is_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    write = RollingKVCache.write

    def forgetful(self: RollingKVCache, layer: int, frame: int, k: Tensor, v: Tensor) -> None:
        write(self, layer, frame, k, v * (frame != 2))

    monkeypatch.setattr(RollingKVCache, "write", forgetful)
    with pytest.raises(ConfigError, match="differ by"):
        no_cache_ratio(toy_pipeline(), repeats=1)


def test_analytic_gflop_is_what_torch_counts() -> None:
    pipeline = toy_pipeline()
    session = pipeline.open(SessionSpec(seed=0))
    mel = pipeline.config.mel

    def unit() -> None:
        sound = np.zeros(mel.unit + mel.lookahead, np.float32)
        session.begin([UnitInput(audio=sound, state=SpeechState.IDLE)])
        latents = None
        while latents is None:
            (latents,) = run_passes(pipeline.denoiser, [session.stream])
        session.decode(latents)

    for _ in range(pipeline.config.cache.window + 1):
        unit()
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        unit()
    counted = counter.get_total_flops() / 1e9
    told = sum(gflop_per_unit(pipeline).values())
    assert told == pytest.approx(counted, rel=0.15, abs=0.01)


def test_a_failed_worker_says_why(tmp_path: Path) -> None:
    with pytest.raises(BackendUnavailable, match=r"1 threads in float32 failed: .*model\.json"):
        run_worker(tmp_path, 1, "float32", 1)


def test_the_table_has_a_row_for_each_setting(model: Path) -> None:
    run = {"threads": 1, "dtype": "float32", **measure_stages(model, "float32", units=2)}
    rows = table({"runs": [run, {**run, "threads": 2}]}).splitlines()
    assert len(rows) == 4
    assert rows[2].startswith("| 1 | float32 |")
    assert rows[3].startswith("| 2 | float32 |")


def test_bad_flags_are_one_line_and_status_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "avatar", "--units", "0"]) == 2
    assert "--units must be at least 1" in capsys.readouterr().err
    assert main(["bench", "avatar", "--model", "no/such"]) == 2
    assert "no such folder" in capsys.readouterr().err
