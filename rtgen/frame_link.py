"""Finished units from the generation process to the media process, through shared memory.

    writer: free slot -> header, sound, pixels -> Ticket --- socket ---> reader: copy out
            free slot <------------------------- slot number <---------- as soon as copied

The segment is a file without a name (memfd on Linux, an unlinked file elsewhere) that both
processes map: it goes when the last of them does, however it dies. A slot has one owner at a time,
and ownership travels by messages of the caller's socket, whose system calls order the memory.

Back-pressure is credits: a session may have `per_session` slots away; when they are, the writer
waits and nothing is dropped. The engine's bound on units under way then stops the session.

This module imports no torch. It is all that the media side may import besides `rtgen.types`.
"""

from __future__ import annotations

import mmap
import os
import struct
import tempfile
from collections import Counter, deque
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Protocol

import numpy as np

from rtgen.errors import ConfigError, LinkError, ShapeError
from rtgen.types import Service, SpeechState, Unit, UnitFormat

_PAGE = 4096
# sequence, generation, index, media time (numerator, denominator), padding, F, H, W, samples,
# state, session id and its length
_HEADER = struct.Struct("<QQQqqIIIIIII64s")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ticket:
    """Says where a unit lies; travels from the writer to the reader.

    Attributes:
        slot: number of the slot.
        sequence: number of the write, so that a slot that was handed out twice is found out.
        generation: of the unit, so that one that was interrupted need not be read.
    """

    slot: int
    sequence: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SlotLayout:
    """Sizes of a slot; each starts on a page of its own.

    Attributes:
        frames: pixel frames of the largest unit.
        height: pixel rows.
        width: pixel columns.
        samples: of the largest unit's sound.
        count: slots.
    """

    frames: int
    height: int
    width: int
    samples: int
    count: int

    def __post_init__(self) -> None:
        sizes = (self.frames, self.height, self.width, self.samples, self.count)
        if min(sizes) < 1:
            raise ConfigError(f"a slot layout needs sizes of at least 1, got {sizes}")

    @classmethod
    def of(cls, unit_format: UnitFormat, count: int) -> SlotLayout:
        """The layout for a pipeline's units."""
        return cls(
            frames=unit_format.frames_per_unit,
            height=unit_format.height,
            width=unit_format.width,
            samples=unit_format.output_samples,
            count=count,
        )

    @property
    def pixels_nbytes(self) -> int:
        """Bytes of the largest unit's frames."""
        return self.frames * self.height * self.width * 3

    @property
    def audio_offset(self) -> int:
        """Where a slot's sound starts, in bytes after the slot's start."""
        return _HEADER.size

    @property
    def pixels_offset(self) -> int:
        """Where a slot's frames start; a multiple of 64 bytes."""
        return -(-(_HEADER.size + 2 * self.samples) // 64) * 64

    @property
    def slot_nbytes(self) -> int:
        """Bytes from one slot to the next."""
        return -(-(self.pixels_offset + self.pixels_nbytes) // _PAGE) * _PAGE

    @property
    def nbytes(self) -> int:
        """Bytes of the segment."""
        return self.count * self.slot_nbytes


def open_segment() -> int:
    """Opens an empty segment without a name and returns its descriptor, the caller's to close."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("rtgen-frames", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


class FrameLink:
    """A segment that this process has mapped; unmapped when the last reference goes.

    Args:
        descriptor: as `open_segment` gave it, here or in the parent; not needed afterwards.
        layout: sizes of its slots, the same on both sides.
        create: set the segment's size; the writer does, before the reader maps it.

    Raises:
        LinkError: the segment is smaller than the layout.
    """

    def __init__(self, descriptor: int, layout: SlotLayout, *, create: bool = False) -> None:
        if create:
            os.ftruncate(descriptor, layout.nbytes)
        size = os.fstat(descriptor).st_size
        if size < layout.nbytes:
            raise LinkError(f"the segment must hold {layout.nbytes} bytes, it has {size}")
        self.layout = layout
        self.memory = mmap.mmap(descriptor, layout.nbytes)


class FrameWriter:
    """The only writer of a link.

    Args:
        link: with the segment's size set.
        per_session: slots of one session that may be away from the writer at a time.
    """

    def __init__(self, link: FrameLink, *, per_session: int) -> None:
        if per_session < 1:
            raise ConfigError(f"per_session must be at least 1, got {per_session}")
        self._memory, self._layout = link.memory, link.layout
        self._per_session = per_session
        self._free = deque(range(link.layout.count))
        self._away: dict[int, str] = {}
        self._held: Counter[str] = Counter()
        self._sequence = 0

    @property
    def free(self) -> int:
        """Slots that are not with the reader."""
        return len(self._free)

    def has_credit(self, session: str) -> bool:
        """Whether `write` would take a unit of this session now."""
        return bool(self._free) and self._held[session] < self._per_session

    def write(self, unit: Unit) -> Ticket | None:
        """Copies a unit into a free slot, which then belongs to the reader.

        Args:
            unit: frames uint8 [F, H, W, 3] with F up to the layout's, audio int16 [samples].

        Returns:
            What the reader needs, or None if the session has no credit: wait for `release`.

        Raises:
            ShapeError: the unit does not fit the slots, or has another dtype.
        """
        pixels, audio, name = unit.frames, unit.audio, unit.session.encode()
        layout = self._layout
        fits = (
            pixels.ndim == 4
            and 1 <= len(pixels) <= layout.frames
            and pixels.shape[1:] == (layout.height, layout.width, 3)
            and audio.ndim == 1
            and len(audio) <= layout.samples
            and unit.padding <= len(audio)
            and len(name) <= 64
        )
        if not fits or pixels.dtype != np.uint8 or audio.dtype != np.int16:
            raise ShapeError(
                f"a unit must be uint8 [up to {layout.frames}, {layout.height}, {layout.width}, 3] "
                f"with int16 [up to {layout.samples}] and an id of at most 64 bytes, got "
                f"{pixels.dtype} {list(pixels.shape)}, {audio.dtype} {list(audio.shape)}"
            )
        if not self.has_credit(unit.session):
            return None
        slot = self._free.popleft()
        self._sequence += 1
        start = slot * layout.slot_nbytes
        _HEADER.pack_into(
            self._memory,
            start,
            self._sequence,
            unit.generation,
            unit.index,
            unit.media_time.numerator,
            unit.media_time.denominator,
            unit.padding,
            *pixels.shape[:3],
            len(audio),
            int(unit.state),
            len(name),
            name,
        )
        at = start + layout.audio_offset
        np.frombuffer(self._memory, np.int16, len(audio), at)[:] = audio
        at = start + layout.pixels_offset
        np.frombuffer(self._memory, np.uint8, pixels.size, at).reshape(pixels.shape)[:] = pixels
        self._away[slot] = unit.session
        self._held[unit.session] += 1
        return Ticket(slot=slot, sequence=self._sequence, generation=unit.generation)

    def release(self, slot: int) -> None:
        """Takes back a slot that the reader has read or dropped.

        Raises:
            LinkError: the slot is not with the reader.
        """
        session = self._away.pop(slot, None)
        if session is None:
            raise LinkError(f"slot {slot} was given back, but the reader did not have it")
        self._free.append(slot)
        self._held[session] -= 1
        if not self._held[session]:
            del self._held[session]


class FrameReader:
    """The only reader of a link.

    Args:
        link: a segment that the writer has made.
    """

    def __init__(self, link: FrameLink) -> None:
        self._memory, self._layout = link.memory, link.layout

    def read(self, ticket: Ticket) -> Unit:
        """Copies a unit out; the caller then sends the slot's number back.

        Raises:
            LinkError: the slot does not hold what the ticket says.
        """
        layout = self._layout
        if not 0 <= ticket.slot < layout.count:
            raise LinkError(f"slot must be 0 to {layout.count - 1}, got {ticket.slot}")
        start = ticket.slot * layout.slot_nbytes
        fields = _HEADER.unpack_from(self._memory, start)
        sequence, generation, index, above, below, padding, *sizes, state, length, name = fields
        if (sequence, generation) != (ticket.sequence, ticket.generation):
            raise LinkError(
                f"slot {ticket.slot} must hold write {ticket.sequence} of generation "
                f"{ticket.generation}, it has {sequence} of {generation}"
            )
        frames, height, width, samples = sizes
        if (
            not 1 <= frames <= layout.frames
            or (height, width) != (layout.height, layout.width)
            or not padding <= samples <= layout.samples
            or state not in list(SpeechState)
            or length > len(name)
            or below < 1
        ):
            raise LinkError(f"the header of slot {ticket.slot} makes no sense: {fields[:-1]}")
        try:
            session = name[:length].decode()
        except UnicodeDecodeError as error:
            raise LinkError(f"the id in slot {ticket.slot} is no text: {error}") from error
        shape, at = (frames, height, width, 3), start + layout.pixels_offset
        pixels = np.frombuffer(self._memory, np.uint8, frames * height * width * 3, at)
        audio = np.frombuffer(self._memory, np.int16, samples, start + layout.audio_offset)
        return Unit(
            session=session,
            generation=generation,
            index=index,
            media_time=Fraction(above, below),
            frames=pixels.reshape(shape).copy(),
            audio=audio.copy(),
            state=SpeechState(state),
            padding=padding,
        )


class SupervisedService(Service, Protocol):
    """A service whose engine is another process that may start, hang, die and be replaced."""

    @property
    def ready(self) -> bool:
        """Whether a warm process takes sessions now."""

    @property
    def healthy(self) -> bool:
        """Whether the process is there and makes progress; True while the first one starts."""

    @property
    def state(self) -> str:
        """One of new, starting, ready, restarting, draining, failed, closed."""

    @property
    def failure(self) -> str | None:
        """Why it is not healthy, or why the last process ended; for people."""

    @property
    def restarts(self) -> int:
        """Processes that were replaced so far."""

    @property
    def figures(self) -> Mapping[str, float]:
        """Metrics of the process that serves, by their full names; none while there is none."""

    @property
    def format(self) -> UnitFormat:
        """Sizes of units; raises `StreamClosed` before the first process was ready."""

    @property
    def description(self) -> Mapping[str, Any]:
        """What the pipeline says about itself; raises as `format` does."""

    async def drain(self, timeout_s: float) -> bool:
        """Refuses new sessions and waits until the open ones are closed; False: they are not."""

    async def close(self) -> None:
        """Ends all sessions and the process; may be called again."""
