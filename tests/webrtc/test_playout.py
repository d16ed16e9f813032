from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from rtgen.errors import ConfigError, StreamClosed
from rtgen.types import OUTPUT_RATE
from tests.webrtc.slow import SlowPlayout
from tests.webrtc.units import unit
from webrtc.joins import FADE_SAMPLES
from webrtc.pacing import BLOCK_SAMPLES, Pacer
from webrtc.playout import MAX_UNITS, Playout


def first_difference(playout: Playout, step: int, seed: int, blocks: int = 100) -> str | None:
    """Plays a random story on the playout and on the slow one; where they first differ."""
    rng = np.random.default_rng(seed)
    slow, pacer = SlowPlayout(), Pacer(0)
    pacer.set_samples_per_frame(step)
    now, index = 0, 0
    for _ in range(blocks):
        roll = rng.random()
        if roll < 0.35 and playout.queued_units < 3:
            for _ in range(int(rng.integers(1, 3))):
                made = unit(index, generation=slow.generation, step=step, frames=2)
                playout.put(made)
                slow.put(made)
                index += 1
        elif roll < 0.38:
            playout.interrupt()
            slow.interrupt()
        now += 960 if rng.random() < 0.9 else int(rng.integers(0, 9000))
        for tick in pacer.due(-(-now * 10**9 // OUTPUT_RATE)):
            if tick.kind == "audio":
                block = playout.audio(tick.position)
                pcm, started = slow.audio(tick.position)
                if [u.index for u in block.started] != started:
                    return f"units that start at {tick.position}"
                if not np.array_equal(block.pcm, pcm):
                    return f"sound at {tick.position}"
            else:
                picture = playout.video(tick.position)
                value = None if picture is None else int(picture.rgb[0, 0, 0])
                if value != slow.video(tick.position):
                    return f"picture at {tick.position}"
    return None


@pytest.mark.parametrize("step", [1600, 1920, 2000, 3000])
def test_playout_equals_the_slow_one_sample_for_sample(step: int) -> None:
    for seed in range(2):
        assert first_difference(Playout(), step, seed) is None


class KeepsOld(Playout):
    def interrupt(self) -> int:
        self.generation += 1
        self._waiting.clear()
        return self.generation


class StartsAnywhere(Playout):
    def _place(self, position: int, end: int) -> None:
        super()._place(position, end)
        if self._placed and self._placed[-1].start > position:
            object.__setattr__(self._placed[-1], "start", position)


class LosesSkipped(Playout):
    def _follow_clock(self, position: int) -> None:
        self._cursor = max(self._cursor, position)


class PlaysTwice(Playout):
    def audio(self, position: int):  # type: ignore[no-untyped-def]
        block = super().audio(position)
        self._resume = 0
        return block


@pytest.mark.parametrize("kind", [KeepsOld, StartsAnywhere, LosesSkipped, PlaysTwice])
def test_the_slow_playout_finds_a_planted_bug(kind: type[Playout]) -> None:
    stories = ((step, seed) for step in (1920, 2000) for seed in range(4))
    assert any(first_difference(kind(), step, seed) for step, seed in stories)


def play(playout: Playout, start: int, end: int) -> tuple[list[int], list[int | None]]:
    """Sound and pictures (pixel values) of [start, end), at 25 pictures a second."""
    sound: list[int] = []
    pictures: list[int | None] = []
    for position in range(start, end, BLOCK_SAMPLES):
        sound += playout.audio(position).pcm.tolist()
        if position % 1920 == 0:
            picture = playout.video(position)
            pictures.append(None if picture is None else int(picture.rgb[0, 0, 0]))
    return sound, pictures


def test_units_in_time_are_played_exactly() -> None:
    playout = Playout()
    units = [unit(0), unit(1)]
    for made in units:
        assert playout.put(made)
    sound, pictures = play(playout, 0, 15_360)
    assert sound == [*units[0].audio.tolist(), *units[1].audio.tolist()]
    assert pictures == list(range(8))
    assert playout.media_end == Fraction(32, 100)
    assert playout.gaps == 0


def test_a_unit_is_acknowledged_by_the_block_in_which_it_starts() -> None:
    playout = Playout()
    playout.put(unit(0))
    playout.put(unit(1))
    started = [
        [made.index for made in playout.audio(position).started]
        for position in range(0, 15_360, BLOCK_SAMPLES)
    ]
    assert started == [[0], *[[]] * 7, [1], *[[]] * 7]


def test_starvation_repeats_the_picture_with_silence_and_nothing_is_lost() -> None:
    playout = Playout()
    playout.put(unit(0))
    play(playout, 0, 7680)
    sound, pictures = play(playout, 7680, 7680 + 2880)
    assert pictures == [3, 3]
    assert sound[FADE_SAMPLES:] == [0] * (2880 - FADE_SAMPLES)
    assert playout.gaps == 1
    late = unit(1)
    playout.put(late)
    sound, pictures = play(playout, 10_560, 10_560 + 960 + 7680)
    assert sound[:960] == [0] * 960  # until the next picture's position
    assert sound[960 + FADE_SAMPLES :] == late.audio[FADE_SAMPLES:].tolist()
    assert pictures == [4, 5, 6, 7]
    assert playout.gap_s == pytest.approx(3840 / 48_000)


def test_repeats_say_that_they_are_and_keep_their_media_time() -> None:
    playout = Playout()
    assert playout.video(0) is None
    playout.put(unit(0))
    play(playout, 0, 7680)
    playout.audio(7680)
    picture = playout.video(7680)
    assert picture is not None
    assert picture.is_repeat
    assert picture.position == 7680
    assert picture.media_time == Fraction(12, 100)


def test_an_interrupt_drops_what_was_not_given_out() -> None:
    playout = Playout()
    playout.put(unit(0))
    playout.put(unit(1))
    play(playout, 0, 2880)
    assert playout.interrupt() == 1
    sound, pictures = play(playout, 2880, 2880 + 4800)
    assert sound[FADE_SAMPLES:] == [0] * (4800 - FADE_SAMPLES)
    assert pictures == [1, 1]
    assert not playout.put(unit(2))
    assert playout.put(unit(1, generation=1))
    _, pictures = play(playout, 7680, 15_360)
    assert pictures == [4, 5, 6, 7]
    assert playout.gaps == 0  # that silence was asked for
    assert playout.dropped_units == 2


def test_after_an_interrupt_only_a_fade_of_the_last_sample_is_left() -> None:
    playout = Playout()
    playout.put(unit(0))
    sound, _ = play(playout, 0, 960)
    playout.interrupt()
    tail, _ = play(playout, 960, 1920)
    assert max(tail) <= sound[-1]
    assert tail[:FADE_SAMPLES] == sorted(tail[:FADE_SAMPLES], reverse=True)


def test_a_skipped_stretch_is_played_behind_it() -> None:
    playout = Playout()
    made = unit(0)
    playout.put(made)
    before, _ = play(playout, 0, 1920)
    after, pictures = play(playout, 48_000, 48_000 + 5760)
    assert before == made.audio[:1920].tolist()
    assert after == made.audio[1920:].tolist()
    assert pictures == [1, 2, 3]


def test_a_new_connection_starts_with_the_next_unit() -> None:
    playout = Playout()
    playout.put(unit(0))
    playout.put(unit(1))
    play(playout, 0, 2880)
    playout.rebase()
    _, pictures = play(playout, 0, 7680)
    assert pictures == [4, 5, 6, 7]


def test_wrong_units_are_refused() -> None:
    playout = Playout()
    with pytest.raises(ConfigError, match="do not divide"):
        playout.put(replace(unit(0), audio=unit(0).audio[:-1]))
    for index in range(MAX_UNITS):
        playout.put(unit(index))
    with pytest.raises(StreamClosed, match="credits"):
        playout.put(unit(MAX_UNITS))
