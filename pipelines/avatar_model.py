"""A folder that holds an avatar model: everything the avatar pipeline needs, and no code.

    model.json                      sizes, steps, statistics, front end, names (`AvatarConfig`)
    lips.safetensors                weights of the `LipNet`: sound to mouth controls
    denoiser.safetensors            weights of the `CausalDenoiser`
    decoder-<avatar>.safetensors    weights of one identity's frame decoder
    avatars.safetensors             per identity the reference latent [T, C, h, w], normalised

The denoiser works on normalised latents, (z - mean) / std per channel; the decoders on raw ones.
A latent says what a face does, its decoder says whose face it is: identities share all the rest.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from decoders.base import MemorylessDecoder
from decoders.unit_conv import UnitConvConfig, UnitDecoder
from pipelines.audio import MelConfig
from pipelines.lips import MOUTH_NAMES, LipConfig, LipNet
from pipelines.motion import CONTROL_NAMES
from rtgen.config import CacheConfig, DenoiserConfig, SamplingConfig
from rtgen.errors import CheckpointError, ConfigError
from rtgen.models.conditioning import Conditioning
from rtgen.models.denoiser import CausalDenoiser, cast_weights
from rtgen.types import EVENTS, SpeechState, UnitFormat
from rtgen.weights.loaders import load_checkpoint, load_strict, save_weights

FORMAT = "rtgen-avatar"
FORMAT_VERSION = 2
CONFIG_FILE = "model.json"
LIPS_FILE = "lips.safetensors"
DENOISER_FILE = "denoiser.safetensors"
AVATARS_FILE = "avatars.safetensors"

T = TypeVar("T")


def decoder_file(avatar: str) -> str:
    """Name of the file that holds an identity's decoder."""
    return f"decoder-{avatar}.safetensors"


@dataclass(frozen=True, slots=True, kw_only=True)
class AvatarConfig:
    """Everything about an avatar model but its weights.

    Attributes:
        name: of the model.
        latent_space: name of the autoencoder's latent space.
        fps: pixel frames per second.
        denoiser: shape of the denoiser.
        cache: window, sink, lead.
        samplings: the schedules it can run, at most one for each number of steps.
        default_steps: number of steps when none is asked for.
        decoder: shape of every identity's decoder.
        latent_mean: mean of each raw latent channel, C numbers.
        latent_std: standard deviation of each, C positive numbers.
        mel: audio front end.
        lips: shape of the network that moves the mouth.
        avatars: identities, the first is the default.
        controls: names of the control numbers per pixel frame, in order: those of the motion
            controller, then the mouth's.
    """

    name: str
    latent_space: str
    fps: int
    denoiser: DenoiserConfig
    cache: CacheConfig
    samplings: tuple[SamplingConfig, ...]
    default_steps: int
    decoder: UnitConvConfig
    latent_mean: tuple[float, ...]
    latent_std: tuple[float, ...]
    mel: MelConfig
    lips: LipConfig
    avatars: tuple[str, ...]
    controls: tuple[str, ...] = CONTROL_NAMES + MOUTH_NAMES

    def __post_init__(self) -> None:
        channels = self.decoder.latent_channels
        _require("in_channels", self.denoiser.in_channels, channels)
        _require("latent_mean", len(self.latent_mean), channels)
        _require("latent_std", len(self.latent_std), channels)
        if self.denoiser.audio_dim is not None:
            _require("audio_dim", self.denoiser.audio_dim, self.mel.audio_dim)
            _require("audio_tokens", self.denoiser.audio_tokens, self.mel.num_tokens)
        _require("lips.num_mels", self.lips.num_mels, self.mel.num_mels)
        _require("mel rows", self.mel.num_rows, LipNet.rows_for(self.decoder.frames_per_unit))
        _require("num_states", self.denoiser.num_states, len(SpeechState))
        _require("controls", self.controls, CONTROL_NAMES + MOUTH_NAMES)
        _require(
            "control_dim",
            self.denoiser.control_dim,
            self.decoder.frames_per_unit * len(self.controls),
        )
        if self.denoiser.num_events not in (0, len(EVENTS)):
            raise ConfigError(
                f"num_events must be 0 or {len(EVENTS)}, got {self.denoiser.num_events}"
            )
        _require("mel unit", self.mel.unit, self.unit_format.model_samples)
        if min(self.latent_std) <= 0:
            raise ConfigError(f"latent_std must be positive, got {min(self.latent_std)}")
        if not self.avatars or len(set(self.avatars)) != len(self.avatars):
            raise ConfigError(f"avatars must be different names, at least one, got {self.avatars}")
        if len(self.steps) != len(self.samplings) or self.default_steps not in self.steps:
            raise ConfigError(
                f"samplings must have different numbers of steps and hold the default "
                f"{self.default_steps}, got {[s.num_inference_steps for s in self.samplings]}"
            )

    @property
    def steps(self) -> tuple[int, ...]:
        """Numbers of steps that can be asked for, ascending."""
        return tuple(sorted({s.num_inference_steps for s in self.samplings}))

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        """(C, h, w) of one latent frame."""
        side = self.decoder.latent_size
        return self.decoder.latent_channels, side, side

    @property
    def unit_format(self) -> UnitFormat:
        """Sizes of its units."""
        return UnitFormat(
            fps=Fraction(self.fps),
            frames_per_unit=self.decoder.frames_per_unit,
            height=self.decoder.size,
            width=self.decoder.size,
            model_rate=self.mel.sample_rate,
            lookahead_samples=self.mel.lookahead,
            units_per_chunk=self.cache.frames_per_chunk,
            lead=self.cache.lead,
        )

    def sampling(self, num_inference_steps: int | None) -> SamplingConfig:
        """The schedule with that many steps, None for the default.

        Raises:
            ConfigError: the model has none.
        """
        steps = self.default_steps if num_inference_steps is None else num_inference_steps
        for sampling in self.samplings:
            if sampling.num_inference_steps == steps:
                return sampling
        raise ConfigError(f"{self.name} runs with {list(self.steps)} steps, got {steps}")

    def neutral(self, num_frames: int) -> Conditioning:
        """What reference latents are conditioned on, in training and here: zeros, no sound."""
        config = self.denoiser
        size = (1, num_frames)
        return Conditioning(
            audio=None
            if config.audio_dim is None
            else torch.zeros(*size, config.audio_tokens, config.audio_dim),
            state=torch.zeros(size, dtype=torch.int64),
            event=torch.zeros(size, dtype=torch.int64) if config.num_events else None,
            control=torch.zeros(*size, config.control_dim),
        )


