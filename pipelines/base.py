"""What pipelines share: pixels to bytes, and the choice of a dtype by measurement."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Literal, get_args

import torch
from torch import Tensor

from rtgen.errors import BackendUnavailable, ConfigError
from rtgen.types import Pixels

logger = logging.getLogger(__name__)

DtypeName = Literal["auto", "float32", "bfloat16", "float16"]


def to_uint8(pixels: Tensor) -> Pixels:
    """Frames for display, each value rounded to the nearest in float32.

    Args:
        pixels: [F, 3, H, W] float in [-1, 1]; what lies outside is clamped.

    Returns:
        uint8 [F, H, W, 3], on the host.
    """
    scaled = pixels.float().clamp(-1, 1).add(1).mul(127.5).round()
    return scaled.to(torch.uint8).permute(0, 2, 3, 1).contiguous().cpu().numpy()


def to_pixels(frames: Pixels) -> Tensor:
    """Frames as the networks take them.

    Args:
        frames: uint8 [F, H, W, 3].

    Returns:
        float32 [F, 3, H, W] in [-1, 1], on the host.
    """
    return torch.from_numpy(frames).permute(0, 3, 1, 2).float() / 127.5 - 1


def require_device(name: str) -> torch.device:
    """The device of that name.

    Raises:
        ConfigError: no such name.
        BackendUnavailable: it is not there.
    """
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"device must be like cpu or cuda:0, got {name!r}") from error
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"device must be cpu or a cuda device, got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise BackendUnavailable(
            f"device {name} is not there: torch {torch.__version__} sees "
            f"{torch.cuda.device_count()} CUDA devices; use cpu"
        )
    return device


def require_dtype(name: str) -> torch.dtype | None:
    """The dtype of that name, None for "auto".

    Raises:
        ConfigError: not one of `DtypeName`.
    """
    if name not in get_args(DtypeName):
        raise ConfigError(f"dtype must be one of {get_args(DtypeName)}, got {name!r}")
    return None if name == "auto" else getattr(torch, name)


def fastest_dtype(
    what: str, device: torch.device, run: Callable[[torch.dtype], Callable[[], object]]
) -> torch.dtype:
    """Chooses between bfloat16 and float32 by running a part in both, and logs the choice.

    bfloat16 is several times faster where the machine has matrix units for it (AMX, tensor cores)
    and several times slower where it has not, so only a measurement tells. On a GPU it is
    bfloat16 without one.

    Args:
        what: name of the part, for the log.
        device: where it runs.
        run: prepares the part in a dtype and returns a call that runs it once.
    """
    if device.type != "cpu":
        logger.info("%s: bfloat16 on %s", what, device)
        return torch.bfloat16
    times: dict[torch.dtype, float] = {}
    for dtype in (torch.float32, torch.bfloat16):
        once = run(dtype)
        once()  # the first call packs weights and plans kernels
        spans = []
        for _ in range(3):
            start = time.thread_time_ns()
            once()
            spans.append(time.thread_time_ns() - start)
        times[dtype] = min(spans) / 1e6
    best = min(times, key=lambda dtype: times[dtype])
    logger.info(
        "%s: %s (float32 takes %.1f ms, bfloat16 %.1f ms)",
        what, str(best).removeprefix("torch."), times[torch.float32], times[torch.bfloat16],
    )  # fmt: skip
    return best
