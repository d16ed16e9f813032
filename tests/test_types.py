from __future__ import annotations

import json
from fractions import Fraction
from typing import Any

import pytest

from rtgen.errors import ConfigError
from rtgen.types import (
    PROTOCOL_VERSION,
    ControlMessage,
    Finished,
    SessionSpec,
    SetAvatar,
    SetQuality,
    SetState,
    Speak,
    SpeechState,
    Stats,
    Stop,
    TriggerEvent,
    UnitFormat,
    parse_control,
)

MESSAGES: tuple[ControlMessage, ...] = (
    Speak(audio=b"\x01\x02\x03\x04", sample_rate=16000),
    Speak(text="Good morning."),
    Stop(),
    SetState(state=SpeechState.LISTENING),
    TriggerEvent(event="nod"),
    SetAvatar(avatar="ada"),
    SetQuality(num_inference_steps=2),
)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: m.type)
def test_a_control_message_survives_json(message: ControlMessage) -> None:
    assert parse_control(json.loads(json.dumps(message.to_dict()))) == message


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"version": PROTOCOL_VERSION + 1}, "version must be"),
        ({"version": True}, "version must be"),
        ({"type": "sing"}, "type must be one of"),
        ({"type": ["set_state"]}, "type must be one of"),
        ({"state": "asleep"}, "set_state.state must be one of"),
        ({"state": 1}, "set_state.state must be one of"),
        ({"state": ["idle"]}, "set_state.state must be one of"),
        ({"mood": "good"}, r"unknown \['mood'\]"),
    ],
)
def test_a_wrong_control_message_is_refused(change: dict[str, Any], complaint: str) -> None:
    good = SetState(state=SpeechState.IDLE).to_dict()
    parse_control(good)
    with pytest.raises(ConfigError, match=complaint):
        parse_control(good | change)


@pytest.mark.parametrize(
    "body",
    [
        {"type": "speak"},
        {"type": "speak", "text": 3},
        {"type": "speak", "audio": "AAE"},
        {"type": "speak", "audio": "AA=="},
        {"type": "speak", "audio": "AAE=", "text": "both"},
        {"type": "speak", "audio": "AAE=", "sample_rate": 0},
        {"type": "speak", "text": "x" * 5000},
        {"type": "set_state"},
        {"type": "trigger_event", "event": "none"},
        {"type": "trigger_event", "event": "backflip"},
        {"type": "set_avatar", "avatar": None},
        {"type": "set_quality", "num_inference_steps": 0},
        {"type": "set_quality", "num_inference_steps": True},
        {"type": "set_quality", "num_inference_steps": 1.5},
    ],
    ids=json.dumps,
)
def test_a_wrong_value_is_refused(body: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        parse_control({"version": PROTOCOL_VERSION, **body})


@pytest.mark.parametrize("message", [None, 3, "stop", ["stop"]])
def test_a_control_message_is_an_object(message: object) -> None:
    with pytest.raises(ConfigError, match="must be an object"):
        parse_control(message)


def test_server_events_are_json() -> None:
    finished = Finished(generation=1, position_s=2.5, interrupted=True)
    assert json.loads(json.dumps(finished.to_dict())) == {
        "version": PROTOCOL_VERSION,
        "type": "finished",
        "generation": 1,
        "position_s": 2.5,
        "interrupted": True,
    }
    stats = Stats(
        units=1,
        dropped=0,
        late=0,
        buffered_s=0.5,
        real_time_factor=2.0,
        stage_ms={"decode": {"p50": 1.0}},
    )
    assert json.loads(json.dumps(stats.to_dict()))["stage_ms"] == {"decode": {"p50": 1.0}}


def test_a_unit_of_four_frames_at_25_fps_is_160_ms_exactly() -> None:
    unit = UnitFormat(fps=Fraction(25), frames_per_unit=4, height=1, width=1)
    assert unit.duration == Fraction(4, 25)
    assert (unit.output_samples, unit.model_samples) == (7680, 2560)


def test_formats_without_whole_samples_are_refused() -> None:
    with pytest.raises(ConfigError, match="no whole number of samples"):
        UnitFormat(fps=Fraction(30000, 1001), frames_per_unit=1, height=1, width=1)
    with pytest.raises(ConfigError, match="must divide"):
        UnitFormat(fps=Fraction(25), frames_per_unit=4, height=1, width=1, model_rate=22050)


@pytest.mark.parametrize(
    "change", [{"seed": -1}, {"num_inference_steps": 0}, {"service_class": "batch"}]
)
def test_a_wrong_spec_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        SessionSpec(**change)
