"""What the talking face costs on this machine (`rtgen bench avatar`).

Every setting (threads x dtype) runs in a process of its own, so that memory, thread pools and cold
starts are its own too. The face is animated offline from a fixed sound, stage by stage; then the
engine renders the same with its lanes overlapped. "No cache" runs the same weights with the whole
window recomputed in every pass. CPU time is that of all threads of the process.

The last line on stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from rtgen.errors import BackendUnavailable, ConfigError

THREADS = (1, 2)
DTYPES = ("float32", "bfloat16")
WARM_UNITS = 8


@dataclass(slots=True)
class Meter:
    """CPU and wall time per stage.

    Attributes:
        cpu: milliseconds of CPU time of the whole process, one entry per run.
        wall: milliseconds.
    """

    cpu: dict[str, list[float]] = field(default_factory=dict)
    wall: dict[str, list[float]] = field(default_factory=dict)
    _start: tuple[int, int] = (0, 0)

    def start(self) -> None:
        """Begins a stage."""
        self._start = time.process_time_ns(), time.perf_counter_ns()

    def stop(self, name: str) -> None:
        """Ends it under a name, and begins the next."""
        cpu, wall = time.process_time_ns(), time.perf_counter_ns()
        self.cpu.setdefault(name, []).append((cpu - self._start[0]) / 1e6)
        self.wall.setdefault(name, []).append((wall - self._start[1]) / 1e6)
        self.start()


def sound(units: int, unit: int, lookahead: int) -> npt.NDArray[np.float32]:
    """A fixed voice-like sound: 120 Hz pulses in a 3 Hz rhythm with a little noise."""
    count = units * unit + lookahead
    t = np.arange(count) / 16000
    pulses = (np.sin(2 * np.pi * 120 * t) > 0.95) * (np.sin(2 * np.pi * 3 * t) > -0.3)
    noise = np.random.default_rng(0).standard_normal(count)
    return (0.3 * pulses + 0.01 * noise).astype(np.float32)


def measure_stages(model: Path, dtype: str, units: int) -> dict[str, Any]:
    """Steps one session unit by unit and times each stage; for the worker process."""
    started = time.perf_counter()
    from pipelines.avatar import AvatarPipeline
    from rtgen.engine.contract import UnitInput
    from rtgen.sampling.stream import run_passes
    from rtgen.types import SessionSpec, SpeechState

    pipeline = AvatarPipeline.from_directory(model, dtype=dtype)
    mel = pipeline.config.mel
    audio = sound(units + WARM_UNITS, mel.unit, mel.lookahead)
    meter = Meter()

    def run(session: Any, index: int, meter: Meter) -> None:
        begin = index * mel.unit
        meter.start()
        part = audio[begin : begin + mel.unit + mel.lookahead]
        session.begin([UnitInput(audio=part, state=SpeechState.SPEAKING)])
        meter.stop("condition")
        latents = None
        while latents is None:
            due = session.stream.next_pass()
            (latents,) = run_passes(pipeline.denoiser, [session.stream])
            meter.stop("clean" if due.kind == "clean" else "noisy")
        frames = session.decode(latents)
        meter.stop("decode")
        assert frames.shape[0] == pipeline.config.decoder.frames_per_unit

    session = pipeline.open(SessionSpec(seed=0))
    run(session, 0, Meter())
    cold_s = time.perf_counter() - started
    for index in range(1, WARM_UNITS):
        run(session, index, Meter())
    for index in range(WARM_UNITS, WARM_UNITS + units):
        run(session, index, meter)
    warm_started = time.perf_counter()
    run(pipeline.open(SessionSpec(seed=1)), 0, Meter())
    warm_s = time.perf_counter() - warm_started
    frames = pipeline.config.decoder.frames_per_unit
    return {
        "cpu_ms_per_frame": {k: round(sum(v) / units / frames, 3) for k, v in meter.cpu.items()},
        "wall_ms_per_frame": {k: round(sum(v) / units / frames, 3) for k, v in meter.wall.items()},
        "first_frame_cold_s": round(cold_s, 3),
        "first_frame_warm_s": round(warm_s, 3),
        "no_cache_ratio": round(no_cache_ratio(pipeline), 3),
        "gflop_per_unit": gflop_per_unit(pipeline),
        **engine_speed(pipeline, units),
        "peak_rss_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
    }


def engine_speed(pipeline: Any, units: int) -> dict[str, float]:
    """Seconds of video per second of wall time, with the engine's two lanes overlapped."""
    from rtgen.engine.engine import Engine
    from rtgen.types import Grant, SessionSpec

    mel = pipeline.config.mel
    pcm = (sound(units, mel.unit, 0) * 32767).astype(np.int16)
    duration = units * mel.unit / mel.sample_rate
    engine = Engine(pipeline)
    try:
        grant = engine.reserve(SessionSpec(service_class="offline"))
        if not isinstance(grant, Grant):
            raise BackendUnavailable(f"the engine takes no session: {grant.reason}")
        started, cpu = time.perf_counter(), time.process_time()
        made = sum(1 for _ in grant.session.render([pcm], mel.sample_rate))
    finally:
        engine.close()
    wall, cpu = time.perf_counter() - started, time.process_time() - cpu
    if made != units:
        raise ConfigError(f"the engine made {made} units of {units}")
    return {
        "real_time_factor": round(duration / wall, 3),
        "cpu_s_per_video_s": round(cpu / duration, 3),
    }


