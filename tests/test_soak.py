"""Long trials of the shipped avatar (`make soak`): the picture and the memory hold."""

from __future__ import annotations

import resource
from collections.abc import Iterator

import numpy as np
import pytest

from pipelines.avatar import AvatarPipeline
from pipelines.bench_avatar import sound
from rtgen.assets import default_model, find_asset
from rtgen.engine.engine import Engine
from rtgen.types import Grant, Pcm16, SessionSpec

MINUTES = 10
RATE = 16000


def blocks() -> Iterator[Pcm16]:
    """Half a minute of the bench's voice and half a minute of near silence, in turn."""
    voice = (sound(188, 2560, 0)[: 30 * RATE] * 32767).astype(np.int16)
    rng = np.random.default_rng(0)
    for half in range(2 * MINUTES):
        room = (20 * rng.standard_normal(30 * RATE)).astype(np.int16)
        part = voice if half % 2 == 0 else room
        yield from np.split(part, 30)


@pytest.mark.soak
def test_ten_minutes_of_the_shipped_avatar_hold() -> None:
    pipeline = AvatarPipeline.from_directory(find_asset("model", default_model()), dtype="float32")
    lumas: list[float] = []
    backdrops: list[float] = []
    memory: list[int] = []
    first: np.ndarray | None = None
    with Engine(pipeline) as engine:
        grant = engine.reserve(SessionSpec(service_class="offline", seed=5))
        assert isinstance(grant, Grant)
        for unit in grant.session.render(blocks(), RATE):
            frame = unit.frames[0].astype(np.float32)
            first = frame if first is None else first
            lumas.append(float(frame.mean()))
            backdrops.append(float(np.square(frame[:40, :40] - first[:40, :40]).mean()))
            memory.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
    assert len(lumas) == MINUTES * 60 * 25 // 4
    minute = len(lumas) // MINUTES
    drift = np.mean(lumas[-minute:]) - np.mean(lumas[:minute])
    assert abs(drift) < 1.5, f"brightness moved by {drift:.2f} of 255"
    minutes = np.array(backdrops).reshape(MINUTES, -1).mean(1)
    psnr = 10 * np.log10(65025 / np.maximum(minutes, 1e-6))
    assert psnr.min() > 45, f"backdrop PSNR by minute: {np.round(psnr, 1)}"
    grown = (memory[-1] - memory[2 * minute]) / 1024
    assert grown < 32, f"memory grew by {grown:.0f} MiB from minute 2 to {MINUTES}"
