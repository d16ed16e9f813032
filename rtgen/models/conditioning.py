"""What a chunk is conditioned on, and what the denoiser prepares from it once per chunk.

`Conditioning` is raw input: prompt embeddings, audio tokens, state, event, control numbers.
`PreparedConditioning` holds what all passes of a chunk share: keys and values of text and audio
for every layer, and an addition to the time embedding of every frame.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor, nn

from rtgen.config import DenoiserConfig
from rtgen.errors import ConfigError, ShapeError
from rtgen.models.layers import Linear, Mlp, timestep_embedding


@dataclass(frozen=True, slots=True, kw_only=True)
class Conditioning:
    """Raw conditioning of T latent frames; a part is given exactly when the model has it.

    Attributes:
        prompt_embeds: [B, Lt, text_dim] float, zero rows after the text's end. They are attended
            to like all others, so keep the padding the model was trained with.
        audio: [B, T, audio_tokens, audio_dim] float.
        state: [B, T] int64 in 0..num_states-1.
        event: [B, T] int64 in 0..num_events-1, 0 for none.
        control: [B, T, control_dim] float.
    """

    prompt_embeds: Tensor | None = None
    audio: Tensor | None = None
    state: Tensor | None = None
    event: Tensor | None = None
    control: Tensor | None = None

    def validate(self, config: DenoiserConfig) -> None:
        """Checks every part against the model.

        Raises:
            ConfigError: a part is missing, or the model has no such part.
            ShapeError: a part has the wrong shape or dtype, or lengths disagree.
        """
        expected: dict[str, tuple[int | None, ...] | None] = {
            "prompt_embeds": None if config.text_dim is None else (None, config.text_dim),
            "audio": None
            if config.audio_dim is None
            else (None, config.audio_tokens, config.audio_dim),
            "state": (None,) if config.num_states else None,
            "event": (None,) if config.num_events else None,
            "control": (None, config.control_dim) if config.control_dim else None,
        }
        batches, lengths = set(), set()
        for name, shape in expected.items():
            value: Tensor | None = getattr(self, name)
            if (value is None) != (shape is None):
                have = "needs" if value is None else "has no"
                raise ConfigError(f"the model {have} {name}; give exactly the parts it has")
            if value is None or shape is None:
                continue
            _check_shape(name, value, shape)
            if name in ("state", "event") and value.dtype != torch.int64:
                raise ShapeError(f"{name} must be int64, got {value.dtype}")
            batches.add(len(value))
            if name != "prompt_embeds":
                lengths.add(value.shape[1])
        if len(batches) > 1 or len(lengths) > 1:
            raise ShapeError(
                f"all parts must have the same B and T, got B in {sorted(batches)} and T in "
                f"{sorted(lengths)}"
            )

    def to(self, device: torch.device | str) -> Conditioning:
        """The same on another device."""
        parts = {f.name: getattr(self, f.name) for f in fields(self)}
        return Conditioning(**{n: None if p is None else p.to(device) for n, p in parts.items()})

    @classmethod
    def stack(cls, rows: Sequence[Conditioning]) -> Conditioning:
        """One batch from several, row after row.

        Raises:
            ConfigError: a part is given in some rows only.
            ShapeError: the rows' shapes differ.
        """
        return cls(
            **{f.name: _join(f.name, [getattr(r, f.name) for r in rows]) for f in fields(cls)}
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedConditioning:
    """What every pass of a chunk reads; made by `CausalDenoiser.prepare`.

    Attributes:
        text: [L, 2, B, Lt, heads, d], keys and values of the prompt; None without text.
        audio: [L, 2, B, T, A, heads, d], keys and values of each frame's tokens; None without.
        temb: [B, T, D] float32, added to the time embedding; None for nothing.
        picture: [B, T, N, condition_map] float32, of `ConditionMap`; None without one.
    """

    text: Tensor | None = None
    audio: Tensor | None = None
    temb: Tensor | None = None
    picture: Tensor | None = None

    @classmethod
    def stack(cls, rows: Sequence[PreparedConditioning]) -> PreparedConditioning:
        """One batch from several, row after row.

        Raises:
            ConfigError: a part is given in some rows only.
            ShapeError: the rows' shapes differ.
        """
        if len(rows) == 1:
            return rows[0]
        return cls(
            text=_join("text", [row.text for row in rows], 2),
            audio=_join("audio", [row.audio for row in rows], 2),
            temb=_join("temb", [row.temb for row in rows], 0),
            picture=_join("picture", [row.picture for row in rows], 0),
        )

    @classmethod
    def join_frames(cls, chunks: Sequence[PreparedConditioning]) -> PreparedConditioning:
        """The conditioning of consecutive chunks under one prompt, for a merged pass.

        Raises:
            ConfigError: the chunks do not share one prepared prompt (see `same_text`).
        """
        if not all(chunk.same_text(chunks[0]) for chunk in chunks):
            raise ConfigError(
                "chunks under different prompts cannot share a pass; run them one after the other"
            )
        return cls(
            text=chunks[0].text,
            audio=_join("audio", [chunk.audio for chunk in chunks], 3),
            temb=_join("temb", [chunk.temb for chunk in chunks], 1),
            picture=_join("picture", [chunk.picture for chunk in chunks], 1),
        )

    def first_frames(self, frames: int) -> PreparedConditioning:
        """The part that belongs to the first `frames` frames; shares memory."""
        return PreparedConditioning(
            text=self.text,
            audio=None if self.audio is None else self.audio[:, :, :, :frames],
            temb=None if self.temb is None else self.temb[:, :frames],
            picture=None if self.picture is None else self.picture[:, :frames],
        )

    def rows(self, rows: Sequence[int]) -> PreparedConditioning:
        """A copy of the given rows of the batch, in that order."""
        index = list(rows)
        return PreparedConditioning(
            text=None if self.text is None else self.text[:, :, index],
            audio=None if self.audio is None else self.audio[:, :, index],
            temb=None if self.temb is None else self.temb[index],
            picture=None if self.picture is None else self.picture[index],
        )

    def same_text(self, other: PreparedConditioning) -> bool:
        """Whether both were prepared with the very same prompt tensor, or both without."""
        return self.text is other.text


def _check_shape(name: str, value: Tensor, shape: tuple[int | None, ...]) -> None:
    if value.ndim != 1 + len(shape) or any(
        want not in (None, got) for want, got in zip(shape, value.shape[1:], strict=True)
    ):
        want = ", ".join(["B", *("any" if n is None else str(n) for n in shape)])
        raise ShapeError(f"{name} must be [{want}], got {list(value.shape)}")


def _join(name: str, parts: Sequence[Tensor | None], dim: int = 0) -> Tensor | None:
    given = [part for part in parts if part is not None]
    if not given:
        return None
    if len(given) != len(parts):
        raise ConfigError(f"{name} is given for {len(given)} of {len(parts)} parts; give all")
    shapes = {(*part.shape[:dim], *part.shape[dim + 1 :]) for part in given}
    if len(shapes) > 1:
        raise ShapeError(f"{name} must have one shape in all parts, got {sorted(shapes)}")
    return torch.cat(given, dim=dim)


class FrameEmbedder(nn.Module):
    """Embeds what a frame is conditioned on besides time and text, as one vector.

    Args:
        config: which parts there are.
        audio_dim: numbers of sound per frame, 0 for none.
        control_dim: control numbers per frame, 0 for none.
    """

    def __init__(self, config: DenoiserConfig, audio_dim: int, control_dim: int) -> None:
        super().__init__()
        dim = config.inner_dim
        if audio_dim:
            self.audio_pool = Mlp(audio_dim, dim, nn.SiLU())
        if config.num_states:
            self.state_embedder = nn.Embedding(config.num_states, dim)
        if config.num_events:
            self.event_embedder = nn.Embedding(config.num_events, dim)
        if control_dim:
            self.control_embedder = Mlp(control_dim, dim, nn.SiLU())
            # Controls come in natural units (radians beside 0..1); training sets 1 / std here.
            self.control_scale: Tensor
            self.register_buffer("control_scale", torch.ones(control_dim))

    def forward(
        self,
        audio: Tensor | None,
        state: Tensor | None,
        event: Tensor | None,
        control: Tensor | None,
    ) -> Tensor | None:
        """Vectors [..., D] float32, None for a model without such parts.

        Args:
            audio: [..., audio_dim].
            state: [...] int64.
            event: [...] int64.
            control: [..., control_dim].
        """
        parts: list[Tensor] = []
        if audio is not None:
            parts.append(self.audio_pool(audio))
        if state is not None:
            parts.append(self.state_embedder(state))
        if event is not None:
            parts.append(self.event_embedder(event))
        if control is not None:
            parts.append(self.control_embedder(control * self.control_scale))
        return torch.stack([part.float() for part in parts]).sum(0) if parts else None


class ConditionMap(nn.Module):
    """Draws a frame's conditioning as a picture of tokens: a first draft of the frame.

    Modulation is the same for all tokens of a frame. Where a control moves a place (an eyelid, the
    outline of a turned head), a picture says so directly. It is added to the embedded patches, and
    a draft made from it to the output, so that the blocks are left with what the draft misses.

    In a latent space factored by pixel frame the map is drawn for each pixel frame alone, from its
    own controls and its own stretch of the audio tokens, so the draft of neighbouring frames is one
    smooth function, within a unit and across its border.
    """

    def __init__(self, config: DenoiserConfig) -> None:
        super().__init__()
        assert config.position_grid is not None  # the configuration requires it
        rows, columns = config.position_grid
        _, p, q = config.patch_size
        dim, channels, frames = config.inner_dim, config.condition_map, config.frames_per_latent
        self.frames = frames
        self.frame_channels = config.out_channels // frames
        self.shape = (rows * columns, channels)
        self.heard = config.audio_tokens - frames + 1  # audio tokens that one pixel frame hears
        audio_dim = self.heard * (config.audio_dim or 0) if config.audio_tokens else 0
        self.embedder = FrameEmbedder(config, audio_dim, config.control_dim // frames)
        self.draw = Mlp(dim, 2 * dim, nn.SiLU())
        self.to_map = Linear(2 * dim, rows * columns * channels)
        self.to_tokens = Linear(frames * channels, dim)
        self.to_draft = Linear(channels, p * q * config.out_channels // frames)
        self.draft_mean = nn.Parameter(
            torch.zeros(rows * columns, p * q * config.out_channels // frames)
        )

    def forward(self, conditioning: Conditioning) -> Tensor:
        """Pictures [B, T, N, frames * condition_map] float32; all passes of a chunk share them."""
        audio, control = conditioning.audio, conditioning.control
        state, event = conditioning.state, conditioning.event
        if audio is not None:  # [B, T, A, audio_dim] -> [B, T, frames, heard * audio_dim]
            audio = audio.unfold(2, self.heard, 1).transpose(-1, -2).flatten(3)
        if control is not None:
            control = control.reshape(*control.shape[:2], self.frames, -1)
        vector = self.embedder(
            audio,
            None if state is None else state[..., None].expand(*state.shape, self.frames),
            None if event is None else event[..., None].expand(*event.shape, self.frames),
            control,
        )
        drawn = self.to_map(nn.functional.silu(self.draw(vector))).float()
        picture = nn.functional.silu(drawn.reshape(*drawn.shape[:-1], *self.shape))
        return picture.transpose(2, 3).flatten(3)

    def draft(self, picture: Tensor) -> Tensor:
        """Draft of the network's output in patches, [B, T, N, p * q * C_out] float32."""
        pictures = picture.reshape(*picture.shape[:-1], self.frames, -1).transpose(2, 3)
        out: Tensor = self.to_draft(pictures).float() + self.draft_mean
        out = out.reshape(*out.shape[:-1], -1, self.frame_channels)  # [.., N, p * q, C / frames]
        return out.permute(0, 1, 3, 4, 2, 5).flatten(3)


