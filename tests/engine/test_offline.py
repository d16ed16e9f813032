"""Rendering through the engine: whole, exact, the same on every lane and for every block size."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
import torch

from pipelines.avatar import AvatarConditioner, AvatarPipeline
from rtgen.engine.audio_buffer import FILTER_REACH, decimate
from rtgen.engine.contract import UnitInput
from rtgen.engine.engine import Engine
from rtgen.engine.lanes import Lanes, inline_lanes, thread_lanes
from rtgen.errors import ConfigError, StreamClosed
from rtgen.types import (
    Finished,
    Pcm16,
    SessionSpec,
    SpeechState,
    Started,
    Stats,
    Stop,
    Unit,
)
from tests.engine.drive import opened, pictures, same, sound
from tests.sound import blocks, silence, tone
from tests.toy_pipeline import OFFLINE, toy_pipeline


def rendered(
    pcm: Pcm16,
    *,
    lanes: Lanes | None = None,
    block: int = 4_800,
    rate: int = 48_000,
    spec: SessionSpec = OFFLINE,
    pipeline: AvatarPipeline | None = None,
) -> list[Unit]:
    pipeline = toy_pipeline() if pipeline is None else pipeline
    with Engine(pipeline, lanes=inline_lanes() if lanes is None else lanes) as engine:
        return list(opened(engine, spec).render(blocks(pcm, block), rate))


def test_a_render_has_all_the_sound_and_as_much_picture() -> None:
    pcm = tone(2.05)
    units = rendered(pcm)
    np.testing.assert_array_equal(sound(units), pcm)
    assert [unit.index for unit in units] == list(range(13))
    assert [unit.media_time for unit in units] == [n * Fraction(4, 25) for n in range(13)]
    assert pictures(units).shape == (52, 32, 32, 3)
    assert units[-1].padding == 13 * 7680 - len(pcm)


def test_a_render_equals_the_stream_stepped_by_hand() -> None:
    pipeline, pcm = toy_pipeline(), tone(0.8)
    conditioner = AvatarConditioner(pipeline.config, pipeline.lips, OFFLINE.seed)
    session = pipeline.open(OFFLINE)
    padded = np.concatenate([np.zeros(FILTER_REACH, np.int16), pcm, silence(1.0)])
    heard = decimate(padded, 3)
    frames = []
    for n in range(5):
        audio = heard[2560 * n : 2560 * n + 4480]
        unit = UnitInput(audio=audio, state=SpeechState.SPEAKING)
        x0 = session.stream.step(conditioner.step(unit))
        raw = x0[0] * torch.tensor(pipeline.config.latent_std).view(-1, 1, 1)
        raw = raw + torch.tensor(pipeline.config.latent_mean).view(-1, 1, 1)
        with torch.inference_mode():
            pixels = pipeline.decoder(None).network(raw[None, None])[0]
        frames.append(pixels.clamp(-1, 1).permute(0, 2, 3, 1) * 127.5 + 127.5)
    truth = torch.cat(frames).numpy()
    made = pictures(rendered(pcm)).astype(float)
    assert np.abs(made - truth).max() < 0.502  # nothing but rounding to whole levels
    assert np.abs(made[4:] - truth[:-4]).mean() > 1.5  # a unit of delay would be seen


@pytest.mark.parametrize("intra_op_threads", [1, None])
def test_thread_lanes_give_the_frames_of_inline_lanes(intra_op_threads: int | None) -> None:
    pcm = tone(2.0)
    before = threading.active_count()
    threaded = rendered(pcm, lanes=thread_lanes(intra_op_threads=intra_op_threads))
    assert same(threaded, rendered(pcm))
    assert threading.active_count() == before


@pytest.mark.parametrize("rate", [48_000, 44_100])
def test_block_sizes_change_no_bit(rate: int) -> None:
    pcm = tone(2.5, rate)
    expected = rendered(pcm, rate=rate, block=2 * rate)
    assert same(rendered(pcm, rate=rate, block=rate // 200), expected)
    assert same(rendered(pcm, rate=rate, block=2 * rate, lanes=thread_lanes()), expected)


def test_the_comparison_sees_a_difference_of_one_bit_of_sound() -> None:
    pcm = tone(1.0)
    other = pcm.copy()
    other[20_000] ^= 1
    assert not same(rendered(pcm), rendered(other))


def test_another_seed_sound_or_state_gives_another_picture() -> None:
    base = pictures(rendered(silence(0.5)))
    for other in (
        rendered(silence(0.5), spec=SessionSpec(service_class="offline", seed=4)),
        rendered(tone(0.5)),
        rendered(
            silence(0.5),
            spec=SessionSpec(service_class="offline", seed=3, state=SpeechState.THINKING),
        ),
    ):
        assert not np.array_equal(pictures(other), base)


@pytest.mark.parametrize("merge_clean_pass", [False, True])
def test_chunks_of_two_units_come_out_as_single_units(merge_clean_pass: bool) -> None:
    pipeline = toy_pipeline(frames_per_chunk=2, merge_clean_pass=merge_clean_pass)
    pcm = tone(0.9)  # 5.6 units: the third chunk is full, of its second unit some is padding
    units = rendered(pcm, pipeline=pipeline)
    np.testing.assert_array_equal(sound(units), pcm)
    assert [unit.index for unit in units] == list(range(6))
    odd = rendered(tone(0.7), pipeline=pipeline)  # 4.4 units: the sixth would be all padding
    assert [unit.index for unit in odd] == list(range(5))
    assert same(rendered(pcm, pipeline=pipeline, lanes=thread_lanes()), units)


def test_merged_clean_passes_give_the_same_face() -> None:
    pcm = tone(1.0)
    merged = pictures(rendered(pcm, pipeline=toy_pipeline(merge_clean_pass=True)))
    apart = pictures(rendered(pcm))
    assert np.abs(merged.astype(int) - apart).max() <= 1


def test_nothing_is_made_before_a_unit_and_its_look_ahead_are_there() -> None:
    with Engine(toy_pipeline(), lanes=inline_lanes()) as engine:
        session = opened(engine, OFFLINE)
        need = 7_680 + 5_760 + 96  # unit, look-ahead, reach of the decimating filter
        session.push_audio(tone(1.0)[: need - 1], 48_000)
        with pytest.raises(TimeoutError, match="push sound"):
            session.next_unit()
        session.push_audio(tone(1.0)[need - 1 : need], 48_000)
        assert session.next_unit() is not None
        with pytest.raises(TimeoutError):
            session.next_unit(timeout_s=0.0)


@pytest.mark.parametrize("make_lanes", [inline_lanes, thread_lanes])
def test_units_that_nobody_takes_hold_up_the_engine_and_then_the_sound(
    make_lanes: Callable[[], Lanes],
) -> None:
    # 4 units wait for the client, and 4 s of sound for a place.
    capacity, accepted, pcm = 4 * 7_680 + 4 * 48_000, 0, tone(10.0)
    with Engine(toy_pipeline(), lanes=make_lanes()) as engine:
        session = opened(engine, OFFLINE)
        while accepted < capacity:
            assert session.wait_audio_room(0.01, timeout_s=60.0)
            accepted += session.push_audio(pcm[accepted:], 48_000)
        assert accepted == capacity
        assert not session.wait_audio_room(0.01, timeout_s=0.1)
        assert session.next_unit() is not None
        assert session.wait_audio_room(0.01, timeout_s=60.0)


def test_turns_and_figures_are_reported() -> None:
    with Engine(toy_pipeline(), lanes=inline_lanes()) as engine:
        session = opened(engine, OFFLINE)
        units = list(session.render(blocks(tone(4.2), 4_800), 48_000))
        events = session.poll_events()
        stats = session.stats()
    assert [event.type for event in events] == ["started", "stats", "finished"]
    started, _, finished = events
    assert isinstance(started, Started)
    assert isinstance(finished, Finished)
    assert (started.position_s, finished.position_s, finished.interrupted) == (0.0, 4.2, False)
    assert isinstance(stats, Stats)
    assert (stats.units, stats.dropped, stats.buffered_s) == (len(units), 0, 0.0)
    assert set(stats.stage_ms) == {"condition", "denoise", "clean", "decode"}
    assert stats.real_time_factor > 0


def test_no_sound_gives_no_units() -> None:
    assert rendered(silence(0.0)) == []


def test_an_offline_session_takes_no_interrupt_and_no_sound_after_its_end() -> None:
    with Engine(toy_pipeline(), lanes=inline_lanes()) as engine:
        session = opened(engine, OFFLINE)
        with pytest.raises(ConfigError, match="not interrupted"):
            session.control(Stop())
        with pytest.raises(ConfigError, match="holds 4"):
            session.wait_audio_room(5.0)
        session.push_audio(tone(0.5), 48_000)
        session.end_audio()
        with pytest.raises(StreamClosed):
            session.push_audio(tone(0.1), 48_000)
        assert len(list(session.units())) == 4
        with pytest.raises(StreamClosed):
            session.push_audio(tone(0.1), 48_000)


def living() -> int:
    """Objects of our own classes that are alive, tensors included."""
    gc.collect()
    ours = ("rtgen.", "pipelines.", "decoders.", "concurrent.")
    return sum(str(type(thing).__module__).startswith(ours) for thing in gc.get_objects())


def growth(keep: bool) -> int:
    """How many more objects live after 60 units than after 20, if the client keeps units or not."""
    with Engine(toy_pipeline(), lanes=inline_lanes()) as engine:
        session, kept, counts = opened(engine, OFFLINE), list[Unit](), list[int]()
        second = tone(0.96)  # six units
        for number, unit in enumerate(session.render((second for _ in range(11)), 48_000)):
            if keep:
                kept.append(unit)
            del unit
            if number in (20, 60):
                counts.append(living())
    return counts[1] - counts[0]


def test_nothing_piles_up_in_a_long_render() -> None:
    assert abs(growth(keep=False)) <= 10


def test_the_count_of_objects_sees_units_that_are_kept() -> None:
    assert growth(keep=True) >= 40
