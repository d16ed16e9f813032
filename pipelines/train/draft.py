"""Trains the denoiser's condition map alone, before the blocks are trained.

The map turns a unit's conditioning into a first draft of its latents without history or noise: a
plain regression that sees a thousand units in the time in which the transformer sees ten. The
blocks then learn what the draft misses.
"""

from __future__ import annotations

import logging
import math

import numpy as np
import torch
from torch import Tensor

from pipelines.train.unit_tracks import UnitTracks
from rtgen.models.conditioning import Conditioning
from rtgen.models.denoiser import CausalDenoiser

logger = logging.getLogger(__name__)

BATCH = 64
LEARNING_RATE = 2e-3
TEMPORAL_WEIGHT = 4.0  # of the error of differences between the frames of a unit


def frame_steps(latents: Tensor) -> Tensor:
    """Differences between neighbouring pixel frames of each unit.

    Args:
        latents: [B, T, 4 * c, h, w], the four frames' channels stacked.

    Returns:
        [B, T, 3, c, h, w].
    """
    batch, units, channels = latents.shape[:3]
    frames = latents.reshape(batch, units, 4, channels // 4, *latents.shape[3:])
    return frames[:, :, 1:] - frames[:, :, :-1]


def unpatch(patches: Tensor, grid: tuple[int, int], patch: tuple[int, int]) -> Tensor:
    """Patches [B, N, p * q * C] of one frame each to latents [B, C, h, w]."""
    x = patches.reshape(len(patches), *grid, *patch, -1).permute(0, 5, 1, 3, 2, 4)
    return x.reshape(len(patches), -1, grid[0] * patch[0], grid[1] * patch[1])


def train_draft(
    denoiser: CausalDenoiser, tracks: UnitTracks, importance: Tensor, steps: int, seed: int
) -> float:
    """Trains `condition_embedder.condition_map` in place, its mean set to that of the tracks.

    Args:
        denoiser: with a condition map.
        tracks: to train on.
        importance: [h, w], loss weight of places.
        steps: of `BATCH` random units; the rate falls as a cosine.
        seed: of sampling.

    Returns:
        The last running mean of the squared error.
    """
    config, condition_map = denoiser.config, denoiser.condition_embedder.condition_map
    assert config.position_grid is not None
    grid, patch = config.position_grid, config.patch_size[1:]
    rng = np.random.default_rng((seed, 1))
    _set_mean(denoiser, tracks.sample(rng, 256, 4).latents.flatten(0, 1))
    parameters = [p for p in condition_map.parameters() if p is not condition_map.draft_mean]
    optimizer = torch.optim.AdamW(parameters, LEARNING_RATE, weight_decay=0.02, fused=True)
    running = 1.0
    for step in range(steps):
        rate = LEARNING_RATE * max(0.02, 0.5 * (1 + math.cos(math.pi * step / steps)))
        optimizer.param_groups[0]["lr"] = rate * min(1.0, (step + 1) / 100)
        run = tracks.sample(rng, BATCH, 1)
        conditioning = Conditioning(state=run.state, control=run.control)
        draft = condition_map.draft(condition_map(conditioning))[:, 0]
        out, truth = unpatch(draft, grid, (patch[0], patch[1])), run.latents[:, 0]
        error = (out - truth).square()
        moved = frame_steps(out[:, None]) - frame_steps(truth[:, None])
        motion = (moved.square() * importance).mean()
        loss = (error * importance).mean() + TEMPORAL_WEIGHT * motion
        optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        running = 0.99 * running + 0.01 * float(error.detach().mean())
        if (step + 1) % 500 == 0:
            logger.info("draft step %d: error %.4f", step + 1, running)
    return running


def _set_mean(denoiser: CausalDenoiser, latents: Tensor) -> None:
    """Sets the draft's mean picture to that of latents [n, C, h, w], averaged over frames."""
    config, condition_map = denoiser.config, denoiser.condition_embedder.condition_map
    assert config.position_grid is not None
    (rows, columns), (_, p, q) = config.position_grid, config.patch_size
    mean = latents.mean(0)
    per_frame = mean.reshape(config.frames_per_latent, -1, *mean.shape[1:]).mean(0)
    patches = per_frame.reshape(-1, rows, p, columns, q).permute(1, 3, 2, 4, 0)
    condition_map.draft_mean.data.copy_(patches.reshape(condition_map.draft_mean.shape))
