"""Measures the avatar against exact labels (`rtgen eval avatar`).

Held-out dialogues (voices and sentences never trained on) and a few scenes without speech are
shown twice: by the model, and by their exact labels through the same decoder. The probe reads
both, and every row of the table compares them. Streams are looked at unit by unit and kept as a
few numbers a frame (`pipelines.evaluation.log`), so ten minutes need no more memory than one.

The run is made of parts; each is kept under `parts/` and skipped when it is there already.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import logging
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from pipelines.avatar import AvatarPipeline
from pipelines.avatar_model import (
    AVATARS_FILE,
    CONFIG_FILE,
    DENOISER_FILE,
    LIPS_FILE,
    decoder_file,
    load_config,
    load_decoder,
)
from pipelines.evaluation.parts import Stage, digest
from pipelines.evaluation.probe_fit import STEPS, fit, gather, report
from pipelines.evaluation.regressor import (
    MouthRegressor,
    load_regressor,
    save_regressor,
    train_regressor,
)
from pipelines.evaluation.scenes import (
    Plan,
    event_scenes,
    quiet_scenes,
    speech_scenes,
    variant_scenes,
)
from pipelines.evaluation.table import Row, rows_of, text_of
from pipelines.probe import FaceProbe
from pipelines.train.latent_renderer import LatentRenderer, load_renderer
from rtgen.errors import CheckpointError, ConfigError

__all__ = ["add_arguments", "run"]

logger = logging.getLogger(__name__)

PROBE_FILE = "probe.safetensors"
QUICK = Plan(seeds=1, minutes=1.0, quiet_s=8.0, gesture_rounds=1, variant_s=8.0, clip_s=20.0)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags of `rtgen eval avatar`."""
    add = parser.add_argument
    add("--model", type=Path, required=True, help="model folder")
    add("--renderer", type=Path, required=True, help="folder of `rtgen train renderer`")
    add("--data", type=Path, nargs="+", help="folders of `rtgen train data`: fit probe and "
        "regressor on them instead of taking the model's probe")  # fmt: skip
    add("--autoencoder", type=Path, help="its training folder, whose metrics are reported too")
    add("--bench", type=Path, help="JSON of `rtgen bench avatar`, for the cost")
    add("--out", type=Path, required=True, help="folder for measures, sheet, clip and parts")
    add("--quick", action="store_true", help="one minute, one seed: no drift, a few CPU-minutes")
    add("--seeds", type=int, default=5, help="streams of dialogue")
    add("--minutes", type=float, default=10.0, help="length of each")
    add("--seed", type=int, default=7, help="of the first stream")
    add("--steps", type=int, help="denoising steps, default the model's")
    add("--avatar", help="identity, default the model's first")
    add("--threads", type=int, default=1, help="of each network")
    add("--device", default="cpu")
    add("--dtype", default="auto")


def plan_of(args: argparse.Namespace) -> Plan:
    """How much is to be shown.

    Raises:
        ConfigError: a number is out of range.
    """
    if args.seeds < 1 or args.minutes < 0.5:
        raise ConfigError(
            f"--seeds must be at least 1 and --minutes at least 0.5, "
            f"got {args.seeds} and {args.minutes}"
        )
    if args.quick:
        return dataclasses.replace(QUICK, seed=args.seed)
    return Plan(seed=args.seed, seeds=args.seeds, minutes=args.minutes)


