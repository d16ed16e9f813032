"""A session as a client without an event loop sees it: calls that wait, and plain iterators."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rtgen.errors import ConfigError
from rtgen.types import (
    ControlMessage,
    Pcm16,
    Pixels,
    ServerEvent,
    SessionSpec,
    Stats,
    Unit,
    UnitFormat,
)

if TYPE_CHECKING:
    from rtgen.engine.engine import Engine
    from rtgen.engine.session import SessionCore


class EngineSession:
    """The client's end of a session; any thread may call any method.

    With inline lanes a method that waits also does the engine's work.
    """

    def __init__(self, core: SessionCore, engine: Engine) -> None:
        self._core = core
        self._engine = engine

    @property
    def id(self) -> str:
        """Name of the session, as in its units."""
        return self._core.id

    @property
    def spec(self) -> SessionSpec:
        """What the session shows now."""
        return self._core.spec

    @property
    def format(self) -> UnitFormat:
        """Sizes of its units."""
        return self._core.format

    @property
    def core(self) -> SessionCore:
        """The bookkeeping behind it, for other faces of the same session."""
        return self._core

    def push_audio(self, pcm: Pcm16, sample_rate: int) -> int:
        """Appends speech without waiting; see `rtgen.types.Session.push_audio`.

        Live, at most 120 s of sound wait; offline, 4 s. Keep what is not accepted, and push it
        again when there is room.

        Raises:
            MediaError: not int16 sound, or a rate out of range.
            StreamClosed: the session has ended, or its sound has been declared complete.
        """
        return self._core.push_audio(pcm, sample_rate)

    def end_audio(self) -> None:
        """Ends the utterance (live), or the session's sound and with it the session (offline).

        Raises:
            StreamClosed: the session has ended.
        """
        self._core.end_audio()

    def wait_audio_room(self, seconds: float, timeout_s: float | None = None) -> bool:
        """Waits until that much sound would be accepted.

        Returns:
            False after the timeout, or if no room comes unless units are taken first.

        Raises:
            ConfigError: a session never holds that much.
            StreamClosed: the session has ended.
        """
        core = self._core
        core.check_room(seconds)
        found = self._engine.wait_for(
            core,
            lambda: core.is_closing or core.is_ended or core.audio_room_s() >= seconds,
            timeout_s,
        )
        core.require_open()
        return found

    def push_frame(self, frame: Pixels) -> None:
        """Gives a picture of a camera; see `rtgen.types.Session.push_frame`.

        Raises:
            ConfigError: the model is not driven by pictures.
            ShapeError: not uint8 [H, W, 3].
            StreamClosed: the session has ended.
        """
        self._core.push_frame(frame)

    def control(self, message: ControlMessage) -> None:
        """Applies a message at the next unit not yet begun.

        Raises:
            ConfigError: it cannot be applied; the session goes on as before.
            StreamClosed: the session has ended.
        """
        self._core.control(message)

    def ack(self, unit: Unit) -> None:
        """Says that a live unit is on the screen; see `rtgen.types.Session.ack`.

        Raises:
            ConfigError: the unit was never delivered.
        """
        self._core.ack(unit)

    def next_unit(self, timeout_s: float | None = None) -> Unit | None:
        """Waits for the next unit.

        Returns:
            The unit, or None when the session has ended.

        Raises:
            TimeoutError: none came in time, or none can come: sound or an acknowledgement is
                missing (known with inline lanes only).
            RtgenError: what the session failed of; other errors come as `StreamClosed`.
        """
        core = self._core
        if not self._engine.wait_for(core, core.has_unit_or_end, timeout_s):
            raise TimeoutError("no unit came: push sound, end it, or acknowledge units")
        unit = core.pop_unit()
        if unit is None:
            core.raise_error()
        return unit

    def units(self) -> Iterator[Unit]:
        """Units as they come, until the session ends; raises as `next_unit`."""
        while (unit := self.next_unit()) is not None:
            yield unit

    def render(self, blocks: Iterable[Pcm16], sample_rate: int) -> Iterator[Unit]:
        """Makes everything of a recording: pushes its sound as there is room, and yields units.

        Memory stays constant: blocks are read as they are used up.

        Args:
            blocks: int16 [samples] or [channels, samples] each.
            sample_rate: Hz.

        Raises:
            ConfigError: the session is live.
            RtgenError: what the session failed of.
        """
        if self._core.is_live:
            raise ConfigError("render needs a session of the offline class")
        for block in blocks:
            rest = block
            while rest.shape[-1]:
                rest = rest[..., self.push_audio(rest, sample_rate) :]
                if rest.shape[-1]:
                    unit = self.next_unit()
                    if unit is None:
                        return
                    yield unit
        self.end_audio()
        yield from self.units()

    def pop_event(self) -> ServerEvent | None:
        """The next server event, None if there is none now."""
        return self._core.pop_event()

    def poll_events(self) -> list[ServerEvent]:
        """All server events that wait."""
        return list(iter(self.pop_event, None))

    def stats(self) -> Stats:
        """Figures so far."""
        return self._core.stats()

    def close(self) -> None:
        """Ends the session and waits until its place is free; may be called again."""
        self._core.request_close()
        self._engine.wait_for(self._core, lambda: self._core.is_disposed, None)
