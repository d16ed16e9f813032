"""What frame decoders cost on this machine (`rtgen bench decoders`).

Every decoder streams random latents with random weights, one session, on one thread, in a process
of its own. Times are CPU times of that process, so that other work on the machine counts little;
the best step counts, after the first and one more. "diffusers" is the decoding of
`AutoencoderKLWan` of a whole clip, channels-last, which is a loop over latent frames too.

The last line on stdout is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipelines.bench_avatar import conditions
from rtgen.errors import BackendUnavailable, ConfigError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from decoders.base import StreamingNetwork

BASELINE = "diffusers"
FLASH = ("flash-S", "flash-S windowed", "flash-XL", "flash-XL windowed")
AVATAR = ("avatar conv", "avatar flash")
STOCK = ("stock", "stock direct")
DECODERS = (BASELINE, *STOCK, *FLASH, *AVATAR)
PIXELS_PER_LATENT = {"wan2.1": 8, "wan2.2": 16}
DTYPES = ("float32", "bfloat16")
MIN_STEPS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One decoder at one size.

    Attributes:
        decoder: one of `DECODERS`.
        latent_space: of those that are not the avatar's.
        height: pixel rows.
        width: pixel columns.
        dtype: of weights and memory.
        steps: most steady steps to time.
        seconds: CPU time after which no further step is begun.
    """

    decoder: str
    latent_space: str = "wan2.1"
    height: int = 256
    width: int = 256
    dtype: str = "float32"
    steps: int = 10
    seconds: float = 20.0

    def __post_init__(self) -> None:
        scale = PIXELS_PER_LATENT.get(self.latent_space)
        if scale is None or self.decoder not in DECODERS or self.dtype not in DTYPES:
            raise ConfigError(
                f"decoders are {', '.join(DECODERS)}; latent spaces {', '.join(PIXELS_PER_LATENT)};"
                f" dtypes {', '.join(DTYPES)}; got {self}"
            )
        if any(side < 16 or side % 16 for side in (self.height, self.width)):
            raise ConfigError(f"size must be multiples of 16, got {self.height}x{self.width}")
        if self.steps < MIN_STEPS:
            raise ConfigError(f"steps must be at least {MIN_STEPS}, got {self.steps}")

    @property
    def latent_size(self) -> tuple[int, int]:
        """Latent rows and columns."""
        scale = 16 if self.decoder in AVATAR else PIXELS_PER_LATENT[self.latent_space]
        return self.height // scale, self.width // scale


class Clock:
    """CPU milliseconds per step, until there are enough.

    Args:
        setting: says how many steps and how long.
    """

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.first_ms = 0.0
        self.steps_ms: list[float] = []

    def run(self, step: Callable[[], object]) -> None:
        """Times the first step, leaves out the second, times the rest."""
        self.first_ms = _cpu_ms(step)
        step()
        while not self.is_enough:
            self.steps_ms.append(_cpu_ms(step))

    @property
    def is_enough(self) -> bool:
        """Whether no further step is needed."""
        done = len(self.steps_ms)
        spent = sum(self.steps_ms) / 1000
        return done >= self.setting.steps or (done >= MIN_STEPS and spent > self.setting.seconds)


def _cpu_ms(step: Callable[[], object]) -> float:
    start = time.process_time_ns()
    step()
    return (time.process_time_ns() - start) / 1e6


def materialise(module: nn.Module, dtype: torch.dtype) -> None:
    """Gives a module on the meta device weights that keep signals at a size of about 1."""
    import torch

    module.to_empty(device="cpu")
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.ndim < 2 or "gamma" in name:
                parameter.fill_(1.0 if "norm" in name and "bias" not in name else 0.0)
            else:
                bound = (3 / parameter[0].numel()) ** 0.5
                parameter.uniform_(-bound, bound, generator=generator)
        for buffer in module.buffers():
            buffer.zero_()
    module.to(dtype).eval().requires_grad_(False)


def build(setting: Setting) -> tuple[StreamingNetwork | nn.Module, float]:
    """A decoder on the meta device, and the analytic GFLOP of one steady latent frame."""
    import torch

    from decoders.flash import FlashNetwork
    from decoders.flash_presets import AVATAR_FLASH, flash_config, flash_flops
    from decoders.stock_vae import WAN21_VAE, WAN22_VAE, StockVae
    from decoders.unit_conv import UnitConvConfig, UnitDecoder, decoder_flops

    with torch.device("meta"):
        if setting.decoder in STOCK:
            vae = StockVae(WAN21_VAE if setting.latent_space == "wan2.1" else WAN22_VAE)
            return vae, count_gflop(vae, setting)
        if setting.decoder == "avatar conv":
            conv = UnitConvConfig(size=setting.height)
            return UnitDecoder(conv), decoder_flops(conv) / 1e9
        if setting.decoder == "avatar flash":
            config = AVATAR_FLASH
        else:
            size, _, windowed = setting.decoder.removeprefix("flash-").partition(" ")
            config = flash_config(size, setting.latent_space, windowed=bool(windowed))  # type: ignore[arg-type]
        return FlashNetwork(config), flash_flops(config, *setting.latent_size) / 1e9


