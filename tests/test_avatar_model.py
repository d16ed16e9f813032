"""A model folder: what is saved comes back, and what does not fit is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from decoders.unit_conv import UnitDecoder
from pipelines.avatar import AvatarPipeline, save_avatar_model
from pipelines.avatar_model import AvatarConfig, load_config, load_decoder, load_references
from pipelines.lips import LipNet, load_lips
from rtgen.errors import CheckpointError, ConfigError
from rtgen.models.denoiser import CausalDenoiser
from tests.toy_pipeline import toy_config, write_toy_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_toy_model(tmp_path)


def parts(config: AvatarConfig) -> tuple[LipNet, CausalDenoiser, dict[str, UnitDecoder]]:
    decoders = {name: UnitDecoder(config.decoder) for name in config.avatars}
    return LipNet(config.lips), CausalDenoiser(config.denoiser), decoders


def test_a_model_folder_gives_back_what_was_saved(tmp_path: Path) -> None:
    config = toy_config()
    lips, denoiser, decoders = parts(config)
    for decoder in decoders.values():
        decoder.canvas.copy_(torch.rand_like(decoder.canvas) * 2 - 1)
    references = {name: torch.randn(1, *config.latent_shape) for name in config.avatars}
    save_avatar_model(tmp_path, config, lips, denoiser, decoders, references)
    assert load_config(tmp_path) == config
    loaded = load_references(tmp_path, config)
    for name, value in references.items():
        torch.testing.assert_close(loaded[name], value, rtol=0, atol=0)
    for name, decoder in decoders.items():
        network = load_decoder(tmp_path, config, name)
        torch.testing.assert_close(network.canvas, decoder.canvas, rtol=0, atol=0)
        torch.testing.assert_close(
            network.conv_in.weight, decoder.conv_in.weight.bfloat16().float(), rtol=0, atol=0
        )
    heard = load_lips(tmp_path / "lips.safetensors", config.lips)
    torch.testing.assert_close(heard.out.weight, lips.out.weight, rtol=0, atol=0)
    stored = load_file(tmp_path / "denoiser.safetensors")
    assert stored["blocks.0.ffn.net.0.proj.weight"].dtype is torch.bfloat16
    assert stored["scale_shift_table"].dtype is torch.float32
    assert denoiser.scale_shift_table.dtype is torch.float32  # the network given is unchanged
    assert denoiser.proj_out.weight.dtype is torch.float32


def edit_json(change: dict[str, Any]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "model.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | change))

    return edit


def edit_part(part: str, **change: Any) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        path = folder / "model.json"
        values = json.loads(path.read_text())
        path.write_text(json.dumps(values | {part: values[part] | change}))

    return edit


def edit_weights(name: str, change: Callable[[dict[str, Any]], object]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        weights = load_file(folder / name)
        change(weights)
        save_file(weights, folder / name)

    return edit


BROKEN: dict[str, tuple[Callable[[Path], object], str]] = {
    "no config": (lambda f: (f / "model.json").unlink(), "cannot read"),
    "no json": (lambda f: (f / "model.json").write_text("{"), "cannot read"),
    "no object": (lambda f: (f / "model.json").write_text("[]"), "must hold an object"),
    "version": (edit_json({"version": 1}), "must be rtgen-avatar 2"),
    "format": (edit_json({"format": "other"}), "must be rtgen-avatar 2"),
    "unknown field": (edit_json({"colour": "red"}), r"has no \['colour'\]"),
    "unknown part field": (edit_part("mel", colour="red"), r"MelConfig has no \['colour'\]"),
    "wrong type": (edit_part("cache", window="seven"), "CacheConfig"),
    "wrong list": (edit_json({"samplings": 3}), "model.json"),
    "wrong part": (edit_json({"cache": None}), "must be an object"),
    "mel": (edit_part("mel", num_mels=32), "audio_dim must be 128"),
    "lips": (edit_part("lips", num_mels=32), "lips.num_mels must be 64"),
    "rows": (edit_part("mel", rows_per_token=5), "audio_dim must be 320"),
    "hop": (edit_part("mel", unit=3200), "mel unit must be 2560"),
    "mean": (edit_json({"latent_mean": [0.0]}), "latent_mean must be 16"),
    "std": (edit_json({"latent_std": [0.0] * 16}), "latent_std must be positive"),
    "steps": (edit_json({"default_steps": 5}), "hold the default 5"),
    "controls": (edit_json({"controls": ["blink"]}), "controls must be"),
    "avatars": (edit_json({"avatars": []}), "avatars must be different names"),
    "avatar": (edit_json({"avatars": ["ada", "cy"]}), "decoder-cy.safetensors"),
    "avatars' latents": (edit_json({"avatars": ["ada"]}), r"must hold \['ada'\]"),
    "no weights": (lambda f: (f / "decoder-bo.safetensors").unlink(), "cannot read weights"),
    "no lips": (lambda f: (f / "lips.safetensors").unlink(), "cannot read weights"),
    "damaged": (lambda f: (f / "denoiser.safetensors").write_bytes(b"\0" * 64), "cannot read"),
    "missing": (
        edit_weights("denoiser.safetensors", lambda w: w.pop("proj_out.bias")),
        "missing proj_out.bias",
    ),
    "unexpected": (
        edit_weights("decoder-bo.safetensors", lambda w: w.update(extra=torch.zeros(1))),
        "unexpected extra",
    ),
    "shape": (
        edit_weights("decoder-bo.safetensors", lambda w: w.update(canvas=torch.zeros(3, 8, 8))),
        "canvas must be",
    ),
    "reference": (
        edit_weights("avatars.safetensors", lambda w: w.update(ada=torch.zeros(1, 16, 3, 3))),
        "ada must be finite",
    ),
    "reference is NaN": (
        edit_weights("avatars.safetensors", lambda w: w["ada"].fill_(torch.nan)),
        "ada must be finite",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_folder_is_refused_with_what_is_wrong(case: str, folder: Path) -> None:
    breaking, complaint = BROKEN[case]
    AvatarPipeline.from_directory(folder, dtype="float32")
    breaking(folder)
    with pytest.raises(CheckpointError, match=complaint):
        AvatarPipeline.from_directory(folder, dtype="float32")


def test_saving_refuses_parts_that_do_not_fit(tmp_path: Path) -> None:
    config = toy_config()
    lips, denoiser, decoders = parts(config)
    good = {name: torch.zeros(config.latent_shape) for name in config.avatars}
    others = (
        replace(config, denoiser=replace(config.denoiser, num_layers=3)),
        replace(config, lips=replace(config.lips, hidden=16)),
        replace(config, decoder=replace(config.decoder, widths=(16, 8, 8))),
    )
    for other in others:
        with pytest.raises(CheckpointError, match="config must be that of the networks"):
            save_avatar_model(tmp_path, other, lips, denoiser, decoders, good)
    with pytest.raises(CheckpointError, match="must hold"):
        save_avatar_model(tmp_path, config, lips, denoiser, decoders, {"ada": good["ada"]})
    with pytest.raises(CheckpointError, match="decoders must be those of"):
        save_avatar_model(tmp_path, config, lips, denoiser, {"ada": decoders["ada"]}, good)
    long = good | {"bo": torch.zeros(2, *config.latent_shape)}  # the sink holds one frame
    with pytest.raises(CheckpointError, match="bo must be finite"):
        save_avatar_model(tmp_path, config, lips, denoiser, decoders, long)


def test_a_config_whose_parts_disagree_is_refused() -> None:
    config = toy_config()
    for change in (
        {"avatars": ("a", "a")},
        {"samplings": config.samplings * 2},
        {"denoiser": replace(config.denoiser, num_states=3)},
        {"denoiser": replace(config.denoiser, control_dim=4)},
        {"denoiser": replace(config.denoiser, num_events=3)},
        {"lips": replace(config.lips, num_mels=32)},
        {"mel": replace(config.mel, num_tokens=11)},
    ):
        values: dict[str, Any] = change
        with pytest.raises(ConfigError):
            replace(config, **values)
    assert isinstance(config, AvatarConfig)
    assert config.steps == (1, 2)
