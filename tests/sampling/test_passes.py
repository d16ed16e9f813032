"""Many streams in few forwards: a row has the same bits in any company, and fails with no one."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from rtgen.config import CacheConfig
from rtgen.errors import ConfigError
from rtgen.models.denoiser import CausalDenoiser
from rtgen.models.invariance import invariant_batch_sizes
from rtgen.sampling import stream as stream_module
from rtgen.sampling.passes import NonFiniteError, StreamPass, batches, forward_rows
from rtgen.sampling.stream import ChunkStream, run_passes
from tests.sampling.reference import (
    LATENT_SHAPE,
    make_conditioning,
    make_denoiser,
    make_script,
    make_stream,
    play,
)

STREAMS, CHUNKS = 5, 7


def config(frames: int = 1, merge: bool = False, mode: str = "absolute") -> CacheConfig:
    return CacheConfig(
        window=1 + 2 * frames,
        sink=1,
        frames_per_chunk=frames,
        lead=frames,
        merge_clean_pass=merge,
        position_mode=mode,  # type: ignore[arg-type]
    )


@contextmanager
def batch_sizes(denoiser: nn.Module) -> Iterator[list[int]]:
    """Collects how many rows each forward has."""
    seen: list[int] = []

    def hook(_module: nn.Module, inputs: tuple[Tensor, ...], _output: Tensor) -> None:
        seen.append(len(inputs[0]))

    with denoiser.register_forward_hook(hook):
        yield seen


def check_company(
    denoiser: CausalDenoiser, cache: CacheConfig, allowed: Sequence[int] | None
) -> list[int]:
    """Streams at different steps and places run together; each equals itself alone."""
    frames = cache.frames_per_chunk
    scripts = [make_script(CHUNKS, frames, seed=row) for row in range(STREAMS)]

    def fresh(row: int) -> ChunkStream:
        return make_stream(denoiser, cache, seed=row)

    alone = [play(fresh(row), script) for row, script in enumerate(scripts)]
    streams = [fresh(row) for row in range(STREAMS)]
    chunks: list[list[Tensor]] = [[] for _ in streams]

    def tick(rows: Sequence[int]) -> None:
        for row in rows:
            index = streams[row].position // frames
            if not streams[row].is_running and index < CHUNKS:
                streams[row].begin(scripts[row][index])
        for row, x0 in zip(
            rows, run_passes(denoiser, [streams[row] for row in rows], allowed), strict=True
        ):
            if x0 is not None:
                chunks[row].append(x0)

    for count in range(1, STREAMS):
        tick(range(count))
    with batch_sizes(denoiser) as seen:
        while any(stream.position < CHUNKS * frames for stream in streams):
            tick(range(STREAMS))
    for row in range(STREAMS):
        assert torch.equal(torch.cat(chunks[row]), alone[row]), row
    return seen


@pytest.mark.parametrize("mode", ["absolute", "relative"])
@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("frames", [1, 3])
def test_rows_equal_themselves_alone_at_self_tested_sizes(
    frames: int, merge: bool, mode: str
) -> None:
    denoiser, cache = make_denoiser(), config(frames, merge, mode)
    allowed = invariant_batch_sizes(denoiser, STREAMS, cache, height=4, width=4)
    assert set(check_company(denoiser, cache, allowed)) <= set(allowed)


@pytest.mark.parametrize("merge", [False, True])
@pytest.mark.parametrize("frames", [1, 3])
def test_rows_equal_themselves_alone_in_row_tiles(frames: int, merge: bool) -> None:
    denoiser = make_denoiser()
    denoiser.row_tile = 1
    seen = check_company(denoiser, config(frames, merge), None)
    assert max(seen) > 1


def test_company_check_catches_swapped_rows() -> None:
    def swapped(denoiser: CausalDenoiser, rows: Sequence[StreamPass]) -> Tensor:
        return forward_rows(denoiser, rows).roll(1, 0)

    denoiser = make_denoiser()
    denoiser.row_tile = 1
    with patch.object(stream_module, "forward_rows", swapped), pytest.raises(AssertionError):
        check_company(denoiser, config(), None)


def test_company_check_catches_conditioning_of_the_first_row() -> None:
    def first_for_all(denoiser: CausalDenoiser, rows: Sequence[StreamPass]) -> Tensor:
        shared = [replace(row, prepared=rows[0].prepared) for row in rows]
        return forward_rows(denoiser, shared)

    denoiser = make_denoiser()
    denoiser.row_tile = 1
    with patch.object(stream_module, "forward_rows", first_for_all), pytest.raises(AssertionError):
        check_company(denoiser, config(), None)


def test_rows_of_different_steps_and_positions_share_one_forward() -> None:
    denoiser = make_denoiser()
    streams = [make_stream(denoiser, config(), seed=row) for row in range(3)]
    streams[0].step(make_conditioning(1, 0))  # its clean pass is due
    streams[1].step(make_conditioning(1, 1))
    run_passes(denoiser, [streams[1]])
    streams[1].begin(make_conditioning(1, 2))
    run_passes(denoiser, [streams[1]])  # its last noisy pass is due
    streams[2].begin(make_conditioning(1, 3))  # its first noisy pass is due
    with batch_sizes(denoiser) as seen:
        results = run_passes(denoiser, streams)
    assert seen == [3]
    assert [x0 is None for x0 in results] == [True, False, True]
    assert [stream.position for stream in streams] == [1, 2, 0]


def test_passes_of_different_shapes_are_grouped() -> None:
    denoiser, cache = make_denoiser(), config(merge=True)
    streams = [make_stream(denoiser, cache, seed=row) for row in range(4)]
    for stream in streams[:2]:
        stream.step(make_conditioning(1, 0))
    for stream in streams:
        stream.begin(make_conditioning(1, 1))
    with batch_sizes(denoiser) as seen:
        run_passes(denoiser, streams)
    assert seen == [2, 2]


def test_prompts_of_different_lengths_are_grouped() -> None:
    denoiser = make_denoiser(text_dim=5)
    streams = [make_stream(denoiser, config(), seed=row) for row in range(3)]
    for stream, length in zip(streams, (4, 6, 4), strict=True):
        stream.begin(make_conditioning(1, 0, denoiser.config, torch.ones(1, length, 5)))
    with batch_sizes(denoiser) as seen:
        run_passes(denoiser, streams)
    assert seen == [2, 1]


def test_streams_without_a_pass_take_no_part() -> None:
    denoiser = make_denoiser()
    streams = [make_stream(denoiser, config()) for _ in range(2)]
    assert run_passes(denoiser, []) == []
    assert run_passes(denoiser, streams) == [None, None]
    streams[1].begin(make_conditioning(1, 0))
    with batch_sizes(denoiser) as seen:
        run_passes(denoiser, streams)
    assert seen == [1]


def test_a_stream_listed_twice_is_refused() -> None:
    stream = make_stream(make_denoiser(), config())
    stream.begin(make_conditioning(1, 0))
    with pytest.raises(ConfigError, match="once"):
        run_passes(stream.denoiser, [stream, stream])


@pytest.mark.parametrize(
    ("allowed", "cut"),
    [(None, [7]), ((1, 2, 4), [4, 2, 1]), ((1,), [1] * 7), ((3, 1), [3, 3, 1]), ((1, 8), [1] * 7)],
)
def test_batches_are_cut_to_allowed_sizes(allowed: Sequence[int] | None, cut: list[int]) -> None:
    denoiser = make_denoiser()
    passes: list[tuple[int, StreamPass]] = []
    for number in range(7):
        stream = make_stream(denoiser, config())
        stream.begin(make_conditioning(1, number))
        due = stream.next_pass()
        assert due is not None
        passes.append((number, due))
    found = list(batches(passes, allowed))
    assert [len(batch) for batch in found] == cut
    assert [number for batch in found for number, _ in batch] == list(range(7))


@pytest.mark.parametrize("allowed", [(), (2, 4), (0, 1)])
def test_allowed_sizes_must_hold_one(allowed: Sequence[int]) -> None:
    stream = make_stream(make_denoiser(), config())
    stream.begin(make_conditioning(1, 0))
    with pytest.raises(ConfigError, match="must hold 1"):
        run_passes(stream.denoiser, [stream], allowed)
    assert stream.is_running


def started(denoiser: CausalDenoiser) -> list[ChunkStream]:
    """Three streams, each one forward further than the last, all beyond their windows."""
    streams = [make_stream(denoiser, config(), seed=row) for row in range(3)]
    for row, stream in enumerate(streams):
        play(stream, make_script(4, 1, seed=row))
        run_passes(denoiser, [stream])
        stream.begin(make_conditioning(1, 100 + row))
        if row:
            run_passes(denoiser, [stream])
    return streams


def finish(streams: Sequence[ChunkStream], denoiser: CausalDenoiser) -> list[Tensor]:
    """The running chunk of each, and one more."""
    outputs: list[Tensor] = []
    for row, stream in enumerate(streams):
        x0 = None
        while x0 is None:
            (x0,) = run_passes(denoiser, [stream])
        outputs.append(torch.cat((x0, stream.step(make_conditioning(1, 200 + row)))))
    return outputs


@pytest.mark.parametrize("allowed", [None, (1,), (1, 2)])
def test_a_failure_leaves_every_stream_where_it_was(allowed: Sequence[int] | None) -> None:
    denoiser = make_denoiser()
    clean = finish(started(denoiser), denoiser)
    streams = started(denoiser)
    states = [stream._state for stream in streams]
    calls: list[int] = []

    def fail(*_: Any) -> None:
        calls.append(1)
        if len(calls) == (1 if allowed is None else 2):
            raise RuntimeError("planted")

    with (
        denoiser.blocks[1].register_forward_hook(fail),
        pytest.raises(RuntimeError, match="planted"),
    ):
        run_passes(denoiser, streams, allowed)
    assert all(stream._state is state for stream, state in zip(streams, states, strict=True))
    for ours, theirs in zip(finish(streams, denoiser), clean, strict=True):
        assert torch.equal(ours, theirs)


def test_nan_names_its_stream_and_the_others_go_on_without_it() -> None:
    denoiser = make_denoiser()
    clean = finish(started(denoiser), denoiser)
    streams = started(denoiser)

    def poison(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        output = output.clone()
        output[1] = torch.nan
        return output

    with (
        denoiser.blocks[0].register_forward_hook(poison),
        pytest.raises(NonFiniteError, match="stream 1") as caught,
    ):
        run_passes(denoiser, streams)
    assert caught.value.rows == (1,)
    healthy = [streams[0], streams[2]]
    for stream in healthy:
        stream.cache.check_integrity()
    outputs = finish([streams[0]], denoiser)
    assert torch.equal(outputs[0], clean[0])


def test_a_batch_of_streams_with_one_that_does_not_check() -> None:
    denoiser = make_denoiser()
    checked = make_stream(denoiser, config(), check_finite=True)
    trusting = make_stream(denoiser, config(), check_finite=False)
    for stream in (checked, trusting):
        stream.begin(make_conditioning(1, 0))

    def poison(_module: nn.Module, _inputs: Any, output: Tensor) -> Tensor:
        return torch.full_like(output, torch.inf)

    with denoiser.register_forward_hook(poison):
        with pytest.raises(NonFiniteError) as caught:
            run_passes(denoiser, [trusting, checked])
        assert caught.value.rows == (1,)
        assert run_passes(denoiser, [trusting]) == [None]
    assert trusting.latent_shape == LATENT_SHAPE
