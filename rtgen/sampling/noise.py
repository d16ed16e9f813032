"""Counter-based Gaussian noise: a function of (seed, frame, step) and of nothing else.

Each (seed, frame, step) owns a stream of Philox-4x64 (Salmon et al., "Parallel random numbers: as
easy as 1, 2, 3", 2011): the seed is the key, frame and step are the upper half of the counter, and
the lower half counts within the frame. No state is carried, so a session's noise depends neither
on its company nor on how often it was rolled back, restored or moved.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rtgen.errors import ConfigError

CLEAN_STEP = 2**32 - 1
"""Step id of the noise that finished frames get on their way into the cache."""

_KEY_TAG = 0x7274_6765_6E00_0001  # second key word: keeps other users of the same seed apart


def frame_noise(seed: int, frame: int, step: int, shape: Sequence[int]) -> Tensor:
    """Standard normal noise of one latent frame, the same bits at every call.

    Args:
        seed: of the session, 0 <= seed < 2**64.
        frame: latent frame number in the stream, 0 <= frame < 2**64.
        step: sampling step that uses the noise, 0 <= step < 2**32; `CLEAN_STEP` for the clean pass.
        shape: of the result, for example (C, h, w).

    Returns:
        `shape`, float32, on the CPU.

    Raises:
        ConfigError: seed, frame or step is out of range.
    """
    require_seed(seed)
    _require_word("frame", frame, 64)
    _require_word("step", step, 32)
    bits = np.random.Philox(
        key=np.array([seed, _KEY_TAG], dtype=np.uint64),
        counter=np.array([0, 0, step, frame], dtype=np.uint64),
    )
    values = np.random.Generator(bits).standard_normal(tuple(shape), dtype=np.float32)
    return torch.from_numpy(values)


def chunk_noise(
    seed: int,
    start_frame: int,
    num_frames: int,
    step: int,
    shape: Sequence[int],
    device: torch.device | None = None,
) -> Tensor:
    """Noise of consecutive frames, each as `frame_noise` gives it.

    Args:
        seed: of the session.
        start_frame: latent frame number of the first.
        num_frames: T.
        step: sampling step that uses the noise.
        shape: of one frame, (C, h, w).
        device: of the result; None for the CPU.

    Returns:
        [T, C, h, w], float32.

    Raises:
        ConfigError: a number is out of range.
    """
    on_cuda = device is not None and device.type == "cuda"
    # Copies from pinned memory do not wait for what the device is doing.
    noise = torch.empty((num_frames, *shape), pin_memory=on_cuda)
    for index in range(num_frames):
        noise[index].copy_(frame_noise(seed, start_frame + index, step, shape))
    return noise if device is None else noise.to(device, non_blocking=True)


def require_seed(seed: int) -> None:
    """Refuses a seed that is not in [0, 2**64).

    Raises:
        ConfigError: names the range.
    """
    _require_word("seed", seed, 64)


def _require_word(name: str, value: int, bits: int) -> None:
    if not 0 <= value < 2**bits:
        raise ConfigError(f"{name} must be in [0, 2**{bits}), got {value}")
