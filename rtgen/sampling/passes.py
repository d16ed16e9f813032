"""One forward of one stream as a batch row, and many rows as few forwards."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import torch
from torch import Tensor

from rtgen.config import CacheConfig
from rtgen.errors import ConfigError, RtgenError
from rtgen.models.blocks import CachePass
from rtgen.models.conditioning import PreparedConditioning
from rtgen.models.denoiser import CausalDenoiser
from rtgen.models.kv_cache import RollingKVCache
from rtgen.sampling.state import FinishedChunk, RunningChunk, ordinary_tensors

PassKind = Literal["clean", "noisy", "merged"]


class NonFiniteError(RtgenError, ArithmeticError):
    """A pass returned NaN or infinity; no stream has advanced.

    Attributes:
        rows: positions of the streams concerned in the list given to `run_passes`.
    """

    def __init__(self, rows: tuple[int, ...]) -> None:
        super().__init__(
            f"expected finite output, got NaN or infinity for stream {', '.join(map(str, rows))} "
            f"of the batch; close it, or check its conditioning and the weights' dtype"
        )
        self.rows = rows


@dataclass(frozen=True, slots=True)
class StreamPass:
    """The next forward of one stream, as one batch row.

    Attributes:
        kind: "clean", "noisy", or "merged" (the clean pass in front, the noisy one behind).
        latents: [T, C, h, w] float32. Shared with the stream: do not write to it.
        timestep: [T] float32, 0..1000.
        cache: where the row stands in the stream's ring.
        prepared: conditioning of the T frames, B = 1.
        emits: whether completing it yields x0.
    """

    kind: PassKind
    latents: Tensor
    timestep: Tensor
    cache: CachePass
    prepared: PreparedConditioning
    emits: bool

    def discard(self) -> None:
        """Zeroes what a failed forward may have written; running it again writes it anew."""
        self.cache.cache.discard(self.cache.start_frame, len(self.latents))


@lru_cache(maxsize=256)
def _timesteps(device: torch.device, *runs: tuple[float, int]) -> Tensor:
    """[T] float32 of (timestep, frames); kept, so that steady passes copy nothing."""
    values = [timestep for timestep, frames in runs for _ in range(frames)]
    with ordinary_tensors():
        return torch.tensor(values, dtype=torch.float32, device=device)


def clean_pass(cache: RollingKVCache, chunk: FinishedChunk) -> StreamPass:
    """The pass that leaves a finished chunk's final keys and values in the cache."""
    frames = len(chunk.context)
    return StreamPass(
        kind="clean",
        latents=chunk.context,
        timestep=_timesteps(cache.device, (chunk.timestep, frames)),
        cache=CachePass(cache, chunk.start, (frames,)),
        prepared=chunk.conditions.prepared,
        emits=False,
    )


def noisy_pass(cache: RollingKVCache, chunk: RunningChunk) -> StreamPass:
    """The step that is due of a running chunk."""
    frames = len(chunk.latents)
    return StreamPass(
        kind="noisy",
        latents=chunk.latents,
        timestep=_timesteps(cache.device, (chunk.timestep, frames)),
        cache=CachePass(cache, chunk.start, (frames,)),
        prepared=chunk.conditions.prepared,
        emits=chunk.is_last_step,
    )


def can_merge(config: CacheConfig, owed: Sequence[FinishedChunk], running: RunningChunk) -> bool:
    """Whether the one owed clean pass may run together with the running chunk's first step.

    They must be neighbours of one length, under one prompt: a row has one set of text keys.
    """
    last = owed[-1]
    return (
        config.merge_clean_pass
        and len(owed) == 1
        and last.end == running.start
        and len(last.context) == len(running.latents)
        and last.conditions.prepared.same_text(running.conditions.prepared)
    )


def merged_pass(cache: RollingKVCache, clean: FinishedChunk, noisy: RunningChunk) -> StreamPass:
    """The clean pass of one chunk and the first step of the next one, as two groups."""
    groups = (len(clean.context), len(noisy.latents))
    prepared = (clean.conditions.prepared, noisy.conditions.prepared)
    return StreamPass(
        kind="merged",
        latents=torch.cat((clean.context, noisy.latents)),
        timestep=_timesteps(cache.device, (clean.timestep, groups[0]), (noisy.timestep, groups[1])),
        cache=CachePass(cache, clean.start, groups),
        prepared=PreparedConditioning.join_frames(prepared),
        emits=noisy.is_last_step,
    )


@torch.inference_mode()
def forward_rows(denoiser: CausalDenoiser, rows: Sequence[StreamPass]) -> Tensor:
    """One forward of passes of one shape.

    Args:
        denoiser: the network.
        rows: B passes that `batches` put together.

    Returns:
        [B, T, C, h, w] float32.
    """
    if len(rows) == 1:
        latents, timestep = rows[0].latents[None], rows[0].timestep[None]
    else:
        latents = torch.stack([row.latents for row in rows])
        timestep = torch.stack([row.timestep for row in rows])
    prepared = PreparedConditioning.stack([row.prepared for row in rows])
    output: Tensor = denoiser(latents, timestep, prepared, caches=[row.cache for row in rows])
    return output


def batches(
    passes: Sequence[tuple[int, StreamPass]], allowed_sizes: Collection[int] | None
) -> Iterator[list[tuple[int, StreamPass]]]:
    """Puts passes of one shape together and cuts them into allowed sizes, largest first.

    Args:
        passes: each with a number of the caller's.
        allowed_sizes: batch sizes to use, 1 among them; None for any.

    Raises:
        ConfigError: `allowed_sizes` lacks 1 or holds a number below it.
    """
    if allowed_sizes is not None and min(allowed_sizes, default=0) != 1:
        raise ConfigError(f"allowed_sizes must hold 1 and nothing less, got {allowed_sizes}")
    shapes: dict[object, list[tuple[int, StreamPass]]] = {}
    for number, item in passes:
        text = item.prepared.text
        key = (item.cache.groups, item.latents.shape, None if text is None else text.shape[3])
        shapes.setdefault(key, []).append((number, item))
    for alike in shapes.values():
        while alike:
            left = len(alike)
            size = left if allowed_sizes is None else max(n for n in allowed_sizes if n <= left)
            yield alike[:size]
            alike = alike[size:]
