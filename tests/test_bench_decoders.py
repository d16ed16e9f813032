"""The decoders' bench: its fields, its arithmetic, its refusals. Its times are not tested."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from decoders.stock_vae import StockVaeConfig
from pipelines import bench_decoders
from pipelines.bench_decoders import (
    AVATAR,
    BASELINE,
    Clock,
    Setting,
    add_ratios,
    build,
    materialise,
    measure,
    run_worker,
    table,
)
from rtgen.cli import main
from rtgen.errors import BackendUnavailable, ConfigError

FIELDS = {
    "parameters_millions",
    "gflop_per_latent",
    "state_mib",
    "cpu_ms_per_frame",
    "median_cpu_ms_per_frame",
    "first_step_cpu_ms",
    "steps",
    "cpu_ms_per_gflop",
    "peak_rss_mib",
}


@pytest.fixture(autouse=True)
def small_vae(monkeypatch: pytest.MonkeyPatch) -> None:
    """Wan2.1's decoder with few channels, and a small transformer."""
    monkeypatch.setattr("decoders.stock_vae.WAN21_VAE", StockVaeConfig(base_dim=4, z_dim=4))
    monkeypatch.setitem(bench_decoders_sizes(), "S", (24, 2, 4, 2))


def bench_decoders_sizes() -> dict[str, tuple[int, int, int, int]]:
    from decoders import flash_presets

    return flash_presets._SIZES


def small(decoder: str) -> Setting:
    return Setting(decoder=decoder, height=32, width=32, steps=2)


@pytest.mark.parametrize("decoder", ["diffusers", "stock", "flash-S", "flash-S windowed"])
def test_a_run_has_every_field(decoder: str) -> None:
    run = measure(small(decoder))
    assert set(run) == FIELDS
    assert run["cpu_ms_per_frame"] > 0
    assert run["steps"] == 2
    assert run["state_mib"] > 0
    assert run["gflop_per_latent"] > 0
    json.dumps(run)


def test_the_avatars_convolutional_decoder_is_measured_too() -> None:
    run = measure(small("avatar conv"))
    assert run["state_mib"] == 0
    assert run["cpu_ms_per_frame"] > 0


def test_the_baseline_has_the_same_state_and_more_products() -> None:
    """Its upsamplers multiply repeated pixels."""
    theirs, ours = measure(small(BASELINE)), measure(small("stock"))
    assert theirs["state_mib"] == pytest.approx(ours["state_mib"], rel=0.01)
    assert theirs["gflop_per_latent"] > ours["gflop_per_latent"]


def test_random_weights_keep_signals_alive() -> None:
    network, _ = build(small("stock"))
    materialise(network, torch.float32)
    latents = torch.randn(4, 4, 4)
    network.prepare()  # type: ignore[operator]
    pixels, _ = network.stream(latents, network.new_memory(4, 4), True)  # type: ignore[operator]
    assert 0.01 < pixels.std() < 1


def test_the_clock_leaves_out_the_first_two_steps() -> None:
    clock, calls = Clock(small("stock")), []
    clock.run(lambda: calls.append(0))
    assert len(calls) == 4
    assert len(clock.steps_ms) == 2
    clock = Clock(dataclasses.replace(small("stock"), steps=50, seconds=0.0))
    clock.run(lambda: sum(range(10**5)))
    assert len(clock.steps_ms) == 2


def runs() -> list[dict[str, Any]]:
    shared = dict.fromkeys(FIELDS, 1.0)
    return [
        {**shared, "decoder": BASELINE, "size": "32x32", "cpu_ms_per_frame": 30.0},
        {**shared, "decoder": "stock", "size": "32x32", "cpu_ms_per_frame": 20.0},
        {**shared, "decoder": "stock", "size": "64x64"},
        {**shared, "decoder": AVATAR[0], "size": "32x32"},
    ]


def test_ratios_are_against_the_baseline_of_the_same_size() -> None:
    found = runs()
    add_ratios(found)
    assert [run.get("speedup") for run in found] == [1, 1.5, None, None]
    assert "| 1.5x less |" in table({"runs": found})


def test_a_failed_worker_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench_decoders, "asdict", lambda setting: {"decoder": "none"})
    with pytest.raises(BackendUnavailable, match="bench of stock failed: .*decoders are"):
        run_worker(small("stock"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"decoder": "none"}, "decoders are"),
        ({"latent_space": "wan3"}, "latent spaces"),
        ({"dtype": "float16"}, "dtypes"),
        ({"height": 40}, "multiples of 16"),
        ({"steps": 1}, "at least 2"),
    ],
)
def test_settings_that_break_a_rule_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(small("stock"), **changes)


def test_the_command_prints_a_table_and_one_document(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(bench_decoders, "run_worker", measure)
    words = ["bench", "decoders", "--size", "32x32", "--steps", "2", "--decoder", "stock"]
    out = tmp_path / "bench.json"
    assert main([*words, "--decoder", "avatar conv", "--out", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("| decoder | size |")
    document = json.loads(lines[-1])
    assert json.loads(out.read_text()) == document
    assert [run["decoder"] for run in document["runs"]] == ["stock"]  # the avatar's is of 256x256
    assert main(["bench", "decoders", "--size", "huge"]) == 2
    assert "--size must be HEIGHTxWIDTH" in capsys.readouterr().err
