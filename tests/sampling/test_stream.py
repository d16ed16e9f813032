"""A stream against the whole clip computed without a cache, and what it promises to its callers."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from rtgen.config import CacheConfig, SamplingConfig
from rtgen.errors import ConfigError, ShapeError
from rtgen.models.conditioning import Conditioning
from rtgen.sampling import stream as stream_module
from rtgen.sampling.noise import frame_noise
from rtgen.sampling.state import cut_frames
from rtgen.sampling.stream import ChunkStream, run_passes
from tests.sampling.reference import (
    CONFIG,
    LATENT_SHAPE,
    SAMPLING,
    make_conditioning,
    make_denoiser,
    make_script,
    make_stream,
    play,
    play_idle,
    whole_clip,
)

# (frames_per_chunk, window, sink)
SHAPES = [(1, 3, 0), (1, 4, 1), (1, 6, 3), (3, 6, 0), (3, 7, 1), (3, 9, 3)]
MODES = ["absolute", "relative"]
CLIP_FRAMES = 24  # beyond the 21 that public models were trained on

Play = Callable[[ChunkStream, Sequence[Conditioning]], Tensor]


def cache(shape: tuple[int, int, int], mode: str = "absolute", merge: bool = False) -> CacheConfig:
    frames, window, sink = shape
    return CacheConfig(
        window=window,
        sink=sink,
        frames_per_chunk=frames,
        lead=3,
        merge_clean_pass=merge,
        position_mode=mode,  # type: ignore[arg-type]
    )


def check_whole_clip(
    cache_config: CacheConfig,
    sampling: SamplingConfig = SAMPLING,
    *,
    play: Play = play,
    stream_sampling: SamplingConfig | None = None,
    frames: int = CLIP_FRAMES,
    **changes: object,
) -> None:
    """Compares a stream with separate clean passes, and one that merges them, with the oracle."""
    denoiser = make_denoiser(**changes)
    length = cache_config.frames_per_chunk
    script = make_script(frames // length, length, config=denoiser.config)
    clip = whole_clip(denoiser, cache_config, sampling, script)
    outputs = []
    for merge in (False, True):
        config = replace(cache_config, merge_clean_pass=merge)
        outputs.append(play(make_stream(denoiser, config, stream_sampling or sampling), script))
        assert_close(outputs[-1], clip)
    assert_close(*outputs)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("shape", SHAPES)
def test_separate_and_merged_passes_equal_the_whole_clip(
    shape: tuple[int, int, int], mode: str
) -> None:
    check_whole_clip(cache(shape, mode))


@pytest.mark.parametrize("shape", [(1, 4, 1), (3, 7, 1)])
@pytest.mark.parametrize(
    "sampling",
    [
        SamplingConfig(timesteps=(1000,), warp=True),
        SamplingConfig(timesteps=(1000, 750, 500, 250), warp=True),
        SamplingConfig(timesteps=(1000, 757, 522), shift=8.0, renoise="ode"),
        SamplingConfig(timesteps=(1000, 500), warp=True, context_noise=0.1),
    ],
    ids=["one_step", "four_steps", "ode", "context_noise"],
)
def test_other_sampling_equals_whole_clip(
    shape: tuple[int, int, int], sampling: SamplingConfig
) -> None:
    check_whole_clip(cache(shape), sampling, frames=9)


def test_sample_prediction_equals_whole_clip() -> None:
    check_whole_clip(cache((3, 7, 1)), prediction_type="sample", frames=12)


def test_idle_stream_equals_whole_clip() -> None:
    """Clean passes run by themselves although they could be merged."""
    check_whole_clip(cache((1, 4, 1)), play=play_idle, frames=12)


def skip_clean_pass(stream: ChunkStream, script: Sequence[Conditioning]) -> Tensor:
    chunks = []
    for conditioning in script:
        chunks.append(stream.step(conditioning))
        stream.cache.commit(stream.position - stream.cache.committed)
        stream._state = replace(stream._state, owed=())
    return torch.cat(chunks)


def lose_sink(stream: ChunkStream, script: Sequence[Conditioning]) -> Tensor:
    chunks = []
    for conditioning in script:
        chunks.append(stream.step(conditioning))
        stream.cache.keys[:, : stream.cache.tokens_per_frame] = 0
    return torch.cat(chunks)


@pytest.mark.parametrize("bug", [skip_clean_pass, lose_sink])
def test_whole_clip_catches_a_broken_cache(bug: Play) -> None:
    with pytest.raises(AssertionError, match="not close"):
        check_whole_clip(cache((1, 4, 1)), play=bug, frames=9)


def test_whole_clip_catches_noise_keyed_by_call_order() -> None:
    calls = iter(range(10**6))

    def noise(
        seed: int, start: int, frames: int, step: int, shape: object, device: object
    ) -> Tensor:
        return torch.stack([frame_noise(seed, next(calls), 0, LATENT_SHAPE) for _ in range(frames)])

    with (
        patch.object(stream_module, "chunk_noise", noise),
        pytest.raises(AssertionError, match="not close"),
    ):
        check_whole_clip(cache((1, 4, 1)), frames=9)


def test_whole_clip_catches_ignored_context_noise() -> None:
    noisy = SamplingConfig(timesteps=(1000, 500), warp=True, context_noise=0.1)
    with pytest.raises(AssertionError, match="not close"):
        check_whole_clip(cache((1, 4, 1)), noisy, stream_sampling=SAMPLING, frames=9)


@pytest.mark.parametrize("wrong", [(1, 5, 1), (1, 4, 0)])
def test_whole_clip_catches_a_wrong_window(wrong: tuple[int, int, int]) -> None:
    denoiser, script = make_denoiser(), make_script(12, 1)
    clip = whole_clip(denoiser, cache((1, 4, 1)), SAMPLING, script)
    with pytest.raises(AssertionError, match="not close"):
        assert_close(play(make_stream(denoiser, cache(wrong)), script), clip)


def test_whole_clip_catches_the_other_position_mode() -> None:
    denoiser, script = make_denoiser(), make_script(12, 1)
    clip = whole_clip(denoiser, cache((1, 4, 1), "relative"), SAMPLING, script)
    with pytest.raises(AssertionError, match="not close"):
        assert_close(play(make_stream(denoiser, cache((1, 4, 1))), script), clip)


def count_forwards(stream: ChunkStream, script: Sequence[Conditioning]) -> int:
    calls: list[int] = []
    with stream.denoiser.register_forward_hook(lambda *_: calls.append(1)):
        play(stream, script)
    return len(calls)


def test_merging_saves_one_forward_per_chunk() -> None:
    denoiser, script = make_denoiser(), make_script(10, 1)
    assert count_forwards(make_stream(denoiser, cache((1, 4, 1))), script) == 10 * 2 + 9
    assert count_forwards(make_stream(denoiser, cache((1, 4, 1), merge=True)), script) == 10 * 2


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("given", [(1,), (3,), (1, 3), (5,), (2, 12)])
def test_primed_stream_equals_whole_clip(given: tuple[int, ...], merge: bool) -> None:
    cache_config = cache((3, 7, 1), "relative", merge)
    denoiser, script = make_denoiser(), make_script(4, 3)
    stream = make_stream(denoiser, cache_config)
    chunks: list[tuple[Tensor, Conditioning]] = []
    generator = torch.Generator().manual_seed(4)
    for call, frames in enumerate(given):
        latents = torch.randn(frames, *LATENT_SHAPE, generator=generator)
        conditioning = make_conditioning(frames, 77 + call)
        for start in range(0, frames, 3):
            part = cut_frames(conditioning, start, start + 3)
            chunks.append((latents[start : start + 3].clone(), part))
        stream.prime(latents, conditioning)
        latents.zero_()
    assert stream.position == sum(given)
    assert stream.num_owed == len(chunks)
    clip = whole_clip(denoiser, cache_config, SAMPLING, script, given=chunks)
    assert_close(play(stream, script), clip)


def test_priming_changes_what_follows() -> None:
    denoiser, script = make_denoiser(), make_script(3, 1)
    outputs = []
    for level in (0.0, 1.0):
        stream = make_stream(denoiser, cache((1, 4, 1)))
        stream.prime(torch.full((1, *LATENT_SHAPE), level), make_conditioning(1, 9))
        outputs.append(play(stream, script))
    assert not torch.equal(*outputs)


def test_priming_after_the_first_chunk_is_refused() -> None:
    stream = make_stream(make_denoiser(), cache((1, 4, 1)))
    latents, conditioning = torch.zeros(1, *LATENT_SHAPE), make_conditioning(1, 0)
    stream.begin(conditioning)
    with pytest.raises(ConfigError, match="before its first chunk"):
        stream.prime(latents, conditioning)
    stream.rollback(0)
    stream.prime(latents, conditioning)
    stream.step(conditioning)
    with pytest.raises(ConfigError, match="before its first chunk"):
        stream.prime(latents, conditioning)


@pytest.mark.parametrize("merge", [False, True])
def test_later_conditioning_leaves_earlier_chunks_alone(merge: bool) -> None:
    denoiser = make_denoiser()
    script, other = make_script(8, 1), make_script(8, 1, seed=1)
    base = play(make_stream(denoiser, cache((1, 4, 1), merge=merge)), script)
    for change in range(8):
        mixed = [*script[:change], *other[change:]]
        changed = play(make_stream(denoiser, cache((1, 4, 1), merge=merge)), mixed)
        assert torch.equal(changed[:change], base[:change])
        assert not torch.equal(changed[change], base[change])


def test_causality_check_catches_conditioning_read_a_chunk_ahead() -> None:
    denoiser = make_denoiser()
    script, other = make_script(8, 1), make_script(8, 1, seed=1)
    shifted, mixed = script[1:], [*script[:4], *other[4:]][1:]
    base = play(make_stream(denoiser, cache((1, 4, 1))), shifted)
    changed = play(make_stream(denoiser, cache((1, 4, 1))), mixed)
    assert not torch.equal(changed[:4], base[:4])


def test_each_audio_and_state_matters() -> None:
    denoiser, script = make_denoiser(), make_script(1, 1)
    base = play(make_stream(denoiser, cache((1, 4, 1))), script)
    audio, state = script[0].audio, script[0].state
    assert audio is not None
    assert state is not None
    for changed in (
        Conditioning(audio=audio + 0.1, state=state),
        Conditioning(audio=audio, state=(state + 1) % 3),
    ):
        assert not torch.equal(play(make_stream(denoiser, cache((1, 4, 1))), [changed]), base)


def test_seed_changes_the_output_and_repeats_it() -> None:
    denoiser, script = make_denoiser(), make_script(3, 1)
    outputs = [
        play(make_stream(denoiser, cache((1, 4, 1)), seed=seed), script) for seed in (1, 1, 2)
    ]
    assert torch.equal(outputs[0], outputs[1])
    assert not torch.equal(outputs[0], outputs[2])


def test_x0_is_out_before_the_clean_pass() -> None:
    stream = make_stream(make_denoiser(), cache((3, 7, 1)))
    x0 = stream.step(make_conditioning(3, 0))
    assert x0.shape == (3, *LATENT_SHAPE)
    assert (stream.position, stream.num_owed, stream.cache.committed) == (3, 1, 0)
    due = stream.next_pass()
    assert due is not None
    assert (due.kind, due.emits) == ("clean", False)
    assert torch.equal(due.latents, x0)
    assert torch.equal(due.timestep, torch.zeros(3))
    assert run_passes(stream.denoiser, [stream]) == [None]
    assert (stream.num_owed, stream.cache.committed) == (0, 3)
    assert stream.next_pass() is None


def test_passes_of_a_chunk_in_order() -> None:
    stream = make_stream(make_denoiser(), cache((1, 4, 1), merge=True))
    seen = []
    for index in range(3):
        stream.begin(make_conditioning(1, index))
        while stream.is_running:
            due = stream.next_pass()
            assert due is not None
            where = due.cache
            seen.append(
                (due.kind, where.start_frame, where.groups, due.emits, due.timestep.tolist())
            )
            run_passes(stream.denoiser, [stream])
    low = 1000 * 2.5 / 3
    flat = [(kind, start, groups, emits) for kind, start, groups, emits, _ in seen]
    assert flat == [
        ("noisy", 0, (1,), False),
        ("noisy", 0, (1,), True),
        ("merged", 0, (1, 1), False),
        ("noisy", 1, (1,), True),
        ("merged", 1, (1, 1), False),
        ("noisy", 2, (1,), True),
    ]
    told = [pytest.approx(t) for t in ([1000.0], [low], [0.0, 1000.0], [low], [0.0, 1000.0], [low])]
    assert [t for *_, t in seen] == told


def test_next_pass_changes_nothing() -> None:
    denoiser, script = make_denoiser(), make_script(6, 1)
    asked, quiet = (make_stream(denoiser, cache((1, 4, 1), merge=True)) for _ in range(2))
    chunks = []
    for conditioning in script:
        asked.begin(conditioning)
        x0 = None
        while x0 is None:
            state, ring = asked._state, asked.cache.keys.clone()
            first, second = asked.next_pass(), asked.next_pass()
            assert first is not None
            assert second is not None
            assert torch.equal(first.latents, second.latents)
            assert asked._state is state
            assert torch.equal(asked.cache.keys, ring)
            (x0,) = run_passes(denoiser, [asked])
        chunks.append(x0)
    assert torch.equal(torch.cat(chunks), play(quiet, script))


def test_complete_takes_a_forward_of_the_callers_own() -> None:
    denoiser, script = make_denoiser(), make_script(5, 1)
    stream, chunks = make_stream(denoiser, cache((1, 4, 1), merge=True)), []
    for conditioning in script:
        stream.begin(conditioning)
        while stream.is_running:
            due = stream.next_pass()
            assert due is not None
            with torch.no_grad():
                output = denoiser(
                    due.latents[None], due.timestep[None], due.prepared, caches=[due.cache]
                )
            x0 = stream.complete(output[0])
        assert x0 is not None
        chunks.append(x0)
    other = make_stream(denoiser, cache((1, 4, 1), merge=True))
    assert torch.equal(torch.cat(chunks), play(other, script))


def test_callers_tensors_are_not_shared() -> None:
    """What goes in may be overwritten after begin, what comes out is the caller's."""
    denoiser, script = make_denoiser(), make_script(6, 1)
    clean = play(make_stream(denoiser, cache((1, 4, 1))), script)
    stream, chunks = make_stream(denoiser, cache((1, 4, 1))), []
    for conditioning in make_script(6, 1):
        stream.begin(conditioning)
        assert conditioning.audio is not None
        assert conditioning.state is not None
        conditioning.audio.fill_(9.0)
        conditioning.state.zero_()
        x0 = None
        while x0 is None:
            (x0,) = run_passes(denoiser, [stream])
        chunks.append(x0.clone())
        x0.fill_(9.0)
    assert torch.equal(torch.cat(chunks), clean)