def _require(name: str, got: object, want: object) -> None:
    if got != want:
        raise ConfigError(f"{name} must be {want} to fit the other parts, got {got}")


def save_avatar_model(
    folder: Path | str,
    config: AvatarConfig,
    lips: LipNet,
    denoiser: CausalDenoiser,
    decoders: Mapping[str, UnitDecoder],
    references: Mapping[str, Tensor],
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> None:
    """Writes a model folder; every file is written whole or not at all.

    Args:
        folder: created if need be.
        config: must describe the networks and name the identities.
        lips: unchanged; stored in float32.
        denoiser: unchanged.
        decoders: per avatar, unchanged; a canvas stays float32, bfloat16 would band it.
        references: per avatar [T, C, h, w] (or [C, h, w]) normalised latents, T at most the sink.
        dtype: of the stored weights, except those that serve in float32.

    Raises:
        CheckpointError: parts do not fit the configuration, or the folder cannot be written.
    """
    folder = Path(folder)
    fits = denoiser.config == config.denoiser and lips.config == config.lips
    if not fits or any(decoder.config != config.decoder for decoder in decoders.values()):
        raise CheckpointError("config must be that of the networks given; build it from theirs")
    if set(decoders) != set(config.avatars):
        raise CheckpointError(
            f"decoders must be those of {sorted(config.avatars)}, got {sorted(decoders)}"
        )
    latents = {
        name: (value[None] if value.ndim == 3 else value).float()
        for name, value in references.items()
    }
    _check_references(latents, config, "references")
    twin = CausalDenoiser(config.denoiser)
    twin.load_state_dict(denoiser.state_dict())
    save_weights(folder / DENOISER_FILE, cast_weights(twin, dtype).state_dict())
    save_weights(folder / LIPS_FILE, lips.state_dict())
    for avatar, decoder in decoders.items():
        parameters = {name: value.to(dtype) for name, value in decoder.named_parameters()}
        buffers = {name: value.float() for name, value in decoder.named_buffers()}
        save_weights(folder / decoder_file(avatar), parameters | buffers)
    save_weights(folder / AVATARS_FILE, latents)
    values = {"format": FORMAT, "version": FORMAT_VERSION, **dataclasses.asdict(config)}
    try:
        (folder / CONFIG_FILE).write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise CheckpointError(f"cannot write {folder / CONFIG_FILE}: {error}") from error


def load_config(folder: Path | str) -> AvatarConfig:
    """Reads `model.json`.

    Raises:
        CheckpointError: missing, of another format or version, or inconsistent.
    """
    path = Path(folder) / CONFIG_FILE
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {path}: {error}") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} must hold an object")
    kind = (values.pop("format", None), values.pop("version", None))
    if kind != (FORMAT, FORMAT_VERSION):
        raise CheckpointError(f"{path} must be {FORMAT} {FORMAT_VERSION}, is {kind[0]} {kind[1]}")
    try:
        nested: dict[str, Any] = {
            "denoiser": _from_json(DenoiserConfig, values.get("denoiser")),
            "cache": _from_json(CacheConfig, values.get("cache")),
            "decoder": _from_json(UnitConvConfig, values.get("decoder")),
            "mel": _from_json(MelConfig, values.get("mel")),
            "lips": _from_json(LipConfig, values.get("lips")),
            "samplings": tuple(_from_json(SamplingConfig, s) for s in values.get("samplings", ())),
        }
        return _from_json(AvatarConfig, values | nested)
    except (ConfigError, TypeError) as error:
        raise CheckpointError(f"{path}: {error}") from error


