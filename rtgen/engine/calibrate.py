"""What the engine measures before it serves: safe batch sizes, times, bytes, free memory.

The weights that will serve run with made-up sessions. Batch sizes at which a row's bits depend on
its company are out; so are sizes that cost as much a row as a smaller one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import ParamSpec, TypeVar

import numpy as np
import torch
from torch import Tensor

from rtgen.engine.contract import Pipeline, PipelineSession, UnitInput
from rtgen.engine.cost_model import CONDITION, DECODE, Profile
from rtgen.engine.lanes import Lane, Lanes
from rtgen.engine.load import Demand
from rtgen.models.invariance import invariant_batch_sizes
from rtgen.sampling.passes import StreamPass
from rtgen.sampling.stream import run_passes
from rtgen.types import SessionSpec, SpeechState, UnitFormat

P = ParamSpec("P")
R = TypeVar("R")

CHUNKS = 5
"""Chunks timed for each batch size."""
MEMORY_SHARE = 0.8
"""Of the memory that is free at start."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a model's sessions have in common.

    Attributes:
        default_steps: forwards to x0 when none are asked for.
        frames_per_chunk: latent frames of a chunk.
        merges: whether the clean pass is merged with the next chunk's first pass.
        session_bytes: memory of one session.
        device: where the model is.
    """

    default_steps: int
    frames_per_chunk: int
    merges: bool
    session_bytes: int
    device: torch.device

    def demand(self, steps: int | None, unit_format: UnitFormat) -> Demand:
        """What a session with so many steps (None: the default) asks of the engine."""
        count = self.default_steps if steps is None else steps
        shape = str(self.frames_per_chunk)
        first = f"{shape}+{shape}" if self.merges else shape
        return Demand(
            noisy=(first, *([shape] * (count - 1))),
            clean=None if self.merges else shape,
            units_per_chunk=unit_format.units_per_chunk,
            unit_ns=int(unit_format.duration * 10**9),
            lead=unit_format.lead,
        )


def shape_of(due: StreamPass) -> str:
    """Name of a pass's shape: the latent frames of its groups."""
    return "+".join(map(str, due.cache.groups))


def model_facts(pipeline: Pipeline, lanes: Lanes) -> ModelFacts:
    """Opens a session and looks at it."""
    session = _run(lanes.denoise, pipeline.open, SessionSpec())
    unit, stream = pipeline.format, session.stream
    waiting = unit.lead * unit.frames_per_unit * unit.height * unit.width * 3
    facts = ModelFacts(
        default_steps=stream.sampling_config.num_inference_steps,
        frames_per_chunk=stream.cache_config.frames_per_chunk,
        merges=stream.cache_config.merge_clean_pass,
        session_bytes=session.nbytes + waiting,
        device=stream.device,
    )
    session.close()
    return facts


def safe_sizes(pipeline: Pipeline, max_batch: int, lanes: Lanes) -> tuple[int, ...]:
    """Batch sizes up to `max_batch` at which every row has the bits that it has alone."""
    session = _run(lanes.denoise, pipeline.open, SessionSpec())
    stream = session.stream
    _, height, width = stream.latent_shape
    sizes: tuple[int, ...] = lanes.denoise.submit(
        invariant_batch_sizes,
        pipeline.denoiser,
        max_batch,
        stream.cache_config,
        height=height,
        width=width,
    ).result()
    session.close()
    return sizes


def measure(pipeline: Pipeline, facts: ModelFacts, sizes: Sequence[int], lanes: Lanes) -> Profile:
    """Times forwards of every shape and size, conditioning and decoding, on their lanes.

    The shortest of a few runs counts: what others on the machine do to it is for the cost model,
    which follows it.
    """
    rows = [
        _run(lanes.denoise, pipeline.open, SessionSpec(seed=seed)) for seed in range(max(sizes))
    ]
    times: dict[tuple[str, int], list[int]] = {}
    for _ in range(rows[0].stream.cache_config.window):
        _denoise(pipeline, rows, lanes, {})
    for size in sizes:
        for _ in range(CHUNKS):
            for row, x0 in zip(rows, _denoise(pipeline, rows[:size], lanes, times), strict=False):
                _timed(times, DECODE, 1, lanes.decode, row.decode, x0)
    for row in rows:
        row.close()
    forward_ns: dict[str, dict[int, int]] = {}
    for (name, size), spans in times.items():
        forward_ns.setdefault(name, {})[size] = min(spans)
    return Profile(
        device=str(facts.device),
        model=str(pipeline.describe().get("model", type(pipeline).__name__)),
        forward_ns={name: paying(spans) for name, spans in forward_ns.items()},
        session_bytes=facts.session_bytes,
    )


def restricted(profile: Profile, sizes: Sequence[int]) -> Profile:
    """A profile without the batch sizes that are not safe."""
    forward_ns = {
        name: {size: ns for size, ns in times.items() if size in sizes}
        for name, times in profile.forward_ns.items()
    }
    return replace(profile, forward_ns=forward_ns)


def paying(spans: dict[int, int]) -> dict[int, int]:
    """The batch sizes that cost less a row than every smaller one.

    Args:
        spans: time of a forward by its rows.
    """
    kept: dict[int, int] = {}
    for size, ns in sorted(spans.items()):
        if all(ns / size < other / rows for rows, other in kept.items()):
            kept[size] = ns
    return kept


def free_bytes(device: torch.device) -> int | None:
    """Memory that sessions may take; None where the system does not say."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0] * MEMORY_SHARE)
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(int(value.split()[0]) * 1024 * MEMORY_SHARE)
    return None


def _denoise(
    pipeline: Pipeline,
    rows: Sequence[PipelineSession],
    lanes: Lanes,
    times: dict[tuple[str, int], list[int]],
) -> list[Tensor]:
    """Makes one chunk of all rows in step, and their clean pass; returns x0 of each."""
    for row in rows:
        _timed(times, CONDITION, 1, lanes.denoise, row.begin, _silence(pipeline.format))
    streams = [row.stream for row in rows]
    x0: list[Tensor] = []
    while (due := streams[0].next_pass()) is not None:
        outputs = _timed(
            times, shape_of(due), len(rows), lanes.denoise, run_passes, pipeline.denoiser, streams
        )
        x0 += [latents for latents in outputs if latents is not None]
        if x0 and streams[0].cache_config.merge_clean_pass:
            break
    return x0


def _timed(
    times: dict[tuple[str, int], list[int]],
    name: str,
    size: int,
    lane: Lane,
    job: Callable[P, R],
    *args: P.args,
    **kwargs: P.kwargs,
) -> R:
    def work() -> tuple[R, int]:
        start = time.perf_counter_ns()
        result = job(*args, **kwargs)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return result, time.perf_counter_ns() - start

    result, span_ns = lane.submit(work).result()
    times.setdefault((name, size), []).append(span_ns)
    return result


def _run(lane: Lane, job: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    return lane.submit(job, *args, **kwargs).result()


def _silence(unit: UnitFormat) -> list[UnitInput]:
    audio = np.zeros(unit.model_samples + unit.lookahead_samples, np.float32)
    return [UnitInput(audio=audio, state=SpeechState.IDLE)] * unit.units_per_chunk
