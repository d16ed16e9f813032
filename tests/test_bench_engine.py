"""The engine's bench: its document, its comparison, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipelines.bench_engine import measured, table
from rtgen.cli import main
from tests.toy_pipeline import write_toy_model


def test_the_bench_prints_a_table_and_one_document(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "engine.json"
    assert main(["bench", "engine", "--seconds", "6", "--out", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    document = json.loads(lines[-1])
    assert json.loads(out.read_text()) == document
    assert "\n".join(lines[:-1]) == table(document)
    assert document["batched"]["sessions"] >= 2 * document["first_come"]["sessions"]
    assert document["one_too_many"]["miss_rate_with_ladder"] <= 0.005
    assert document["admitted"]["late"] == 0
    assert document["offline_beside"]["added_late"] == 0
    assert document["overload"]["recovery_s"] <= 2


def test_a_model_is_measured_here(tmp_path: Path) -> None:
    found = measured(write_toy_model(tmp_path / "toy"))
    assert found["safe_batch_sizes"][0] == 1
    assert found["profile"]["forward_ns"]["1"]["1"] > 0
    assert found["admitted"] >= 1
    assert found["load_of_one"]["decode"] > 0
    assert found["limited_by"] in {"denoise", "decode", "response", "simulation", "places"}


def test_bad_flags_are_one_line_and_status_two(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "engine", "--seconds", "1"]) == 2
    assert "--seconds must be at least 5" in capsys.readouterr().err
    assert main(["bench", "engine", "--model", "no/such"]) == 2
    assert "no such folder" in capsys.readouterr().err
