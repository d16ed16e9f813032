"""The records that make up a stream's state; all frozen, and no tensor in them is written to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from rtgen.config import CacheConfig, SamplingConfig
from rtgen.errors import ShapeError
from rtgen.models.conditioning import Conditioning, PreparedConditioning
from rtgen.models.kv_cache import CacheSnapshot
from rtgen.sampling.schedulers import FlowMatchSchedule


@dataclass(frozen=True, slots=True)
class Conditions:
    """What a chunk is conditioned on.

    Attributes:
        prepared: for every pass of the chunk.
        prompt_embeds: the tensor whose text `prepared` holds; None without text.
    """

    prepared: PreparedConditioning
    prompt_embeds: Tensor | None


@dataclass(frozen=True, slots=True)
class RunningChunk:
    """A chunk that is being denoised.

    Attributes:
        start: its first frame.
        step: the noisy step that is due.
        latents: [F, C, h, w] float32, as that step takes them.
        conditions: what it is conditioned on.
        schedule: the noise levels that it was begun with.
    """

    start: int
    step: int
    latents: Tensor
    conditions: Conditions
    schedule: FlowMatchSchedule

    @property
    def timestep(self) -> float:
        """What the network is told at the step that is due, 0 to 1000."""
        return self.schedule.timesteps[self.step]

    @property
    def is_last_step(self) -> bool:
        """Whether the step that is due yields x0."""
        return self.step + 1 == self.schedule.num_steps


@dataclass(frozen=True, slots=True)
class FinishedChunk:
    """A chunk whose x0 is out, as its clean pass takes it.

    Attributes:
        start: its first frame.
        context: [F, C, h, w] float32, x0 at the noise level of context.
        timestep: what the network is told in the clean pass, 0 to 1000.
        conditions: what it is conditioned on.
    """

    start: int
    context: Tensor
    timestep: float
    conditions: Conditions

    @property
    def end(self) -> int:
        """The frame after its last."""
        return self.start + len(self.context)


@dataclass(frozen=True, slots=True)
class StreamState:
    """Everything about a stream but its ring.

    Attributes:
        seed: of the noise.
        position: the frame after the last finished one.
        floor: the earliest position that a roll-back may reach.
        primed: frames given, not generated.
        running: the chunk that is being denoised.
        owed: finished chunks whose clean pass is due, oldest first.
        recent: finished chunks whose merged clean pass a roll-back makes due again.
        conditions: the latest, to know a prompt again.
    """

    seed: int
    position: int = 0
    floor: int = 0
    primed: int = 0
    running: RunningChunk | None = None
    owed: tuple[FinishedChunk, ...] = ()
    recent: tuple[FinishedChunk, ...] = ()
    conditions: Conditions | None = None

    def rolled_back(self, target: int) -> StreamState:
        """The state at an earlier position: no chunk is running, and what was owed then is."""
        owed = tuple(chunk for chunk in self.owed if chunk.start < target)
        recent = tuple(chunk for chunk in self.recent if chunk.start < target)
        if not owed and recent and recent[-1].end == target:
            owed = recent[-1:]  # its clean pass was merged with what is dropped
        return replace(
            self,
            position=target,
            running=None,
            owed=owed,
            recent=recent,
            conditions=owed[-1].conditions if owed else self.conditions,
        )


@dataclass(frozen=True, slots=True)
class Outcome:
    """What completing a pass changes.

    Attributes:
        state: the stream's next state.
        commit: frames whose keys and values are now final.
        x0: [F, C, h, w] float32 of a chunk that is finished by it.
    """

    state: StreamState
    commit: int
    x0: Tensor | None


@dataclass(frozen=True, slots=True)
class StreamSnapshot:
    """A stream at one moment; shares no memory that changes.

    Attributes:
        cache_config: of the stream.
        latent_shape: (C, h, w) of one frame.
        sampling_config: in force for the next chunk.
        state: all but the ring.
        cache: the ring.
    """

    cache_config: CacheConfig
    latent_shape: tuple[int, int, int]
    sampling_config: SamplingConfig
    state: StreamState
    cache: CacheSnapshot


@contextmanager
def ordinary_tensors() -> Iterator[None]:
    """No gradients, but tensors that may be kept and used outside inference mode."""
    with torch.inference_mode(False), torch.no_grad():
        yield


_PER_FRAME = ("audio", "state", "event", "control")


def check_frames(conditioning: Conditioning, num_frames: int) -> None:
    """Refuses conditioning that is not of one stream and `num_frames` frames.

    Raises:
        ShapeError: names the part.
    """
    embeds = conditioning.prompt_embeds
    if embeds is not None and len(embeds) != 1:
        raise ShapeError(f"prompt_embeds must be [1, Lt, text_dim], got {list(embeds.shape)}")
    for name in _PER_FRAME:
        value: Tensor | None = getattr(conditioning, name)
        if value is not None and tuple(value.shape[:2]) != (1, num_frames):
            raise ShapeError(f"{name} must be [1, {num_frames}, ...], got {list(value.shape)}")


def cut_frames(conditioning: Conditioning, first: int, last: int) -> Conditioning:
    """The conditioning of frames `first` to `last - 1`."""
    parts: dict[str, Tensor] = {}
    for name in _PER_FRAME:
        value: Tensor | None = getattr(conditioning, name)
        if value is not None:
            parts[name] = value[:, first:last]
    return Conditioning(prompt_embeds=conditioning.prompt_embeds, **parts)
