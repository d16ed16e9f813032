"""What a frame decoder is: latents to pixels one latent frame at a time, with state per session.

Weights are shared, state is not: a decoder keeps nothing between calls but in the states it is
given. Latents carry a `latent_space` tag through the models that make and read them; two that
differ do not fit, whatever their shapes say.

A step is a transaction: everything is checked and computed first, then all states move on. An
error, or a cancellation, leaves every state where it was.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn

from rtgen.errors import ConfigError, ShapeError


class DecoderState(Protocol):
    """Memory of one session in a decoder."""

    @property
    def nbytes(self) -> int:
        """Most bytes that the state holds between two steps."""
        ...

    def clone(self) -> Self:
        """An independent copy."""
        ...

    def rollback(self, frames: int) -> None:
        """Returns to where the state stood `frames` latent frames ago.

        Raises:
            ConfigError: that is further back than the state remembers.
        """
        ...


S = TypeVar("S", bound=DecoderState)


class Decoder(Protocol[S]):
    """Turns latents into pixels.

    Attributes:
        latent_space: name of the latent space it reads.
    """

    @property
    def latent_space(self) -> str: ...

    def new_state(
        self, height: int, width: int, dtype: torch.dtype, device: torch.device | str
    ) -> S:
        """State of a new session.

        Args:
            height: latent rows.
            width: latent columns.
            dtype: of the decoder's weights.
            device: where the decoder's weights are.

        Raises:
            ConfigError: the decoder cannot decode this size, or its weights are of another dtype or
                elsewhere.
        """
        ...

    def step(
        self, states: Sequence[S], latents: Tensor, latent_space: str | None = None
    ) -> list[Tensor]:
        """Decodes the next latent frame of some sessions.

        Args:
            states: one per row, each a different session's; moved on together, in place, once all
                rows are decoded.
            latents: [B, 1, C, h, w], raw (not normalised) latents; not written.
            latent_space: what the latents are of, where the caller carries it along.

        Returns:
            For each row [F, 3, H, W] float32 in about [-1, 1]: the frames of one unit, or a single
            one where the latent space has a first-frame rule. A row has the same bits alone and in
            any company.

        Raises:
            ShapeError: latents do not fit the states or the decoder.
            ConfigError: latents are of another space or not finite, or one state comes twice.
        """
        ...


def require_latent_space(decoder: Decoder[S], latent_space: str) -> None:
    """Checks that latents of a space may be given to a decoder.

    Raises:
        ConfigError: the decoder reads another space.
    """
    if decoder.latent_space != latent_space:
        raise ConfigError(
            f"the decoder reads latents of {decoder.latent_space!r}, these are of "
            f"{latent_space!r}; use the decoder that was trained with them"
        )


class _SizedState(DecoderState, Protocol):
    height: int
    width: int


def _check_latents(
    states: Sequence[_SizedState], latents: Tensor, channels: int, device: torch.device
) -> None:
    """Refuses what a step cannot take; reads `latents` once."""
    if latents.ndim != 5 or latents.shape[:3] != (len(states), 1, channels):
        raise ShapeError(
            f"latents must be [{len(states)}, 1, {channels}, h, w], got {list(latents.shape)}"
        )
    for state in states:
        if tuple(latents.shape[3:]) != (state.height, state.width):
            raise ShapeError(
                f"latents must be {state.height}x{state.width} as their state is, got "
                f"{list(latents.shape)}; make a new state for another size"
            )
    if latents.device != device:
        raise ShapeError(f"latents must be on {device}, where the decoder is, not {latents.device}")
    if len({id(state) for state in states}) != len(states):
        raise ConfigError("the states of one call must be of different sessions; one came twice")
    if not bool(latents.isfinite().all()):
        raise ConfigError("latents hold NaN or infinity; the state did not move, send good ones")


def _check_placement(
    parameter: Tensor, dtype: torch.dtype, device: torch.device | str
) -> torch.device:
    if dtype != parameter.dtype or torch.device(device).type != parameter.device.type:
        raise ConfigError(
            f"the decoder's weights are {parameter.dtype} on {parameter.device}, a state of {dtype}"
            f" on {device} does not fit; move the decoder first"
        )
    return parameter.device


@dataclass(slots=True)
class MemorylessState:
    """State of a decoder that remembers nothing: the size it was opened for."""

    height: int
    width: int

    @property
    def nbytes(self) -> int:
        return 0

    def clone(self) -> Self:
        return type(self)(self.height, self.width)

    def rollback(self, frames: int) -> None:
        if frames < 0:
            raise ConfigError(f"frames must not be negative, got {frames}")


class MemorylessDecoder:
    """A network that decodes every latent frame by itself, as a `Decoder`.

    Args:
        network: [B, T, C, h, w] to [B, T * F, 3, H, W]; used as it stands.
        latent_space: what it was trained on.
        latent_shape: (C, h, w) that it takes.

    Attributes:
        dtype: of its weights.
    """

    def __init__(
        self, network: nn.Module, *, latent_space: str, latent_shape: tuple[int, int, int]
    ) -> None:
        self.network = network
        self.latent_space = latent_space
        self.latent_shape = latent_shape
        self.dtype = next(network.parameters()).dtype

    def new_state(
        self, height: int, width: int, dtype: torch.dtype, device: torch.device | str
    ) -> MemorylessState:
        if (height, width) != self.latent_shape[1:]:
            raise ConfigError(
                f"the decoder takes latents of {self.latent_shape[1:]}, got {(height, width)}"
            )
        _check_placement(next(self.network.parameters()), dtype, device)
        return MemorylessState(height, width)

    @torch.inference_mode()
    def step(
        self, states: Sequence[MemorylessState], latents: Tensor, latent_space: str | None = None
    ) -> list[Tensor]:
        if latent_space is not None:
            require_latent_space(self, latent_space)
        device = next(self.network.parameters()).device
        _check_latents(states, latents, self.latent_shape[0], device)
        # Row by row: a batch of convolutions need not give the bits of each row alone.
        return [self.network(row[None].to(self.dtype))[0].float() for row in latents]


class _Snapshot(NamedTuple):
    frames: int
    memory: tuple[Tensor, ...]


@dataclass(slots=True)
class TensorState:
    """Memory of one session as tensors of fixed sizes that nobody writes after they are made.

    Because of that a step swaps one reference, a copy shares its tensors, and going back takes up
    older ones.

    Attributes:
        height: latent rows.
        width: latent columns.
        lead: latent frames that `rollback` can take back.
    """

    height: int
    width: int
    lead: int
    _snapshots: tuple[_Snapshot, ...]  # the current one last

    @classmethod
    def empty(cls, height: int, width: int, lead: int, memory: tuple[Tensor, ...]) -> Self:
        """The state before the first frame."""
        return cls(height, width, lead, (_Snapshot(0, memory),))

    @property
    def frames(self) -> int:
        """Latent frames decoded."""
        return self._snapshots[-1].frames

    @property
    def memory(self) -> tuple[Tensor, ...]:
        """What the next frame may depend on; not to be written."""
        return self._snapshots[-1].memory

    @property
    def nbytes(self) -> int:
        return (self.lead + 1) * sum(tensor.nbytes for tensor in self.memory)

    def clone(self) -> Self:
        return type(self)(self.height, self.width, self.lead, self._snapshots)

    def rollback(self, frames: int) -> None:
        if not 0 <= frames < len(self._snapshots):
            raise ConfigError(
                f"can roll back at most {len(self._snapshots) - 1} latent frames here, asked for "
                f"{frames}; open the decoder with a larger lead than {self.lead}"
            )
        self._snapshots = self._snapshots[: len(self._snapshots) - frames]

    def advance(self, memory: tuple[Tensor, ...]) -> None:
        """Moves on by one latent frame.

        Args:
            memory: tensors of their own, as large as those before.
        """
        kept = self._snapshots[-self.lead :] if self.lead else ()
        self._snapshots = (*kept, _Snapshot(self.frames + 1, memory))


class StreamingNetwork(nn.Module, ABC):
    """Weights of a decoder with memory: a pure function of latents and memory.

    Attributes:
        latent_channels: C.
    """

    latent_channels: int

    @abstractmethod
    def new_memory(self, height: int, width: int) -> tuple[Tensor, ...]:
        """What comes before the first latent frame, on the device and in the dtype of the weights.

        Raises:
            ConfigError: latents of this size cannot be decoded.
        """

    @abstractmethod
    def stream(
        self, latents: Tensor, memory: tuple[Tensor, ...], is_first: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Decodes one latent frame.

        Args:
            latents: [C, h, w] in the dtype of the weights.
            memory: what the frame before left; not written.
            is_first: whether the stream begins here.

        Returns:
            pixels [F, 3, H, W], and the memory for the next frame in tensors of its own.
        """


