"""What every training stage shares: learning-rate schedule, averaged weights, checkpoints, log.

A stage is one command that can be cut at any time and started again: it resumes from its last
checkpoint, with optimizer, averaged weights, random state and step count.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import math
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from rtgen.errors import ConfigError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainConfig:
    """One stage's budget and optimizer.

    Attributes:
        steps: optimizer steps in all.
        learning_rate: peak.
        warmup: steps of linear rise.
        flat: share of the steps after which the cosine fall begins.
        weight_decay: on tensors of two and more dimensions.
        ema: largest decay of the averaged weights.
        seed: of initial weights and sampling.
        save_every_s: seconds between checkpoints.
        threads: intra-op threads, 0 for torch's own choice.
    """

    steps: int
    learning_rate: float
    warmup: int = 100
    flat: float = 0.4
    weight_decay: float = 0.01
    ema: float = 0.998
    seed: int = 0
    save_every_s: float = 60.0
    threads: int = 0

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"steps must be at least 1, got {self.steps}")

    def rate(self, step: int) -> float:
        """Learning rate of a step: linear rise, flat, cosine fall to 2 %."""
        rise = min(1.0, (step + 1) / self.warmup)
        done = step / self.steps
        if done < self.flat:
            return self.learning_rate * rise
        fall = 0.5 * (1 + math.cos(math.pi * (done - self.flat) / (1 - self.flat)))
        return self.learning_rate * rise * max(0.02, fall)


@dataclass
class Trainer:
    """Runs a stage.

    Attributes:
        model: trained in place.
        config: budget and optimizer.
        directory: where `last.pt` and `log.jsonl` go.
    """

    model: nn.Module
    config: TrainConfig
    directory: Path
    step: int = 0
    averaged: dict[str, Tensor] = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)

    def __post_init__(self) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        if self.config.threads:
            torch.set_num_threads(self.config.threads)
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        decay: dict[str, Any] = {"params": [p for p in parameters if p.ndim > 1]}
        rest: dict[str, Any] = {
            "params": [p for p in parameters if p.ndim <= 1],
            "weight_decay": 0.0,
        }
        self.optimizer = torch.optim.AdamW(
            [decay, rest],
            self.config.learning_rate,
            (0.9, 0.95),
            weight_decay=self.config.weight_decay,
            fused=True,
        )
        self.averaged = {k: v.detach().clone() for k, v in self.model.state_dict().items()}
        if (self.directory / "last.pt").exists():
            self._resume()

    def run(
        self,
        loss_of: Callable[[int], dict[str, Tensor]],
        evaluate: Callable[[], dict[str, float]] | None = None,
        evaluate_every: int = 200,
    ) -> None:
        """Trains to the end of the budget.

        Args:
            loss_of: returns the terms of a step (0, 1, ...; counted on after a resume); "loss" is
                minimised, all are logged.
            evaluate: called every `evaluate_every` steps and at the end, on averaged weights.
            evaluate_every: steps.
        """
        saved = started = time.monotonic()
        first = self.step
        means: dict[str, float] = {}
        for step in self._steps():
            terms = loss_of(step)
            self.optimizer.zero_grad(set_to_none=True)
            terms["loss"].backward()  # type: ignore[no-untyped-call]
            norm = nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            if not torch.isfinite(norm):
                raise ConfigError(f"step {step}: gradient is not finite; lower the learning rate")
            self.optimizer.step()
            self._average()
            for name, value in terms.items():
                means[name] = 0.98 * means.get(name, value.item()) + 0.02 * value.item()
            last = self.step == self.config.steps
            if evaluate is not None and (self.step % evaluate_every == 0 or last):
                with self.averaged_weights():
                    means_now = {**means, **evaluate()}
                self._log(
                    {**means_now, "s_per_step": (time.monotonic() - started) / (self.step - first)}
                )
            if last or time.monotonic() - saved > self.config.save_every_s:
                self.save()
                saved = time.monotonic()

    def _steps(self) -> Iterator[int]:
        while self.step < self.config.steps:
            for group in self.optimizer.param_groups:
                group["lr"] = self.config.rate(self.step)
            self.step += 1
            yield self.step - 1

    @torch.no_grad()
    def _average(self) -> None:
        decay = min(self.config.ema, self.step / (self.step + 20))
        for name, value in self.model.state_dict().items():
            if value.is_floating_point():
                self.averaged[name].lerp_(value, 1 - decay)
            else:
                self.averaged[name].copy_(value)

    def averaged_weights(self) -> _Swap:
        """A context in which the model holds the averaged weights."""
        return _Swap(self.model, self.averaged)

    def _log(self, values: dict[str, float]) -> None:
        record = {"step": self.step, **{k: round(v, 5) for k, v in values.items()}}
        with (self.directory / "log.jsonl").open("a") as log:
            log.write(json.dumps(record) + "\n")

    def save(self) -> None:
        """Writes the resumable checkpoint, whole or not at all."""
        state = {
            "model": self.model.state_dict(),
            "averaged": self.averaged,
            "optimizer": self.optimizer.state_dict(),
            "step": self.step,
            "random": torch.get_rng_state(),
        }
        part = self.directory / "last.pt.part"
        torch.save(state, part)
        os.replace(part, self.directory / "last.pt")

    def _resume(self) -> None:
        state: dict[str, Any] = torch.load(self.directory / "last.pt", weights_only=True)
        self.model.load_state_dict(state["model"])
        self.averaged = state["averaged"]
        self.optimizer.load_state_dict(state["optimizer"])
        self.step = state["step"]
        torch.set_rng_state(state["random"])


class _Swap:
    """Holds other weights in a model for the length of a with-block."""

    def __init__(self, model: nn.Module, weights: dict[str, Tensor]) -> None:
        self._model, self._weights = model, weights
        self._kept: dict[str, Tensor] = {}

    def __enter__(self) -> None:
        self._kept = {k: v.detach().clone() for k, v in self._model.state_dict().items()}
        self._model.load_state_dict(self._weights)
        self._model.eval()

    def __exit__(self, *_: object) -> None:
        self._model.load_state_dict(self._kept)
        self._model.train()


def add_train_arguments(parser: argparse.ArgumentParser, config: TrainConfig) -> None:
    """Adds the flags every stage has, with a stage's own defaults."""
    parser.add_argument("--data", type=Path, required=True, help="folder made by `train data`")
    parser.add_argument("--out", type=Path, required=True, help="folder for checkpoints and log")
    parser.add_argument("--steps", type=int, default=config.steps)
    parser.add_argument("--learning-rate", type=float, default=config.learning_rate)
    parser.add_argument("--seed", type=int, default=config.seed)
    parser.add_argument("--threads", type=int, default=config.threads)
    parser.add_argument("--device", default="cpu", help="torch device that trains")
    parser.add_argument(
        "--precision", choices=("auto", "fp32", "bf16"), default="auto",
        help="of matrix products; auto takes the faster one on this machine",
    )  # fmt: skip


