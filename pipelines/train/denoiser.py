"""Trains the avatar's causal denoiser (`rtgen train denoiser`).

Each example is the reference latent (the sink) and a run of units. Every unit gets its own noise
level: about half are to be denoised, the rest are history with a little noise on it, so that the
network learns to continue from its own imperfect output. In the second half of the budget part of
the history is the network's own prediction (one extra forward without gradient).
"""

from __future__ import annotations

import argparse
import json
import logging
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from pipelines.train.draft import TEMPORAL_WEIGHT, frame_steps, train_draft
from pipelines.train.latent_renderer import LatentRenderer, load_renderer
from pipelines.train.loop import (
    Precision,
    TrainConfig,
    Trainer,
    add_train_arguments,
    train_config,
)
from pipelines.train.unit_tracks import UnitTracks, load_unit_tracks
from rtgen.config import CacheConfig, DenoiserConfig
from rtgen.models.conditioning import Conditioning
from rtgen.models.denoiser import CausalDenoiser, block_causal_mask

logger = logging.getLogger(__name__)

DEFAULTS = TrainConfig(steps=4000, learning_rate=1e-3, warmup=100, flat=0.5)
BATCH = 6
SHIFT = 3.0
CONTEXT_NOISE = 0.12  # history noise is uniform up to this sigma
CACHE = CacheConfig(window=7, sink=1, frames_per_chunk=1, lead=2, position_mode="relative")


def avatar_denoiser_config(control_dim: int, num_states: int) -> DenoiserConfig:
    """The shipped avatar's denoiser: 64 tokens a unit; sound reaches it as mouth controls."""
    return DenoiserConfig(
        num_attention_heads=4,
        attention_head_dim=64,
        in_channels=16,
        out_channels=16,
        ffn_dim=1024,
        num_layers=6,
        num_states=num_states,
        control_dim=control_dim,
        position_grid=(8, 8),
        condition_map=32,
        frames_per_latent=4,
        prediction_type="sample",
        activation_fn="gelu",
    )


@dataclass(frozen=True, slots=True)
class Batch:
    """One training batch; T counts the sink.

    Attributes:
        latents: [B, T, C, h, w], the truth; frame 0 is the reference.
        conditioning: of those T frames (the sink's is zero).
    """

    latents: Tensor
    conditioning: Conditioning


def conditioning_of(state: Tensor, control: Tensor, sink: int = 1) -> Conditioning:
    """Conditioning of a run of units with `sink` neutral frames before it."""

    def lead(x: Tensor) -> Tensor:
        return torch.cat([torch.zeros_like(x[:, :1]).expand(-1, sink, *x.shape[2:]), x], 1)

    return Conditioning(state=lead(state), control=lead(control))


@torch.no_grad()
def importance_map(renderer: LatentRenderer, labels: Tensor, mouth: Tensor, eyes: Tensor) -> Tensor:
    """Loss weight per latent pixel: where mouth labels move latents x4, where eyes do x2.

    Args:
        renderer: labels to latents.
        labels: [n, L] of training tracks.
        mouth: indices of the mouth's labels.
        eyes: indices of the eyes' labels.

    Returns:
        [h, w], mean 1.
    """
    neutral = labels.median(0).values
    weight = torch.ones(renderer.shape[1:])
    for index, gain in ((mouth, 3.0), (eyes, 1.5)):
        varied = neutral.repeat(len(labels), 1)
        varied[:, index] = labels[:, index]
        motion = renderer(varied).std(0).mean(0)
        weight = weight + gain * (motion / motion.quantile(0.97)).clamp(0, 1)
    return weight / weight.mean()


