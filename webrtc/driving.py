"""What makes one session speak: pushed sound, uploaded files, typed text, the microphone.

Utterances are queued and pushed one at a time, in pieces, as the service has room. The microphone
is live and waits for nobody: while a queued utterance plays it is ignored, and what the service
does not take is dropped. An interrupt ends all of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from concurrent.futures import Executor
from fractions import Fraction
from typing import Any

import numpy as np

from rtgen.types import OUTPUT_RATE, Pcm16, Session, Speak, Stats
from webrtc.config import UploadLimits
from webrtc.microphone import MicrophoneGate
from webrtc.signalling import Problem
from webrtc.uploads import Upload, UploadInfo
from webrtc.voice import Voice, synthesize

MAX_UTTERANCES = 8
PIECE_S = 0.5
MAX_MICROPHONE_BACKLOG_S = 0.6
"""Above it microphone sound is left out, down to `MICROPHONE_BACKLOG_S`."""
MICROPHONE_BACKLOG_S = 0.3

Spawn = Callable[[Coroutine[Any, Any, None]], "asyncio.Task[None]"]


class Driver:
    """Sound into one session.

    Args:
        session: of the service.
        pool: where files are decoded.
        limits: of uploaded files.
        voice: that speaks typed text, or None.
        played: media time that was played, seconds.
        spawn: starts a task whose failure is told to the client.
    """

    def __init__(
        self,
        session: Session,
        pool: Executor,
        limits: UploadLimits,
        voice: Voice | None,
        *,
        played: Callable[[], Fraction],
        spawn: Spawn,
    ) -> None:
        self._session, self._pool, self._limits, self._voice = session, pool, limits, voice
        self._played, self._spawn = played, spawn
        self._lock = asyncio.Lock()
        self._utterances: set[asyncio.Task[None]] = set()
        self._is_reading_file = False
        self._fed_until = Fraction(0)  # media time at which queued utterances end, about
        self._skip_s = 0.0
        self.gate = MicrophoneGate()
        self.is_microphone_on = False

    def speak(self, message: Speak) -> None:
        """Queues an utterance given as sound or text.

        Raises:
            Problem: 501 text without a synthesizer; 429 too many utterances wait.
        """
        if message.text:
            if self._voice is None:
                raise Problem(501, "no_text", "typed text needs espeak-ng or flite on the server")
            self._queue(self._speak_text(self._voice, message.text))
        else:
            pcm = np.frombuffer(message.audio, "<i2").astype(np.int16)
            self._queue(self.feed(_pieces(pcm, message.sample_rate), message.sample_rate))

    async def speak_file(self, body: bytes) -> UploadInfo:
        """Queues an uploaded file; returns when its header was read.

        Raises:
            Problem: 409 another file is being read; else as `Upload`.
        """
        if self._is_reading_file:
            raise Problem(409, "busy", "another file is still being read; stop it or wait")
        loop = asyncio.get_running_loop()
        self._is_reading_file = True
        try:
            upload = await loop.run_in_executor(self._pool, Upload, body, self._limits)
            task = self._queue(self.feed(self._decoded(upload), OUTPUT_RATE))
        except BaseException:
            self._is_reading_file = False
            raise

        def done(_: object) -> None:
            self._is_reading_file = False
            self._pool.submit(upload.close)

        task.add_done_callback(done)
        return upload.info

    async def speak_stream(self, pieces: AsyncIterator[Pcm16], sample_rate: int) -> None:
        """Queues an utterance that is still coming, and returns when all of it was pushed.

        Raises:
            Problem: 409 an interrupt ended it; 429 too many utterances wait.
        """
        task = self._queue(self.feed(pieces, sample_rate))
        await asyncio.wait({task})
        if task.cancelled():
            raise Problem(409, "interrupted", "the speech was stopped; send it again to go on")

    async def feed(self, pieces: AsyncIterator[Pcm16], sample_rate: int) -> None:
        """Pushes one utterance as there is room, and ends it."""
        async with self._lock:
            pushed = False
            async for piece in pieces:
                rest = piece
                while len(rest):
                    await self._session.audio_room(min(len(rest) / sample_rate, PIECE_S))
                    taken = self._session.push_audio(rest, sample_rate)
                    rest, pushed = rest[taken:], True
                    start = max(self._fed_until, self._played())
                    self._fed_until = start + Fraction(taken, sample_rate)
            if pushed:
                self._session.end_audio()

    def microphone(self, pcm: Pcm16, sample_rate: int) -> None:
        """Takes a block of the microphone, int16 [samples]."""
        if not self.is_microphone_on:
            return
        if self._lock.locked() or self._played() < self._fed_until:
            self.gate.reset()
            return
        out = self.gate.push(pcm, sample_rate)
        skipped = min(round(self._skip_s * sample_rate), len(out.pcm))
        self._skip_s -= skipped / sample_rate
        if len(out.pcm) > skipped:
            self._session.push_audio(out.pcm[skipped:], sample_rate)
        if out.is_end:
            self._skip_s = 0.0
            self._session.end_audio()

    def set_microphone(self, on: bool) -> None:
        """Whether the microphone drives the face."""
        if self.is_microphone_on and not on and self.gate.is_open:
            self._session.end_audio()
        self.is_microphone_on = on
        self.gate.reset()

    def describe_microphone(self) -> dict[str, object]:
        """Whether it is heard and what is heard, as JSON values."""
        level = self.gate.level_db
        return {
            "on": self.is_microphone_on,
            "level_db": None if level is None else round(level, 1),
            "speaking": self.gate.is_open,
        }

    def follow(self, stats: Stats) -> None:
        """Keeps the microphone from lagging: what waits too long is left out."""
        is_live = self.gate.is_open and not self._lock.locked()
        if is_live and stats.buffered_s > MAX_MICROPHONE_BACKLOG_S:
            self._skip_s = stats.buffered_s - MICROPHONE_BACKLOG_S

    def stop(self) -> None:
        """Drops all utterances; the service's session is told by the caller."""
        for task in self._utterances:
            task.cancel()
        self._fed_until = Fraction(0)
        self._skip_s = 0.0
        self.gate.reset()

    def _queue(self, utterance: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        if len(self._utterances) >= MAX_UTTERANCES:
            utterance.close()
            raise Problem(429, "busy", f"{MAX_UTTERANCES} utterances wait already; stop or wait")
        task = self._spawn(utterance)
        self._utterances.add(task)
        task.add_done_callback(self._utterances.discard)
        return task

    async def _speak_text(self, voice: Voice, text: str) -> None:
        pcm, sample_rate = await synthesize(voice, text)
        await self.feed(_pieces(pcm, sample_rate), sample_rate)

    async def _decoded(self, upload: Upload) -> AsyncIterator[Pcm16]:
        loop = asyncio.get_running_loop()
        while (piece := await loop.run_in_executor(self._pool, upload.next_piece)) is not None:
            yield piece


async def _pieces(pcm: Pcm16, sample_rate: int) -> AsyncIterator[Pcm16]:
    size = max(round(PIECE_S * sample_rate), 1)
    for start in range(0, len(pcm), size):
        yield pcm[start : start + size]
