from __future__ import annotations

import asyncio
import json
import random
import struct
import typing
from fractions import Fraction

import pytest

from rtgen.engine.host_messages import (
    Ack,
    AskStats,
    Audio,
    Beat,
    Closed,
    CloseSession,
    Control,
    EndAudio,
    Ended,
    Event,
    Failed,
    Granted,
    Message,
    Picture,
    PictureTaken,
    Ready,
    Refused,
    Release,
    Reserve,
    Room,
    Shutdown,
    Start,
    StartFailed,
    StatsReply,
    UnitReady,
)
from rtgen.engine.host_wire import (
    MAX_PAYLOAD_BYTES,
    WIRE_VERSION,
    decode_body,
    decode_prefix,
    encode,
    read_message,
)
from rtgen.errors import LinkError
from rtgen.types import (
    ControlMessage,
    ErrorEvent,
    Finished,
    QualityChanged,
    ServerEvent,
    SessionSpec,
    SetAvatar,
    SetQuality,
    SetState,
    Speak,
    SpeechState,
    Started,
    Stats,
    Stop,
    TriggerEvent,
    UnitFormat,
)

PREFIX = 12
STATS = Stats(
    units=3,
    dropped=1,
    late=0,
    buffered_s=0.25,
    real_time_factor=1.5,
    stage_ms={"denoise": {"p50": 1.0, "max": 2.5}},
)
CONTROLS: list[ControlMessage] = [
    Speak(audio=bytes(range(256)), sample_rate=16_000),
    Speak(text="hällo\0"),
    Stop(),
    SetState(state=SpeechState.THINKING),
    TriggerEvent(event="nod"),
    SetAvatar(avatar="bo"),
    SetQuality(num_inference_steps=4),
]
EVENTS: list[ServerEvent] = [
    Started(generation=1, position_s=2.0),
    Finished(generation=1, position_s=2.5, interrupted=True),
    STATS,
    ErrorEvent(message="no \ud7ff", fatal=False),
    QualityChanged(num_inference_steps=1, degraded=True),
]
MESSAGES: list[Message] = [
    Start(
        factory="a.b:C.d",
        arguments={"x": [1, None, {"y": True}]},
        max_sessions=2,
        slots_per_session=4,
        intra_op_threads=1,
        warm_units=3,
        drain_s=1.0,
        log_level=20,
    ),
    Reserve(request=2**40, spec=SessionSpec(avatar="bo", seed=2**63 - 1, service_class="offline")),
    Reserve(request=0, spec=SessionSpec(num_inference_steps=3, state=SpeechState.LISTENING)),
    Audio(session="s", sample_rate=48_000, channels=2, epoch=0, total=9, pcm=bytes(range(240))),
    EndAudio(session="s"),
    *(Control(session="s", epoch=1, total=0, message=message) for message in CONTROLS),
    Ack(session="s", generation=3, index=7),
    Picture(session="s", height=2, width=3, pixels=bytes(18)),
    AskStats(request=1, session="s"),
    CloseSession(session="s"),
    Release(slot=3),
    Shutdown(),
    Ready(
        format=UnitFormat(fps=Fraction(25, 2), frames_per_unit=4, height=8, width=16),
        description={"model": "toy", "sizes": [1, 2.5]},
        slots=8,
    ),
    StartFailed(error="ConfigError", message="no"),
    Beat(stalled_s=0.5, draining=False, figures={"rtgen_engine_rows_total": 3.0}),
    Granted(request=1, session="s", room=5_760_000),
    Refused(request=1, reason="full", retry_after_s=5.0),
    Failed(request=1, error="ConfigError", message="no"),
    UnitReady(session="s", slot=1, sequence=2, generation=3),
    *(Event(session="s", event=event) for event in EVENTS),
    Room(session="s", epoch=0, total=1, samples=2),
    PictureTaken(session="s"),
    StatsReply(request=1, stats=STATS),
    Ended(session="s", error=None, message=""),
    Ended(session="s", error="StreamClosed", message="x"),
    Closed(session="s"),
]


def received(data: bytes) -> Message | None:
    """What a reader makes of a stream's first bytes."""

    async def work() -> Message | None:
        reader = asyncio.StreamReader()
        reader.feed_data(data)
        reader.feed_eof()
        return await read_message(reader)

    return asyncio.run(work())


def altered(message: Message, **values: object) -> bytes:
    """The bytes of a message with other values in its header; None removes a field."""
    data = encode(message)
    kind, size, _ = decode_prefix(data[:PREFIX])
    header = json.loads(data[PREFIX : PREFIX + size])
    header.update(values)
    text = json.dumps({k: v for k, v in header.items() if v is not None}).encode()
    rest = data[PREFIX + size :]
    return struct.pack("!2sBBII", b"RG", WIRE_VERSION, kind, len(text), len(rest)) + text + rest


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_a_message_arrives_as_it_was(message: Message) -> None:
    assert received(encode(message)) == message


def test_every_kind_of_message_is_tried() -> None:
    assert {type(message) for message in MESSAGES} == set(typing.get_args(Message))
    assert {type(message) for message in CONTROLS} == set(typing.get_args(ControlMessage))
    assert {type(message) for message in EVENTS} == set(typing.get_args(ServerEvent))


