"""What peers send to be connected, read strictly before aiortc sees any of it; free of I/O.

aiortc's parser raises six kinds of errors on damaged SDP and takes seconds for thousands of
candidates, so sizes and lines are checked here first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, cast

from rtgen.errors import ConfigError, SignallingError
from rtgen.types import SessionSpec, SpeechState

MAX_SDP_BYTES = 64 * 1024
MAX_CANDIDATES = 64
MAX_MEDIA = 4
Kind = Literal["audio", "video", "application"]

_TITLES = {
    400: "Bad request",
    401: "Not authorised",
    403: "Not allowed",
    404: "Not found",
    405: "Method not allowed",
    409: "Busy",
    413: "Too large",
    415: "Unsupported media",
    422: "Cannot be used",
    429: "Too many",
    501: "Not available",
    503: "Not now",
}


class Problem(SignallingError):
    """A refused request, as RFC 9457 wants it told.

    Args:
        status: HTTP status.
        reason: one word for programs.
        message: for people: what was expected, what came, what to do.
        retry_after_s: when to ask again.
    """

    def __init__(
        self, status: int, reason: str, message: str, retry_after_s: float | None = None
    ) -> None:
        super().__init__(status, message)
        self.reason = reason
        self.retry_after_s = retry_after_s

    def to_dict(self) -> dict[str, object]:
        """The body of the answer."""
        return {
            "type": "about:blank",
            "title": _TITLES.get(self.status, "Error"),
            "status": self.status,
            "detail": str(self),
            "reason": self.reason,
        }


@dataclass(frozen=True, slots=True)
class RemoteSdp:
    """A peer's offer that passed the checks.

    Attributes:
        text: the SDP, changed so that we are the DTLS server.
        kinds: of its media sections, in order.
    """

    text: str
    kinds: tuple[Kind, ...]


def check_sdp(text: str) -> RemoteSdp:
    """Checks an offer's size and shape.

    `a=setup:actpass` becomes `a=setup:active`: as DTLS client, aiortc offers ECDSA ciphers only,
    which servers with RSA certificates refuse.

    Raises:
        Problem: 413 too large; 422 too many candidates, or other media than we serve; 400 no SDP.
    """
    if len(text.encode("utf-8", "surrogatepass")) > MAX_SDP_BYTES:
        raise Problem(413, "too_large", f"an SDP may have {MAX_SDP_BYTES} bytes")
    lines = text.splitlines()
    if not lines or lines[0].strip() != "v=0":
        raise Problem(400, "invalid", "an SDP starts with the line v=0")
    candidates = sum(line.startswith("a=candidate:") for line in lines)
    if candidates > MAX_CANDIDATES:
        raise Problem(
            422, "invalid", f"an SDP may have {MAX_CANDIDATES} candidates, got {candidates}"
        )
    kinds = [line[2:].split(" ")[0] for line in lines if line.startswith("m=")]
    if len(kinds) > MAX_MEDIA:
        raise Problem(
            422, "invalid", f"an SDP may have {MAX_MEDIA} media sections, got {len(kinds)}"
        )
    wrong = [kind for kind in kinds if kind not in ("audio", "video", "application")]
    if wrong or len(set(kinds)) != len(kinds) or not {"audio", "video"} & set(kinds):
        raise Problem(
            422,
            "invalid",
            f"expected one audio section, one video section and a data channel, got {kinds}",
        )
    active = re.sub(r"^a=setup:actpass(?=\r?$)", "a=setup:active", text, flags=re.MULTILINE)
    return RemoteSdp(active, cast(tuple[Kind, ...], tuple(kinds)))


def sent_video_codec(answer: str) -> str | None:
    """The codec that an answer puts first for video; None without video.

    Args:
        answer: our own SDP.
    """
    payload: str | None = None
    is_video = False
    for line in answer.splitlines():
        if line.startswith("m="):
            parts = line[2:].split(" ")
            is_video = parts[0] == "video" and parts[1] != "0"
            payload = parts[3] if is_video else payload
        elif is_video and payload and line.startswith(f"a=rtpmap:{payload} "):
            return line.split(" ")[1].split("/")[0]
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """The body of `POST /offer`.

    Attributes:
        sdp: checked.
        spec: of the session that is asked for.
        resume: token of the session to take up again.
    """

    sdp: RemoteSdp
    spec: SessionSpec = field(default_factory=SessionSpec)
    resume: str | None = None


def parse_offer(body: object) -> Offer:
    """Reads the JSON body of an offer; unknown fields are errors.

    Raises:
        Problem: 400 a wrong field; as `check_sdp` for the SDP.
    """
    if not isinstance(body, Mapping):
        raise Problem(400, "invalid", "the body must be a JSON object")
    unknown = sorted(set(body) - {"type", "sdp", "spec", "resume"})
    if unknown:
        raise Problem(400, "invalid", f"an offer has type, sdp, spec and resume, got {unknown}")
    if body.get("type", "offer") != "offer" or not isinstance(body.get("sdp"), str):
        raise Problem(400, "invalid", "an offer needs type 'offer' and its sdp as text")
    resume = body.get("resume")
    if resume is not None and not isinstance(resume, str):
        raise Problem(400, "invalid", "resume must be a token")
    try:
        spec = parse_spec(body.get("spec"))
    except ConfigError as error:
        raise Problem(400, "invalid", str(error)) from error
    return Offer(sdp=check_sdp(body["sdp"]), spec=spec, resume=resume)


def parse_spec(values: object) -> SessionSpec:
    """Reads what a live client may ask for: avatar, seed, state, and the numbers of steps.

    Raises:
        ConfigError: an unknown field or a wrong value.
    """
    if values is None:
        return SessionSpec()
    if not isinstance(values, Mapping):
        raise ConfigError("spec must be an object")
    kinds: dict[str, tuple[type, ...]] = {
        "avatar": (str, type(None)),
        "seed": (int,),
        "num_inference_steps": (int, type(None)),
        "min_inference_steps": (int, type(None)),
        "state": (str,),
    }
    given: dict[str, Any] = {}
    for name, value in values.items():
        if name not in kinds:
            raise ConfigError(f"spec takes {sorted(kinds)}, got {name!r}")
        if not isinstance(value, kinds[name]) or isinstance(value, bool):
            raise ConfigError(f"spec.{name} has a wrong type: {type(value).__name__}")
        given[name] = value
    if "state" in given:
        names = [state.name.lower() for state in SpeechState]
        if given["state"] not in names:
            raise ConfigError(f"spec.state must be one of {names}, got {given['state']!r}")
        given["state"] = SpeechState(names.index(given["state"]))
    return SessionSpec(**given)


def spec_to_dict(spec: SessionSpec) -> dict[str, object]:
    """The fields that `parse_spec` reads."""
    values: dict[str, object] = {item.name: getattr(spec, item.name) for item in fields(spec)}
    values["state"] = spec.state.name.lower()
    del values["service_class"]
    return values


@dataclass(frozen=True, slots=True)
class Candidate:
    """One trickled ICE candidate.

    Attributes:
        line: "candidate:..." as browsers give it.
        mid: its media section, if named.
        index: number of its media section, if given.
    """

    line: str
    mid: str | None
    index: int | None


def parse_candidates(body: object) -> list[Candidate]:
    """Reads the JSON body of a PATCH; empty candidates mark the end and are left out.

    Raises:
        Problem: 400 another shape; 422 too many.
    """
    items = body.get("candidates") if isinstance(body, Mapping) else None
    if not isinstance(items, list) or set(cast(Mapping[str, object], body)) != {"candidates"}:
        raise Problem(400, "invalid", "the body must be an object with the list candidates")
    if len(items) > MAX_CANDIDATES:
        raise Problem(422, "invalid", f"at most {MAX_CANDIDATES} candidates, got {len(items)}")
    found = []
    for item in items:
        line = item.get("candidate") if isinstance(item, Mapping) else None
        mid = item.get("sdpMid") if isinstance(item, Mapping) else None
        index = item.get("sdpMLineIndex") if isinstance(item, Mapping) else None
        if (
            not isinstance(line, str)
            or len(line) > 1000
            or not isinstance(mid, str | None)
            or not isinstance(index, int | None)
        ):
            raise Problem(400, "invalid", "a candidate has candidate, sdpMid and sdpMLineIndex")
        if line:
            found.append(Candidate(line.removeprefix("a="), mid, index))
    return found
