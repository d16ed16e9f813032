from __future__ import annotations

import os
import random
import subprocess
import sys
from collections import deque
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rtgen.errors import ConfigError, LinkError, ShapeError
from rtgen.frame_link import (
    FrameLink,
    FrameReader,
    FrameWriter,
    SlotLayout,
    Ticket,
    open_segment,
)
from rtgen.types import SpeechState, Unit, UnitFormat

ROOT = Path(__file__).resolve().parent.parent
FORMAT = UnitFormat(fps=Fraction(25), frames_per_unit=4, height=6, width=10)


def pair(count: int = 4, per_session: int = 4) -> tuple[FrameWriter, FrameReader, FrameLink]:
    """Both ends of a link, each with a mapping of its own, as in two processes."""
    layout = SlotLayout.of(FORMAT, count)
    segment = open_segment()
    try:
        written = FrameLink(segment, layout, create=True)
        read = FrameLink(segment, layout)
    finally:
        os.close(segment)
    return FrameWriter(written, per_session=per_session), FrameReader(read), read


def unit(number: int, session: str = "ada", *, frames: int = 4, generation: int = 0) -> Unit:
    """A unit that no other equals."""
    generator = np.random.default_rng([number, generation, len(session)])
    return Unit(
        session=session,
        generation=generation,
        index=number,
        media_time=number * FORMAT.duration,
        frames=generator.integers(0, 256, (frames, 6, 10, 3), np.uint8),
        audio=generator.integers(-(2**15), 2**15, 1920 * frames, np.int16),
        state=SpeechState(number % 4),
        padding=number % 7,
    )


def equal(first: Unit, second: Unit) -> bool:
    return (
        np.array_equal(first.frames, second.frames)
        and np.array_equal(first.audio, second.audio)
        and replace(first, frames=second.frames, audio=second.audio) == second
    )


def written(writer: FrameWriter, one: Unit) -> Ticket:
    ticket = writer.write(one)
    assert ticket is not None
    return ticket


