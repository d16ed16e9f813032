from __future__ import annotations

import random

import numpy as np
import pytest

from rtgen.engine import host_audio
from rtgen.engine.audio_buffer import AudioBuffer
from rtgen.engine.host_audio import AudioRoom, cost
from rtgen.types import OUTPUT_RATE
from tests.toy_pipeline import toy_config

FORMAT = toy_config().unit_format
RATES = (48_000, 44_100, 16_000, 8_000, 22_050)


def drive(seed: int, rates: tuple[int, ...] = RATES) -> int:
    """Pushes, takes and interrupts at random; the engine's buffer is the oracle.

    Figures of the buffer arrive late, as over a link. Returns the samples accepted in all.
    """
    chance = random.Random(seed)
    buffer = AudioBuffer(FORMAT, 2.0)
    room = AudioRoom(buffer.room)
    reports: list[tuple[int, int, int]] = []
    accepted_all = 0
    for _ in range(300):
        rate = chance.choice(rates)
        match chance.choice(["push", "push", "push", "take", "end", "stop", "report"]):
            case "push":
                samples = chance.choice([1, 7, 480, 960, 30_000])
                accepted = room.fits(samples, rate)
                room.take(accepted, rate)
                got = buffer.push(np.zeros(samples, np.int16)[:accepted], rate)
                assert got == accepted, "the engine takes less than was promised"
                accepted_all += accepted
                reports.append((room.epoch, room.total, buffer.room))
            case "take":
                buffer.take()
                reports.append((room.epoch, room.total, buffer.room))
            case "end":
                buffer.end_utterance()
            case "stop":
                if chance.random() < 0.2:
                    buffer.interrupt(0)
                    room.reset()
            case "report" if reports:
                room.report(*reports.pop(0) if chance.random() < 0.5 else reports[-1])
        assert room.samples <= buffer.room
    return accepted_all


def drive_all(rates: tuple[int, ...]) -> None:
    for seed in range(4):
        drive(seed, rates)


@pytest.mark.parametrize("seed", range(4))
def test_what_is_accepted_here_is_never_refused_there(seed: int) -> None:
    assert drive(seed) > OUTPUT_RATE


def test_a_planted_rounding_down_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_audio, "cost", lambda n, rate: n * OUTPUT_RATE // rate)
    with pytest.raises(AssertionError):
        drive_all((44_100, 22_050))


def test_a_planted_report_of_an_older_epoch_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def planted(self: AudioRoom, epoch: int, total: int, samples: int) -> None:
        self._room = samples - (self.total - total)

    monkeypatch.setattr(AudioRoom, "report", planted)
    with pytest.raises(AssertionError):
        drive_all(RATES)


@pytest.mark.parametrize("rate", RATES)
def test_the_answer_to_one_push_is_the_engine_s(rate: int) -> None:
    for samples in (0, 1, 960, 10**6):
        buffer = AudioBuffer(FORMAT, 2.0)
        expected = buffer.push(np.zeros(samples, np.int16), rate)
        assert AudioRoom(2 * OUTPUT_RATE).fits(samples, rate) == expected


def test_nothing_lost_at_the_brim() -> None:
    room = AudioRoom(OUTPUT_RATE)
    while (accepted := room.fits(1_000, 44_100)) > 0:
        room.take(accepted, 44_100)
    assert room.samples == 0 or cost(1, 44_100) > room.samples
    assert room.total <= OUTPUT_RATE
