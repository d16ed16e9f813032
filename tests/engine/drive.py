"""Driving an engine by hand: inline lanes, a virtual clock, a client that shows units on time."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipelines.avatar import AvatarPipeline
from rtgen.engine.client import EngineSession
from rtgen.engine.clock import VirtualClock
from rtgen.engine.cost_model import CONDITION, DECODE, Profile
from rtgen.engine.engine import Engine
from rtgen.engine.lanes import inline_lanes
from rtgen.types import Grant, Pcm16, Pixels, SessionSpec, Unit
from tests.toy_pipeline import LIVE, toy_pipeline


def opened(engine: Engine, spec: SessionSpec) -> EngineSession:
    """A session that must be granted."""
    answer = engine.reserve(spec)
    assert isinstance(answer, Grant), answer
    return answer.session


def settle(engine: Engine) -> None:
    """Lets the engine do all that it can do now."""
    while engine.tick():
        pass


class Stage:
    """A live session on inline lanes under a virtual clock; the test is the client."""

    def __init__(self, spec: SessionSpec = LIVE, pipeline: AvatarPipeline | None = None) -> None:
        self.clock = VirtualClock()
        pipeline = toy_pipeline() if pipeline is None else pipeline
        self.engine = Engine(pipeline, lanes=inline_lanes(), clock=self.clock)
        self.session = opened(self.engine, spec)

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()

    def waiting(self) -> list[Unit]:
        """Everything that the engine makes now without further acknowledgement."""
        settle(self.engine)
        units = []
        while (unit := self.session.core.pop_unit()) is not None:
            units.append(unit)
        return units

    def show(self, count: int) -> list[Unit]:
        """Takes and shows units one by one, with nothing begun ahead of them."""
        shown = []
        for _ in range(count):
            unit = self.session.next_unit()
            assert unit is not None
            self.session.ack(unit)
            shown.append(unit)
        return shown


def pictures(units: Sequence[Unit]) -> Pixels:
    """Frames of units, uint8 [F, H, W, 3]."""
    return np.concatenate([unit.frames for unit in units])


def sound(units: Sequence[Unit]) -> Pcm16:
    """Sound of units without the silence that fills the last one."""
    return np.concatenate([unit.audio[: len(unit.audio) - unit.padding] for unit in units])


def same(first: Sequence[Unit], second: Sequence[Unit]) -> bool:
    """Whether units hold the same pictures, sound, times and states, bit for bit."""
    return len(first) == len(second) and all(
        np.array_equal(a.frames, b.frames)
        and np.array_equal(a.audio, b.audio)
        and (a.index, a.media_time, a.state, a.padding)
        == (b.index, b.media_time, b.state, b.padding)
        for a, b in zip(first, second, strict=True)
    )


def quick_profile(*, merge: bool = False, max_batch: int = 8) -> Profile:
    """Times at which many toy sessions fit, whatever else this machine does."""
    sizes = {size: 1_000_000 + 200_000 * size for size in range(1, max_batch + 1)}
    shapes = ("1", "1+1") if merge else ("1",)
    stages = {CONDITION: {1: 100_000}, DECODE: {1: 500_000}}
    forward_ns = {**dict.fromkeys(shapes, sizes), **stages}
    return Profile(device="cpu", model="toy", forward_ns=forward_ns, session_bytes=100_000)
