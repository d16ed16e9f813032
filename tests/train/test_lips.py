"""Training of the lips: labels, batches, and that a few steps find what the sound says."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip("scipy", reason="needs the train extra")

from pipelines.audio import MelConfig
from pipelines.lips import MOUTH_NAMES, LipConfig, LipNet
from pipelines.motion import CONTROL_NAMES, SPEAKING
from pipelines.train.dataset import save_npz
from pipelines.train.lips import FRAMES, LipStage, SpokenTrack, read_track
from pipelines.train.visemes import (
    FACE_UNITS,
    LEAD_S,
    VISEMES,
    FaceTrack,
    Segment,
    mouth_of,
    mouth_weights,
    touching,
    viseme_mouth,
    weights_of_mouth,
)

JAW = MOUTH_NAMES.index("jawOpen")


def face_and_mouth(seed: int, frames: int = 40) -> tuple[FaceTrack, np.ndarray]:
    rng = np.random.default_rng(seed)
    mouth = 0.5 * rng.random((frames, len(MOUTH_NAMES))).astype(np.float32)
    controls = 0.3 * rng.random((frames, len(CONTROL_NAMES))).astype(np.float32)
    weights = weights_of_mouth(mouth)
    return FaceTrack.from_parts(weights, controls, np.full(frames, SPEAKING)), mouth


def test_the_mouth_of_speech_is_found_under_the_expression() -> None:
    face, mouth = face_and_mouth(0)
    np.testing.assert_allclose(mouth_of(face), mouth, atol=1e-6)
    smile = MOUTH_NAMES.index("mouthSmile")
    raw = face.weights[:, FACE_UNITS.index("mouthSmileLeft")]
    assert np.abs(raw - mouth[:, smile]).max() > 0.1  # planted: without the expression taken off


def test_controls_of_the_mouth_move_both_sides() -> None:
    mouth = np.zeros((1, len(MOUTH_NAMES)), np.float32)
    mouth[0, MOUTH_NAMES.index("mouthPress")] = 0.5
    weights = weights_of_mouth(mouth)[0]
    moved = {FACE_UNITS[i] for i in np.flatnonzero(weights)}
    assert moved == {"mouthPressLeft", "mouthPressRight"}


def test_touching_frames_are_those_in_which_the_labels_close_the_jaw() -> None:
    segments: list[Segment] = [
        (0.2, 0.4, "aa"), (0.4, 0.5, "PP"), (0.5, 0.8, "aa"), (0.8, 0.9, "SS"), (0.9, 1.1, "aa"),
    ]  # fmt: skip
    shut = touching(segments, 40)
    jaw = mouth_weights(segments, 40)[:, FACE_UNITS.index("jawOpen")]
    assert shut.sum() >= 1
    assert jaw[shut > 0].max() < 0.05
    middle = round((0.45 - LEAD_S) * 25 - 0.5)
    assert shut[middle] == 1
    late = touching([(a + 0.08, b + 0.08, v) for a, b, v in segments], 40)  # planted: two late
    assert jaw[late > 0].max() > 0.2


def test_the_closed_mouth_is_that_of_its_viseme() -> None:
    closed = viseme_mouth("PP")
    assert closed[JAW] == 0
    assert closed[MOUTH_NAMES.index("mouthPress")] > 0.5
    assert viseme_mouth("aa")[JAW] > 0.5


def spoken(seed: int, frames: int = 240) -> SpokenTrack:
    """Sound whose loudness is the jaw: what the net has to find."""
    rng = np.random.default_rng(seed)
    jaw = np.repeat(rng.random(frames // 8) < 0.5, 8).astype(np.float32)
    rows = np.full((4 * frames + 32, 64), -1.0, np.float32)
    rows[18 : 18 + 4 * frames] += 2 * np.repeat(jaw, 4)[:, None]
    mouth = np.zeros((frames, len(MOUTH_NAMES)), np.float32)
    mouth[:, JAW] = 0.6 * jaw
    return SpokenTrack(
        rows=torch.from_numpy(rows)[None].half(),
        mouth=torch.from_numpy(mouth),
        touch=torch.zeros(frames),
        rest=torch.from_numpy(1 - jaw),
    )


def test_a_few_steps_find_the_jaw_in_the_sound() -> None:
    torch.manual_seed(0)
    model = LipNet(LipConfig(width=16, hidden=16))
    stage = LipStage(model, [spoken(0), spoken(1)], [spoken(2)], seed=0)
    before = stage.evaluate()["jawOpen_r"]
    optimizer = torch.optim.AdamW(model.parameters(), 5e-3)
    for step in range(40):
        loss = stage.loss(step)["loss"]
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    assert stage.evaluate()["jawOpen_r"] > max(0.8, before + 0.1)


def test_batches_depend_on_seed_and_step_alone() -> None:
    stage = LipStage(LipNet(LipConfig(width=8, hidden=8)), [spoken(0), spoken(1)], [], seed=3)
    one, two, other = stage.batch(5), stage.batch(5), stage.batch(6)
    for a, b, c in zip(one, two, other, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)
        assert not torch.equal(a, c)
    assert one[0].shape == (12, LipNet.rows_for(FRAMES), 64)
    assert one[1].shape == (12, FRAMES, len(MOUTH_NAMES))


def test_a_track_file_is_read_with_rows_that_belong_to_its_frames(tmp_path: Path) -> None:
    face, mouth = face_and_mouth(1, 48)
    mouth[:8] = 0
    face = FaceTrack.from_parts(weights_of_mouth(mouth), face.controls, face.state)
    sound = np.random.default_rng(0).standard_normal(48 * 640) * 3000
    names = ("weights", "pose", "gaze", "breath", "controls", "state")
    path = tmp_path / "train_0000.npz"
    save_npz(
        path,
        {
            **{name: getattr(face, name) for name in names},
            "audio": sound.astype(np.int16),
            "segments": np.array([[0.5, 0.7, VISEMES.index("PP")]], np.float32),
        },
    )
    track = read_track(path, 2, 0, MelConfig())
    assert track.rows.shape == (2, LipNet.rows_for(48), 64)
    assert not torch.equal(track.rows[0], track.rows[1])
    np.testing.assert_allclose(track.mouth.numpy(), mouth, atol=1e-6)
    assert track.touch.sum() > 0
    assert track.rest[:8].min() == 1
    assert track.rest[8:].max() == 0
