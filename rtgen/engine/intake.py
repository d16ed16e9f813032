"""What flows into a session: sound, gestures, pictures, the base state; and the plan of a unit.

Not thread-safe; its session locks it. Sound is bounded by seconds (the pusher keeps what is not
accepted), gestures by number (more are refused), pictures by one (the newest stays).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from rtgen.engine.audio_buffer import AudioBuffer, TakenAudio
from rtgen.engine.speech import SpeechTracker
from rtgen.errors import ConfigError, StreamClosed
from rtgen.types import (
    OUTPUT_RATE,
    Finished,
    Pcm16,
    Pixels,
    SessionSpec,
    Speak,
    SpeechState,
    Started,
    UnitFormat,
)

LIVE_AUDIO_S = 120.0
OFFLINE_AUDIO_S = 4.0
MAX_GESTURES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitPlan:
    """A unit that was begun: everything about it but its pictures.

    Attributes:
        generation: of the session when it was begun.
        index: of the unit.
        taken: its sound.
        padding: samples of silence that fill an offline session's last unit.
        state: what the face does.
        event: gesture that starts with it.
        frame: newest picture of the client's camera.
        begun_ns: when it was begun, by the engine's clock.
        turns: turns of speech that start or end in it.
    """

    generation: int
    index: int
    taken: TakenAudio
    padding: int
    state: SpeechState
    event: str
    frame: Pixels | None
    begun_ns: int
    turns: tuple[Started | Finished, ...]


class Intake:
    """Inputs of one session that no unit has used yet.

    Args:
        spec: what was asked for.
        unit_format: sizes of the pipeline's units.

    Attributes:
        base_state: shown while there is no speech.
        frame: newest picture, until a unit takes it.
        capacity_s: seconds of sound that may wait.
        is_complete: whether an offline session's sound has been declared complete.
    """

    def __init__(self, spec: SessionSpec, unit_format: UnitFormat) -> None:
        self._format = unit_format
        self._is_live = spec.service_class == "live"
        self.base_state = spec.state
        self.frame: Pixels | None = None
        self.capacity_s = LIVE_AUDIO_S if self._is_live else OFFLINE_AUDIO_S
        self.is_complete = False
        self._audio = AudioBuffer(unit_format, self.capacity_s)
        self._speech = SpeechTracker()
        self._gestures: deque[str] = deque()

    @property
    def room_s(self) -> float:
        """Seconds of sound that would be accepted now."""
        return self._audio.room / OUTPUT_RATE

    @property
    def buffered_s(self) -> float:
        """Seconds of sound that wait."""
        return self._audio.available / OUTPUT_RATE

    @property
    def is_used_up(self) -> bool:
        """Whether no unit is left to be made of an offline session's sound."""
        return self.is_complete and not self._audio.available

    @property
    def has_chunk(self) -> bool:
        """Whether the next chunk's input is there: always when live, for silence will do."""
        if self._is_live:
            return True
        if self.is_complete:
            return self._audio.available > 0
        more = (self._format.units_per_chunk - 1) * self._format.output_samples
        return self._audio.available >= self._audio.unit_need + more

    def push_audio(self, pcm: Pcm16, sample_rate: int) -> int:
        """Appends sound; returns how many samples per channel were accepted.

        Raises:
            MediaError: not int16 sound, or a rate out of range.
            StreamClosed: the sound has been declared complete.
        """
        if self.is_complete:
            raise StreamClosed("the sound was ended by end_audio; open another session")
        return self._audio.push(np.asarray(pcm), sample_rate)

    def end_audio(self) -> None:
        """Ends the utterance; offline, the sound is complete."""
        self._audio.end_utterance()
        self.is_complete = not self._is_live

    def speak(self, message: Speak) -> None:
        """Queues one utterance whole.

        Raises:
            ConfigError: it is text, or does not fit.
        """
        if message.text:
            raise ConfigError("the engine has no voice; send speak with audio")
        pcm = np.frombuffer(message.audio, "<i2").astype(np.int16)
        self._audio.end_utterance()
        need = -(-len(pcm) * OUTPUT_RATE // message.sample_rate)
        if self.is_complete or need > self._audio.room:
            raise ConfigError(
                f"{need / OUTPUT_RATE:.1f} s of speech do not fit, there is room for "
                f"{self.room_s:.1f} s; push it in parts"
            )
        self._audio.push(pcm, message.sample_rate)
        self._audio.end_utterance()

    def add_gesture(self, event: str) -> None:
        """Queues a gesture; one starts with each unit.

        Raises:
            ConfigError: too many wait.
        """
        if len(self._gestures) >= MAX_GESTURES:
            raise ConfigError(f"{MAX_GESTURES} gestures wait already; try later")
        self._gestures.append(event)

    def take(self, index: int, generation: int, now_ns: int) -> UnitPlan:
        """Takes the input of unit `index`."""
        size = self._format.output_samples
        start = index * size
        is_dry = self._audio.is_open and not self._audio.available
        if self._is_live and is_dry and self._speech.is_starved(start):
            self._audio.end_utterance()
        taken = self._audio.take()
        is_speaking, turns = self._speech.follow(start, taken, generation)
        frame, self.frame = self.frame, None
        return UnitPlan(
            generation=generation,
            index=index,
            taken=taken,
            padding=0 if self._is_live else size - taken.pushed,
            state=SpeechState.SPEAKING if is_speaking else self.base_state,
            event=self._gestures.popleft() if self._gestures else "none",
            frame=frame,
            begun_ns=now_ns,
            turns=tuple(turns),
        )

    def interrupt(self, dropped: Iterable[UnitPlan], index: int) -> None:
        """Drops the sound that waits and takes back units; their gestures wait again.

        Args:
            dropped: the units, in order.
            index: of the unit that comes next.
        """
        plans = list(dropped)
        self._audio.interrupt(len(plans))
        self._speech.interrupt(index * self._format.output_samples)
        self._gestures.extendleft(p.event for p in reversed(plans) if p.event != "none")
