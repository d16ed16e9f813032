"""The evaluation from its command line to its files, on the toy avatar."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import save_file

from pipelines import evaluate
from pipelines.evaluation import scenes
from pipelines.evaluation.scenes import Plan
from pipelines.evaluation.variants import VARIANTS
from pipelines.train.tracks import Track
from pipelines.train.visemes import FaceTrack
from rtgen.errors import CheckpointError, ConfigError
from tests.evaluation.scenes import speech_track, toy_probe, toy_renderer
from tests.toy_pipeline import write_toy_model

TINY = Plan(seeds=1, minutes=0.2, quiet_s=0.8, gesture_rounds=1, variant_s=0.8, clip_s=1.0)


def cut(split: str, seconds: float, seed: int) -> Track:
    """Held-out speech without a synthesizer: the middle of "pa pa pa"."""
    assert split == "test"
    track, part = speech_track(), slice(90, 90 + round(seconds * 25) // 4 * 4)
    names = ("weights", "pose", "gaze", "breath", "controls", "state")
    face = FaceTrack(**{name: getattr(track.face, name)[part] for name in names})
    segments = [(a - 3.6, b - 3.6, v) for a, b, v in track.segments]
    audio = track.audio[part.start * 640 : part.stop * 640]
    return replace(
        track, face=face, audio=audio, event=track.event[part], segments=segments, seed=seed
    )


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> argparse.Namespace:
    """A quick run of seconds on a folder of the toy."""
    monkeypatch.setattr(evaluate, "QUICK", TINY)
    monkeypatch.setattr(evaluate, "load_renderer", lambda folder: toy_renderer())
    monkeypatch.setattr(scenes, "make_track", cut)
    monkeypatch.setattr(scenes, "VARIANTS", {k: VARIANTS[k] for k in ("clean", "8 kHz")})
    monkeypatch.setattr(scenes, "GESTURES", ("nod",))
    model = write_toy_model(tmp_path / "model")
    toy_probe().save(model / "probe.safetensors")
    renderer = tmp_path / "renderer"
    renderer.mkdir()
    save_file(toy_renderer().state_dict(), renderer / "renderer.safetensors")
    parser = argparse.ArgumentParser()
    evaluate.add_arguments(parser)
    words = ["--model", str(model), "--renderer", str(renderer), "--out", str(tmp_path / "out")]
    return parser.parse_args([*words, "--quick", "--dtype", "float32"])


def test_a_run_writes_the_table_and_resumes(
    arguments: argparse.Namespace, capsys: pytest.CaptureFixture[str]
) -> None:
    assert evaluate.run(arguments) == 0
    table = capsys.readouterr().out
    document = json.loads((arguments.out / "measures.json").read_text())
    assert len(document["rows"]) == table.count("\n") - 1
    assert document["steps"] == 2
    assert document["avatar"] == "ada"
    by_name = {row["measure"]: row for row in document["rows"]}
    assert by_name["jaw correlation"]["passed"] is False  # the toy cannot speak
    assert by_name["identity drift per 10 min"]["passed"] is None
    for name in ("sheet.png", "clip.mp4"):
        assert (arguments.out / name).stat().st_size > 1000

    parts = sorted((arguments.out / "parts").glob("*.npz"))
    times = [part.stat().st_mtime_ns for part in parts]
    assert len(parts) == 10
    assert evaluate.run(arguments) == 0
    assert capsys.readouterr().out == table
    assert [part.stat().st_mtime_ns for part in parts] == times


def test_a_plan_follows_the_flags(arguments: argparse.Namespace) -> None:
    assert evaluate.plan_of(arguments) == TINY
    arguments.quick, arguments.seeds, arguments.minutes = False, 3, 4.0
    assert evaluate.plan_of(arguments) == Plan(seeds=3, minutes=4.0)
    arguments.seeds = 0
    with pytest.raises(ConfigError, match="--seeds"):
        evaluate.plan_of(arguments)


def test_a_probe_of_another_version_is_refused(arguments: argparse.Namespace) -> None:
    from safetensors.numpy import save_file as save_arrays

    save_arrays({"weights": np.zeros(3)}, arguments.model / "probe.safetensors")
    with pytest.raises(CheckpointError, match="fit it anew"):
        evaluate.run(arguments)


def test_cost_is_that_of_the_fastest_run_on_one_thread() -> None:
    def entry(threads: int, noisy: float) -> dict[str, object]:
        times = {"condition": 1.0, "noisy": noisy, "clean": 2.0, "decode": 100.0}
        return {"threads": threads, "cpu_ms_per_frame": times}

    bench = {"runs": [entry(1, 30.0), entry(1, 10.0), entry(2, 5.0)]}
    assert evaluate.denoise_cost(bench) == 13
    with pytest.raises(CheckpointError, match="one thread"):
        evaluate.denoise_cost({"runs": [entry(2, 5.0)]})
