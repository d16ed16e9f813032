"""Factories of toy pipelines that misbehave, for generation processes under test."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from copy import copy
from dataclasses import replace
from typing import NoReturn

from pipelines.avatar import AvatarPipeline, AvatarSession
from rtgen.engine.contract import UnitInput
from rtgen.errors import ConfigError
from rtgen.types import Pixels, SessionSpec, UnitFormat
from tests.toy_pipeline import toy_pipeline

FAULTY_SEED = 99


class HangingSession(AvatarSession):
    """Never comes back from its first unit."""

    def begin(self, units: Sequence[UnitInput]) -> None:
        while True:
            time.sleep(1.0)


class HangingPipeline(AvatarPipeline):
    """A toy whose sessions of seed 99 hang."""

    def open(self, spec: SessionSpec) -> AvatarSession:
        return HangingSession(self, spec) if spec.seed == FAULTY_SEED else super().open(spec)


def hanging() -> AvatarPipeline:
    """A pipeline whose sessions of seed 99 hang."""
    pipeline = copy(toy_pipeline())
    pipeline.__class__ = HangingPipeline
    return pipeline


class SeeingSession(AvatarSession):
    """Tells its pipeline of the pictures that it is given."""

    pipeline: SeeingPipeline

    def begin(self, units: Sequence[UnitInput]) -> None:
        self.pipeline.seen += [unit.frame for unit in units if unit.frame is not None]
        super().begin(units)


class SeeingPipeline(AvatarPipeline):
    """A toy that takes a camera's pictures, and keeps them in `seen`."""

    seen: list[Pixels]

    @property
    def format(self) -> UnitFormat:
        return replace(super().format, takes_frames=True)

    def open(self, spec: SessionSpec) -> AvatarSession:
        session = SeeingSession(self, spec)
        session.pipeline = self
        return session


def seeing() -> SeeingPipeline:
    """A pipeline that takes pictures."""
    pipeline = copy(toy_pipeline())
    pipeline.__class__ = SeeingPipeline
    assert isinstance(pipeline, SeeingPipeline)
    pipeline.seen = []
    return pipeline


def refuses(*, text: str) -> NoReturn:
    """Fails as a wrong model folder does."""
    raise ConfigError(text)


def dies(*, status: int) -> NoReturn:
    """Takes the process with it."""
    os._exit(status)
