"""Typed text to sound, by a speech synthesizer that is installed: espeak-ng, or else flite.

It runs as a process of its own, without a shell; the text goes through its standard input.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
from dataclasses import dataclass

import numpy as np

from rtgen.errors import BackendUnavailable, MediaError
from rtgen.types import Pcm16

logger = logging.getLogger(__name__)

TIMEOUT_S = 15.0
MAX_BYTES = 64 * 2**20
COMMANDS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("espeak-ng", ("--stdin", "--stdout", "-b", "1")),
    ("flite", ("-f", "/dev/stdin", "-o", "/dev/stdout")),
)


@dataclass(frozen=True, slots=True)
class Voice:
    """An installed synthesizer.

    Attributes:
        name: of the program.
        command: what is run.
    """

    name: str
    command: tuple[str, ...]


def find_voice() -> Voice | None:
    """The first synthesizer that is installed, None without any."""
    for name, arguments in COMMANDS:
        path = shutil.which(name)
        if path is not None:
            return Voice(name, (path, *arguments))
    return None


async def synthesize(voice: Voice, text: str, timeout_s: float = TIMEOUT_S) -> tuple[Pcm16, int]:
    """Speaks a text.

    Returns:
        int16 [samples] mono, and its sample rate.

    Raises:
        BackendUnavailable: the program cannot be run, fails, or takes too long.
        MediaError: it gave no sound for this text.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            *voice.command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        raise BackendUnavailable(f"{voice.name} cannot be run: {error}") from error
    try:
        async with asyncio.timeout(timeout_s):
            # One newline more: flite drops a last line without one.
            wav, _ = await process.communicate(text.encode("utf-8", "replace") + b"\n")
    except TimeoutError as error:
        raise BackendUnavailable(f"{voice.name} took longer than {timeout_s:g} s") from error
    finally:
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)  # with what it started itself
            await process.wait()
    if process.returncode:
        raise BackendUnavailable(f"{voice.name} failed with status {process.returncode}")
    return parse_wav(wav)


def parse_wav(wav: bytes) -> tuple[Pcm16, int]:
    """Reads mono 16-bit PCM as synthesizers stream it: the sizes in the header may be wrong.

    Raises:
        MediaError: another format, or no sound.
    """
    at = wav.find(b"fmt ")
    data = wav.find(b"data", at + 4)
    if wav[:4] != b"RIFF" or at < 0 or data < 0 or len(wav) > MAX_BYTES:
        raise MediaError(f"the synthesizer gave no WAV of a usable size ({len(wav)} bytes)")
    kind, channels = (int.from_bytes(wav[at + i : at + i + 2], "little") for i in (8, 10))
    rate = int.from_bytes(wav[at + 12 : at + 16], "little")
    bits = int.from_bytes(wav[at + 22 : at + 24], "little")
    if (kind, channels, bits) != (1, 1, 16):
        raise MediaError(f"expected mono 16-bit PCM, got {kind}, {channels} channels, {bits} bits")
    body = wav[data + 8 :]
    pcm = np.frombuffer(body[: len(body) // 2 * 2], "<i2").astype(np.int16)
    if not len(pcm):
        raise MediaError("there is nothing to be said in this text; type some words")
    return pcm, rate
