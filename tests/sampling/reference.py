"""A tiny denoiser, conditioning to feed it, and the slow way to sample: no cache at all.

`whole_clip` recomputes the whole history densely at every step. What a chunk may see is spelled
out frame by frame, and in relative mode the sink's keys are turned by an explicit angle.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from rtgen.config import CacheConfig, DenoiserConfig, SamplingConfig
from rtgen.models.blocks import DenseAttention
from rtgen.models.conditioning import Conditioning
from rtgen.models.denoiser import CausalDenoiser
from rtgen.sampling.noise import CLEAN_STEP, frame_noise
from rtgen.sampling.schedulers import FlowMatchSchedule
from rtgen.sampling.stream import ChunkStream, run_passes
from tests.toy import CHANNELS, HEIGHT, WIDTH, toy_conditioning, toy_config, toy_denoiser

LATENT_SHAPE = (CHANNELS, HEIGHT, WIDTH)
CONFIG = toy_config(audio_dim=3, audio_tokens=2, num_states=3, freq_dim=16)
SAMPLING = SamplingConfig(timesteps=(1000, 500), warp=True)


def make_denoiser(**changes: Any) -> CausalDenoiser:
    """A toy with audio and state, every parameter random, so that no part can be left out."""
    return toy_denoiser(replace(CONFIG, **changes))


def make_conditioning(
    num_frames: int, seed: int, config: DenoiserConfig = CONFIG, prompt: Tensor | None = None
) -> Conditioning:
    """Random conditioning of some frames under a prompt of the caller's."""
    return replace(toy_conditioning(config, num_frames, seed=seed), prompt_embeds=prompt)


def make_script(
    chunks: int, frames_per_chunk: int, seed: int = 0, config: DenoiserConfig = CONFIG
) -> list[Conditioning]:
    """Conditioning of consecutive chunks."""
    return [make_conditioning(frames_per_chunk, 1000 * seed + i, config) for i in range(chunks)]


def make_stream(
    denoiser: CausalDenoiser,
    cache_config: CacheConfig,
    sampling_config: SamplingConfig = SAMPLING,
    *,
    latent_shape: tuple[int, int, int] = LATENT_SHAPE,
    seed: int = 5,
    **more: Any,
) -> ChunkStream:
    """A stream of the toy's latent size."""
    return ChunkStream(
        denoiser, cache_config, sampling_config, latent_shape=latent_shape, seed=seed, **more
    )


def play(stream: ChunkStream, script: Sequence[Conditioning]) -> Tensor:
    """Generates one chunk after the other, each begun as soon as the last one is out."""
    return torch.cat([stream.step(conditioning) for conditioning in script])


def play_idle(stream: ChunkStream, script: Sequence[Conditioning]) -> Tensor:
    """The same, but every clean pass is run before the next chunk is begun."""
    chunks = []
    for conditioning in script:
        while stream.num_owed:
            run_passes(stream.denoiser, [stream])
        chunks.append(stream.step(conditioning))
    return torch.cat(chunks)


def whole_clip(
    denoiser: CausalDenoiser,
    cache_config: CacheConfig,
    sampling_config: SamplingConfig,
    script: Sequence[Conditioning],
    *,
    seed: int = 5,
    given: Sequence[tuple[Tensor, Conditioning]] = (),
    latent_shape: tuple[int, int, int] = LATENT_SHAPE,
) -> Tensor:
    """What a stream must produce: [T, C, h, w] of the scripted chunks.

    Args:
        denoiser: the network.
        cache_config: window, sink, position mode; the rest is not read.
        sampling_config: steps and noise.
        script: conditioning of each chunk.
        seed: of the noise.
        given: clean chunks before the first one, with their conditioning.
        latent_shape: of one frame.
    """
    schedule = FlowMatchSchedule.from_config(sampling_config, denoiser.config.prediction_type)
    context = torch.zeros(0, *latent_shape)
    chunks: list[tuple[int, int]] = []
    history: list[Conditioning] = []
    produced = []

    def noise(start: int, frames: int, step: int) -> Tensor:
        return torch.stack(
            [frame_noise(seed, start + i, step, latent_shape) for i in range(frames)]
        )

    for clean, conditioning in [*given, *((None, item) for item in script)]:
        start = len(context)
        frames = len(clean) if clean is not None else _num_frames(conditioning)
        chunks.append((start, start + frames))
        history.append(conditioning)
        x0 = torch.empty(0) if clean is None else clean
        if clean is None:
            latents = noise(start, frames, 0)
            for step, sigma in enumerate(schedule.sigmas):
                timestep = torch.tensor(
                    [schedule.context_timestep] * start + [schedule.timesteps[step]] * frames
                )
                output = dense_pass(
                    denoiser, cache_config, chunks, torch.cat((context, latents)), timestep, history
                )[start:]
                flow = output.double()
                x0 = flow if schedule.prediction_type == "sample" else latents - sigma * flow
                if step + 1 < schedule.num_steps:
                    level = schedule.sigmas[step + 1]
                    fresh = noise(start, frames, step + 1).double()
                    if sampling_config.renoise == "ode":
                        fresh = (latents - (1 - sigma) * x0) / sigma
                    latents = ((1 - level) * x0 + level * fresh).float()
            produced.append(x0.float())
        sigma = sampling_config.context_noise
        finished = (1 - sigma) * x0 + sigma * noise(start, frames, CLEAN_STEP)
        context = torch.cat((context, finished.float()))
    return torch.cat(produced)