class ConditionEmbedder(nn.Module):
    """Embeds time, text, audio, state, event and control; diffusers' names where it has them."""

    def __init__(self, config: DenoiserConfig) -> None:
        super().__init__()
        dim = config.inner_dim
        self.freq_dim = config.freq_dim
        self.time_embedder = Mlp(config.freq_dim, dim, nn.SiLU())
        self.time_proj = Linear(dim, 6 * dim)
        if config.text_dim is not None:
            self.text_embedder = Mlp(config.text_dim, dim, nn.GELU(approximate="tanh"))
        if config.audio_dim is not None:
            self.audio_embedder = Mlp(config.audio_dim, dim, nn.SiLU())
            self.audio_position = nn.Parameter(torch.randn(config.audio_tokens, dim) * 0.02)
        self.frame_embedder = FrameEmbedder(
            config, config.audio_tokens * (config.audio_dim or 0), config.control_dim
        )
        if config.condition_map:
            self.condition_map = ConditionMap(config)
        self.config = config

    def embed_time(self, timestep: Tensor, addition: Tensor | None) -> tuple[Tensor, Tensor]:
        """Time embedding and modulation of every frame.

        Args:
            timestep: [B, T] float, 0..1000.
            addition: [B, T, D] float32 or None.

        Returns:
            [B, T, D] and [B, T, 6, D], both float32.
        """
        temb = self.time_embedder(timestep_embedding(timestep, self.freq_dim)).float()
        if addition is not None:
            temb = temb + addition
        modulation = self.time_proj(nn.functional.silu(temb)).float()
        return temb, modulation.unflatten(-1, (6, -1))

    def embed_audio(self, audio: Tensor) -> Tensor:
        """[B, T, A, audio_dim] -> [B, T, A, D]."""
        return self.audio_embedder(audio) + self.audio_position

    def embed_frame(self, conditioning: Conditioning) -> Tensor | None:
        """[B, T, D] float32 to add to the time embedding, None for a model without such parts."""
        audio = conditioning.audio
        embedded: Tensor | None = self.frame_embedder(
            None if audio is None else audio.flatten(2),
            conditioning.state,
            conditioning.event,
            conditioning.control,
        )
        return embedded
