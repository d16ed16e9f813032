"""Few-step flow matching: noise levels, x0 prediction, re-noising.

Flow matching joins data and noise by a straight line, x_sigma = (1 - sigma) x0 + sigma noise
(Lipman et al. 2022; Liu et al. 2022). A network returns the flow, noise - x0, or x0 itself. The
timestep it is told is 1000 sigma.

Levels come from a table of 1000 that the shift bends towards noise (Esser et al. 2024, eq. 23):
sigma' = shift sigma / (1 + (shift - 1) sigma). Self-Forcing reads its list of steps as indices
into that table (`warp`); CausVid feeds the list as it stands and takes sigma from the entry
nearest to it. The shift belongs to the checkpoint: the same list at shift 5 and at shift 8 gives
other levels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from rtgen.config import PredictionType, Renoise, SamplingConfig
from rtgen.errors import ConfigError

NUM_TRAIN_TIMESTEPS = 1000


def shifted_sigmas(shift: float) -> tuple[float, ...]:
    """The table of 1001 noise levels from 1 to 0, bent by `shift`; entry i stands for 1000 - i."""
    steps = range(NUM_TRAIN_TIMESTEPS, -1, -1)
    return tuple(_shift(step / NUM_TRAIN_TIMESTEPS, shift) for step in steps)


def _shift(sigma: float, shift: float) -> float:
    return shift * sigma / (1.0 + (shift - 1.0) * sigma)


@dataclass(frozen=True, slots=True, kw_only=True)
class FlowMatchSchedule:
    """The levels of one chunk's forwards, as host numbers, and the formulas between them.

    Attributes:
        timesteps: what the network is told at each step, 0 to 1000, descending.
        sigmas: noise level of each step, 0 to 1.
        context_sigma: noise level at which finished frames enter the cache.
        prediction_type: what the network returns: "flow" or "sample".
        renoise: how a step leads to the next: "fresh" noise, or "ode" along the straight line.
    """

    timesteps: tuple[float, ...]
    sigmas: tuple[float, ...]
    context_sigma: float = 0.0
    prediction_type: PredictionType = "flow"
    renoise: Renoise = "fresh"

    def __post_init__(self) -> None:
        if len(self.timesteps) != len(self.sigmas) or not self.timesteps:
            raise ConfigError(
                f"timesteps and sigmas must have one entry per step, "
                f"got {len(self.timesteps)} and {len(self.sigmas)}"
            )

    @classmethod
    def from_config(
        cls, config: SamplingConfig, prediction_type: PredictionType = "flow"
    ) -> FlowMatchSchedule:
        """The schedule of a configuration.

        Args:
            config: steps, shift, warp, re-noising and context noise.
            prediction_type: of the denoiser.

        Raises:
            ConfigError: `warp` is on and a timestep is not a whole number.
        """
        table = shifted_sigmas(config.shift)
        if config.warp:
            sigmas = tuple(_warped(table, timestep) for timestep in config.timesteps)
            timesteps = tuple(NUM_TRAIN_TIMESTEPS * sigma for sigma in sigmas)
        else:
            # The 0 at the table's end is no level of a noisy step.
            sigmas = tuple(_nearest(table[:-1], timestep) for timestep in config.timesteps)
            timesteps = tuple(float(timestep) for timestep in config.timesteps)
        return cls(
            timesteps=timesteps,
            sigmas=sigmas,
            context_sigma=config.context_noise,
            prediction_type=prediction_type,
            renoise=config.renoise,
        )

    @property
    def num_steps(self) -> int:
        """Forwards per chunk besides the clean pass."""
        return len(self.timesteps)

    @property
    def context_timestep(self) -> float:
        """What the network is told in the clean pass, 0 to 1000."""
        return NUM_TRAIN_TIMESTEPS * self.context_sigma

    def predict_x0(self, latents: Tensor, output: Tensor, sigma: float) -> Tensor:
        """The clean latents that a network's output means at one noise level.

        Args:
            latents: [..., C, h, w], what the network was given.
            output: same shape, what it returned, any float dtype.
            sigma: noise level of `latents`.

        Returns:
            The same shape, dtype and device as `latents`, never memory of `output`; a flow is
            subtracted in float64, as Self-Forcing does.
        """
        if self.prediction_type == "sample":
            return output.to(latents.dtype, copy=True)
        # A 0-dim CPU operand promotes nothing, so both tensors are widened first.
        x0 = torch.sub(latents.double(), output.double(), alpha=sigma)
        return x0.to(latents.dtype)

    def add_noise(self, x0: Tensor, noise: Tensor, sigma: float) -> Tensor:
        """(1 - sigma) x0 + sigma noise.

        Args:
            x0: [..., C, h, w], clean latents.
            noise: same shape, standard normal.
            sigma: noise level to reach.

        Returns:
            The same shape and dtype as `x0`.
        """
        return torch.add(x0 * (1.0 - sigma), noise, alpha=sigma)

    def follow_path(self, latents: Tensor, x0: Tensor, sigma: float, next_sigma: float) -> Tensor:
        """The point at `next_sigma` of the straight line from `x0` through `latents`.

        It is Euler's step of the flow, x + (sigma' - sigma) flow, with the flow (x - x0) / sigma.

        Args:
            latents: [..., C, h, w], at noise level `sigma`.
            x0: same shape, clean latents predicted from them.
            sigma: noise level of `latents`, above 0.
            next_sigma: noise level to reach.

        Returns:
            The same shape and dtype as `latents`.
        """
        return torch.lerp(x0, latents, next_sigma / sigma)


def _warped(table: tuple[float, ...], timestep: float) -> float:
    if not float(timestep).is_integer():
        raise ConfigError(
            f"with warp, timesteps must be whole numbers in (0, {NUM_TRAIN_TIMESTEPS}] "
            f"(they index the table of levels), got {timestep}"
        )
    return table[NUM_TRAIN_TIMESTEPS - int(timestep)]


def _nearest(table: tuple[float, ...], timestep: float) -> float:
    return min(table, key=lambda sigma: abs(NUM_TRAIN_TIMESTEPS * sigma - timestep))