def count_gflop(network: StreamingNetwork, setting: Setting) -> float:
    """GFLOP of products of one steady latent frame of a network on the meta device."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    size = setting.latent_size
    network.prepare()  # type: ignore[operator]
    latents = torch.zeros(network.latent_channels, *size, device="meta")
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        network.stream(latents, network.new_memory(*size), False)
    return counter.get_total_flops() / 1e9


def measure(setting: Setting) -> dict[str, Any]:
    """Runs one setting in this process."""
    import torch

    torch.set_num_threads(1)
    dtype, clock = getattr(torch, setting.dtype), Clock(setting)
    if setting.decoder == BASELINE:
        facts = _measure_diffusers(setting, dtype, clock)
    else:
        facts = _measure_ours(setting, dtype, clock)
    best, frames = min(clock.steps_ms), 4
    return {
        **facts,
        "cpu_ms_per_frame": round(best / frames, 3),
        "median_cpu_ms_per_frame": round(sorted(clock.steps_ms)[len(clock.steps_ms) // 2] / 4, 3),
        "first_step_cpu_ms": round(clock.first_ms, 3),
        "steps": len(clock.steps_ms),
        "cpu_ms_per_gflop": round(best / facts["gflop_per_latent"], 3),
        "peak_rss_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
    }


def _measure_ours(setting: Setting, dtype: torch.dtype, clock: Clock) -> dict[str, Any]:
    import torch

    from decoders.base import MemorylessDecoder, StreamingDecoder
    from decoders.stock_vae import StockVae
    from decoders.unit_conv import UnitDecoder

    network, gflop = build(setting)
    materialise(network, dtype)
    decoder: MemorylessDecoder | StreamingDecoder
    if isinstance(network, UnitDecoder):
        channels = network.config.latent_channels
        network.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        decoder = MemorylessDecoder(
            network, latent_space="bench", latent_shape=(channels, *setting.latent_size)
        )
    else:
        if isinstance(network, StockVae):
            network.prepare("conv2d" if setting.decoder == "stock direct" else None)
        channels = network.latent_channels  # type: ignore[assignment]
        decoder = StreamingDecoder(network, latent_space="bench", lead=0)  # type: ignore[arg-type]
    state: Any = decoder.new_state(*setting.latent_size, dtype, "cpu")
    latents = torch.randn(1, 1, channels, *setting.latent_size)
    clock.run(lambda: decoder.step([state], latents))
    return _facts(network, gflop, state.nbytes)


def _measure_diffusers(setting: Setting, dtype: torch.dtype, clock: Clock) -> dict[str, Any]:
    """Decodes a clip with `AutoencoderKLWan.decode` and times each turn of its loop.

    Raises:
        BackendUnavailable: diffusers is not installed.
    """
    import torch

    from decoders.stock_vae import WAN21_VAE, WAN22_VAE

    try:
        from diffusers import AutoencoderKLWan
    except ModuleNotFoundError as error:
        raise BackendUnavailable("diffusers is missing; pip install 'rtgen[public]'") from error
    config = WAN21_VAE if setting.latent_space == "wan2.1" else WAN22_VAE
    values = {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in asdict(config).items()
        if not key.startswith("latents_")
    }
    moments = {key: [0.0] * config.z_dim for key in ("latents_mean", "latents_std")}
    with torch.device("meta"):
        vae: Any = AutoencoderKLWan(  # type: ignore[no-untyped-call]
            **values, **moments, in_channels=config.out_channels
        )
    vae.encoder = None
    gflop = _gflop_of_clip(vae, setting, 3) - _gflop_of_clip(vae, setting, 2)
    materialise(vae, dtype)
    for parameter in vae.parameters():
        if parameter.ndim == 5:
            parameter.data = parameter.data.contiguous(memory_format=torch.channels_last_3d)
    forward, caches, turns = vae.decoder.forward, [], [0]

    def timed(*arguments: Any, **named: Any) -> Any:
        out: list[Tensor] = []
        spent = _cpu_ms(lambda: out.append(forward(*arguments, **named)))
        caches.append(named["feat_cache"])
        if turns[0] == 0:
            clock.first_ms = spent
        elif turns[0] > 1:
            clock.steps_ms.append(spent)
        turns[0] += 1
        return out[0]

    vae.decoder.forward = timed
    clip = torch.randn(1, config.z_dim, 2 + MIN_STEPS, *setting.latent_size, dtype=dtype)
    with torch.inference_mode():
        vae.decode(clip)
    nbytes = sum(tensor.nbytes for tensor in caches[-1] if isinstance(tensor, torch.Tensor))
    return _facts(vae, gflop, nbytes)


def _gflop_of_clip(vae: Any, setting: Setting, frames: int) -> float:
    """GFLOP of products when a clip is decoded, on the meta device."""
    import torch
    from torch.utils.flop_counter import FlopCounterMode

    clip = torch.zeros(1, vae.config.z_dim, frames, *setting.latent_size, device="meta")
    with FlopCounterMode(display=False) as counter, torch.inference_mode():
        vae.decode(clip)
    return counter.get_total_flops() / 1e9


def _facts(network: nn.Module, gflop: float, nbytes: int) -> dict[str, Any]:
    count = sum(parameter.numel() for parameter in network.parameters())
    return {
        "parameters_millions": round(count / 1e6, 2),
        "gflop_per_latent": round(gflop, 4),
        "state_mib": round(nbytes / 2**20, 3),
    }


def run_worker(setting: Setting) -> dict[str, Any]:
    """Measures one setting in a fresh process.

    Raises:
        BackendUnavailable: the process failed; its last line of output is in the message.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    command = [sys.executable, "-m", "pipelines.bench_decoders", json.dumps(asdict(setting))]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise BackendUnavailable(f"bench of {setting.decoder} failed: {last}")
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def add_ratios(runs: list[dict[str, Any]]) -> None:
    """Adds to every run how much less CPU time and state it takes than the baseline at its size."""
    baselines = {run["size"]: run for run in runs if run["decoder"] == BASELINE}
    for run in runs:
        base = baselines.get(run["size"])
        if base is None or run["decoder"] in AVATAR:
            continue
        run["speedup"] = round(base["cpu_ms_per_frame"] / max(run["cpu_ms_per_frame"], 1e-9), 2)
        run["state_share"] = round(run["state_mib"] / max(base["state_mib"], 1e-9), 4)


