"""What crosses borders: units, session specs, the control schema, and the service's protocols.

A unit is one latent frame with its sound: `frames_per_unit` pixel frames and exactly the sound of
the same time at `OUTPUT_RATE`. Importing this module imports no torch.
"""

from __future__ import annotations

import base64
import binascii
import enum
import typing
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from rtgen.errors import ConfigError

PROTOCOL_VERSION = 1
OUTPUT_RATE = 48_000
"""Samples per second of the sound that leaves with the pictures."""
EVENTS = ("none", "smile", "nod", "shake", "look_left", "look_right", "surprised")
"""Gestures by id; 0 stands for none."""

Pcm16 = npt.NDArray[np.int16]
Pixels = npt.NDArray[np.uint8]
ServiceClass = Literal["live", "offline"]
S = TypeVar("S", covariant=True)


class SpeechState(enum.IntEnum):
    """What a face is doing; the ids are those of the model's state embedding."""

    IDLE = 0
    LISTENING = 1
    SPEAKING = 2
    THINKING = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitFormat:
    """Sizes of a pipeline's units; picture and sound of a unit last equally long, exactly.

    Attributes:
        fps: pixel frames per second.
        frames_per_unit: pixel frames of one unit.
        height: pixel rows.
        width: pixel columns.
        model_rate: samples per second of the sound that the model hears; it divides 48000.
        lookahead_samples: at `model_rate`, after a unit's end, that its model input holds too.
        units_per_chunk: units denoised together.
        lead: units by which a session can be rolled back.
        takes_frames: whether pictures drive it (`Session.push_frame`).
    """

    fps: Fraction
    frames_per_unit: int
    height: int
    width: int
    model_rate: int = 16_000
    lookahead_samples: int = 0
    units_per_chunk: int = 1
    lead: int = 2
    takes_frames: bool = False

    def __post_init__(self) -> None:
        if OUTPUT_RATE % self.model_rate:
            raise ConfigError(f"model_rate must divide {OUTPUT_RATE}, got {self.model_rate}")
        if (self.duration * self.model_rate).denominator != 1:
            raise ConfigError(
                f"{self.frames_per_unit} frames at {self.fps} fps are no whole number of samples "
                f"at {self.model_rate} Hz"
            )

    @property
    def duration(self) -> Fraction:
        """Seconds of one unit."""
        return self.frames_per_unit / self.fps

    @property
    def output_samples(self) -> int:
        """Samples of one unit at `OUTPUT_RATE`."""
        return int(self.duration * OUTPUT_RATE)

    @property
    def model_samples(self) -> int:
        """Samples of one unit at `model_rate`, look-ahead not counted."""
        return int(self.duration * self.model_rate)


@dataclass(frozen=True, slots=True, kw_only=True)
class Unit:
    """One finished unit.

    Attributes:
        session: id of the session.
        generation: raised by every interrupt; a unit of an older generation is to be dropped.
        index: number of the unit in the session. After an interrupt, numbers that were never
            acknowledged are given again, in the new generation.
        media_time: exact seconds from the session's start to the unit's first frame and sample.
        frames: uint8 [F, H, W, 3], RGB.
        audio: int16 [output_samples], mono at `OUTPUT_RATE`.
        state: what the face was told to do.
        padding: samples at the end of `audio` that are silence added to fill an offline session's
            last unit; 0 elsewhere.
    """

    session: str
    generation: int
    index: int
    media_time: Fraction
    frames: Pixels
    audio: Pcm16
    state: SpeechState
    padding: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSpec:
    """What a client asks for.

    Attributes:
        avatar: name of the identity, or None for the model's first.
        seed: of noise and motion; equal seeds and inputs give equal frames.
        num_inference_steps: forwards per unit, or None for the model's default.
        min_inference_steps: fewest forwards per unit that the session may be lowered to when time
            runs short, or None for the model's fewest.
        service_class: "live" keeps time and drops nothing but what is interrupted; "offline" waits
            for sound and for its reader, and ends with its sound.
        state: base state, shown while there is no speech.
    """

    avatar: str | None = None
    seed: int = 0
    num_inference_steps: int | None = None
    min_inference_steps: int | None = None
    service_class: ServiceClass = "live"
    state: SpeechState = SpeechState.IDLE

    def __post_init__(self) -> None:
        if not 0 <= self.seed < 2**63:
            raise ConfigError(f"seed must be in [0, 2**63), got {self.seed}")
        steps, classes = self.num_inference_steps, typing.get_args(ServiceClass)
        if steps is not None and steps < 1:
            raise ConfigError(f"num_inference_steps must be at least 1, got {steps}")
        floor = self.min_inference_steps
        if floor is not None and not 1 <= floor <= (floor if steps is None else steps):
            raise ConfigError(
                f"min_inference_steps must be 1 to num_inference_steps ({steps}), got {floor}"
            )
        if self.service_class not in classes:
            raise ConfigError(f"service_class must be in {classes}, got {self.service_class!r}")


