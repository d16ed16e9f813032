"""Pipelines by name, from JSON values: what a render or a generation process loads."""

from __future__ import annotations

import logging

from pipelines.avatar import AvatarPipeline

logger = logging.getLogger(__name__)


def avatar_pipeline(folder: str, device: str = "auto", dtype: str = "auto") -> AvatarPipeline:
    """Loads an avatar model.

    Args:
        folder: the model.
        device: "auto" (the first GPU, else the CPU), "cpu", "cuda" or "cuda:N".
        dtype: as `AvatarPipeline.from_directory`.

    Raises:
        RtgenError: as `AvatarPipeline.from_directory`.
    """
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
        logger.info("device: %s", device)
    pipeline = AvatarPipeline.from_directory(folder, device=device, dtype=dtype)
    logger.info("model: %s", pipeline.describe())
    return pipeline