class StreamingDecoder:
    """A `StreamingNetwork` as a `Decoder`.

    Args:
        network: used as it stands.
        latent_space: what it was trained on.
        lead: latent frames that a session can be rolled back; each costs one more memory.

    Attributes:
        dtype: of its weights.
    """

    def __init__(self, network: StreamingNetwork, *, latent_space: str, lead: int = 2) -> None:
        if lead < 0:
            raise ConfigError(f"lead must not be negative, got {lead}")
        self.network = network
        self.latent_space = latent_space
        self.lead = lead
        self.dtype = next(network.parameters()).dtype

    @torch.inference_mode()
    def new_state(
        self, height: int, width: int, dtype: torch.dtype, device: torch.device | str
    ) -> TensorState:
        _check_placement(next(self.network.parameters()), dtype, device)
        return TensorState.empty(height, width, self.lead, self.network.new_memory(height, width))

    @torch.inference_mode()
    def step(
        self, states: Sequence[TensorState], latents: Tensor, latent_space: str | None = None
    ) -> list[Tensor]:
        if latent_space is not None:
            require_latent_space(self, latent_space)
        device = next(self.network.parameters()).device
        _check_latents(states, latents, self.network.latent_channels, device)
        # Row by row: kernels choose their order of sums by the number of rows.
        results = [
            self.network.stream(row[0].to(self.dtype), state.memory, state.frames == 0)
            for state, row in zip(states, latents, strict=True)
        ]
        for state, (_, memory) in zip(states, results, strict=True):
            state.advance(memory)
        return [pixels.float() for pixels, _ in results]
