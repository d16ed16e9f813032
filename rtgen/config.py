"""Configuration: frozen dataclasses that validate themselves, and the flags made from them.

Importing this module imports no torch. Derived numbers are properties; a changed configuration is
a new one (`dataclasses.replace`).
"""

from __future__ import annotations

import argparse
import types
import typing
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal, TypeVar

from rtgen.errors import ConfigError

T = TypeVar("T")

PositionMode = Literal["absolute", "relative"]
PredictionType = Literal["flow", "sample"]
Activation = Literal["gelu-approximate", "gelu"]
Renoise = Literal["fresh", "ode"]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


@dataclass(frozen=True, slots=True, kw_only=True)
class DenoiserConfig:
    """Shape of a `CausalDenoiser`; the first group has diffusers' names and meaning.

    Attributes:
        patch_size: latent frames, rows and columns per token; the first is always 1.
        text_dim: width of the prompt embeddings, or None for a model without text.
        audio_dim: width of one audio token, or None for a model without audio.
        audio_tokens: audio tokens per latent frame.
        num_states: size of the state vocabulary (idle, listening, ...); 0 for none.
        num_events: size of the event vocabulary including "none" at 0; 0 for none.
        control_dim: explicit control numbers per latent frame; 0 for none.
        position_grid: token rows and columns of a learned position table, or None.
        condition_map: channels per token of a learned picture of a frame's state, event, control
            and audio, a first draft of the output; 0 for none. Needs `position_grid`.
        frames_per_latent: pixel frames whose channels are stacked in a latent frame (a latent space
            factored by frame); the map draws each of them alone. 1 for other latent spaces.
        prediction_type: what the network returns: "flow" (noise - x0) or "sample" (x0).
        activation_fn: of the feed-forward: Wan's "gelu-approximate" (tanh), or "gelu" (erf), which
            is several times faster on CPU.
    """

    num_attention_heads: int
    attention_head_dim: int
    in_channels: int
    out_channels: int
    ffn_dim: int
    num_layers: int
    patch_size: tuple[int, int, int] = (1, 2, 2)
    text_dim: int | None = None
    freq_dim: int = 256
    cross_attn_norm: bool = True
    qk_norm: str = "rms_norm_across_heads"
    eps: float = 1e-6
    audio_dim: int | None = None
    audio_tokens: int = 0
    num_states: int = 0
    num_events: int = 0
    control_dim: int = 0
    position_grid: tuple[int, int] | None = None
    condition_map: int = 0
    frames_per_latent: int = 1
    prediction_type: PredictionType = "flow"
    activation_fn: Activation = "gelu-approximate"

    def __post_init__(self) -> None:
        for name in ("num_attention_heads", "in_channels", "out_channels", "ffn_dim", "num_layers"):
            value = getattr(self, name)
            _require(value >= 1, f"{name} must be at least 1, got {value}")
        _require(
            self.attention_head_dim >= 6 and self.attention_head_dim % 2 == 0,
            f"attention_head_dim must be even and at least 6, got {self.attention_head_dim}",
        )
        _require(
            len(self.patch_size) == 3 and self.patch_size[0] == 1 and min(self.patch_size) >= 1,
            f"patch_size must be (1, rows, columns), got {self.patch_size}",
        )
        _require(
            self.qk_norm == "rms_norm_across_heads",
            f"qk_norm must be 'rms_norm_across_heads', got {self.qk_norm!r}",
        )
        _require(
            (self.audio_dim is None) == (self.audio_tokens == 0),
            f"audio_dim and audio_tokens go together, got {self.audio_dim} and {self.audio_tokens}",
        )
        for name in ("num_states", "num_events", "control_dim", "condition_map"):
            value = getattr(self, name)
            _require(value >= 0, f"{name} must not be negative, got {value}")
        _require(
            not self.condition_map
            or (self.position_grid is not None and self.has_frame_conditions),
            "condition_map needs a position_grid and audio, states, events or controls to draw",
        )
        frames = self.frames_per_latent
        _require(
            frames >= 1
            and self.out_channels % frames == 0
            and self.control_dim % frames == 0
            and (not self.audio_tokens or self.audio_tokens >= frames),
            f"frames_per_latent must divide out_channels ({self.out_channels}) and control_dim "
            f"({self.control_dim}) and not exceed audio_tokens, got {frames}",
        )

    @property
    def has_frame_conditions(self) -> bool:
        """Whether frames are conditioned on anything besides time and text."""
        return bool(self.audio_tokens or self.num_states or self.num_events or self.control_dim)

    @property
    def inner_dim(self) -> int:
        """Width of the hidden states."""
        return self.num_attention_heads * self.attention_head_dim

    def tokens_per_frame(self, height: int, width: int) -> int:
        """Tokens of one latent frame of `height` by `width` latent pixels."""
        _, rows, columns = self.patch_size
        _require(
            height % rows == 0 and width % columns == 0,
            f"latent size must be a multiple of {rows}x{columns}, got {height}x{width}",
        )
        return (height // rows) * (width // columns)


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheConfig:
    """Which latent frames a chunk may attend to, and how long they are kept.

    Attributes:
        window: latent frames attended in all: sink, recent ones and the current chunk.
        sink: first latent frames of the stream, attended for ever.
        frames_per_chunk: latent frames denoised together.
        lead: latent frames by which a stream can be rolled back.
        merge_clean_pass: run a chunk's clean pass with the next chunk's first noisy pass.
        position_mode: "absolute": keys keep their phase for ever; "relative": the sink is rotated
            so that it stands directly before the window, and distances stay bounded.
    """

    window: int
    sink: int = 0
    frames_per_chunk: int = 1
    lead: int = 2
    merge_clean_pass: bool = False
    position_mode: PositionMode = "absolute"

    def __post_init__(self) -> None:
        _require(
            1 <= self.frames_per_chunk,
            f"frames_per_chunk must be at least 1, got {self.frames_per_chunk}",
        )
        _require(self.sink >= 0, f"sink must not be negative, got {self.sink}")
        _require(self.lead >= 0, f"lead must not be negative, got {self.lead}")
        _require(
            self.window - self.sink >= self.frames_per_chunk,
            f"window ({self.window}) must hold the sink ({self.sink}) and a chunk of "
            f"{self.frames_per_chunk} frames; raise the window",
        )

    @property
    def recent(self) -> int:
        """Latent frames attended besides the sink."""
        return self.window - self.sink

    @property
    def ring_frames(self) -> int:
        """Frame slots of the ring: the recent frames, the roll-back spare, a merged chunk."""
        return self.recent + self.lead + (self.frames_per_chunk if self.merge_clean_pass else 0)

    @property
    def num_frames(self) -> int:
        """Frame slots in all."""
        return self.sink + self.ring_frames


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    """Few-step flow-matching sampling of one chunk.

    Attributes:
        timesteps: one per forward, descending, in 0..1000, before the warp.
        shift: timestep shift, sigma' = shift*sigma / (1 + (shift-1)*sigma).
        warp: read `timesteps` as indices into the shifted table of 1000 (Self-Forcing's way).
        renoise: "fresh" draws new noise between steps; "ode" follows the straight path.
        context_noise: sigma at which finished frames enter the cache, 0 for clean ones.
    """

    timesteps: tuple[float, ...]
    shift: float = 5.0
    warp: bool = False
    renoise: Renoise = "fresh"
    context_noise: float = 0.0

    def __post_init__(self) -> None:
        _require(len(self.timesteps) >= 1, "timesteps must hold at least one entry")
        _require(
            all(0 < t <= 1000 for t in self.timesteps)
            and all(a > b for a, b in zip(self.timesteps, self.timesteps[1:], strict=False)),
            f"timesteps must descend within (0, 1000], got {self.timesteps}",
        )
        _require(self.shift > 0, f"shift must be positive, got {self.shift}")
        _require(
            0 <= self.context_noise < 1,
            f"context_noise must be in [0, 1), got {self.context_noise}",
        )

    @property
    def num_inference_steps(self) -> int:
        """Forwards per chunk besides the clean pass."""
        return len(self.timesteps)


def add_config_flags(parser: argparse.ArgumentParser, config: type[Any]) -> None:
    """Adds one flag per field of a dataclass; the field's default is the flag's.

    Literal types become choices, bool an on/off pair, `X | None` an optional X.
    """
    hints = typing.get_type_hints(config)
    for field in fields(config):
        kind = hints[field.name]
        if typing.get_origin(kind) in (typing.Union, types.UnionType):
            kind = next(arg for arg in typing.get_args(kind) if arg is not type(None))
        options: dict[str, Any] = {"help": field.metadata.get("help")}
        if field.default is MISSING and field.default_factory is MISSING:
            options["required"] = True
        elif field.default is not MISSING:
            options["default"] = field.default
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif typing.get_origin(kind) is Literal:
            options["choices"] = typing.get_args(kind)
        else:
            options["type"] = kind
        parser.add_argument("--" + field.name.replace("_", "-"), **options)


def config_from_flags(config: type[T], namespace: argparse.Namespace) -> T:
    """Builds the dataclass from parsed flags made by `add_config_flags`."""
    names = [field.name for field in fields(typing.cast(Any, config))]
    return config(**{name: getattr(namespace, name) for name in names})