def test_sound_travels_raw() -> None:
    pcm = bytes(range(256)) * 100
    data = encode(Control(session="s", epoch=0, total=0, message=Speak(audio=pcm)))
    assert data.endswith(pcm)
    assert len(data) < len(pcm) + 300


def test_messages_follow_one_another() -> None:
    async def work() -> list[Message]:
        reader = asyncio.StreamReader()
        for message in MESSAGES:
            reader.feed_data(encode(message))
        reader.feed_eof()
        got: list[Message] = []
        while (one := await read_message(reader)) is not None:
            got.append(one)
        return got

    assert asyncio.run(work()) == MESSAGES


def test_the_end_of_a_stream_is_no_error_between_messages() -> None:
    assert received(b"") is None


@pytest.mark.parametrize("length", [1, 11, 12, 20])
def test_a_stream_that_ends_inside_a_message_is_an_error(length: int) -> None:
    with pytest.raises(LinkError, match="ended inside"):
        received(encode(MESSAGES[1])[:length])


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (b"GET / HTTP/1.1\r\n", "expected b'RG'"),
        (b"RG\x02\x00" + bytes(8), "version 2"),
        (b"RG\x01\xff" + bytes(8), "kind must be below"),
        (struct.pack("!2sBBII", b"RG", 1, 0, 2**31, 0), "more than a message may have"),
        (struct.pack("!2sBBII", b"RG", 1, 0, 2, MAX_PAYLOAD_BYTES + 1), "more than"),
        (struct.pack("!2sBBII", b"RG", 1, 0, 3, 0) + b"{x}", "no JSON"),
        (struct.pack("!2sBBII", b"RG", 1, 0, 2, 0) + b"\xff\xff", "no JSON"),
        (struct.pack("!2sBBII", b"RG", 1, 0, 2, 0) + b"[]", "must be an object"),
        (struct.pack("!2sBBII", b"RG", 1, 0, 90_000, 0) + b"[" * 90_000, "no JSON"),
        (altered(Release(slot=1), slot="1"), "Release.slot must be int"),
        (altered(Release(slot=1), slot=True), "must be int"),
        (altered(Release(slot=1), slot=None), "must have the fields"),
        (altered(Release(slot=1), more=1), "must have the fields"),
        (altered(Refused(request=1, reason="", retry_after_s=1.0), retry_after_s="x"), "float"),
        (altered(MESSAGES[1], spec={"seed": 1}), "must have the fields"),
        (altered(Event(session="s", event=STATS), event={"type": "nothing"}), "must be one of"),
        (altered(Event(session="s", event=STATS), event=[]), "must be one of"),
        (altered(StatsReply(request=1, stats=STATS), stats={"type": "stop"}), "the type 'stats'"),
        (altered(Audio(session="", sample_rate=1, channels=1, epoch=0, total=0, pcm=b"ab"),
                 channels=2), "no sound of 2 channels"),
        (altered(Audio(session="", sample_rate=1, channels=1, epoch=0, total=0, pcm=b"ab"),
                 pcm=False), "belong to no field"),
        (altered(Audio(session="", sample_rate=1, channels=1, epoch=0, total=0, pcm=b""),
                 pcm=True), "must be there"),
        (altered(Picture(session="", height=1, width=1, pixels=b"abc"), height=-1), "no picture"),
        (altered(Ended(session="", error=None, message=""), error=7), "must be str"),
    ],
)  # fmt: skip
def test_what_breaks_the_protocol_is_named(data: bytes, match: str) -> None:
    with pytest.raises(LinkError, match=match):
        received(data)


def test_a_value_that_breaks_a_rule_of_its_class_is_named() -> None:
    spec = json.loads(encode(MESSAGES[2])[PREFIX:])["spec"]
    for change, match in (
        ({"seed": -1}, "seed must be"),
        ({"service_class": "best"}, "must be in"),
        ({"state": "GONE"}, "is no state"),
        ({"num_inference_steps": 0}, "at least 1"),
    ):
        with pytest.raises(LinkError, match=match):
            received(altered(MESSAGES[2], spec=spec | change))


def test_a_format_that_breaks_arithmetic_is_refused() -> None:
    (message,) = (m for m in MESSAGES if isinstance(m, Ready))
    size = decode_prefix(encode(message)[:PREFIX])[1]
    values = json.loads(encode(message)[PREFIX : PREFIX + size])["format"]
    for change in ({"fps": [0, 1]}, {"fps": [25, 0]}, {"fps": [25]}, {"model_rate": 0}):
        with pytest.raises(LinkError):
            received(altered(message, format=values | change))


def test_a_message_that_is_too_large_is_not_sent() -> None:
    size = MAX_PAYLOAD_BYTES + 2
    with pytest.raises(LinkError, match="too large"):
        encode(Audio(session="", sample_rate=1, channels=1, epoch=0, total=0, pcm=bytes(size)))


def test_mutated_bytes_are_refused_or_read_and_nothing_else() -> None:
    chance = random.Random(7)
    refused = 0
    for _ in range(3_000):
        data = bytearray(encode(chance.choice(MESSAGES)))
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(PREFIX, len(data))] = chance.randrange(256)
        kind, header, payload = decode_prefix(bytes(data[:PREFIX]))
        try:
            decode_body(
                kind,
                bytes(data[PREFIX : PREFIX + header]),
                bytes(data[-payload:] if payload else b""),
            )
        except LinkError:
            refused += 1
    assert refused > 1_000
