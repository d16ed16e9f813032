"""The network that moves the mouth: what it reads, and how its classifiers take over."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from pipelines.audio import MelConfig, MelFrontEnd, rows_of_track
from pipelines.lips import MOUTH_NAMES, LipConfig, LipNet, load_lips
from rtgen.errors import CheckpointError, ConfigError, ShapeError
from rtgen.weights.loaders import save_weights
from tests.toy import randomise

SMALL = LipConfig(width=8, hidden=8)


def lips(seed: int = 0) -> LipNet:
    model = LipNet(SMALL)
    randomise(model, seed)
    return model.eval()


def test_every_frame_is_one_function_of_its_own_rows() -> None:
    """Frame by frame over single windows, the slow way; a window one row off differs."""
    model = lips()
    rows = torch.randn(1, LipNet.rows_for(7), 64)
    with torch.no_grad():
        whole = model(rows)
        alone = torch.cat([model(rows[:, 4 * i : 4 * i + 36]) for i in range(7)], 1)
        shifted = torch.cat([model(rows[:, 4 * i + 1 : 4 * i + 37]) for i in range(6)], 1)
    assert whole.shape == (1, 7, len(MOUTH_NAMES))
    torch.testing.assert_close(whole, alone, atol=1e-5, rtol=1e-5)
    assert (whole[:, :6] - shifted).abs().max() > 1e-3


def test_a_frame_reads_all_of_its_rows_and_no_other() -> None:
    model = lips()
    rows = torch.randn(1, LipNet.rows_for(3), 64, requires_grad=True)
    model.raw(rows)[0][0, 1].sum().backward()  # type: ignore[no-untyped-call]
    assert rows.grad is not None
    touched = rows.grad[0].abs().sum(1) > 0
    assert touched.nonzero().flatten().tolist() == list(range(4, 40))


def test_units_heard_live_give_the_mouth_of_the_whole_recording() -> None:
    config, model = MelConfig(), lips()
    sound = np.random.default_rng(0).standard_normal(6 * config.unit).astype(np.float32) * 0.1
    rows = torch.from_numpy(rows_of_track(sound, config))
    assert len(rows) == LipNet.rows_for(24)
    front, mouths = MelFrontEnd(config), []
    padded = np.concatenate([sound, np.zeros(config.lookahead, np.float32)])
    with torch.no_grad():
        for unit in range(6):
            start = unit * config.unit
            tokens = front.step(padded[start : start + config.unit + config.lookahead])
            mouths.append(model(torch.from_numpy(tokens).reshape(1, -1, 64)))
        whole = model(rows[None])
    torch.testing.assert_close(torch.cat(mouths, 1), whole, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize(
    ("touch", "rest", "wanted"), [(-9.0, -9.0, 0.4), (9.0, -9.0, 0.7), (9.0, 9.0, 0.0)]
)
def test_sure_classifiers_take_the_mouth_over(touch: float, rest: float, wanted: float) -> None:
    model = lips()
    torch.nn.init.zeros_(model.out.weight)
    bias = torch.full((len(MOUTH_NAMES) + 2,), 0.4)
    bias[-2:] = torch.tensor([touch, rest])
    assert model.out.bias is not None
    model.out.bias.data.copy_(bias)
    model.closed_shape.fill_(0.7)
    with torch.no_grad():
        mouth = model(torch.randn(1, 36, 64))
    torch.testing.assert_close(mouth, torch.full_like(mouth, wanted), atol=1e-4, rtol=0)


def test_an_unsure_classifier_changes_nothing() -> None:
    model = lips()
    torch.nn.init.zeros_(model.out.weight)
    bias = torch.full((len(MOUTH_NAMES) + 2,), 0.4)
    bias[-2:] = -1.15  # probability 0.24
    assert model.out.bias is not None
    model.out.bias.data.copy_(bias)
    with torch.no_grad():
        mouth = model(torch.randn(1, 36, 64))
    torch.testing.assert_close(mouth, torch.full_like(mouth, 0.4))


def test_mouths_stay_in_range() -> None:
    model = lips()
    with torch.no_grad():
        mouth = model(100 * torch.randn(4, 60, 64))
    assert 0 <= mouth.min() <= mouth.max() <= 1


def test_weights_come_back_from_a_file_and_misfits_are_named(tmp_path: Path) -> None:
    model, path = lips(), tmp_path / "lips.safetensors"
    save_weights(path, model.state_dict())
    again = load_lips(path, SMALL)
    rows = torch.randn(1, 48, 64)
    torch.testing.assert_close(again(rows), model(rows), rtol=0, atol=0)
    with pytest.raises(CheckpointError):
        load_lips(path, LipConfig(width=16, hidden=8))
    with pytest.raises(CheckpointError):
        load_lips(tmp_path / "none.safetensors", SMALL)


def test_wrong_shapes_and_configurations_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"rows must be \[B, R, 64\]"):
        lips()(torch.zeros(1, 40, 32))
    with pytest.raises(ShapeError, match="at least 36, got 35"):
        lips()(torch.zeros(1, 35, 64))
    with pytest.raises(ConfigError, match="width must be even"):
        LipConfig(width=7)
    with pytest.raises(ConfigError, match="at least 1"):
        LipConfig(hidden=0)
    with pytest.raises(ConfigError, match="names must be"):
        LipConfig(names=("jawOpen",))
