"""The talking avatar: sound, state and gestures in, a face out.

A unit's sound becomes mel rows and an energy per frame; the rows move the lips; energy, state and
gesture drive the motion controller; state and controls condition the denoiser; the identity's
decoder paints.

The reference latent of the identity is the first frame of every stream; the sink keeps it in sight
for ever.
"""

from __future__ import annotations

import copy
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from decoders.base import MemorylessDecoder, require_latent_space
from decoders.unit_conv import UnitDecoder
from pipelines.audio import MelFrontEnd
from pipelines.avatar_model import (
    LIPS_FILE,
    AvatarConfig,
    as_decoder,
    load_config,
    load_decoder,
    load_denoiser,
    load_references,
    save_avatar_model,
)
from pipelines.base import fastest_dtype, require_device, require_dtype, to_uint8
from pipelines.lips import LipNet, load_lips
from pipelines.motion import MotionController, MotionState
from pipelines.speech_energy import EnergyState, SpeechEnergy
from rtgen.engine.contract import UnitInput
from rtgen.errors import ConfigError
from rtgen.models.conditioning import Conditioning
from rtgen.models.denoiser import CausalDenoiser, cast_weights
from rtgen.sampling.stream import ChunkStream
from rtgen.types import EVENTS, Pixels, SessionSpec, UnitFormat

__all__ = ["AvatarConditioner", "AvatarPipeline", "AvatarSession", "save_avatar_model"]

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ConditionerState:
    """Everything an `AvatarConditioner` carries from unit to unit."""

    mel: npt.NDArray[np.float32]
    energy: EnergyState
    motion: MotionState


class AvatarConditioner:
    """Turns unit inputs into conditioning; sound features and motion live here.

    Args:
        config: of the model.
        lips: sound to mouth, on the CPU; shared by all sessions, it has no state.
        seed: of the motion.
    """

    def __init__(self, config: AvatarConfig, lips: LipNet, seed: int) -> None:
        self._config = config
        self._lips = lips
        self._mel = MelFrontEnd(config.mel)
        self._energy = SpeechEnergy()
        self._motion = MotionController(seed)

    def step(self, unit: UnitInput) -> Conditioning:
        """Conditioning of the next unit, B = T = 1, on the CPU.

        Raises:
            ConfigError: an unknown gesture.
            ShapeError: the sound has another length.
        """
        denoiser, mel = self._config.denoiser, self._config.mel
        if unit.event not in EVENTS:
            raise ConfigError(f"event must be one of {EVENTS}, got {unit.event!r}")
        event = EVENTS.index(unit.event)
        tokens = torch.from_numpy(self._mel.step(unit.audio))
        with torch.no_grad():
            mouth = self._lips(tokens.reshape(1, mel.num_rows, mel.num_mels))[0]
        energy = self._energy.push(unit.audio[: mel.unit])
        controls = self._motion.step(unit.state, unit.event if event else None, energy)
        return Conditioning(
            audio=None if denoiser.audio_dim is None else tokens[None, None],
            state=torch.tensor([[int(unit.state)]]),
            event=torch.tensor([[event]]) if denoiser.num_events else None,
            control=torch.cat([torch.from_numpy(controls), mouth], 1).reshape(1, 1, -1),
        )

    def snapshot(self) -> ConditionerState:
        """An independent copy of the state."""
        return ConditionerState(
            self._mel.snapshot(), self._energy.snapshot(), self._motion.snapshot()
        )

    def restore(self, state: ConditionerState) -> None:
        """Continues from `state`: the same inputs then give the same bits."""
        self._mel.restore(state.mel)
        self._energy.restore(state.energy)
        self._motion.restore(state.motion)