def run(args: argparse.Namespace) -> int:
    """Shows, measures, and writes measures.json, a contact sheet and a clip."""
    plan = plan_of(args)
    args.out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(args.threads)
    renderer = load_renderer(args.renderer)
    pipeline = AvatarPipeline.from_directory(args.model, device=args.device, dtype=args.dtype)
    probe, net, facts = _instruments(args, renderer, pipeline.identity(args.avatar))
    names = CONFIG_FILE, LIPS_FILE, DENOISER_FILE, AVATARS_FILE
    files = [args.model / n for n in (*names, decoder_file(pipeline.identity(args.avatar)))]
    files += [args.renderer / "renderer.safetensors", _probe_path(args)]
    stage = Stage(
        pipeline=pipeline,
        renderer=renderer,
        probe=probe,
        folder=args.out / "parts",
        key=digest(files, str(pipeline.describe()["denoiser_dtype"])),
        steps=args.steps,
        avatar=args.avatar,
    )
    stage.folder.mkdir(exist_ok=True)
    facts |= {
        "seconds": plan.minutes * 60,
        "seeds": plan.seeds,
        "seed": plan.seed,
        "steps": args.steps or pipeline.config.default_steps,
        "avatar": args.avatar or pipeline.avatars[0],
    }
    measures: dict[str, float] = {}
    if args.bench is not None:
        measures["denoise_cpu_ms"] = denoise_cost(json.loads(args.bench.read_text()))
    scenes: tuple[Callable[[], dict[str, float]], ...] = (
        lambda: speech_scenes(stage, plan, net, args.out),
        lambda: quiet_scenes(stage, plan),
        lambda: event_scenes(stage, plan),
        lambda: variant_scenes(stage, plan),
    )
    for scene in scenes:
        measures |= scene()
        rows = rows_of(measures)
        _write(args.out / "measures.json", facts, rows, measures)
    sys.stdout.write(text_of(rows))
    return 0


def _write(path: Path, facts: dict[str, Any], rows: list[Row], measures: dict[str, float]) -> None:
    """Writes what is known so far; measures that are not finite become null."""
    document = {
        **facts,
        "rows": [row.document() for row in rows],
        "measures": {k: round(v, 4) if math.isfinite(v) else None for k, v in measures.items()},
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


def _probe_path(args: argparse.Namespace) -> Path:
    """Where the probe of this run is: its own when there are data to fit one on."""
    return (args.model if args.data is None else args.out) / PROBE_FILE


def _instruments(
    args: argparse.Namespace, renderer: LatentRenderer, avatar: str
) -> tuple[FaceProbe, MouthRegressor | None, dict[str, Any]]:
    """Probe, regressor and what is known about them, fitted unless that was done before.

    Raises:
        CheckpointError: a file is missing; there is no probe and nothing to fit one on.
    """
    facts: dict[str, Any] = {}
    if args.autoencoder is not None:
        facts["autoencoder"] = json.loads((args.autoencoder / "metrics.json").read_text())
    path = _probe_path(args)
    if args.data is None:
        return FaceProbe.load(path), None, facts
    names = [str(folder.resolve()) for folder in args.data]
    config = load_config(args.model)
    painter = args.model / decoder_file(avatar), args.renderer / "renderer.safetensors"
    key = digest(painter, names, STEPS)
    report_path = args.out / "probe.json"
    if not path.exists() or not _is_current(report_path, key):
        data = gather(args.data, renderer, load_decoder(args.model, config, avatar))
        probe = fit(data.rendered, data.decoded)
        probe.save(path)
        report_path.write_text(json.dumps({"key": key, **report(probe, data)}, indent=1) + "\n")
    probe_facts = json.loads(report_path.read_text())
    probe_facts.pop("key")
    facts["probe"] = probe_facts
    facts["probe_r_on_renders"] = {n: v["r"] for n, v in probe_facts["rendered"].items()}
    net_path = args.out / f"regressor_{digest((), names)}.safetensors"
    if not net_path.exists():
        save_regressor(train_regressor(args.data, config.mel), net_path)
    return FaceProbe.load(path), load_regressor(net_path, config.mel), facts


def _is_current(path: Path, key: str) -> bool:
    """Whether a JSON file was written under a key."""
    return path.exists() and json.loads(path.read_text()).get("key") == key


def denoise_cost(bench: dict[str, Any]) -> float:
    """CPU-ms a pixel frame of conditioning and all denoise passes: the fastest one-thread run.

    Raises:
        CheckpointError: the document holds no such run.
    """
    costs = [
        sum(run["cpu_ms_per_frame"][part] for part in ("condition", "noisy", "clean"))
        for run in bench.get("runs", [])
        if run["threads"] == 1
    ]
    if not costs:
        raise CheckpointError("the bench holds no run on one thread; make one with `rtgen bench`")
    return float(min(costs))
