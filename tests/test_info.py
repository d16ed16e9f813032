"""The facts of `rtgen info`: what is read from the machine, and how it is shown."""

from __future__ import annotations

from pathlib import Path

import pytest

from rtgen import info
from rtgen.errors import CheckpointError
from rtgen.info import as_text, collect, cpu_features
from tests.toy_pipeline import write_toy_model

INTEL = """processor : 0
model name : Some Processor
flags : fpu avx2 avx512f amx_bf16 amx_int8 avx512_bf16x

processor : 1
flags : fpu
"""


def test_cpu_features_are_whole_words_of_the_first_processor() -> None:
    assert cpu_features(INTEL) == ("avx2", "avx512f", "amx_bf16", "amx_int8")
    assert cpu_features("Features\t: fp asimd bf16 sve") == ("asimd", "bf16", "sve")
    assert cpu_features("") == ()


def test_models_avatars_and_sounds_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_toy_model(tmp_path / "models" / "toy")
    (tmp_path / "models" / "broken").mkdir()
    (tmp_path / "audio").mkdir()
    (tmp_path / "audio" / "hello.wav").touch()
    monkeypatch.setattr(info, "assets_root", lambda: tmp_path)
    text = as_text(collect())
    assert "model      toy (avatars ada, bo; steps 2, 1)" in text
    assert "model      broken (model.json cannot be read: " in text
    assert "audio      hello.wav" in text
    assert f"assets     {tmp_path}" in text


def test_a_missing_assets_folder_is_told_not_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Path:
        raise CheckpointError("no assets found")

    monkeypatch.setattr(info, "assets_root", missing)
    facts = collect()
    assert (facts["assets"], facts["models"]) == (None, [])
    assert "assets     none: install rtgen again" in as_text(facts)
