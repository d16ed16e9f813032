"""What a pipeline gives the engine.

The engine steps streams and keeps time; a pipeline turns a unit's sound and state into
conditioning, and latents into pictures.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from rtgen.types import Pixels, SessionSpec, SpeechState, UnitFormat

if TYPE_CHECKING:
    from torch import Tensor

    from rtgen.models.denoiser import CausalDenoiser
    from rtgen.sampling.stream import ChunkStream


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitInput:
    """What a pipeline is told about one unit.

    Attributes:
        audio: float32 [model_samples + lookahead_samples] in [-1, 1] at the model's rate.
        state: constant over the unit.
        event: one of `rtgen.types.EVENTS` that starts with this unit.
        frame: uint8 [H, W, 3], newest picture of the client, where the pipeline takes pictures.
    """

    audio: npt.NDArray[np.float32]
    state: SpeechState
    event: str = "none"
    frame: Pixels | None = None


class PipelineSession(Protocol):
    """All state of one session on the pipeline's side.

    `decode` runs on the decode lane, everything else on the engine's thread; `rollback` is called
    only while no decode is in flight.
    """

    @property
    def stream(self) -> ChunkStream: ...

    @property
    def nbytes(self) -> int:
        """Memory that the session holds on the device."""
        ...

    def begin(self, units: Sequence[UnitInput]) -> None:
        """Conditions the next chunk and begins it in `stream`; takes `units_per_chunk` inputs."""
        ...

    def decode(self, x0: Tensor) -> Pixels:
        """Latents [T, C, h, w] of a chunk to uint8 [T * frames_per_unit, H, W, 3]."""
        ...

    def rollback(self, units: int) -> None:
        """Returns to where the session stood `units` begun units ago (at most `lead`)."""
        ...

    def set_num_inference_steps(self, steps: int) -> None:
        """Changes the forwards per unit from the next chunk on."""
        ...

    def close(self) -> None:
        """Frees the session's memory; may be called again."""
        ...


class Pipeline(Protocol):
    """Weights and formats, shared by sessions."""

    @property
    def format(self) -> UnitFormat: ...

    @property
    def denoiser(self) -> CausalDenoiser: ...

    def check(self, spec: SessionSpec) -> None:
        """Raises `ConfigError` for a spec that `open` could not serve; cheap."""
        ...

    def open(self, spec: SessionSpec) -> PipelineSession:
        """Builds and primes a session."""
        ...

    def describe(self) -> dict[str, Any]:
        """Names and numbers for people: model, avatars, sizes, dtype, device."""
        ...
