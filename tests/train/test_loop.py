"""The training loop: a run that is cut and resumed equals one that is not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pipelines.train.loop import Precision, TrainConfig, Trainer
from rtgen.errors import ConfigError


def train(directory: Path, steps: int, stop_at: int | None = None) -> tuple[nn.Linear, Trainer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    trainer = Trainer(model, TrainConfig(steps=steps, learning_rate=1e-2, warmup=3), directory)

    def loss(step: int) -> dict[str, Tensor]:
        if stop_at is not None and trainer.step > stop_at:
            trainer.step -= 1
            trainer.save()
            raise KeyboardInterrupt
        x = torch.randn(8, 4) * (1 + step % 3)
        return {"loss": (model(x) - x[:, :3]).square().mean()}

    trainer.run(loss, lambda: {"norm": float(model.weight.detach().norm())}, evaluate_every=5)
    return model, trainer


def test_resumed_training_equals_uninterrupted_training(tmp_path: Path) -> None:
    whole, _ = train(tmp_path / "a", 20)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "b", 20, stop_at=9)
    resumed, trainer = train(tmp_path / "b", 20)
    assert trainer.step == 20
    torch.testing.assert_close(resumed.weight, whole.weight, rtol=0, atol=0)
    torch.testing.assert_close(
        trainer.averaged["weight"], torch.load(tmp_path / "a" / "last.pt")["averaged"]["weight"]
    )


def test_a_lost_random_state_is_noticed(tmp_path: Path) -> None:
    whole, _ = train(tmp_path / "a", 20)
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "b", 20, stop_at=9)
    state = torch.load(tmp_path / "b" / "last.pt")
    state["random"] = torch.Generator().manual_seed(99).get_state()
    torch.save(state, tmp_path / "b" / "last.pt")
    resumed, _ = train(tmp_path / "b", 20)
    assert not torch.equal(resumed.weight, whole.weight)


def test_the_log_holds_a_record_per_evaluation(tmp_path: Path) -> None:
    train(tmp_path, 12)
    steps = [json.loads(line)["step"] for line in (tmp_path / "log.jsonl").read_text().splitlines()]
    assert steps == [5, 10, 12]


def test_the_rate_rises_stays_and_falls() -> None:
    config = TrainConfig(steps=100, learning_rate=1.0, warmup=10, flat=0.5)
    assert config.rate(0) == pytest.approx(0.1)
    assert config.rate(30) == 1.0
    assert config.rate(75) == pytest.approx(0.5)
    assert config.rate(99) == pytest.approx(0.02)


def test_a_diverging_step_is_an_error(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    trainer = Trainer(model, TrainConfig(steps=3, learning_rate=1.0), tmp_path)
    with pytest.raises(ConfigError, match="not finite"):
        trainer.run(lambda step: {"loss": model(torch.full((1, 2), float("inf"))).sum()})


def test_averaged_weights_are_swapped_in_and_out(tmp_path: Path) -> None:
    model, trainer = train(tmp_path, 10)
    live = model.weight.detach().clone()
    with trainer.averaged_weights():
        assert torch.equal(model.weight, trainer.averaged["weight"])
        assert not model.training
    assert torch.equal(model.weight, live)
    assert model.training


def test_explicit_precision_is_obeyed() -> None:
    device = torch.device("cpu")
    assert Precision("bf16", device).bfloat16
    assert not Precision("fp32", device).bfloat16
