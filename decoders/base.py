"""What a frame decoder is: latents to pixels one latent frame at a time, with state per session.

Weights are shared, state is not: a decoder keeps nothing between calls but in the states it is
given. Latents carry a `latent_space` tag through the models that make and read them; two that
differ do not fit, whatever their shapes say.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self, TypeVar

import torch
from torch import Tensor, nn

from rtgen.errors import ConfigError, ShapeError


class DecoderState(Protocol):
    """Memory of one session in a decoder."""

    @property
    def nbytes(self) -> int: ...

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
            device: where the state lives.

        Raises:
            ConfigError: the decoder cannot decode this size.
        """
        ...

    def step(self, states: Sequence[S], latents: Tensor) -> list[Tensor]:
        """Decodes the next latent frame of some sessions.

        Args:
            states: one per row, each a different session's; moved on in place.
            latents: [B, 1, C, h, w], raw (not normalised) latents.

        Returns:
            For each row [F, 3, H, W] float32 in about [-1, 1]: the frames of one unit, or a single
            one where the latent space has a first-frame rule.

        Raises:
            ShapeError: latents do not fit the states or the decoder.
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
        return MemorylessState(height, width)

    @torch.inference_mode()
    def step(self, states: Sequence[MemorylessState], latents: Tensor) -> list[Tensor]:
        if latents.shape[:1] + latents.shape[1:2] != (len(states), 1) or (
            tuple(latents.shape[2:]) != self.latent_shape
        ):
            raise ShapeError(
                f"latents must be [{len(states)}, 1, {', '.join(map(str, self.latent_shape))}], "
                f"got {list(latents.shape)}"
            )
        # Row by row: a batch of convolutions need not give the bits of each row alone.
        return [self.network(row[None].to(self.dtype))[0].float() for row in latents]