def table(document: dict[str, Any]) -> str:
    """The runs as a Markdown table."""
    rows = [
        "| decoder | size | parameters | GFLOP a frame | CPU-ms a frame | against diffusers | "
        "CPU-ms a GFLOP | state | memory |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for run in document["runs"]:
        speedup = f"{run['speedup']:.1f}x less" if "speedup" in run else ""
        rows.append(
            f"| {run['decoder']} | {run['size']} | {run['parameters_millions']:.1f} M "
            f"| {run['gflop_per_latent'] / 4:.1f} | {run['cpu_ms_per_frame']:.1f} | {speedup} "
            f"| {run['cpu_ms_per_gflop']:.1f} | {run['state_mib']:.1f} MiB "
            f"| {run['peak_rss_mib']:.0f} MiB |"
        )
    return "\n".join(rows)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `rtgen bench decoders`."""
    add = parser.add_argument
    add("--size", action="append", metavar="HxW", help="pixels, may repeat; default 256x256")
    add("--latent-space", default="wan2.1", help="wan2.1 or wan2.2")
    add("--dtype", default="float32", help="float32 or bfloat16")
    add("--decoder", action="append", help=f"may repeat; default all: {', '.join(DECODERS)}")
    add("--steps", type=int, default=10, help="most steady steps per decoder")
    add("--out", type=Path, help="also write the JSON document here")


def settings_of(args: argparse.Namespace) -> list[Setting]:
    """All settings that the flags ask for; the avatar's decoders at their own size only.

    Raises:
        ConfigError: a flag is wrong.
    """
    settings = []
    for size in args.size or ["256x256"]:
        sides = re.fullmatch(r"(\d+)x(\d+)", size)
        if sides is None:
            raise ConfigError(f"--size must be HEIGHTxWIDTH, for example 256x256, got {size!r}")
        for decoder in args.decoder or DECODERS:
            setting = Setting(
                decoder=decoder,
                latent_space=args.latent_space,
                height=int(sides[1]),
                width=int(sides[2]),
                dtype=args.dtype,
                steps=args.steps,
            )
            if decoder not in AVATAR or (setting.height, setting.width) == (256, 256):
                settings.append(setting)
    return settings


def run(args: argparse.Namespace) -> int:
    """Runs every setting, prints the table and the JSON document."""
    settings = settings_of(args)
    document: dict[str, Any] = {
        "bench": "decoders",
        "latent_space": args.latent_space,
        "dtype": args.dtype,
        "threads": 1,
        **conditions(),
    }
    runs = [
        {"decoder": s.decoder, "size": f"{s.height}x{s.width}", **run_worker(s)} for s in settings
    ]
    add_ratios(runs)
    document["runs"] = runs
    sys.stdout.write(table(document) + "\n")
    if args.out is not None:
        args.out.write_text(json.dumps(document, indent=1) + "\n")
    sys.stdout.write(json.dumps(document) + "\n")
    return 0


if __name__ == "__main__":
    sys.stdout.write(json.dumps(measure(Setting(**json.loads(sys.argv[1])))) + "\n")
