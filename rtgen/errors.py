"""The exceptions that rtgen raises on purpose.

RtgenError
├── ConfigError (ValueError)      a value that breaks a rule of a configuration or of a request
├── ShapeError (ValueError)       a tensor whose shape, dtype or device breaks the contract
├── CheckpointError               weights that are missing, unreadable, or do not fit the model
├── BackendUnavailable            a device, library or program that was asked for and is not there
├── MediaError                    input or output media that cannot be read, understood or written
├── StreamClosed                  a call on a session or stream that has ended
├── LinkError                     another process of ours died, hung, or broke the protocol
└── SignallingError               a request of a peer that is answered with an HTTP status

A message says what was expected, what came, and what to do. The command line prints it as one
line and exits with status 2.
"""

from __future__ import annotations


class RtgenError(Exception):
    """Base of every error that rtgen raises on purpose."""


class ConfigError(RtgenError, ValueError):
    """A value breaks a rule of a configuration or of a request."""


class ShapeError(RtgenError, ValueError):
    """A tensor's shape, dtype or device is not what the contract says."""


class CheckpointError(RtgenError):
    """Weights are missing, unreadable, or do not fit the model."""


class BackendUnavailable(RtgenError):
    """A device, library or program that was asked for is not there."""


class MediaError(RtgenError):
    """Media cannot be read, understood or written."""


class StreamClosed(RtgenError):
    """A session or stream has ended and takes no further calls."""


class LinkError(RtgenError):
    """Another process of ours died, hung, or sent what the protocol does not allow."""


class SignallingError(RtgenError):
    """A peer's request is refused.

    Args:
        status: HTTP status code of the answer, 400 to 599.
        message: what was expected, what came, what to do.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
