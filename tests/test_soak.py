"""Long trials of the shipped avatar (`make soak`): the picture and the memory hold."""

from __future__ import annotations

import os
import resource
import wave
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pipelines.avatar import AvatarPipeline
from pipelines.bench_avatar import sound
from pipelines.render import RenderConfig, render
from rtgen.assets import default_model, find_asset
from rtgen.engine.engine import Engine
from rtgen.progress import Progress
from rtgen.types import Grant, Pcm16, SessionSpec
from tests.toy_pipeline import write_toy_model

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


@pytest.mark.soak
def test_memory_holds_over_a_file_of_an_hour(tmp_path: Path) -> None:
    """The whole command at toy size: 60 minutes of sound in, a file of the same length out."""
    minutes = 60
    second = (8000 * np.sin(np.arange(RATE) * 0.05)).astype("<i2").tobytes()
    with wave.open(str(tmp_path / "speech.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(RATE)
        for _ in range(60 * minutes):
            file.writeframes(second)
    model = write_toy_model(tmp_path / "model")
    wanted = RenderConfig(
        audio=tmp_path / "speech.wav",
        out=tmp_path / "talk.mp4",
        model=f"{model}{os.sep}",
        device="cpu",
        dtype="float32",
    )
    memory: list[int] = []

    def note(progress: Progress) -> None:
        if progress.done_s >= 60 * (len(memory) + 1):
            pages = Path("/proc/self/statm").read_text().split()[1]
            memory.append(int(pages) * resource.getpagesize())

    report = render(wanted, on_progress=note)
    assert report.num_frames == minutes * 60 * 25
    assert len(memory) == minutes
    grown = (max(memory[-10:]) - max(memory[2:12])) / 2**20
    assert grown < 24, f"MiB by minute: {[m >> 20 for m in memory]}"
