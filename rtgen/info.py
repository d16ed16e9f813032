"""What this installation can run on and what it carries: the facts behind `rtgen info`."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch

from rtgen import __version__
from rtgen.assets import assets_root, find_asset, list_assets, model_facts
from rtgen.errors import BackendUnavailable, CheckpointError
from rtgen.models.attention import BACKENDS, resolve_backend

__all__ = ["as_text", "collect", "cpu_facts", "cpu_features"]

DISTRIBUTIONS = (
    "torch", "numpy", "safetensors", "av", "diffusers", "transformers", "xformers", "aiortc",
    "gradio",
)  # fmt: skip
# What decides whether bfloat16 or float32 is the faster type on a CPU.
FEATURES = (
    "avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "asimd", "bf16", "sve",
)  # fmt: skip


def cpu_features(cpuinfo: str) -> tuple[str, ...]:
    """Returns those of `FEATURES` that the first processor of /proc/cpuinfo has."""
    for line in cpuinfo.splitlines():
        name, _, words = line.partition(":")
        if name.strip() in ("flags", "Features"):
            found = set(words.split())
            return tuple(feature for feature in FEATURES if feature in found)
    return ()


def cpu_facts() -> dict[str, Any]:
    """Name, model, cores and features of the processor, and what torch uses of them."""
    try:
        cpuinfo = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:  # not Linux
        cpuinfo = ""
    models = [line.partition(":")[2] for line in cpuinfo.splitlines() if "model name" in line]
    affinity = getattr(os, "sched_getaffinity", None)
    return {
        "name": "cpu",
        "model": models[0].strip() if models else platform.processor() or platform.machine(),
        "cores": len(affinity(0)) if affinity else os.cpu_count(),
        "features": list(cpu_features(cpuinfo)),
        "torch_uses": torch.backends.cpu.get_cpu_capability(),
    }


def _gpus() -> list[dict[str, Any]]:
    found = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        found.append(
            {
                "name": f"cuda:{index}",
                "model": properties.name,
                "memory_gib": round(properties.total_memory / 2**30, 1),
                "capability": f"{properties.major}.{properties.minor}",
            }
        )
    return found


def _backends(device: str) -> dict[str, str]:
    found = {}
    for name in BACKENDS:
        try:
            resolve_backend(name, device)
            found[name] = "yes"
        except BackendUnavailable as error:
            found[name] = f"no: {error}"
    return found


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {"rtgen": __version__, "python": platform.python_version()}
    for name in DISTRIBUTIONS:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def collect() -> dict[str, Any]:
    """Gathers the facts as JSON values.

    Returns:
        "versions": {name: version or None}, "platform", "devices": a list of dicts with "name" and
        "model", "attention": {device: {backend: "yes" or "no: reason"}}, "assets": path or None,
        "models": a list as of `model_facts`, "audio": names.
    """
    devices = [cpu_facts(), *_gpus()]
    try:
        root: Path | None = assets_root()
    except CheckpointError:
        root = None
    models = list_assets("model", root) if root else ()
    return {
        "versions": _versions(),
        "platform": f"{sys.platform} {platform.machine()}",
        "devices": devices,
        "attention": {device["name"]: _backends(device["name"]) for device in devices},
        "assets": str(root) if root else None,
        "models": [model_facts(find_asset("model", name, root)) for name in models],
        "audio": list(list_assets("audio", root)) if root else [],
    }


def as_text(info: dict[str, Any]) -> str:
    """Formats what `collect` returned for people."""
    versions = ", ".join(f"{name} {text}" for name, text in info["versions"].items() if text)
    absent = ", ".join(name for name, text in info["versions"].items() if text is None)
    lines = [f"versions   {versions}"]
    if absent:
        lines.append(f"           not installed: {absent}")
    lines.append(f"platform   {info['platform']}")
    for device in info["devices"]:
        name, model, *rest = device.values()
        details = [
            f"{key.replace('_', ' ')} {' '.join(value) if isinstance(value, list) else value}"
            for key, value in zip(list(device)[2:], rest, strict=True)
        ]
        lines.append(f"device     {name}: {model} ({'; '.join(details)})")
    for device, backends in info["attention"].items():
        usable = ", ".join(name for name, text in backends.items() if text == "yes")
        lines.append(f"attention  {device}: {usable}")
    lines.append(f"assets     {info['assets'] or 'none: install rtgen again'}")
    for model in info["models"]:
        facts = model.get("error") or (
            f"avatars {', '.join(model['avatars'])}; steps {', '.join(map(str, model['steps']))}"
        )
        lines.append(f"model      {model['name']} ({facts})")
    if not info["models"]:
        lines.append("models     none")
    lines.append(f"audio      {', '.join(info['audio']) or 'none'}")
    return "\n".join(lines)
