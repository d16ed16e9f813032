"""Slow, obvious references, written from the equations and sharing no code with the project.

`SlowStream` runs the denoiser chunk by chunk in float64 and remembers, for every layer and frame,
the keys before rotation. For every chunk it gathers the frames it may see one by one, gives them
positions, rotates pair by pair and attends query by query.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from rtgen.config import CacheConfig
from rtgen.models.conditioning import Conditioning
from rtgen.models.denoiser import CausalDenoiser

_Activation = Callable[[Tensor], Tensor]


def slow_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Attention of q [N, heads, d] over k, v [S, heads, d], query by query; mask [N, S] bool."""
    out = torch.empty_like(q)
    for i in range(len(q)):
        allowed = torch.ones(len(k), dtype=torch.bool) if mask is None else mask[i]
        scores = (k[allowed] * q[i]).sum(-1) / math.sqrt(q.shape[-1])  # [S, heads]
        weights = torch.exp(scores - scores.amax(0))
        out[i] = ((weights / weights.sum(0))[..., None] * v[allowed]).sum(0)
    return out


def slow_rotate(x: Tensor, frame: int, columns: int) -> Tensor:
    """Rotates the keys or queries of one frame, x [N, heads, d], tokens row by row."""
    d = x.shape[-1]
    spatial = 2 * (d // 6)
    tokens = torch.arange(len(x), dtype=torch.float64)
    frames = torch.full_like(tokens, frame)
    out, start = x.clone(), 0
    for dim, position in (
        (d - 2 * spatial, frames),
        (spatial, tokens // columns),
        (spatial, tokens % columns),
    ):
        for i in range(dim // 2):
            angle = (position / 10000 ** (2 * i / dim))[:, None]
            a, b = x[..., start + 2 * i], x[..., start + 2 * i + 1]
            out[..., start + 2 * i] = a * angle.cos() - b * angle.sin()
            out[..., start + 2 * i + 1] = a * angle.sin() + b * angle.cos()
        start += dim
    return out


class SlowStream:
    """One stream of a denoiser under a cache configuration, as the definition says.

    Args:
        denoiser: whose weights are read.
        cache_config: window, sink and position mode.

    Frames that were never run have zero keys and values.
    """

    def __init__(self, denoiser: CausalDenoiser, cache_config: CacheConfig) -> None:
        self.config = denoiser.config
        self.cache_config = cache_config
        self.weights = {n: p.detach().double() for n, p in denoiser.state_dict().items()}
        self.past: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def chunk(
        self, latents: Tensor, timestep: Tensor, conditioning: Conditioning, start: int
    ) -> Tensor:
        """One pass over frames start.. of latents [F, C, h, w], timestep [F]; [F, C_out, h, w]."""
        frames, _, height, width = latents.shape
        columns = width // self.config.patch_size[2]
        pictures = [self._picture(conditioning, f) for f in range(frames)]
        x = [
            self._patches(frame) + self._to_tokens(picture)
            for frame, picture in zip(latents.double(), pictures, strict=True)
        ]
        times = [self._time(timestep, conditioning, f) for f in range(frames)]
        for layer in range(self.config.num_layers):
            x = self._block(layer, x, [m for _, m in times], conditioning, start, columns)
        outs = []
        for f in range(frames):
            shift, scale = self.weights["scale_shift_table"][0] + times[f][0]
            h = self._linear("proj_out", self._norm(x[f]) * (1 + scale) + shift)
            outs.append(self._unpatch(h + self._draft(pictures[f]), height, width))
        return torch.stack(outs)

    def _visible(self, end: int) -> list[int]:
        config = self.cache_config
        sink = [frame for frame in range(config.sink) if frame < end]
        recent = [f for f in range(end - (config.window - config.sink), end) if f >= config.sink]
        return sink + recent

    def _block(
        self,
        layer: int,
        x: list[Tensor],
        modulation: list[Tensor],
        conditioning: Conditioning,
        start: int,
        columns: int,
    ) -> list[Tensor]:
        name, end = f"blocks.{layer}.", start + len(x)
        m = [self.weights[name + "scale_shift_table"][0] + e for e in modulation]
        queries = []
        for f in range(len(x)):
            h = self._norm(x[f]) * (1 + m[f][1]) + m[f][0]
            q, k, v = (self._project(name + "attn1", part, h) for part in "qkv")
            queries.append(q)
            self.past[layer, start + f] = k, v
        visible = self._visible(end)
        if self.cache_config.position_mode == "relative":
            positions = {frame: index for index, frame in enumerate(visible)}
        else:
            positions = {frame: frame for frame in visible}
        unknown = (torch.zeros_like(queries[0]), torch.zeros_like(queries[0]))
        seen = [self.past.get((layer, frame), unknown) for frame in visible]
        keys = torch.cat(
            [slow_rotate(k, positions[g], columns) for g, (k, _) in zip(visible, seen, strict=True)]
        )
        values = torch.cat([v for _, v in seen])
        outs = []
        for f in range(len(x)):
            q = slow_rotate(queries[f], positions[start + f], columns)
            attended = slow_attention(q, keys, values).flatten(1)
            h = x[f] + m[f][2] * self._linear(name + "attn1.to_out.0", attended)
            h = h + self._cross(name, "attn2", "norm2", h, self._text(conditioning))
            h = h + self._cross(name, "audio_attn", "audio_norm", h, self._audio(conditioning, f))
            y = self._norm(h) * (1 + m[f][4]) + m[f][3]
            y = self._gelu(self._linear(name + "ffn.net.0.proj", y))
            outs.append(h + m[f][5] * self._linear(name + "ffn.net.2", y))
        return outs

    def _cross(
        self, block: str, attn: str, norm: str, x: Tensor, context: Tensor | None
    ) -> Tensor | float:
        if context is None:
            return 0.0
        h = self._norm(x) * self.weights[f"{block}{norm}.weight"]
        h = h + self.weights[f"{block}{norm}.bias"]
        q = self._project(block + attn, "q", h)
        k, v = (self._project(block + attn, part, context) for part in "kv")
        return self._linear(f"{block}{attn}.to_out.0", slow_attention(q, k, v).flatten(1))

    def _project(self, attn: str, part: str, x: Tensor) -> Tensor:
        y = self._linear(f"{attn}.to_{part}", x)
        if part != "v":
            y = y / torch.sqrt((y * y).mean(-1, keepdim=True) + self.config.eps)
            y = y * self.weights[f"{attn}.norm_{part}.weight"]
        return y.reshape(len(y), self.config.num_attention_heads, -1)

    def _time(self, timestep: Tensor, conditioning: Conditioning, f: int) -> tuple[Tensor, Tensor]:
        half = self.config.freq_dim // 2
        angles = [float(timestep[f]) * 10000 ** (-i / half) for i in range(half)]
        wave = [math.cos(a) for a in angles] + [math.sin(a) for a in angles]
        e = self._mlp("time_embedder", torch.tensor(wave, dtype=torch.float64), _silu)
        e = e + self._addition(conditioning, f)
        return e, self._linear("condition_embedder.time_proj", _silu(e)).reshape(6, -1)

    def _addition(self, conditioning: Conditioning, f: int) -> Tensor:
        """What frame f is conditioned on besides time and text, [D]."""
        audio, control = conditioning.audio, conditioning.control
        return self._embed(
            "frame_embedder",
            None if audio is None else audio[0, f].double().flatten(),
            None if control is None else control[0, f].double(),
            conditioning,
            f,
        )

    def _embed(
        self,
        name: str,
        audio: Tensor | None,
        control: Tensor | None,
        conditioning: Conditioning,
        f: int,
    ) -> Tensor:
        e = torch.zeros(self.config.inner_dim, dtype=torch.float64)
        if audio is not None:
            e = e + self._mlp(f"{name}.audio_pool", audio, _silu)
        if control is not None:
            scale = self.weights[f"condition_embedder.{name}.control_scale"]
            e = e + self._mlp(f"{name}.control_embedder", control * scale, _silu)
        for part in ("state", "event"):
            value = getattr(conditioning, part)
            if value is not None:
                table = self.weights[f"condition_embedder.{name}.{part}_embedder.weight"]
                e = e + table[int(value[0, f])]
        return e

    def _picture(self, conditioning: Conditioning, f: int) -> list[Tensor] | None:
        """The conditioning of each pixel frame of latent frame f on its tokens, [N, c] each."""
        c, count = self.config.condition_map, self.config.frames_per_latent
        if not c:
            return None
        pictures = []
        for pixel_frame in range(count):
            audio = control = None
            if conditioning.audio is not None:
                tokens = conditioning.audio[0, f].double()
                audio = tokens[pixel_frame : pixel_frame + len(tokens) - count + 1].flatten()
            if conditioning.control is not None:
                size = self.config.control_dim // count
                control = conditioning.control[0, f].double()[pixel_frame * size :][:size]
            vector = self._embed("condition_map.embedder", audio, control, conditioning, f)
            drawn = self._mlp("condition_map.draw", vector, _silu)
            numbers = self._linear("condition_embedder.condition_map.to_map", _silu(drawn)).tolist()
            rows = [numbers[i : i + c] for i in range(0, len(numbers), c)]
            pictures.append(_silu(torch.tensor(rows, dtype=torch.float64)))
        return pictures

    def _to_tokens(self, pictures: list[Tensor] | None) -> Tensor | float:
        if pictures is None:
            return 0.0
        return self._linear("condition_embedder.condition_map.to_tokens", torch.cat(pictures, 1))

    def _draft(self, pictures: list[Tensor] | None) -> Tensor | float:
        """[N, p * q * C]: for each pixel of a patch the channels of one frame after the other."""
        if pictures is None:
            return 0.0
        name, channels = "condition_embedder.condition_map.", self.config.out_channels
        own = channels // len(pictures)
        _, p, q = self.config.patch_size
        out = torch.empty(len(pictures[0]), p * q * channels, dtype=torch.float64)
        for index, picture in enumerate(pictures):
            values = self._linear(name + "to_draft", picture) + self.weights[name + "draft_mean"]
            for pixel in range(p * q):
                place = pixel * channels + index * own
                out[:, place : place + own] = values[:, pixel * own : (pixel + 1) * own]
        return out

    def _text(self, conditioning: Conditioning) -> Tensor | None:
        if conditioning.prompt_embeds is None:
            return None
        return self._mlp("text_embedder", conditioning.prompt_embeds[0].double(), _gelu_tanh)

    def _audio(self, conditioning: Conditioning, f: int) -> Tensor | None:
        if conditioning.audio is None:
            return None
        tokens = self._mlp("audio_embedder", conditioning.audio[0, f].double(), _silu)
        return tokens + self.weights["condition_embedder.audio_position"]

    def _mlp(self, name: str, x: Tensor, act: _Activation) -> Tensor:
        name = f"condition_embedder.{name}.linear_"
        return self._linear(name + "2", act(self._linear(name + "1", x)))

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return x @ self.weights[name + ".weight"].T + self.weights[name + ".bias"]

    def _norm(self, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True)
        variance = (centred * centred).mean(-1, keepdim=True)
        return centred / torch.sqrt(variance + self.config.eps)

    def _gelu(self, x: Tensor) -> Tensor:
        if self.config.activation_fn == "gelu":
            return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))
        return _gelu_tanh(x)

    def _patches(self, frame: Tensor) -> Tensor:
        _, p, q = self.config.patch_size
        kernel, bias = self.weights["patch_embedding.weight"], self.weights["patch_embedding.bias"]
        tokens = []
        for row in range(0, frame.shape[1], p):
            for column in range(0, frame.shape[2], q):
                patch = frame[:, row : row + p, column : column + q]
                tokens.append((kernel[:, :, 0] * patch).sum((1, 2, 3)) + bias)
        x = torch.stack(tokens)
        if self.config.position_grid is not None:
            x = x + self.weights["position_embedding"]
        return x

    def _unpatch(self, tokens: Tensor, height: int, width: int) -> Tensor:
        _, p, q = self.config.patch_size
        out = tokens.new_empty(self.config.out_channels, height, width)
        columns = width // q
        for token, values in enumerate(tokens.reshape(len(tokens), p, q, -1)):
            row, column = token // columns * p, token % columns * q
            out[:, row : row + p, column : column + q] = values.permute(2, 0, 1)
        return out


def _silu(x: Tensor) -> Tensor:
    return x / (1 + torch.exp(-x))


def _gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))
