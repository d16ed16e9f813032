"""Roll-back, snapshots and failures: whatever happens in between, the output is the same bits."""

import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from rtgen.config import CacheConfig, SamplingConfig
from rtgen.errors import ConfigError, RtgenError
from rtgen.models.conditioning import Conditioning
from rtgen.models.denoiser import CausalDenoiser
from rtgen.sampling import stream as stream_module
from rtgen.sampling.noise import frame_noise
from rtgen.sampling.passes import NonFiniteError, StreamPass
from rtgen.sampling.stream import ChunkStream, run_passes
from tests.sampling.reference import (
    LATENT_SHAPE,
    SAMPLING,
    make_conditioning,
    make_denoiser,
    make_script,
    make_stream,
    play,
)

CHUNKS = 8


def config(frames: int, mode: str = "absolute", merge: bool = False, sink: int = 1) -> CacheConfig:
    return CacheConfig(
        window=sink + 2 * frames,
        sink=sink,
        frames_per_chunk=frames,
        lead=2 * frames,
        merge_clean_pass=merge,
        position_mode=mode,  # type: ignore[arg-type]
    )


CONFIGS = [
    config(1),
    config(1, merge=True),
    config(1, "relative"),
    config(1, "relative", merge=True),
    config(3, "relative"),
    config(3, merge=True),
]
NAMES = [f"{c.frames_per_chunk}-{c.position_mode}-{c.merge_clean_pass}" for c in CONFIGS]


