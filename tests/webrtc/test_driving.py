"""Typed text, and long streams: who is heard, who waits, what is kept from growing."""

from __future__ import annotations

import stat
from fractions import Fraction
from pathlib import Path

import pytest

from rtgen.errors import BackendUnavailable, MediaError
from rtgen.types import OUTPUT_RATE, Unit
from tests.engine.drive import Stage
from tests.webrtc.live import Client, is_loud, run, site
from webrtc.pacing import Pacer
from webrtc.playout import Playout
from webrtc.voice import Voice, find_voice, synthesize

VOICE = find_voice()
needs_voice = pytest.mark.skipif(VOICE is None, reason="neither espeak-ng nor flite is installed")


@needs_voice
def test_typed_text_is_spoken() -> None:
    async def work() -> None:
        async with site() as found:
            assert (await found.json("GET", "/config"))[1]["text"] is True
            client = Client(found)
            assert await client.connect() == 201
            await client.live()
            client.send("speak", text="-v hello $(world) `id`")
            await client.until(lambda: client.told("started"))
            await client.until(lambda: sum(map(is_loud, client.sound)) > 10)
            client.send("stop")
            await client.until(lambda: client.told("finished"))
            assert client.told("error") == []
            await client.close()

    run(work())


@needs_voice
def test_a_text_without_words_is_an_error_or_silence() -> None:
    assert VOICE is not None
    try:
        pcm, rate = run(synthesize(VOICE, "..."))
    except MediaError:
        return
    assert rate > 0
    assert len(pcm) < 5 * rate


def test_without_a_synthesizer_text_is_refused() -> None:
    async def work() -> None:
        async with site() as found:
            client = Client(found)
            assert await client.connect() == 201
            await client.live()
            session = found.server.hub.find(client.answer["session"])
            session.driver._voice = None
            message = {"version": 1, "type": "speak", "text": "hello"}
            status, problem = await found.json("POST", client.path + "/control", json=message)
            assert (status, problem["reason"]) == (501, "no_text")
            await client.close()

    run(work())


@pytest.mark.parametrize(
    ("script", "said"),
    [("exit 3", "status 3"), ("sleep 30", "longer than"), ("echo no sound", "no WAV")],
)
def test_a_failing_synthesizer_is_told_in_words(tmp_path: Path, script: str, said: str) -> None:
    program = tmp_path / "voice"
    program.write_text(f"#!/bin/sh\nexec 0<&-\n{script}\n")
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    with pytest.raises((BackendUnavailable, MediaError), match=said):
        run(synthesize(Voice("voice", (str(program),)), "hello", timeout_s=0.5))
    with pytest.raises(BackendUnavailable, match="cannot be run"):
        run(synthesize(Voice("voice", (str(tmp_path / "none"),)), "hello"))


# -- producers that are too fast and too slow, under a virtual clock

UNIT_NS = 160_000_000


def played(make_ns: int, seconds: int) -> tuple[list[Fraction], list[int], Playout]:
    """Plays what a real engine makes when every unit takes `make_ns` to arrive.

    Returns:
        Per unit how far its media time lies behind the wall clock, the most units that waited,
        and the playout.
    """
    lags: list[Fraction] = []
    waiting: list[int] = []
    with Stage() as stage:
        playout, pacer = Playout(), Pacer(stage.clock.now_ns())
        coming: list[tuple[int, Unit]] = []
        free_ns = 0
        for _ in range(seconds * 50):
            now_ns = stage.clock.now_ns()
            for unit in stage.waiting():
                free_ns = max(free_ns, now_ns) + make_ns
                coming.append((free_ns, unit))
            while coming and coming[0][0] <= now_ns:
                playout.put(coming.pop(0)[1])
            if playout.samples_per_frame and pacer.samples_per_frame is None:
                pacer.set_samples_per_frame(playout.samples_per_frame)
            waiting.append(playout.queued_units + len(coming))
            for tick in pacer.due(now_ns):
                if tick.kind == "audio":
                    for unit in playout.audio(tick.position).started:
                        stage.session.ack(unit)
                        lags.append(Fraction(tick.position, OUTPUT_RATE) - unit.media_time)
                else:
                    playout.video(tick.position)
            stage.clock.advance(0.02)
    return lags, waiting, playout


def test_a_fast_producer_adds_no_latency_and_piles_nothing_up() -> None:
    lags, waiting, playout = played(UNIT_NS // 8, 20)
    assert len(lags) > 120
    assert lags[-1] == lags[3]
    assert max(waiting) <= 3
    assert playout.gaps == 0


def test_a_slow_producer_makes_gaps_but_no_queue_and_loses_nothing() -> None:
    lags, waiting, playout = played(UNIT_NS * 2, 10)
    assert max(waiting) <= 3
    assert playout.gaps > 20
    growth = lags[-1] - lags[5]
    assert playout.gap_s >= growth > 0
    assert playout.dropped_units == 0