@dataclass(frozen=True, slots=True)
class Grant(Generic[S]):
    """A reservation: `session` is open and belongs to the caller, who must close it."""

    session: S


@dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """No room: what stood in the way, and when to ask again."""

    reason: str
    retry_after_s: float


class _Message:
    """A frozen dataclass with a `type`; its fields are the schema."""

    type: ClassVar[str]

    def to_dict(self) -> dict[str, Any]:
        """The message as JSON values: its fields, `type`, and the protocol's `version`."""
        body = {f.name: _plain(getattr(self, f.name)) for f in fields(typing.cast(Any, self))}
        return {"version": PROTOCOL_VERSION, "type": self.type, **body}


def _plain(value: Any) -> Any:
    if isinstance(value, SpeechState):
        return value.name.lower()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return value


@dataclass(frozen=True, slots=True, kw_only=True)
class Speak(_Message):
    """Queue one utterance, given as sound or as text.

    Attributes:
        audio: mono int16 little-endian samples (base64 in JSON); empty if `text` is given.
        sample_rate: of `audio`, Hz.
        text: to be spoken by a synthesizer of the media side; an engine takes sound only.
    """

    type: ClassVar[str] = "speak"
    audio: bytes = b""
    sample_rate: int = OUTPUT_RATE
    text: str = ""

    def __post_init__(self) -> None:
        if bool(self.audio) == bool(self.text):
            raise ConfigError("speak takes either audio or text")
        if len(self.audio) % 2:
            raise ConfigError(f"audio must be whole int16 samples, got {len(self.audio)} bytes")
        if not 1_000 <= self.sample_rate <= 384_000:
            raise ConfigError(f"sample_rate must be 1000 to 384000, got {self.sample_rate}")
        if len(self.text) > 4_000:
            raise ConfigError(f"text must have at most 4000 characters, got {len(self.text)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop(_Message):
    """Interrupt: speech that was not played is dropped, the face goes to the base state."""

    type: ClassVar[str] = "stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class SetState(_Message):
    """The base state, shown from the next unit on while there is no speech."""

    type: ClassVar[str] = "set_state"
    state: SpeechState


@dataclass(frozen=True, slots=True, kw_only=True)
class TriggerEvent(_Message):
    """A gesture, one of `EVENTS` but "none", starting with the next unit."""

    type: ClassVar[str] = "trigger_event"
    event: str

    def __post_init__(self) -> None:
        if self.event not in EVENTS[1:]:
            raise ConfigError(f"event must be one of {EVENTS[1:]}, got {self.event!r}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SetAvatar(_Message):
    """Another identity, from the next unit on; the picture is cut there."""

    type: ClassVar[str] = "set_avatar"
    avatar: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SetQuality(_Message):
    """Forwards per unit, from the next unit on."""

    type: ClassVar[str] = "set_quality"
    num_inference_steps: int

    def __post_init__(self) -> None:
        steps = self.num_inference_steps
        if not 1 <= steps <= 1000:
            raise ConfigError(f"num_inference_steps must be 1 to 1000, got {steps}")


ControlMessage = Speak | Stop | SetState | TriggerEvent | SetAvatar | SetQuality


@dataclass(frozen=True, slots=True, kw_only=True)
class Started(_Message):
    """Speech began: its first sample lies at `position_s` of the session's media time."""

    type: ClassVar[str] = "started"
    generation: int
    position_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished(_Message):
    """Speech ended at `position_s` of media time; follows every `Started` exactly once."""

    type: ClassVar[str] = "finished"
    generation: int
    position_s: float
    interrupted: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Stats(_Message):
    """Figures since the session's start, sent every few units.

    Attributes:
        units: delivered.
        dropped: units made and dropped by interrupts.
        late: live units delivered after their time.
        buffered_s: seconds of speech that wait.
        real_time_factor: media seconds per wall second over the recent units; above 1 is faster.
        stage_ms: per stage, recent percentiles: {"denoise": {"p50": .., "p95": .., "max": ..}}.
    """

    type: ClassVar[str] = "stats"
    units: int
    dropped: int
    late: int
    buffered_s: float
    real_time_factor: float
    stage_ms: Mapping[str, Mapping[str, float]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorEvent(_Message):
    """Something failed; a fatal one is the session's last event."""

    type: ClassVar[str] = "error"
    message: str
    fatal: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityChanged(_Message):
    """The load changed the forwards per unit, from the next unit on.

    Attributes:
        num_inference_steps: from now on.
        degraded: whether that is fewer than was asked for.
    """

    type: ClassVar[str] = "quality_changed"
    num_inference_steps: int
    degraded: bool


ServerEvent = Started | Finished | Stats | QualityChanged | ErrorEvent

_CONTROL_TYPES: dict[str, type[Any]] = {kind.type: kind for kind in typing.get_args(ControlMessage)}


def parse_control(message: object) -> ControlMessage:
    """Reads a control message that came as JSON values.

    Args:
        message: a mapping with `version`, `type` and the type's fields; nothing else.

    Raises:
        ConfigError: another version, an unknown type or field, a missing field, a wrong value.
    """
    if not isinstance(message, Mapping):
        raise ConfigError(f"a control message must be an object, got {type(message).__name__}")
    version, name = message.get("version"), message.get("type")
    if version != PROTOCOL_VERSION or isinstance(version, bool):
        raise ConfigError(f"version must be {PROTOCOL_VERSION}, got {version!r}")
    kind = _CONTROL_TYPES.get(name) if isinstance(name, str) else None
    if kind is None:
        raise ConfigError(f"type must be one of {sorted(_CONTROL_TYPES)}, got {name!r}")
    given = {key: value for key, value in message.items() if key not in ("version", "type")}
    hints = typing.get_type_hints(kind)
    known = {field.name: hints[field.name] for field in fields(kind)}
    if unknown := sorted(str(key) for key in given.keys() - known.keys()):
        raise ConfigError(f"{name} takes {sorted(known)}, got unknown {unknown}")
    values = {key: _parsed(f"{name}.{key}", value, known[key]) for key, value in given.items()}
    try:
        return typing.cast(ControlMessage, kind(**values))
    except TypeError as error:  # a field without default was not given
        raise ConfigError(f"{name} needs all of {sorted(known)}, got {sorted(given)}") from error


def _parsed(name: str, value: object, kind: type[Any]) -> object:
    """Checks one JSON value against a field's type, and converts states and bytes."""
    if kind is SpeechState:
        names = [state.name.lower() for state in SpeechState]
        if value not in names:
            raise ConfigError(f"{name} must be one of {names}, got {value!r}")
        return SpeechState(names.index(str(value)))
    expected: type[Any] = str if kind is bytes else kind
    if not isinstance(value, expected) or isinstance(value, bool):
        raise ConfigError(f"{name} must be {expected.__name__}, got {type(value).__name__}")
    if kind is bytes:
        try:
            return base64.b64decode(str(value), validate=True)
        except (binascii.Error, ValueError) as error:
            raise ConfigError(f"{name} must be base64: {error}") from error
    return value


class Session(Protocol):
    """One client's session, as an event loop sees it; no call blocks."""

    @property
    def id(self) -> str: ...

    def units(self) -> AsyncIterator[Unit]:
        """Finished units in order; ends when the session ends. One reader."""

    def events(self) -> AsyncIterator[ServerEvent]:
        """Server events in order; of unread ones the oldest `Stats` make room. One reader."""

    def push_audio(self, pcm: Pcm16, sample_rate: int) -> int:
        """Appends speech, int16 [samples] or [channels, samples]; returns samples accepted."""

    def end_audio(self) -> None:
        """Ends the utterance (live), or the session's sound and with it the session (offline)."""

    async def audio_room(self, seconds: float) -> None:
        """Returns when that much sound would be accepted, or the session has ended."""

    def push_frame(self, frame: Pixels) -> None:
        """Gives a picture of a camera, uint8 [H, W, 3]; it replaces one not yet used."""

    def control(self, message: ControlMessage) -> None:
        """Applies a message; it takes effect at the next unit not yet begun."""

    def ack(self, unit: Unit) -> None:
        """Says that a live unit is on screen: an interrupt goes back to it, and a place is free."""

    async def close(self) -> None:
        """Ends the session and frees its place; may be called again."""


class Service(Protocol):
    """Where sessions come from."""

    async def reserve(self, spec: SessionSpec) -> Grant[Session] | Refusal:
        """Opens a session, or says why not; raises `ConfigError` for what no wait would mend."""
