"""Configuration of the media process."""

from __future__ import annotations

import ipaddress
import math
from dataclasses import dataclass, field
from pathlib import Path

from rtgen.errors import ConfigError
from webrtc.liveness import TimeLimits
from webrtc.rate_control import RateConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class IceServer:
    """A STUN or TURN server, as in `RTCIceServer`.

    Attributes:
        urls: "stun:host:port" or "turn:host:port?transport=udp".
        username: for TURN.
        credential: for TURN.
    """

    urls: tuple[str, ...]
    username: str | None = None
    credential: str | None = None

    def __post_init__(self) -> None:
        wrong = [u for u in self.urls if not u.startswith(("stun:", "stuns:", "turn:", "turns:"))]
        if not self.urls or wrong:
            raise ConfigError(f"an ICE server is stun:host or turn:host, got {wrong or self.urls}")

    def to_dict(self) -> dict[str, object]:
        """As browsers want it."""
        body: dict[str, object] = {"urls": list(self.urls)}
        if self.username is not None:
            body |= {"username": self.username, "credential": self.credential or ""}
        return body


@dataclass(frozen=True, slots=True, kw_only=True)
class UploadLimits:
    """What an uploaded file may be.

    Attributes:
        max_bytes: of the body.
        max_s: of its sound.
        max_decode_s: of work on it.
    """

    max_bytes: int = 32 * 2**20
    max_s: float = 600.0
    max_decode_s: float = 60.0

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Configuration of a server.

    Attributes:
        host: address to listen on; media uses the same unless `media_addresses` is given.
        port: 0 for any free one.
        token: that every request must carry as `Authorization: Bearer`, or None.
        tls_cert: PEM file, or None for plain HTTP. Browsers give the microphone to HTTPS pages and
            to pages from this machine only.
        tls_key: PEM file of its key.
        cors_origins: other origins whose pages may use the server.
        ice_servers: for both sides. None by default, so gathering never waits for one.
        media_addresses: host addresses for media; empty: `host`, or all if that is unspecified.
        max_sessions: media sessions, besides what the service admits.
        encoder_threads: that encode pictures.
        limits: time limits of sessions.
        rate: bitrate of pictures.
        uploads: limits of uploaded files.
        model: name to show.
        avatars: names to choose from.
        steps: numbers of forwards to choose from.
        default_steps: the one that is taken when none is chosen; None: not known.
        samples: sound files that visitors may have spoken.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    token: str | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    cors_origins: tuple[str, ...] = ()
    ice_servers: tuple[IceServer, ...] = ()
    media_addresses: tuple[str, ...] = ()
    max_sessions: int = 4
    encoder_threads: int = 1
    limits: TimeLimits = field(default_factory=TimeLimits)
    rate: RateConfig = field(default_factory=RateConfig)
    uploads: UploadLimits = field(default_factory=UploadLimits)
    model: str = ""
    avatars: tuple[str, ...] = ()
    steps: tuple[int, ...] = ()
    default_steps: int | None = None
    samples: tuple[Path, ...] = ()

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port must be 0 to 65535, got {self.port}")
        for name in ("max_sessions", "encoder_threads"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.token is not None and not (self.token.isascii() and len(self.token) >= 8):
            raise ConfigError("a token must have at least 8 ASCII characters")
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("TLS needs both a certificate and its key")
        if "*" in self.cors_origins:
            raise ConfigError("name the origins that may use the server; '*' would be everyone")

    @property
    def gather(self) -> tuple[str, ...]:
        """Host addresses for media; empty for all of the machine."""
        if self.media_addresses:
            return self.media_addresses
        if self.host == "localhost":
            return ("127.0.0.1",)
        try:
            address = ipaddress.ip_address(self.host)
        except ValueError:
            return ()
        return () if address.is_unspecified else (str(address),)