class AvatarSession:
    """`rtgen.engine.contract.PipelineSession` of the avatar."""

    def __init__(self, pipeline: AvatarPipeline, spec: SessionSpec) -> None:
        config = pipeline.config
        self.spec = spec
        self._pipeline = pipeline
        self._chunk = config.cache.frames_per_chunk
        self._stream: ChunkStream | None = ChunkStream(
            pipeline.denoiser,
            config.cache,
            config.sampling(spec.num_inference_steps),
            latent_shape=config.latent_shape,
            seed=spec.seed,
        )
        self._conditioner = AvatarConditioner(config, pipeline.lips, spec.seed)
        # States before each of the latest units: what a roll-back returns to.
        depth = config.cache.lead + self._chunk
        self._before: deque[ConditionerState] = deque(maxlen=depth)
        _, height, width = config.latent_shape
        decoder, device = pipeline.decoder(spec.avatar), pipeline.device
        self._decoder = decoder
        self._decoder_state = decoder.new_state(height, width, decoder.dtype, device)
        reference = pipeline.reference(spec.avatar)
        self._stream.prime(reference, _to(config.neutral(len(reference)), device))
        for frame in reference:
            decoder.step([self._decoder_state], pipeline.denormalise(frame)[None, None])

    @property
    def stream(self) -> ChunkStream:
        if self._stream is None:
            raise ConfigError("the session is closed")
        return self._stream

    @property
    def nbytes(self) -> int:
        return self.stream.nbytes + self._decoder_state.nbytes

    def begin(self, units: Sequence[UnitInput]) -> None:
        if len(units) != self._chunk:
            raise ConfigError(f"a chunk is {self._chunk} units, got {len(units)}")
        rows: list[Conditioning] = []
        for unit in units:
            self._before.append(self._conditioner.snapshot())
            rows.append(self._conditioner.step(unit))
        self.stream.begin(_to(_join(rows), self._pipeline.device))

    def decode(self, x0: Tensor) -> Pixels:
        pipeline = self._pipeline
        units = [
            self._decoder.step([self._decoder_state], pipeline.denormalise(frame)[None, None])[0]
            for frame in x0
        ]
        return to_uint8(torch.cat(units))

    def rollback(self, units: int) -> None:
        if not 0 <= units <= len(self._before):
            raise ConfigError(f"can take back 0 to {len(self._before)} units, got {units}")
        running = self._chunk if self.stream.is_running else 0
        self.stream.rollback(max(units - running, 0))
        self._decoder_state.rollback(max(units - running, 0))
        if units:
            for _ in range(units):
                state = self._before.pop()
            self._conditioner.restore(state)

    def set_num_inference_steps(self, steps: int) -> None:
        self.stream.set_sampling(self._pipeline.config.sampling(steps))

    def close(self) -> None:
        self._stream = None
        self._before.clear()


