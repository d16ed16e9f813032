"""Many live clients of one engine under a virtual clock; each shows its units on time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from torch import Tensor, nn

from pipelines.avatar import AvatarPipeline
from rtgen.engine.client import EngineSession
from rtgen.engine.clock import VirtualClock
from rtgen.engine.engine import Engine
from rtgen.engine.lanes import inline_lanes
from rtgen.engine.trace import Decision
from rtgen.types import SessionSpec, Unit
from tests.engine.drive import opened, quick_profile, settle
from tests.toy_pipeline import toy_pipeline

UNIT_NS = 160_000_000
TICK_S = 0.02


@cache
def tiled_pipeline(merge_clean_pass: bool) -> AvatarPipeline:
    """A toy whose rows keep their bits at every batch size."""
    pipeline = toy_pipeline.__wrapped__(merge_clean_pass=merge_clean_pass)
    pipeline.denoiser.row_tile = 1
    return pipeline


@dataclass
class Client:
    """Shows each unit when it is due, or as soon as it is there."""

    session: EngineSession
    shown: list[Unit] = field(default_factory=list)
    waiting: list[Unit] = field(default_factory=list)
    due_ns: int = 0

    def play(self, now_ns: int) -> None:
        while (unit := self.session.core.pop_unit()) is not None:
            self.waiting.append(unit)
        generation = max((unit.generation for unit in self.waiting), default=0)
        self.waiting = [unit for unit in self.waiting if unit.generation == generation]
        if self.waiting and now_ns >= self.due_ns:
            unit = self.waiting.pop(0)
            self.session.ack(unit)
            self.shown.append(unit)
            self.due_ns = now_ns + UNIT_NS


class Crowd:
    """An engine with room for six, and its clients."""

    def __init__(self, *, merge: bool = False) -> None:
        self.clock = VirtualClock()
        self.trace: list[Decision] = []
        self.clients: list[Client] = []
        self.engine = Engine(
            tiled_pipeline(merge),
            lanes=inline_lanes(),
            clock=self.clock,
            max_sessions=6,
            profile=quick_profile(merge=merge, max_batch=6),
            recorder=self.trace.append,
        )

    def __enter__(self) -> Crowd:
        return self

    def __exit__(self, *_: object) -> None:
        self.engine.close()

    def join(self, spec: SessionSpec) -> Client:
        client = Client(opened(self.engine, spec))
        self.clients.append(client)
        return client

    def leave(self, client: Client) -> None:
        self.clients.remove(client)
        client.session.close()

    def play(self, seconds: float) -> None:
        for _ in range(round(seconds / TICK_S)):
            settle(self.engine)
            for client in self.clients:
                client.play(self.clock.now_ns())
            self.clock.advance(TICK_S)


@contextmanager
def rows_per_forward(denoiser: nn.Module) -> Iterator[list[int]]:
    """Collects how many rows each forward has."""
    seen: list[int] = []

    def hook(_module: nn.Module, inputs: tuple[Tensor, ...], _output: Any) -> None:
        seen.append(len(inputs[0]))

    with denoiser.register_forward_hook(hook):
        yield seen