def dense_pass(
    denoiser: CausalDenoiser,
    cache_config: CacheConfig,
    chunks: Sequence[tuple[int, int]],
    latents: Tensor,
    timestep: Tensor,
    history: Sequence[Conditioning],
) -> Tensor:
    """One forward over all frames so far, each chunk seeing what it may see; [T, C, h, w]."""
    joined = Conditioning(
        prompt_embeds=history[-1].prompt_embeds,
        audio=_join([item.audio for item in history]),
        state=_join([item.state for item in history]),
    )
    with torch.no_grad(), dense_attention(cache_config, chunks):
        prepared = denoiser.prepare(joined)
        output: Tensor = denoiser(latents[None], timestep[None], prepared)
    return output[0]


@contextmanager
def dense_attention(cache_config: CacheConfig, chunks: Sequence[tuple[int, int]]) -> Iterator[None]:
    """Replaces dense self-attention by a table of who sees whom, and from how far away.

    In relative mode a chunk sees the sink later than it was written; turning the sink's keys by
    some frames or the queries by as many in the other direction gives the same scores.
    """
    window, sink = cache_config.window, cache_config.sink
    frames = chunks[-1][1]
    seen = torch.zeros(frames, frames, dtype=torch.bool)
    delay = torch.zeros(frames, dtype=torch.float64)
    for start, end in chunks:
        for query in range(start, end):
            delay[query] = max(0, end - window)
            allowed = [key < sink or key >= end - (window - sink) for key in range(end)]
            seen[query, :end] = torch.tensor(allowed)

    def attend(self: DenseAttention, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        n, heads, d = q.shape[1] // frames, *q.shape[2:]
        q, k, v = (x.reshape(frames, n, heads, d) for x in (q, k, v))
        scores = torch.einsum("tnhd,smhd->htnsm", q, k)
        if cache_config.position_mode == "relative" and sink:
            scores[..., :sink, :] = torch.einsum("tnhd,smhd->htnsm", turn(q, -delay), k[:sink])
        scores = scores.masked_fill(~seen[None, :, None, :, None], -torch.inf) / d**0.5
        weights = scores.flatten(-2).softmax(-1).view_as(scores)
        return torch.einsum("htnsm,smhd->tnhd", weights, v).reshape(1, frames * n, heads, d)

    with patch.object(DenseAttention, "__call__", attend):
        yield


def turn(x: Tensor, frames: Tensor) -> Tensor:
    """Queries or keys [T, N, heads, d], each frame moved along time by its entry of `frames`.

    The first pairs of a head turn, by Wan's ladder of frequencies; rows and columns stay.
    """
    x, d = x.clone(), x.shape[-1]
    dim = d - 4 * (d // 6)
    for pair in range(dim // 2):
        angle = (frames * 10000.0 ** (-2 * pair / dim))[:, None, None]
        cos, sin = angle.cos(), angle.sin()
        a, b = x[..., 2 * pair].double(), x[..., 2 * pair + 1].double()
        x[..., 2 * pair] = (a * cos - b * sin).float()
        x[..., 2 * pair + 1] = (a * sin + b * cos).float()
    return x


def _num_frames(conditioning: Conditioning) -> int:
    part = conditioning.audio if conditioning.audio is not None else conditioning.state
    assert part is not None
    return part.shape[1]


def _join(parts: Sequence[Tensor | None]) -> Tensor | None:
    given = [part for part in parts if part is not None]
    return torch.cat(given, dim=1) if given else None