@pytest.mark.parametrize("merge", [False, True])
def test_changed_steps_take_effect_at_the_next_chunk(merge: bool) -> None:
    denoiser = make_denoiser()
    stream = make_stream(denoiser, cache((1, 4, 1), merge=merge))
    script = make_script(4, 1)
    base = play(make_stream(denoiser, cache((1, 4, 1), merge=merge)), script)
    stream.step(script[0])
    stream.begin(script[1])
    stream.set_sampling(SamplingConfig(timesteps=(1000,), warp=True))
    x0, passes = None, 0
    while x0 is None:
        (x0,) = run_passes(denoiser, [stream])
        passes += 1
    assert torch.equal(x0, base[1:2])
    assert passes == (2 if merge else 3)
    assert not torch.equal(stream.step(script[2]), base[2:3])


def test_prompt_change_runs_split_and_equals_separate_passes() -> None:
    config = make_denoiser(text_dim=5).config
    denoiser = make_denoiser(text_dim=5)
    generator = torch.Generator().manual_seed(2)
    prompts = [torch.randn(1, 4, 5, generator=generator) for _ in range(2)]
    script = [make_conditioning(1, index, config, prompts[index // 3 % 2]) for index in range(9)]
    separate = play(make_stream(denoiser, cache((1, 4, 1))), script)
    stream, kinds = make_stream(denoiser, cache((1, 4, 1), merge=True)), []
    chunks = []
    for conditioning in script:
        stream.begin(conditioning)
        x0 = None
        while x0 is None:
            due = stream.next_pass()
            assert due is not None
            kinds.append(due.kind)
            (x0,) = run_passes(denoiser, [stream])
        chunks.append(x0)
    assert_close(torch.cat(chunks), separate)
    assert kinds.count("clean") == 2
    assert kinds.count("merged") == 6
    one = play(
        make_stream(denoiser, cache((1, 4, 1))),
        [make_conditioning(1, index, config, prompts[0]) for index in range(9)],
    )
    assert torch.equal(one[:3], separate[:3])
    assert not torch.equal(one[3], separate[3])


def test_text_stream_equals_whole_clip() -> None:
    denoiser = make_denoiser(text_dim=5, audio_dim=None, audio_tokens=0)
    prompt = torch.randn(1, 4, 5, generator=torch.Generator().manual_seed(2))
    script = [make_conditioning(3, index, denoiser.config, prompt) for index in range(6)]
    stream = make_stream(denoiser, cache((3, 7, 1), merge=True))
    clip = whole_clip(denoiser, cache((3, 7, 1)), SAMPLING, script)
    assert_close(play(stream, script), clip)


def test_text_is_prepared_once_per_prompt() -> None:
    denoiser = make_denoiser(text_dim=5)
    prompt = torch.randn(1, 4, 5)
    calls: list[int] = []
    embedder = denoiser.condition_embedder.text_embedder
    stream = make_stream(denoiser, cache((1, 4, 1)))
    with embedder.register_forward_hook(lambda *_: calls.append(1)):
        for index in range(5):
            stream.step(make_conditioning(1, index, denoiser.config, prompt))
        assert len(calls) == 1
        stream.step(make_conditioning(1, 9, denoiser.config, prompt.clone()))
    assert len(calls) == 2


def test_begin_while_a_chunk_is_running_is_an_error() -> None:
    denoiser = make_denoiser()
    stream = make_stream(denoiser, cache((1, 4, 1)))
    stream.begin(make_conditioning(1, 0))
    with pytest.raises(ConfigError, match="is running"):
        stream.begin(make_conditioning(1, 1))
    run_passes(denoiser, [stream])
    with pytest.raises(ConfigError, match="is running"):
        stream.begin(make_conditioning(1, 1))


def test_misuse_is_refused_and_changes_nothing() -> None:
    denoiser = make_denoiser()
    stream = make_stream(denoiser, cache((3, 7, 1)))
    state = stream._state
    with pytest.raises(ConfigError, match="begin a chunk"):
        stream.complete(torch.zeros(3, *LATENT_SHAPE))
    with pytest.raises(ShapeError, match=r"audio must be \[1, 3"):
        stream.begin(make_conditioning(2, 0))
    with pytest.raises(ConfigError, match="needs audio"):
        stream.begin(Conditioning(state=torch.zeros(1, 3, dtype=torch.int64)))
    with pytest.raises(ShapeError, match=r"latents must be \[T, 4, 4, 4\]"):
        stream.prime(torch.zeros(1, 4, 4, 5), make_conditioning(1, 0))
    assert stream._state is state
    stream.begin(make_conditioning(3, 0))
    with pytest.raises(ShapeError, match="output must be"):
        stream.complete(torch.zeros(1, *LATENT_SHAPE))


def test_streams_that_cannot_work_are_refused() -> None:
    with pytest.raises(ConfigError, match="channels"):
        make_stream(make_denoiser(), cache((1, 4, 1)), latent_shape=(3, 4, 4))
    with pytest.raises(ConfigError, match="channels"):
        make_stream(make_denoiser(out_channels=8), cache((1, 4, 1)))
    with pytest.raises(ConfigError, match="multiple of 2x2"):
        make_stream(make_denoiser(), cache((1, 4, 1)), latent_shape=(4, 5, 4))
    with pytest.raises(ConfigError, match="seed"):
        make_stream(make_denoiser(), cache((1, 4, 1)), seed=-1)


def test_the_denoiser_can_train_after_streaming() -> None:
    """Nothing made in inference mode is left behind in the shared network."""
    denoiser = make_denoiser()
    x0 = play(make_stream(denoiser, cache((1, 4, 1))), make_script(2, 1))
    denoiser.requires_grad_(True)
    prepared = denoiser.prepare(make_conditioning(2, 0))
    output = denoiser(x0[None], torch.full((1, 2), 500.0), prepared)
    (output * x0).sum().backward()
    assert all(parameter.grad is not None for parameter in denoiser.parameters())


def test_streams_share_no_state() -> None:
    denoiser, script, other = make_denoiser(), make_script(6, 1), make_script(6, 1, seed=3)
    alone = play(make_stream(denoiser, cache((1, 4, 1))), script)
    first, second = make_stream(denoiser, cache((1, 4, 1))), make_stream(denoiser, cache((1, 4, 1)))
    chunks = []
    for ours, theirs in zip(script, other, strict=True):
        chunks.append(first.step(ours))
        second.step(theirs)
    assert torch.equal(torch.cat(chunks), alone)
    assert CONFIG == denoiser.config