class DenoiserStage:
    """Sampling, loss and evaluation of the denoiser."""

    def __init__(
        self, model: CausalDenoiser, tracks: UnitTracks, importance: Tensor, seed: int, steps: int,
        precision: Precision,
    ) -> None:  # fmt: skip
        self.model, self.tracks = model, tracks
        self.precision, device = precision, precision.device
        self.importance = importance.to(device)
        self.seed, self.steps, self.device = seed, steps, device
        self.units = CACHE.recent
        self.mask = block_causal_mask(
            CACHE.sink + self.units, 64, frames_per_chunk=1, window=CACHE.window, sink=CACHE.sink
        ).to(device)

    def batch(self, rng: np.random.Generator, size: int, *, held_out: bool = False) -> Batch:
        """Random runs of units of random tracks, after the reference."""
        run = self.tracks.sample(rng, size, self.units, held_out=held_out)
        sink = self.tracks.reference.expand(size, 1, *self.tracks.reference.shape)
        return Batch(
            torch.cat([sink, run.latents], 1).to(self.device),
            conditioning_of(run.state, run.control).to(self.device),
        )

    def predict(self, noisy: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """The network's x0 of every frame, fp32 [B, T, C, h, w]."""
        with self.precision.autocast():
            prepared = self.model.prepare(conditioning)
            out: Tensor = self.model(noisy, sigma * 1000, prepared, mask=self.mask)
        return out.float()

    def loss(self, step: int) -> dict[str, Tensor]:
        """Squared error of x0 and of its motion on noisy units, over sigma^2 + 0.1."""
        rng = np.random.default_rng((self.seed, step))
        batch = self.batch(rng, BATCH)
        truth = batch.latents
        size = truth.shape[:2]
        u = torch.rand(size, device=self.device)
        sigma = SHIFT * u / (1 + (SHIFT - 1) * u)
        sigma[torch.rand(size, device=self.device) < 0.2] = 1.0
        noisy = torch.rand(size, device=self.device) < 0.5
        noisy[:, -1] |= torch.rand(size[0], device=self.device) < 0.5
        noisy[:, : CACHE.sink] = False
        sigma = torch.where(noisy, sigma, CONTEXT_NOISE * torch.rand(size, device=self.device))
        history = truth
        if step > self.steps // 2 and rng.random() < 0.5:
            history = self._own_history(batch, noisy)
        source = torch.where(noisy[..., None, None, None], truth, history)
        level = sigma[..., None, None, None]
        noised = (1 - level) * source + level * torch.randn_like(truth)
        x0 = self.predict(noised, sigma, batch.conditioning)
        error = (x0 - truth).square() * self.importance
        weight = noisy / (sigma.square() + 0.1)
        per_frame = error.mean((2, 3, 4))
        moved = frame_steps(x0) - frame_steps(truth)
        motion = (moved.square() * self.importance).mean((2, 3, 4, 5))
        total = per_frame + TEMPORAL_WEIGHT * motion
        loss = (total * weight).sum() / weight.sum().clamp_min(1)
        full = noisy & (sigma >= 0.999)
        at_noise = (per_frame * full).sum() / full.sum().clamp_min(1)
        return {"loss": loss, "from_noise": at_noise.detach(), "motion": motion.mean().detach()}

    @torch.no_grad()
    def _own_history(self, batch: Batch, noisy: Tensor) -> Tensor:
        """Predictions from pure noise for the frames that will serve as history."""
        sigma = torch.where(noisy, 0.0, 1.0)
        sigma[:, : CACHE.sink] = 0.0
        level = sigma[..., None, None, None]
        noised = (1 - level) * batch.latents + level * torch.randn_like(batch.latents)
        out = self.predict(noised, sigma, batch.conditioning)
        out[:, : CACHE.sink] = batch.latents[:, : CACHE.sink]
        return out

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Held-out error of the last unit from pure noise, given true history."""
        rng = np.random.default_rng((self.seed, 10**9))
        state = torch.get_rng_state()
        torch.manual_seed(self.seed)
        batch = self.batch(rng, 48, held_out=True)
        sigma = torch.full(batch.latents.shape[:2], 0.04, device=self.device)
        sigma[:, -1] = 1.0
        level = sigma[..., None, None, None]
        noised = (1 - level) * batch.latents + level * torch.randn_like(batch.latents)
        x0 = self.predict(noised, sigma, batch.conditioning)[:, -1]
        torch.set_rng_state(state)
        truth = batch.latents[:, -1]
        error = (x0 - truth).square()
        steps, true_steps = frame_steps(x0[:, None]), frame_steps(truth[:, None])
        joins = x0[:, :4] - batch.latents[:, -2, -4:]
        true_joins = truth[:, :4] - batch.latents[:, -2, -4:]
        return {
            "motion_gain": float(steps.abs().mean() / true_steps.abs().mean()),
            "motion_error": float((steps - true_steps).abs().mean() / true_steps.abs().mean()),
            "join_ratio": float(joins.abs().mean() / true_joins.abs().mean()),
            "test_error": float(error.mean()),
            "test_error_weighted": float((error * self.importance).mean()),
            "test_gain": float(x0.std() / batch.latents[:, -1].std()),
        }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `rtgen train denoiser`."""
    add_train_arguments(parser, DEFAULTS)
    parser.add_argument("--renderer", type=Path, required=True, help="folder of the label renderer")
    parser.add_argument(
        "--draft-steps", type=int, default=6000, help="steps of the condition map alone, first"
    )
    parser.add_argument(
        "--init", type=Path, help="folder of an earlier run whose averaged weights to start from"
    )


def run(args: argparse.Namespace) -> int:
    """Prepares the tracks, trains, and writes the averaged weights with their metrics."""
    torch.manual_seed(args.seed)
    precision = Precision(args.precision, torch.device(args.device))
    renderer = load_renderer(args.renderer)
    data = load_unit_tracks(args.data, renderer)
    config = avatar_denoiser_config(data.control_dim, data.num_states)
    model = CausalDenoiser(config).to(precision.device)
    model.attention_backend = "naive"
    if args.init is not None:
        earlier = torch.load(args.init / "last.pt", weights_only=True)["averaged"]
        missing = model.load_state_dict(earlier, strict=False).missing_keys
        logger.info("started from %s; new: %s", args.init, missing)
    embedder = model.condition_embedder
    embedder.frame_embedder.control_scale.copy_(1 / data.control_std)
    per_frame = len(data.control_std) // config.frames_per_latent
    embedder.condition_map.embedder.control_scale.copy_(1 / data.control_std[:per_frame])
    importance = importance_map(renderer, data.label_sample, data.mouth_labels, data.eye_labels)
    stage = DenoiserStage(model, data, importance, args.seed, args.steps, precision)
    if args.draft_steps and not (args.out / "last.pt").exists():
        train_draft(model, data, importance, args.draft_steps, args.seed)
    if args.draft_steps:
        # Small batches and a high rate would only unlearn it; the blocks mend what it misses.
        embedder.condition_map.requires_grad_(False)
    trainer = Trainer(model, train_config(args, DEFAULTS), args.out)
    trainer.run(stage.loss, stage.evaluate, evaluate_every=100)
    with trainer.averaged_weights():
        metrics = stage.evaluate()
        torch.save(
            {
                "model": model.state_dict(),
                "reference": data.reference,
                "latent_mean": data.latent_mean,
                "latent_std": data.latent_std,
            },
            args.out / "denoiser.pt",
        )
    (args.out / "metrics.json").write_text(json.dumps(metrics, indent=1) + "\n")
    return 0