def no_cache_ratio(pipeline: Any, repeats: int = 5) -> float:
    """CPU time of a pass that recomputes the whole window over one that reads the cache.

    Raises:
        ConfigError: the two do not agree on the newest frame, so they do not do the same work.
    """
    import torch

    from rtgen.models.denoiser import CachePass, block_causal_mask

    config, denoiser = pipeline.config, pipeline.denoiser
    window = config.cache.window
    channels, height, width = config.latent_shape
    tokens = config.denoiser.tokens_per_frame(height, width)
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(1, window, channels, height, width, generator=generator)
    timestep = torch.full((1, window), 500.0)
    whole = denoiser.prepare(config.neutral(window))
    single = denoiser.prepare(config.neutral(1))
    cache = denoiser.new_cache(config.cache, height, width)
    mask = block_causal_mask(window, tokens, 1, window, config.cache.sink)

    def cached(frame: int) -> Any:
        where = CachePass(cache, frame, (1,))
        return denoiser(latents[:, frame : frame + 1], timestep[:, :1], single, caches=[where])

    def dense(frame: int) -> Any:
        return denoiser(latents, timestep, whole, mask=mask)[:, frame : frame + 1]

    newest = window - 1
    spans, outputs = [], []
    with torch.inference_mode():
        for frame in range(newest):
            cached(frame)
            cache.commit(1)
        for call in (dense, cached):
            outputs.append(call(newest))
            started = time.process_time()
            for _ in range(repeats):
                call(newest)
            spans.append(time.process_time() - started)
    apart = (outputs[0] - outputs[1]).square().mean().sqrt() / outputs[1].square().mean().sqrt()
    single_precision = denoiser.patch_embedding.weight.dtype == torch.float32
    if apart > (1e-3 if single_precision else 0.05):
        raise ConfigError(f"with and without cache differ by {float(apart):.3f} of the output")
    return float(spans[0] / max(spans[1], 1e-9))


def gflop_per_unit(pipeline: Any) -> dict[str, float]:
    """Analytic GFLOP of one unit: denoiser (all its passes) and decoder."""
    from decoders.unit_conv import decoder_flops
    from rtgen.models.flops import flops

    config = pipeline.config
    _, height, width = config.latent_shape
    passes = config.default_steps + 1
    one = flops(config.denoiser, height, width, 1, config.cache.window)
    return {
        "denoiser": round(passes * one / 1e9, 2),
        "decoder": round(decoder_flops(config.decoder) / 1e9, 2),
    }


def conditions() -> dict[str, Any]:
    """What the numbers were made on."""
    import torch

    from rtgen.info import cpu_facts

    cpu = cpu_facts()
    return {
        "cpu": cpu["model"],
        "cores": cpu["cores"],
        "features": cpu["features"],
        "torch": torch.__version__,
        "python": platform.python_version(),
        "load": round(os.getloadavg()[0], 2),
    }


def run_worker(model: Path, threads: int, dtype: str, units: int) -> dict[str, Any]:
    """Measures one setting in a fresh process.

    Raises:
        BackendUnavailable: the process failed; its last line of output is in the message.
    """
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": str(threads),
        "OMP_WAIT_POLICY": "passive",
    }
    command = [sys.executable, "-m", "pipelines.bench_avatar", str(model), dtype, str(units)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise BackendUnavailable(f"bench with {threads} threads in {dtype} failed: {last}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def table(document: dict[str, Any]) -> str:
    """The settings as a Markdown table."""
    rows = [
        "| threads | dtype | denoise | decode | all, CPU-ms a frame | speed | first frame cold / "
        "warm | memory | no cache |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for run in document["runs"]:
        cpu = run["cpu_ms_per_frame"]
        denoise = cpu["condition"] + cpu["noisy"] + cpu["clean"]
        rows.append(
            f"| {run['threads']} | {run['dtype']} | {denoise:.1f} | {cpu['decode']:.1f} "
            f"| {denoise + cpu['decode']:.1f} | {run['real_time_factor']:.2f}x real time "
            f"| {run['first_frame_cold_s']:.1f} / {run['first_frame_warm_s']:.2f} s "
            f"| {run['peak_rss_mib']:.0f} MiB | {run['no_cache_ratio']:.1f}x slower |"
        )
    return "\n".join(rows)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `rtgen bench avatar`."""
    parser.add_argument("--model", help="name or folder, default the shipped one")
    parser.add_argument("--units", type=int, default=60, help="units of 160 ms per setting")
    parser.add_argument("--out", type=Path, help="also write the JSON document here")


def run(args: argparse.Namespace) -> int:
    """Runs every setting, prints the table and the JSON document."""
    from rtgen.assets import default_model, find_asset

    if args.units < 1:
        raise ConfigError(f"--units must be at least 1, got {args.units}")
    model = find_asset("model", args.model if args.model is not None else default_model())
    document: dict[str, Any] = {"bench": "avatar", "units": args.units, **conditions()}
    document["runs"] = [
        {"threads": threads, "dtype": dtype, **run_worker(model, threads, dtype, args.units)}
        for threads in THREADS
        for dtype in DTYPES
    ]
    sys.stdout.write(table(document) + "\n")
    if args.out is not None:
        args.out.write_text(json.dumps(document, indent=1) + "\n")
    sys.stdout.write(json.dumps(document) + "\n")
    return 0


if __name__ == "__main__":
    sys.stdout.write(
        json.dumps(measure_stages(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]))) + "\n"
    )