def test_a_unit_arrives_bit_for_bit() -> None:
    writer, reader, _ = pair()
    for number, frames in enumerate([1, 4, 2, 4]):
        sent = unit(number, frames=frames, generation=number // 2)
        got = reader.read(written(writer, sent))
        assert equal(got, sent)
        assert got.frames.dtype == np.uint8
        assert got.audio.dtype == np.int16


@pytest.mark.parametrize("field", ["frames", "audio", "index", "media_time", "state", "padding"])
def test_the_comparison_finds_a_planted_difference(field: str) -> None:
    one = unit(3)
    other = unit(4)
    changed = replace(one, **{field: getattr(other, field)})
    assert not equal(one, changed)


def test_a_unit_that_was_read_outlives_its_slot() -> None:
    writer, reader, _ = pair(count=1)
    first = written(writer, unit(0))
    got = reader.read(first)
    writer.release(first.slot)
    written(writer, unit(1))
    assert equal(got, unit(0))


def test_credits_bound_each_session_and_all_of_them() -> None:
    writer, _, _ = pair(count=3, per_session=2)
    tickets = [written(writer, unit(n)) for n in range(2)]
    assert writer.write(unit(2)) is None
    assert not writer.has_credit("ada")
    other = written(writer, unit(0, "bo"))
    assert writer.write(unit(1, "bo")) is None
    assert writer.free == 0
    writer.release(other.slot)
    assert writer.write(unit(2)) is None
    writer.release(tickets[0].slot)
    assert writer.write(unit(2)) is not None


def test_a_slot_comes_back_once() -> None:
    writer, _, _ = pair()
    ticket = written(writer, unit(0))
    writer.release(ticket.slot)
    for slot in (ticket.slot, 99, -1):
        with pytest.raises(LinkError, match="did not have it"):
            writer.release(slot)
    assert writer.free == 4


def drive(writer: FrameWriter, reader: FrameReader, count: int, *, forget_dropped: bool) -> int:
    """Streams units of three sessions with interrupts, against a queue as oracle.

    Returns how many were read. `forget_dropped` plants the leak: units of an old generation are
    dropped without giving their slots back.
    """
    chance = random.Random(5)
    on_way: deque[tuple[Ticket, Unit]] = deque()
    generations = {"ada": 0, "bo": 0, "cy": 0}
    done, stuck = 0, 0
    for number in range(count):
        name = chance.choice(list(generations))
        one = unit(number, name, generation=generations[name])
        if (ticket := writer.write(one)) is not None:
            on_way.append((ticket, one))
            stuck = 0
        stuck += 1
        assert stuck < 50, "the slots have run out"
        if chance.random() < 0.1:
            generations[name] += 1
        while on_way and chance.random() < 0.6:
            ticket, one = on_way.popleft()
            if ticket.generation < generations[one.session]:
                if not forget_dropped:
                    writer.release(ticket.slot)
                continue
            assert equal(reader.read(ticket), one)
            writer.release(ticket.slot)
            done += 1
    for ticket, _ in on_way:
        writer.release(ticket.slot)
    return done


def test_slots_neither_run_out_nor_leak() -> None:
    writer, reader, _ = pair(count=6, per_session=3)
    assert drive(writer, reader, 1_000, forget_dropped=False) > 500
    assert writer.free == 6


def test_a_planted_leak_is_found() -> None:
    writer, reader, _ = pair(count=6, per_session=3)
    with pytest.raises(AssertionError, match="run out"):
        drive(writer, reader, 1_000, forget_dropped=True)


def test_a_slot_that_was_handed_out_twice_is_found() -> None:
    writer, reader, _ = pair(count=1)
    first = written(writer, unit(0))
    writer.release(first.slot)  # the planted bug: before it was read
    written(writer, unit(1))
    with pytest.raises(LinkError, match="must hold write 1"):
        reader.read(first)


@pytest.mark.parametrize(
    ("sizes", "value"),
    [
        ("frames", np.zeros((5, 6, 10, 3), np.uint8)),
        ("frames", np.zeros((0, 6, 10, 3), np.uint8)),
        ("frames", np.zeros((4, 10, 6, 3), np.uint8)),
        ("frames", np.zeros((4, 6, 10, 4), np.uint8)),
        ("frames", np.zeros((4, 6, 10, 3), np.float32)),
        ("frames", np.zeros((6, 10, 3), np.uint8)),
        ("audio", np.zeros(7681, np.int16)),
        ("audio", np.zeros((1, 7680), np.int16)),
        ("audio", np.zeros(7680, np.float32)),
        ("padding", 7681),
        ("session", "x" * 65),
    ],
)
def test_a_unit_that_does_not_fit_is_refused(sizes: str, value: Any) -> None:
    writer, _, _ = pair()
    with pytest.raises(ShapeError, match="a unit must be"):
        writer.write(replace(unit(0), **{sizes: value}))
    assert writer.free == 4


@pytest.mark.parametrize("at", range(40, 68, 4))  # padding, F, H, W, samples, state, id's length
def test_a_header_that_makes_no_sense_is_refused(at: int) -> None:
    writer, reader, link = pair()
    ticket = written(writer, unit(0))
    start = ticket.slot * link.layout.slot_nbytes
    link.memory[start + at : start + at + 4] = b"\xff\xff\xff\x7f"
    with pytest.raises(LinkError, match="makes no sense"):
        reader.read(ticket)


def test_an_id_that_is_no_text_is_refused() -> None:
    writer, reader, link = pair()
    ticket = written(writer, unit(0))
    link.memory[68:71] = b"\xff\xff\xff"
    with pytest.raises(LinkError, match="no text"):
        reader.read(ticket)


@pytest.mark.parametrize("slot", [-1, 4])
def test_a_slot_that_is_not_there_is_refused(slot: int) -> None:
    _, reader, _ = pair()
    with pytest.raises(LinkError, match="slot must be 0 to 3"):
        reader.read(Ticket(slot=slot, sequence=1, generation=0))


def test_a_segment_that_is_too_small_is_refused() -> None:
    segment = open_segment()
    with pytest.raises(LinkError, match="must hold"):
        FrameLink(segment, SlotLayout.of(FORMAT, 1))
    os.close(segment)


def test_a_layout_without_size_is_refused() -> None:
    with pytest.raises(ConfigError, match="at least 1"):
        SlotLayout.of(FORMAT, 0)
    segment = open_segment()
    link = FrameLink(segment, SlotLayout.of(FORMAT, 1), create=True)
    os.close(segment)
    with pytest.raises(ConfigError, match="per_session"):
        FrameWriter(link, per_session=0)


def test_slots_do_not_overlap() -> None:
    layout = SlotLayout.of(FORMAT, 3)
    assert layout.pixels_offset >= layout.audio_offset + 2 * layout.samples
    assert layout.pixels_offset % 64 == 0
    assert layout.slot_nbytes >= layout.pixels_offset + layout.pixels_nbytes
    assert layout.slot_nbytes % 4096 == 0


def test_a_segment_has_no_name() -> None:
    """Nothing is left to be removed, however the processes end."""
    shared = Path("/dev/shm")
    before = sorted(shared.iterdir()) if shared.is_dir() else []
    pair()
    assert (sorted(shared.iterdir()) if shared.is_dir() else []) == before


@pytest.mark.parametrize("module", ["rtgen.frame_link", "rtgen.engine.host"])
def test_the_media_side_loads_no_torch(module: str) -> None:
    source = f"import sys, {module}\nsys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", source], cwd=ROOT, check=False).returncode == 0
