"""Messages between the media process and the generation process, and their bytes.

    magic "RG" | version u8 | kind u8 | header bytes u32 | payload bytes u32 | header | payload

The header is a JSON object with exactly the message's fields. The payload is its field of bytes
(sound, a camera's pixels), raw; the header says whether there is one. Pixels of finished units go
through `rtgen.frame_link` instead. What breaks a rule is a `LinkError`, and whoever finds it
closes the link.
"""

from __future__ import annotations

import asyncio
import functools
import json
import struct
import types
import typing
from collections.abc import Hashable, Mapping
from dataclasses import fields, is_dataclass
from fractions import Fraction
from typing import Any, Literal, NoReturn

from rtgen.engine.host_messages import Message
from rtgen.errors import ConfigError, LinkError
from rtgen.types import SpeechState

WIRE_VERSION = 1
MAX_HEADER_BYTES = 1 << 20
MAX_PAYLOAD_BYTES = 32 << 20
_PREFIX = struct.Struct("!2sBBII")
_MAGIC = b"RG"
_KINDS: tuple[type[Any], ...] = typing.get_args(Message)


def encode(message: Message) -> bytes:
    """The bytes of a message.

    Raises:
        LinkError: it is larger than a message may be.
    """
    payload: list[bytes] = []
    text = json.dumps(_plain(message, payload), allow_nan=False, separators=(",", ":"))
    header, body = text.encode(), b"".join(payload)
    if len(header) > MAX_HEADER_BYTES or len(body) > MAX_PAYLOAD_BYTES or len(payload) > 1:
        _refuse(f"{type(message).__name__} of {len(header)} and {len(body)} bytes is too large")
    kind = _KINDS.index(type(message))
    return _PREFIX.pack(_MAGIC, WIRE_VERSION, kind, len(header), len(body)) + header + body


def decode_prefix(data: bytes) -> tuple[int, int, int]:
    """Kind, header bytes and payload bytes of a message that begins with `data`.

    Raises:
        LinkError: no message of this version begins so.
    """
    magic, version, kind, header, payload = _PREFIX.unpack(data)
    if (magic, version) != (_MAGIC, WIRE_VERSION):
        _refuse(f"expected {_MAGIC!r} version {WIRE_VERSION}, got {magic!r} version {version}")
    if kind >= len(_KINDS):
        _refuse(f"kind must be below {len(_KINDS)}, got {kind}")
    if header > MAX_HEADER_BYTES or payload > MAX_PAYLOAD_BYTES:
        _refuse(f"{header} and {payload} bytes are more than a message may have")
    return kind, header, payload


def decode_body(kind: int, header: bytes, payload: bytes) -> Message:
    """Rebuilds a message, checking every field.

    Raises:
        LinkError: not the fields of that kind, or a value that breaks a rule.
    """
    name = _KINDS[kind].__name__
    try:
        values = json.loads(header, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or far too deep
        _refuse(f"the header of {name} is no JSON: {error}")
    rest = [payload] if payload else []
    message = _built(_KINDS[kind], values, name, rest)
    if rest:
        _refuse(f"{name} came with {len(payload)} bytes that belong to no field")
    return typing.cast(Message, message)


async def read_message(reader: asyncio.StreamReader) -> Message | None:
    """Reads one message; None at the end of the stream.

    Raises:
        LinkError: what came is no message, or the stream ended inside one.
    """
    try:
        prefix = await reader.readexactly(_PREFIX.size)
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise LinkError("the stream ended inside a message") from error
        return None
    kind, header, payload = decode_prefix(prefix)
    try:
        body = await reader.readexactly(header + payload)
    except asyncio.IncompleteReadError as error:
        raise LinkError("the stream ended inside a message") from error
    return decode_body(kind, body[:header], body[header:])


def _refuse(what: str) -> NoReturn:
    raise LinkError(f"not a message of this link: {what}")


def _plain(value: Any, payload: list[bytes]) -> Any:
    """JSON values; bytes go to `payload`."""
    if isinstance(value, bytes):
        if value:
            payload.append(value)
        return bool(value)
    if isinstance(value, SpeechState):
        return value.name
    if isinstance(value, Fraction):
        return [value.numerator, value.denominator]
    if is_dataclass(value):
        tag = {"type": value.type} if hasattr(value, "type") else {}
        named = {f.name: _plain(getattr(value, f.name), payload) for f in fields(value)}
        return tag | named
    if isinstance(value, Mapping):
        return {key: _plain(item, payload) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item, payload) for item in value]
    return value


@functools.cache
def _hints(kind: Hashable) -> dict[str, Any]:
    """Names and types of a dataclass's fields."""
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in fields(typing.cast(Any, kind))}


def _built(kind: Any, value: Any, where: str, payload: list[bytes]) -> Any:
    """The value of type `kind` that `_plain` made `value` of."""
    if kind is Any:
        return value
    origin, options = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        return _one_of(options, value, where, payload)
    if origin is Literal:
        return value if value in options else _refuse(f"{where} must be in {options}")
    if isinstance(kind, type) and is_dataclass(kind):
        return _dataclass(kind, value, where, payload)
    if kind is bytes:
        if type(value) is not bool or (value and not payload):
            _refuse(f"{where} must say whether there is a payload, and it must be there")
        return payload.pop() if value else b""
    if kind is SpeechState:
        known = isinstance(value, str) and value in SpeechState.__members__
        return SpeechState[value] if known else _refuse(f"{where} is no state")
    if kind is Fraction:
        is_pair = isinstance(value, list) and [type(part) for part in value] == [int, int]
        return Fraction(*value) if is_pair and value[1] else _refuse(f"{where} is no fraction")
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, dict):
            _refuse(f"{where} must be an object")
        return {key: _built(options[1], item, where, payload) for key, item in value.items()}
    if kind is float and type(value) is int:
        return float(value)
    return value if type(value) is kind else _refuse(f"{where} must be {kind.__name__}")


def _one_of(options: tuple[Any, ...], value: Any, where: str, payload: list[bytes]) -> Any:
    if value is None and type(None) in options:
        return None
    tags = {option.type: option for option in options if hasattr(option, "type")}
    if tags:
        tag = value.get("type") if isinstance(value, dict) else None
        if not isinstance(tag, str) or tag not in tags:
            _refuse(f"{where} must be one of {sorted(tags)}, got {tag!r}")
        return _built(tags[tag], value, where, payload)
    (kind,) = (option for option in options if option is not type(None))
    return _built(kind, value, where, payload)


def _dataclass(kind: type[Any], value: Any, where: str, payload: list[bytes]) -> Any:
    hints = _hints(typing.cast(Hashable, kind))
    if not isinstance(value, dict):
        _refuse(f"{where} must be an object, got {type(value).__name__}")
    given = dict(value)
    if hasattr(kind, "type") and given.pop("type", None) != kind.type:
        _refuse(f"{where} must have the type {kind.type!r}")
    if given.keys() != hints.keys():
        _refuse(f"{where} must have the fields {sorted(hints)}, got {sorted(given)}")
    built = {
        name: _built(hints[name], item, f"{where}.{name}", payload) for name, item in given.items()
    }
    try:
        return kind(**built)
    except (ConfigError, ZeroDivisionError) as error:
        raise LinkError(f"not a message of this link: {where}: {error}") from error
