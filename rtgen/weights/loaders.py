"""Weights in and out of files: always strict, never by pickle's code execution.

A model of ours is a folder in diffusers' layout, `config.json` beside
`diffusion_pytorch_model.safetensors`, so `load_denoiser` reads both ours and diffusers' Wan.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from rtgen.config import DenoiserConfig
from rtgen.errors import CheckpointError, ConfigError
from rtgen.models.denoiser import CausalDenoiser, cast_weights
from rtgen.weights.key_maps import to_diffusers

CONFIG_NAME = "config.json"
WEIGHTS_NAME = "diffusion_pytorch_model.safetensors"
# Fields of diffusers' configuration that our class does not have, and the values that mean "off".
_IGNORED: dict[str, tuple[Any, ...]] = {
    "image_dim": (None,),
    "added_kv_proj_dim": (None,),
    "pos_embed_seq_len": (None,),
}
# What torch and safetensors raise for a missing, cut or foreign file.
_READ_ERRORS = (
    OSError,
    EOFError,
    SafetensorError,
    RuntimeError,
    TypeError,
    ValueError,
    pickle.UnpicklingError,
)


def load_checkpoint(path: Path | str) -> dict[str, Any]:
    """Reads one weights file onto the CPU, as it is.

    Args:
        path: `.safetensors`, or a `.pt`, `.pth`, `.bin` file of plain tensors.

    Raises:
        CheckpointError: the file is missing, of another kind, damaged, or needs code to be read.
    """
    path = Path(path)
    try:
        if path.suffix == ".safetensors":
            return dict(load_file(path))
        if path.suffix in (".pt", ".pth", ".bin"):
            return dict(torch.load(path, map_location="cpu", weights_only=True))
    except _READ_ERRORS as error:
        raise CheckpointError(f"cannot read weights from {path}: {error}") from error
    raise CheckpointError(f"{path}: expected a .safetensors, .pt, .pth or .bin file")


def load_strict(
    module: nn.Module, state: Mapping[str, Tensor], source: str, *, assign: bool = False
) -> None:
    """Loads weights that must fit a module exactly.

    Args:
        module: written in place.
        state: name to tensor.
        source: what the error calls the origin, say a path.
        assign: take the tensors themselves, with their dtype, instead of copying.

    Raises:
        CheckpointError: lists every missing, unexpected, mis-shaped and non-float weight.
    """
    own = module.state_dict()
    problems = [f"missing {name} {list(own[name].shape)}" for name in own if name not in state]
    problems += [
        f"unexpected {name} {list(state[name].shape)}" for name in state if name not in own
    ]
    for name in own.keys() & state.keys():
        want, got = own[name], state[name]
        if want.shape != got.shape:
            problems.append(f"{name} must be {list(want.shape)}, is {list(got.shape)}")
        elif want.is_floating_point() != got.is_floating_point():
            problems.append(f"{name} must be {want.dtype}, is {got.dtype}")
    if problems:
        listing = "\n  ".join(sorted(problems))
        raise CheckpointError(
            f"{source} does not fit {type(module).__name__}, {len(problems)} weights are wrong; "
            f"use the configuration it was trained with:\n  {listing}"
        )
    module.load_state_dict(state, strict=True, assign=assign)


def save_weights(path: Path | str, state: Mapping[str, Tensor]) -> None:
    """Writes a safetensors file, whole or not at all.

    Raises:
        CheckpointError: the file cannot be written.
    """
    path = Path(path)
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(
            {name: value.detach().cpu().contiguous() for name, value in state.items()}, partial
        )
        partial.chmod(0o644)  # safetensors makes files that only their owner can read
        os.replace(partial, path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write weights to {path}: {error}") from error
    finally:
        partial.unlink(missing_ok=True)


def save_denoiser(
    denoiser: CausalDenoiser, folder: Path | str, dtype: torch.dtype | None = None
) -> None:
    """Writes configuration and weights into a folder.

    Args:
        denoiser: what to write; unchanged.
        folder: created if need be.
        dtype: cast weights to this on the way; None keeps them as they are.

    Raises:
        CheckpointError: the folder cannot be written.
    """
    folder = Path(folder)
    state = denoiser.state_dict()
    if dtype is not None:
        state = {name: value.to(dtype) for name, value in state.items()}
    save_weights(folder / WEIGHTS_NAME, state)
    config = {"_class_name": "CausalDenoiser", **dataclasses.asdict(denoiser.config)}
    try:
        (folder / CONFIG_NAME).write_text(json.dumps(config, indent=2) + "\n")
    except OSError as error:
        raise CheckpointError(f"cannot write {folder / CONFIG_NAME}: {error}") from error


def denoiser_config_from_json(values: Mapping[str, Any]) -> DenoiserConfig:
    """A configuration from `config.json`, ours or that of diffusers' Wan transformer.

    Raises:
        ConfigError: a field is unknown, or asks for a part that the class does not have.
    """
    known = {field.name for field in dataclasses.fields(DenoiserConfig)}
    arguments: dict[str, Any] = {}
    for name, value in values.items():
        if name.startswith("_") or name == "rope_max_seq_len":  # there is no largest position
            continue
        if name in known:
            arguments[name] = tuple(value) if isinstance(value, list) else value
        elif value not in _IGNORED.get(name, ()):
            raise ConfigError(f"the denoiser has no {name} = {value!r}; use a text-to-video model")
    try:
        return DenoiserConfig(**arguments)
    except TypeError as error:
        raise ConfigError(f"the denoiser's configuration is incomplete: {error}") from error


def load_denoiser(
    folder: Path | str, *, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
) -> CausalDenoiser:
    """Reads a denoiser, ready for inference.

    Args:
        folder: holds `config.json` and one or several `diffusion_pytorch_model*.safetensors`.
        dtype: of the weights, except those that stay float32 (see `cast_weights`).
        device: where to put it.

    Raises:
        CheckpointError: a file is missing or damaged, or the weights do not fit.
        ConfigError: the configuration is not one of our class.
    """
    folder = Path(folder)
    try:
        values = json.loads((folder / CONFIG_NAME).read_text())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"cannot read {folder / CONFIG_NAME}: {error}") from error
    files = sorted(folder.glob("diffusion_pytorch_model*.safetensors"))
    if not files:
        raise CheckpointError(f"{folder} holds no diffusion_pytorch_model*.safetensors")
    state: dict[str, Any] = {}
    for file in files:
        state |= load_checkpoint(file)
    with torch.device("meta"):  # no time lost on initial values
        denoiser = CausalDenoiser(denoiser_config_from_json(values))
    load_strict(denoiser, to_diffusers(state), str(folder), assign=True)
    return cast_weights(denoiser, dtype).to(device).eval().requires_grad_(False)
