"""The messages between the media process and the generation process.

Their fields are the schema; `rtgen.engine.host_wire` makes bytes of them. A message has one field
of bytes at most. A session's messages are handled in the order in which they were sent.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rtgen.errors import ConfigError
from rtgen.types import ControlMessage, ServerEvent, SessionSpec, Stats, UnitFormat

# -- to the generation process


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """First message: what to build. `factory` is "module:name" or "module:Class.method"."""

    factory: str
    arguments: Mapping[str, Any]
    max_sessions: int
    slots_per_session: int
    intra_op_threads: int
    warm_units: int
    drain_s: float
    log_level: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Reserve:
    """Asks for a session; answered by `Granted`, `Refused` or `Failed` with the same number."""

    request: int
    spec: SessionSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Audio:
    """Speech, int16 [channels, samples]; `epoch` and `total` as in `host_audio.AudioRoom`."""

    session: str
    sample_rate: int
    channels: int
    epoch: int
    total: int
    pcm: bytes

    def __post_init__(self) -> None:
        if self.channels < 1 or len(self.pcm) % (2 * self.channels):
            raise ConfigError(f"{len(self.pcm)} bytes are no sound of {self.channels} channels")


@dataclass(frozen=True, slots=True, kw_only=True)
class EndAudio:
    """Ends the utterance, or an offline session's sound."""

    session: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Control:
    """A control message; `epoch` and `total` as in `Audio`, after it."""

    session: str
    epoch: int
    total: int
    message: ControlMessage


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    """A unit is on screen."""

    session: str
    generation: int
    index: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Picture:
    """A camera's picture, uint8 [height, width, 3]; the next one waits for `PictureTaken`."""

    session: str
    height: int
    width: int
    pixels: bytes

    def __post_init__(self) -> None:
        if min(self.height, self.width) < 1 or 3 * self.height * self.width != len(self.pixels):
            raise ConfigError(
                f"{len(self.pixels)} bytes are no picture of {self.height} x {self.width}"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class AskStats:
    """Asks for figures; answered by `StatsReply` or, if the session is gone, by `Failed`."""

    request: int
    session: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CloseSession:
    """The client wants no more; answered by `Closed`."""

    session: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Release:
    """The reader has done with a slot."""

    slot: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Shutdown:
    """End everything and exit."""


# -- to the media process


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """The pipeline has made warm units; `slots` of the frame link are there."""

    format: UnitFormat
    description: Mapping[str, Any]
    slots: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StartFailed:
    """The start failed with an error of class `error`; the process ends."""

    error: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """The process lives; its oldest job runs since `stalled_s`; `figures` are its metrics."""

    stalled_s: float
    draining: bool
    figures: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Granted:
    """A session is open; `room` samples at `OUTPUT_RATE` of sound may wait in it."""

    request: int
    session: str
    room: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """No room now."""

    request: int
    reason: str
    retry_after_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed:
    """A request raised an error of class `error`."""

    request: int
    error: str
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitReady:
    """A unit lies in a slot, which now belongs to the reader."""

    session: str
    slot: int
    sequence: int
    generation: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """A server event of a session."""

    session: str
    event: ServerEvent


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Sound that fits, after everything up to `epoch` and `total` was taken."""

    session: str
    epoch: int
    total: int
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PictureTaken:
    """The next picture may be sent."""

    session: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StatsReply:
    """Figures that were asked for."""

    request: int
    stats: Stats


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """No unit will follow; `error` is the class of what the session failed of, if it did."""

    session: str
    error: str | None
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Closed:
    """The session's place is free; nothing more will come of it."""

    session: str


Command = (
    Reserve | Audio | EndAudio | Control | Ack | Picture | AskStats | CloseSession | Release
    | Shutdown
)  # fmt: skip
Reply = (
    Beat | Granted | Refused | Failed | UnitReady | Event | Room | PictureTaken | StatsReply
    | Ended | Closed
)  # fmt: skip
Message = Start | Command | Ready | StartFailed | Reply
