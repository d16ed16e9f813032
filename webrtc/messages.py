"""Messages that the media side adds to the control schema of `rtgen.types`."""

from __future__ import annotations

import json
import time
from typing import Protocol

from rtgen.errors import ConfigError
from rtgen.types import PROTOCOL_VERSION
from webrtc.playout import Playout

MAX_MESSAGE = 64 * 1024
"""Characters of one message over the data channel."""


class Sink(Protocol):
    """Another receiver of messages, besides the data channel; a full one loses them."""

    def send(self, message: dict[str, object]) -> bool: ...


def state_message(session_id: str, state: str, reason: str = "") -> dict[str, object]:
    """The session is in another state."""
    return {
        "version": PROTOCOL_VERSION,
        "type": "session",
        "state": state,
        "session": session_id,
        "reason": reason,
    }


def media_message(
    figures: dict[str, object],
    playout: Playout,
    *,
    target_bitrate: int,
    codec: str | None,
    microphone: dict[str, object],
) -> dict[str, object]:
    """What was sent and how, once a second."""
    return {
        "version": PROTOCOL_VERSION,
        "type": "media",
        **figures,
        "gaps": playout.gaps,
        "gap_ms": round(1000 * playout.gap_s),
        "target_kbps": round(target_bitrate / 1000),
        "codec": codec,
        "media_time_s": round(float(playout.media_end), 3),
        "generation": playout.generation,
        "queued_units": playout.queued_units,
        "mic": microphone,
    }


def pong(message: dict[str, object]) -> dict[str, object]:
    """The answer to a heartbeat, with the wall clock that RTCP sender reports carry.

    Raises:
        ConfigError: it carries no time.
    """
    time_ms = message.get("time_ms")
    if not isinstance(time_ms, int | float):
        raise ConfigError(f"ping needs the number time_ms, got {time_ms!r}")
    return {
        "version": PROTOCOL_VERSION,
        "type": "pong",
        "time_ms": time_ms,
        "server_time_ms": 1000 * time.time(),
    }


def microphone_switch(message: dict[str, object]) -> bool:
    """Whether the microphone is to be heard.

    Raises:
        ConfigError: it does not say.
    """
    on = message.get("on")
    if not isinstance(on, bool):
        raise ConfigError(f"mic needs on: true or false, got {on!r}")
    return on


def parse_message(text: str, limit: int = MAX_MESSAGE) -> object:
    """Reads a message's JSON.

    Raises:
        ConfigError: too long, or no JSON.
    """
    if len(text) > limit:
        raise ConfigError(f"a message may have {limit} characters, got {len(text)}")
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"a message must be JSON: {error}") from error