def load_denoiser(folder: Path | str, config: AvatarConfig) -> CausalDenoiser:
    """The denoiser in float32 on the CPU, for inference.

    Raises:
        CheckpointError: the file is missing, damaged, or does not fit.
    """
    path = Path(folder) / DENOISER_FILE
    denoiser = CausalDenoiser(config.denoiser)
    load_strict(denoiser, load_checkpoint(path), str(path))
    return denoiser.eval().requires_grad_(False)


def load_decoder(folder: Path | str, config: AvatarConfig, avatar: str) -> UnitDecoder:
    """An identity's decoder network in float32 on the CPU, for inference.

    Raises:
        CheckpointError: the file is missing, damaged, or does not fit.
    """
    path = Path(folder) / decoder_file(avatar)
    decoder = UnitDecoder(config.decoder)
    load_strict(decoder, load_checkpoint(path), str(path))
    return decoder.eval().requires_grad_(False)


def as_decoder(network: UnitDecoder, config: AvatarConfig, dtype: torch.dtype) -> MemorylessDecoder:
    """The network with its weights cast in place (its canvas stays), as a `Decoder`."""
    for parameter in network.parameters():
        parameter.data = parameter.data.to(dtype)
    network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    return MemorylessDecoder(
        network, latent_space=config.latent_space, latent_shape=config.latent_shape
    )


def load_references(folder: Path | str, config: AvatarConfig) -> dict[str, Tensor]:
    """Per avatar [T, C, h, w], normalised, float32.

    Raises:
        CheckpointError: the file is missing, damaged, or does not fit.
    """
    path = Path(folder) / AVATARS_FILE
    latents = load_checkpoint(path)
    _check_references(latents, config, str(path))
    return {name: latents[name].float() for name in config.avatars}


def _check_references(latents: Mapping[str, Tensor], config: AvatarConfig, source: str) -> None:
    if set(latents) != set(config.avatars):
        raise CheckpointError(
            f"{source} must hold {sorted(config.avatars)}, it holds {sorted(latents)}"
        )
    most = max(config.cache.sink, 1)
    for name, value in latents.items():
        fits = value.ndim == 4 and tuple(value.shape[1:]) == config.latent_shape
        if not fits or not 1 <= len(value) <= most or not bool(value.isfinite().all()):
            raise CheckpointError(
                f"{source}: {name} must be finite [1 to {most}, *{config.latent_shape}], "
                f"is {list(value.shape)}"
            )


def _from_json(kind: type[T], values: object) -> T:
    """A configuration from JSON values: lists become tuples, all fields must be known.

    Raises:
        ConfigError: no object, an unknown or missing field, or a value that breaks a rule.
    """
    if not isinstance(values, Mapping):
        raise ConfigError(f"{kind.__name__} must be an object, got {type(values).__name__}")
    known = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    if unknown := sorted(values.keys() - known):
        raise ConfigError(f"{kind.__name__} has no {unknown}")
    arguments = {
        name: tuple(value) if isinstance(value, list) else value for name, value in values.items()
    }
    try:
        return kind(**arguments)
    except TypeError as error:
        raise ConfigError(f"{kind.__name__}: {error}") from error