class AvatarPipeline:
    """`rtgen.engine.contract.Pipeline` of an avatar model; see `from_directory`.

    Args:
        config: of the model.
        lips: for inference, on the CPU.
        denoiser: for inference, already on the device in the dtype that serves.
        decoders: per avatar, likewise.
        references: per avatar [T, C, h, w] normalised latents.
        device: where denoiser, decoders and latents are.

    Raises:
        ConfigError: a decoder reads another latent space than the denoiser writes.
    """

    def __init__(
        self,
        config: AvatarConfig,
        lips: LipNet,
        denoiser: CausalDenoiser,
        decoders: dict[str, MemorylessDecoder],
        references: dict[str, Tensor],
        device: torch.device,
    ) -> None:
        for decoder in decoders.values():
            require_latent_space(decoder, config.latent_space)
        self.config = config
        self.lips = lips
        self.denoiser = denoiser
        self._decoders = decoders
        self.device = device
        self._references = {name: value.to(device) for name, value in references.items()}
        shape = (len(config.latent_mean), 1, 1)
        self._mean = torch.tensor(config.latent_mean, device=device).view(shape)
        self._std = torch.tensor(config.latent_std, device=device).view(shape)

    @classmethod
    def from_directory(
        cls, folder: Path | str, *, device: str = "cpu", dtype: str = "auto"
    ) -> AvatarPipeline:
        """Loads a model folder (`pipelines.avatar_model`).

        Args:
            folder: the model.
            device: "cpu" or a CUDA device.
            dtype: "float32", "bfloat16" or "float16" for both networks, or "auto": on the CPU
                each network runs once in bfloat16 and float32, and the faster is taken and logged.

        Raises:
            CheckpointError: a file is missing, damaged, or does not fit.
            ConfigError: an unknown device or dtype name.
            BackendUnavailable: the device is not there.
        """
        place, asked = require_device(device), require_dtype(dtype)
        config = load_config(folder)
        denoiser = load_denoiser(folder, config)
        networks = {avatar: load_decoder(folder, config, avatar) for avatar in config.avatars}
        network = networks[config.avatars[0]]
        denoiser_dtype = asked or fastest_dtype(
            "denoiser", place, lambda dtype: _denoiser_trial(denoiser, config, dtype)
        )
        decoder_dtype = asked or fastest_dtype(
            "decoder", place, lambda dtype: _decoder_trial(network, config, dtype)
        )
        return cls(
            config,
            load_lips(Path(folder) / LIPS_FILE, config.lips),
            cast_weights(denoiser, denoiser_dtype).to(place),
            {
                avatar: as_decoder(network.to(place), config, decoder_dtype)
                for avatar, network in networks.items()
            },
            load_references(folder, config),
            place,
        )

    @property
    def format(self) -> UnitFormat:
        return self.config.unit_format

    @property
    def avatars(self) -> tuple[str, ...]:
        """Names of the identities; the first is the default."""
        return self.config.avatars

    def check(self, spec: SessionSpec) -> None:
        self.config.sampling(spec.num_inference_steps)
        self.reference(spec.avatar)

    def open(self, spec: SessionSpec) -> AvatarSession:
        """Builds and primes a session.

        Raises:
            ConfigError: an unknown avatar, or a number of steps that the model has not.
        """
        return AvatarSession(self, spec)

    def describe(self) -> dict[str, Any]:
        config, decoder = self.config, self.decoder(None)
        parts = self.lips, self.denoiser, decoder.network
        dtypes = self.denoiser.patch_embedding.weight.dtype, decoder.dtype
        return {
            "model": config.name,
            "avatars": list(config.avatars),
            "size": [config.decoder.size, config.decoder.size],
            "fps": config.fps,
            "steps": list(config.steps),
            "default_steps": config.default_steps,
            "window": config.cache.window,
            "parameters": [sum(p.numel() for p in part.parameters()) for part in parts],
            "device": str(self.device),
            "denoiser_dtype": str(dtypes[0]).removeprefix("torch."),
            "decoder_dtype": str(dtypes[1]).removeprefix("torch."),
        }

    def reference(self, avatar: str | None) -> Tensor:
        """Reference latents [T, C, h, w] of an identity, None for the first.

        Raises:
            ConfigError: no such identity.
        """
        return self._references[self.identity(avatar)]

    def decoder(self, avatar: str | None) -> MemorylessDecoder:
        """The decoder of an identity, None for the first.

        Raises:
            ConfigError: no such identity.
        """
        return self._decoders[self.identity(avatar)]

    def identity(self, avatar: str | None) -> str:
        """The name of an identity, None for the first.

        Raises:
            ConfigError: no such identity.
        """
        name = self.avatars[0] if avatar is None else avatar
        if name not in self._references:
            raise ConfigError(f"avatar must be one of {list(self.avatars)}, got {name!r}")
        return name

    def denormalise(self, latents: Tensor) -> Tensor:
        """[..., C, h, w], as the denoiser has them, to the decoder's scale."""
        return latents * self._std + self._mean


def _to(conditioning: Conditioning, device: torch.device) -> Conditioning:
    parts = (conditioning.audio, conditioning.state, conditioning.event, conditioning.control)
    audio, state, event, control = (None if x is None else x.to(device) for x in parts)
    return Conditioning(audio=audio, state=state, event=event, control=control)


def _join(rows: Sequence[Conditioning]) -> Conditioning:
    """One chunk from the conditioning of its units."""
    if len(rows) == 1:
        return rows[0]
    columns = zip(*((row.audio, row.state, row.event, row.control) for row in rows), strict=True)
    audio, state, event, control = (
        torch.cat(given, 1) if (given := [x for x in column if x is not None]) else None
        for column in columns
    )
    return Conditioning(audio=audio, state=state, event=event, control=control)


def _denoiser_trial(
    denoiser: CausalDenoiser, config: AvatarConfig, dtype: torch.dtype
) -> Callable[[], object]:
    """A call that makes one chunk in a dtype, all passes included."""
    stream = ChunkStream(
        cast_weights(copy.deepcopy(denoiser), dtype),
        config.cache,
        config.sampling(None),
        latent_shape=config.latent_shape,
    )
    conditioning = config.neutral(config.cache.frames_per_chunk)
    return lambda: stream.step(conditioning)


def _decoder_trial(
    network: UnitDecoder, config: AvatarConfig, dtype: torch.dtype
) -> Callable[[], object]:
    """A call that decodes one latent frame in a dtype."""
    decoder = as_decoder(copy.deepcopy(network), config, dtype)
    latents = torch.zeros(1, 1, *config.latent_shape)
    state = decoder.new_state(*config.latent_shape[1:], dtype, "cpu")
    return lambda: decoder.step([state], latents)