def train_config(args: argparse.Namespace, defaults: TrainConfig) -> TrainConfig:
    """A stage's defaults with what the flags say."""
    return dataclasses.replace(
        defaults,
        steps=args.steps,
        learning_rate=args.learning_rate,
        seed=args.seed,
        threads=args.threads,
    )


class Precision:
    """Whether matrix products run in bfloat16, by choice or by a short measurement.

    Args:
        choice: "fp32", "bf16" or "auto".
        device: where training runs.
    """

    def __init__(self, choice: str, device: torch.device) -> None:
        self.device = device
        self.bfloat16 = choice == "bf16" or (choice == "auto" and _bfloat16_is_faster(device))
        logger.info("training in %s on %s", "bf16" if self.bfloat16 else "fp32", device)

    def autocast(self) -> torch.autocast:
        """The context for a forward pass."""
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.bfloat16)


def _bfloat16_is_faster(device: torch.device) -> bool:
    if device.type != "cpu":
        return True
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        matrix = torch.ones(512, 512, dtype=dtype)
        times = []
        for _ in range(5):
            started = time.perf_counter()
            matrix @ matrix
            times.append(time.perf_counter() - started)
        seconds[dtype] = min(times)
    return seconds[torch.bfloat16] < 0.8 * seconds[torch.float32]