def run_one(
    stream: ChunkStream, script: Sequence[Conditioning], idle: bool = False
) -> Tensor | None:
    """One forward; begins the scripted chunk of the stream's position if none is running."""
    if not stream.is_running and not (idle and stream.num_owed):
        stream.begin(script[stream.position // stream.cache_config.frames_per_chunk])
    (x0,) = run_passes(stream.denoiser, [stream])
    return x0


def run_out(stream: ChunkStream, script: Sequence[Conditioning], idle: bool = False) -> Tensor:
    """The script's remaining chunks."""
    chunks: list[Tensor] = []
    end = len(script) * stream.cache_config.frames_per_chunk
    while stream.position < end:
        x0 = run_one(stream, script, idle)
        if x0 is not None:
            chunks.append(x0)
    return torch.cat(chunks)


def positions(denoiser: CausalDenoiser, cache: CacheConfig, idle: bool) -> list[int]:
    """Where a stream stands after each forward of `CHUNKS` chunks."""
    stream, script = make_stream(denoiser, cache), make_script(CHUNKS, cache.frames_per_chunk)
    found = [0]
    while stream.position < CHUNKS * cache.frames_per_chunk:
        run_one(stream, script, idle)
        found.append(stream.position)
    return found


def check_rollback(
    cache: CacheConfig,
    make: Callable[[CausalDenoiser, CacheConfig], ChunkStream] = make_stream,
    idle: bool = False,
) -> None:
    """Leaves from every forward of the last chunks by every allowed distance, and replays."""
    denoiser, frames = make_denoiser(num_layers=1), cache.frames_per_chunk
    script, other = make_script(CHUNKS, frames), make_script(CHUNKS, frames, seed=1)
    whole = run_out(make_stream(denoiser, cache), script, idle)
    after = positions(denoiser, cache, idle)
    early = after.index(3 * frames)
    begun = make(denoiser, cache)
    for _ in range(early):
        run_one(begun, script, idle)
    snapshot = begun.snapshot()
    for forwards in range(after.index(5 * frames), after.index(7 * frames) + 1):
        for distance in range(0, cache.lead + 1, frames):
            target = after[forwards] - distance
            stream = make(denoiser, cache)
            stream.restore(snapshot)
            past = [*script[: target // frames], *other[target // frames :]]
            for _ in range(forwards - early):
                run_one(stream, past, idle)
            stream.rollback(distance)
            assert not stream.is_running
            assert torch.equal(run_out(stream, script, idle), whole[target:])
            stream.cache.check_integrity()


@pytest.mark.parametrize("cache", CONFIGS, ids=NAMES)
def test_rollback_then_replay_equals_never_left(cache: CacheConfig) -> None:
    check_rollback(cache)


@pytest.mark.parametrize("frames", [1, 3])
def test_rollback_across_a_clean_pass_run_alone(frames: int) -> None:
    check_rollback(config(frames), idle=True)


class RollsBackOneTooFew(ChunkStream):
    def rollback(self, num_frames: int) -> None:
        super().rollback(max(0, num_frames - self.cache_config.frames_per_chunk))


class KeepsRunning(ChunkStream):
    def rollback(self, num_frames: int) -> None:
        running = self._state.running
        super().rollback(num_frames)
        if num_frames == 0:
            self._state = replace(self._state, running=running)


class NoiseByChunkCount(ChunkStream):
    drawn = 0

    def _noise(self, state: Any, start: int, num_frames: int, step: int) -> Tensor:
        self.drawn += 1
        return torch.stack([frame_noise(state.seed, self.drawn, step, LATENT_SHAPE)] * num_frames)


class NoSpareSlots(ChunkStream):
    """A ring without the `lead` spare slots: rolled back, it reads overwritten frames."""

    def __init__(self, denoiser: CausalDenoiser, cache: CacheConfig, *rest: Any, **more: Any):
        super().__init__(denoiser, cache, *rest, **more)
        ring = self.cache._runs
        spare = cache.lead

        def runs(start: int, frames: int) -> list[tuple[int, int, int]]:
            size = cache.ring_frames - spare
            found = [ring(frame, 1)[0] for frame in range(start, start + frames)]
            return [
                (i, slot if slot < cache.sink else cache.sink + (start + i - cache.sink) % size, 1)
                for i, (_, slot, _) in enumerate(found)
            ]

        self.cache._runs = runs  # type: ignore[method-assign,assignment]


@pytest.mark.parametrize("bug", [RollsBackOneTooFew, KeepsRunning, NoiseByChunkCount, NoSpareSlots])
def test_rollback_check_catches(bug: type[ChunkStream]) -> None:
    def make(denoiser: CausalDenoiser, cache: CacheConfig) -> ChunkStream:
        return bug(denoiser, cache, SAMPLING, latent_shape=LATENT_SHAPE, seed=5)

    with pytest.raises(AssertionError):
        check_rollback(config(1), make)


@pytest.mark.parametrize("merge", [False, True])
def test_rollback_twice_within_lead(merge: bool) -> None:
    denoiser, script = make_denoiser(), make_script(CHUNKS, 1)
    whole = play(make_stream(denoiser, config(1, merge=merge)), script)
    stream = make_stream(denoiser, config(1, merge=merge))
    play(stream, script[:6])
    stream.begin(script[6])
    run_passes(denoiser, [stream])
    stream.rollback(1)
    run_one(stream, script)
    stream.rollback(1)
    assert stream.position == 4
    assert torch.equal(run_out(stream, script), whole[4:])


def test_rollback_is_bounded_by_the_furthest_position() -> None:
    denoiser, script = make_denoiser(), make_script(CHUNKS, 1)
    stream = make_stream(denoiser, config(1))
    play(stream, script[:6])
    for distance in (-1, 3):
        with pytest.raises(ConfigError, match=r"can drop 0 to 2 frames at frame 6 \(lead 2"):
            stream.rollback(distance)
    stream.rollback(2)
    with pytest.raises(ConfigError, match="can drop 0 to 0 frames"):
        stream.rollback(1)
    stream.step(script[4])
    with pytest.raises(ConfigError, match="can drop 0 to 1 frames"):
        stream.rollback(2)
    assert torch.equal(run_out(stream, script), play(make_stream(denoiser, config(1)), script)[5:])


def test_primed_frames_are_never_dropped() -> None:
    denoiser, script = make_denoiser(), make_script(4, 1)
    outputs = []
    for leave in (False, True):
        stream = make_stream(denoiser, config(1))
        stream.prime(torch.ones(2, *LATENT_SHAPE), make_conditioning(2, 50))
        if leave:
            stream.step(script[3])
            with pytest.raises(ConfigError, match="2 primed"):
                stream.rollback(2)
            stream.rollback(1)
            assert (stream.position, stream.num_owed) == (2, 0)
        outputs.append(play(stream, script))
    assert torch.equal(*outputs)


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("owed", [False, True])
def test_rollback_inside_a_chunk_keeps_its_first_frames(merge: bool, owed: bool) -> None:
    """The frames that stay are context as they were; a chunk may then start at any frame."""
    denoiser, script = make_denoiser(), make_script(CHUNKS, 3)
    outputs = []
    for extra in (0, 1):
        stream = make_stream(denoiser, config(3, merge=merge))
        play(stream, script[:4])
        if not owed:
            run_passes(denoiser, [stream])
            if extra:
                stream.begin(script[7])
                run_passes(denoiser, [stream])
        stream.rollback(2)
        assert (stream.position, stream.num_owed) == (10, int(owed))
        x0 = stream.step(script[4])
        assert stream.position == 13
        kept = [tensor.clone() for tensor in stream.cache.read(9, 1)]
        outputs.append((x0, *kept, stream.step(script[5])))
    for first, second in zip(*outputs, strict=True):
        assert torch.equal(first, second)


def test_rollback_returns_to_the_prompt_of_its_position() -> None:
    """After a dropped prompt change the replay merges as the stream did that never left."""
    denoiser = make_denoiser(text_dim=5)
    generator = torch.Generator().manual_seed(2)
    old, new = (torch.randn(1, 4, 5, generator=generator) for _ in range(2))
    cache = config(1, merge=True)

    def script(prompt: Tensor) -> list[Conditioning]:
        return [make_conditioning(1, i, denoiser.config, prompt) for i in range(CHUNKS)]

    whole = play(make_stream(denoiser, cache), script(old))
    stream = make_stream(denoiser, cache)
    play(stream, script(old)[:5])
    play(stream, script(new)[5:7])
    stream.rollback(2)
    stream.begin(script(old)[5])
    due = stream.next_pass()
    assert due is not None
    assert due.kind == "merged"
    assert torch.equal(run_out(stream, script(old)), whole[5:])


@pytest.mark.parametrize("cache", CONFIGS, ids=NAMES)
def test_restored_fresh_stream_goes_on_alike(cache: CacheConfig) -> None:
    """From every forward; the stream itself goes on too, and the snapshot does not notice."""
    denoiser, frames = make_denoiser(num_layers=1), cache.frames_per_chunk
    script, other = make_script(CHUNKS, frames), make_script(CHUNKS, frames, seed=1)
    whole = play(make_stream(denoiser, cache), script)
    after = positions(denoiser, cache, idle=False)
    for forwards in range(after.index(5 * frames), after.index(7 * frames)):
        stream = make_stream(denoiser, cache)
        for _ in range(forwards):
            run_one(stream, script)
        snapshot = stream.snapshot()
        run_out(stream, [*script[:6], *other[6:]])
        fresh = make_stream(denoiser, cache, SamplingConfig(timesteps=(9.0,)), seed=77)
        play(fresh, other[:2])
        fresh.restore(snapshot)
        assert torch.equal(run_out(fresh, script), whole[after[forwards] :])
        stream.restore(snapshot)
        assert torch.equal(run_out(stream, script), whole[after[forwards] :])


def test_restore_check_catches_a_snapshot_that_shares_the_ring() -> None:
    denoiser, script = make_denoiser(), make_script(CHUNKS, 1)
    stream = make_stream(denoiser, config(1))
    play(stream, script[:5])
    with patch.object(Tensor, "clone", lambda self: self):
        snapshot = stream.snapshot()
    run_out(stream, [*script[:6], *make_script(CHUNKS, 1, seed=1)[6:]])
    fresh = make_stream(denoiser, config(1))
    fresh.restore(snapshot)
    assert not torch.equal(
        run_out(fresh, script), play(make_stream(denoiser, config(1)), script)[5:]
    )


@pytest.mark.parametrize("merge", [False, True])
def test_snapshot_survives_pickling(merge: bool) -> None:
    denoiser, script = make_denoiser(), make_script(CHUNKS, 1)
    stream = make_stream(denoiser, config(1, merge=merge))
    play(stream, script[:5])
    snapshot = pickle.loads(pickle.dumps(stream.snapshot()))
    fresh = make_stream(denoiser, config(1, merge=merge))
    fresh.restore(snapshot)
    assert torch.equal(run_out(fresh, script), run_out(stream, script))


def test_rollback_after_restore() -> None:
    denoiser, script = make_denoiser(), make_script(CHUNKS, 1)
    stream = make_stream(denoiser, config(1, merge=True))
    whole = play(stream, script[:7])
    fresh = make_stream(denoiser, config(1, merge=True))
    fresh.restore(stream.snapshot())
    fresh.rollback(2)
    assert torch.equal(run_out(fresh, script[:7]), whole[5:])


def test_snapshot_tensors_are_usable_outside_inference_mode() -> None:
    denoiser = make_denoiser()
    with torch.inference_mode():
        stream = make_stream(denoiser, config(1, merge=True))
        x0 = play(stream, make_script(3, 1))
        snapshot = stream.snapshot()
    (owed,) = snapshot.state.owed
    for tensor in (snapshot.cache.keys, snapshot.cache.values, owed.context):
        assert not tensor.is_inference()
    assert not stream.step(make_conditioning(1, 8)).is_inference()
    assert x0.is_inference()  # the caller's own torch.cat


def test_restore_refuses_another_form() -> None:
    denoiser = make_denoiser()
    snapshot = make_stream(denoiser, config(1)).snapshot()
    with pytest.raises(ConfigError, match="cache_config"):
        make_stream(denoiser, config(3)).restore(snapshot)
    with pytest.raises(ConfigError, match="latent_shape"):
        make_stream(denoiser, config(1), latent_shape=(4, 4, 8)).restore(snapshot)
    with pytest.raises(ConfigError, match="keys"):
        make_stream(make_denoiser(num_layers=1), config(1)).restore(snapshot)


class Planted(RuntimeError):
    """The exception that the tests inject."""


@contextmanager
def raise_once(module: nn.Module, call: int) -> Iterator[None]:
    """Makes one forward of a module raise after it has run."""
    calls = 0

    def hook(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == call + 1:
            raise Planted

    with module.register_forward_hook(hook):
        yield


def check_failures(cache: CacheConfig, make: Callable[..., ChunkStream] = make_stream) -> None:
    """Raises in every layer of every pass of three chunks beyond the window, then goes on."""
    denoiser, frames = make_denoiser(), cache.frames_per_chunk
    script = make_script(6, frames)
    whole = play(make_stream(denoiser, cache), script)
    begun = make(denoiser, cache)
    play(begun, script[:3])
    snapshot = begun.snapshot()
    modules = [*denoiser.blocks, denoiser.proj_out]
    passes = 3 * SAMPLING.num_inference_steps + (0 if cache.merge_clean_pass else 3)
    for module in modules:
        for call in range(passes):
            stream = make(denoiser, cache)
            stream.restore(snapshot)
            chunks, failures = [], 0
            with raise_once(module, call):
                while stream.position < 6 * frames:
                    if not stream.is_running:
                        stream.begin(script[stream.position // frames])
                    state, committed = stream._state, stream.cache.committed
                    try:
                        (x0,) = run_passes(denoiser, [stream])
                    except Planted:
                        failures += 1
                        assert stream._state is state
                        assert stream.cache.committed == committed
                        stream.cache.check_integrity()
                        continue
                    if x0 is not None:
                        chunks.append(x0)
            assert failures == 1
            assert torch.equal(torch.cat(chunks), whole[3 * frames :])


@pytest.mark.parametrize("cache", CONFIGS, ids=NAMES)
def test_failure_in_any_layer_of_any_pass_leaves_the_committed_state(cache: CacheConfig) -> None:
    check_failures(cache)


def test_failure_check_catches_a_discard_one_frame_early() -> None:
    def discard(self: StreamPass) -> None:
        self.cache.cache.discard(self.cache.start_frame - 1, len(self.latents))

    with patch.object(StreamPass, "discard", discard), pytest.raises(AssertionError):
        check_failures(config(1))


def test_failure_check_catches_a_stream_that_advances_first() -> None:
    class Hasty(ChunkStream):
        def next_pass(self) -> StreamPass | None:
            due = super().next_pass()
            running = self._state.running
            if due is not None and due.kind == "noisy" and running is not None and not due.emits:
                ahead = replace(running, step=running.step + 1)
                self._state = replace(self._state, running=ahead)
            return due

    def make(denoiser: CausalDenoiser, cache: CacheConfig) -> ChunkStream:
        return Hasty(denoiser, cache, SAMPLING, latent_shape=LATENT_SHAPE, seed=5)

    with pytest.raises(AssertionError):
        check_failures(config(1), make)


@pytest.mark.parametrize("part", ["chunk_noise", "prepare"])
def test_failed_begin_leaves_the_stream_as_it_was(part: str) -> None:
    denoiser, script = make_denoiser(), make_script(4, 1)
    whole = play(make_stream(denoiser, config(1)), script)
    stream = make_stream(denoiser, config(1))
    play(stream, script[:2])
    owner = stream_module if part == "chunk_noise" else denoiser
    with patch.object(owner, part, side_effect=Planted), pytest.raises(Planted):
        stream.begin(script[2])
    assert not stream.is_running
    assert torch.equal(run_out(stream, script), whole[2:])


def test_failed_renoising_leaves_the_stream_as_it_was() -> None:
    denoiser, script = make_denoiser(), make_script(4, 1)
    whole = play(make_stream(denoiser, config(1, merge=True)), script)
    stream = make_stream(denoiser, config(1, merge=True))
    play(stream, script[:2])
    stream.begin(script[2])
    with patch.object(stream_module, "chunk_noise", side_effect=Planted), pytest.raises(Planted):
        run_passes(denoiser, [stream])
    assert torch.equal(run_out(stream, script), whole[2:])


def test_failed_prime_leaves_the_stream_as_it_was() -> None:
    denoiser, script = make_denoiser(), make_script(2, 1)
    latents, conditioning = torch.ones(3, *LATENT_SHAPE), make_conditioning(3, 7)
    good, bad = make_stream(denoiser, config(1)), make_stream(denoiser, config(1))
    good.prime(latents, conditioning)
    with (
        raise_once(denoiser.condition_embedder.frame_embedder.audio_pool, 1),
        pytest.raises(Planted),
    ):
        bad.prime(latents, conditioning)
    assert (bad.position, bad.num_owed) == (0, 0)
    bad.prime(latents, conditioning)
    assert torch.equal(play(bad, script), play(good, script))


@contextmanager
def poison(module: nn.Module, row: int = 0) -> Iterator[None]:
    """Makes one row of a module's output NaN."""

    def hook(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        output = output.clone()
        output[row] = torch.nan
        return output

    with module.register_forward_hook(hook):
        yield


@pytest.mark.parametrize("backend", ["sdpa", "naive"])
@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("forwards", [0, 1, 2, 3])
def test_nan_is_refused_and_leaves_no_trace(forwards: int, merge: bool, backend: str) -> None:
    denoiser, script = make_denoiser(), make_script(CHUNKS, 1)
    denoiser.attention_backend = backend
    whole = play(make_stream(denoiser, config(1, merge=merge)), script)
    stream = make_stream(denoiser, config(1, merge=merge))
    play(stream, script[:5])
    stream.begin(script[5])
    chunks = []
    for _ in range(forwards):
        x0 = run_one(stream, script)
        chunks += [] if x0 is None else [x0]
    if not stream.is_running:
        stream.begin(script[stream.position])
    with poison(denoiser.blocks[0]), pytest.raises(NonFiniteError, match="stream 0") as caught:
        run_passes(denoiser, [stream])
    assert caught.value.rows == (0,)
    assert isinstance(caught.value, RtgenError)
    stream.cache.check_integrity()
    assert torch.equal(torch.cat([*chunks, run_out(stream, script)]), whole[5:])


def check_nan_behind_a_hole() -> None:
    """A NaN in slots that a rolled-back stream masks out: 0 * NaN would be NaN again."""
    denoiser, script = make_denoiser(), make_script(CHUNKS, 1)
    denoiser.attention_backend = "naive"
    whole = play(make_stream(denoiser, config(1)), script)
    for start in range(4, 8):
        stream = make_stream(denoiser, config(1))
        play(stream, script[:start])
        stream.begin(script[start])
        run_passes(denoiser, [stream])
        with poison(denoiser.blocks[0]), pytest.raises(NonFiniteError):
            run_passes(denoiser, [stream])
        stream.rollback(2)
        assert torch.equal(run_out(stream, script), whole[start - 2 :])


def test_nan_of_a_failed_pass_does_not_reach_a_rolled_back_stream() -> None:
    check_nan_behind_a_hole()


def test_hole_check_catches_a_missing_discard() -> None:
    with (
        patch.object(StreamPass, "discard", lambda self: None),
        pytest.raises((AssertionError, NonFiniteError)),
    ):
        check_nan_behind_a_hole()


def test_complete_refuses_nan_too() -> None:
    stream = make_stream(make_denoiser(), config(1))
    stream.begin(make_conditioning(1, 0))
    state = stream._state
    with pytest.raises(NonFiniteError):
        stream.complete(torch.full((1, *LATENT_SHAPE), torch.inf))
    assert stream._state is state


def test_unchecked_stream_lets_nan_through() -> None:
    stream = make_stream(make_denoiser(), config(1), check_finite=False)
    with poison(stream.denoiser.proj_out):
        assert stream.step(make_conditioning(1, 0)).isnan().all()
