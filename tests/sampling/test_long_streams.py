"""Streams without an end: positions past every table of the public models, constant memory."""

import gc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.testing import assert_close

from rtgen.config import CacheConfig, SamplingConfig
from rtgen.models import denoiser as denoiser_module
from rtgen.models.conditioning import Conditioning
from rtgen.models.rope import frame_rope
from rtgen.sampling.noise import frame_noise
from rtgen.sampling.stream import ChunkStream
from tests.sampling.reference import dense_pass, make_conditioning, make_denoiser, make_stream

SHAPE = (4, 2, 2)  # one token per frame
CACHE = CacheConfig(window=5, sink=1, lead=1, merge_clean_pass=True)
ONE_STEP = SamplingConfig(timesteps=(1000,), warp=True)
PLAIN = {"audio_dim": None, "audio_tokens": 0}

Step = Callable[[ChunkStream, Conditioning], Tensor]


def check_past_1024(cache: CacheConfig, rope: Callable[..., Tensor] = frame_rope) -> None:
    """Chunks of a long stream, each recomputed densely from everything before it."""
    denoiser, frames = make_denoiser(num_layers=1, **PLAIN), 1028
    conditioning = make_conditioning(1, 0, denoiser.config)
    stream = make_stream(denoiser, cache, ONE_STEP, latent_shape=SHAPE)
    with patch.object(denoiser_module, "frame_rope", rope):
        clip = torch.cat([stream.step(conditioning) for _ in range(frames)])
    assert stream.position == frames
    chunks = [(frame, frame + 1) for frame in range(frames)]
    for frame in (22, 1024, 1027):
        noise = frame_noise(5, frame, 0, SHAPE)
        latents = torch.cat((clip[:frame], noise[None]))
        timestep = torch.zeros(frame + 1)
        timestep[-1] = 1000.0
        history = [conditioning] * (frame + 1)
        flow = dense_pass(denoiser, cache, chunks[: frame + 1], latents, timestep, history)[-1]
        assert_close(clip[frame], noise - flow)


@pytest.mark.parametrize("mode", ["absolute", "relative"])
def test_positions_past_1024_are_as_good_as_any(mode: str) -> None:
    check_past_1024(replace(CACHE, position_mode=mode))  # type: ignore[arg-type]


def test_long_check_catches_positions_that_wrap() -> None:
    def wrapping(positions: range, *rest: Any) -> Tensor:
        return frame_rope([position % 1024 for position in positions], *rest)

    with pytest.raises(AssertionError, match="not close"):
        check_past_1024(CACHE, wrapping)


def tensor_bytes() -> int:
    """Bytes of all storages that Python objects hold."""
    gc.collect()
    storages: dict[int, int] = {}
    for item in gc.get_objects():
        # Tracers of other tests may have left fake tensors, which hold no memory.
        if issubclass(type(item), Tensor) and not isinstance(item, FakeTensor):
            storage = item.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def resident_bytes() -> int:
    """Resident memory of this process, from Linux's statm (in pages of 4 KiB)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def check_constant_memory(warm_up: int, chunks: int, step: Step) -> None:
    """Plays `chunks` chunks; the first `warm_up` fill the ring and the bounded tables."""
    denoiser = make_denoiser(num_layers=1, **PLAIN)
    script = [make_conditioning(1, index, denoiser.config) for index in range(16)]
    stream = make_stream(denoiser, CACHE, ONE_STEP, latent_shape=SHAPE)
    for index in range(warm_up):
        step(stream, script[index % 16])
    held, resident = tensor_bytes(), resident_bytes()
    for index in range(warm_up, chunks):
        x0 = step(stream, script[index % 16])
    assert stream.position == chunks
    assert x0.isfinite().all()
    del x0
    # Not one number per chunk: what tracers of other tests build meanwhile is no part of a stream.
    assert tensor_bytes() - held < 4 * (chunks - warm_up)
    assert resident_bytes() - resident < 8 * 2**20
    stream.cache.check_integrity()


@pytest.mark.slow
def test_ten_thousand_chunks_take_constant_memory() -> None:
    check_constant_memory(600, 10_000, ChunkStream.step)


def test_memory_check_catches_a_history_that_is_kept() -> None:
    kept: list[Tensor] = []

    def step(stream: ChunkStream, conditioning: Conditioning) -> Tensor:
        kept.append(stream.step(conditioning))
        return kept[-1]

    check_constant_memory(300, 330, ChunkStream.step)
    with pytest.raises(AssertionError):
        check_constant_memory(300, 330, step)
