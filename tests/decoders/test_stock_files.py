"""Weights of the stock decoder: both namings, folders and files, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.loaders.single_file_utils import convert_wan_vae_to_diffusers
from safetensors.torch import save_file
from torch import Tensor

from decoders.stock_vae import (
    WAN21_VAE,
    StockVae,
    StockVaeConfig,
    config_from_json,
    load_stock_decoder,
)
from rtgen.errors import CheckpointError, ConfigError
from rtgen.weights.wan_vae import vae_to_diffusers, vae_to_original
from tests.decoders.stock import CONFIGS, SMALL, decoding, noise, ours, stream, theirs


def original(state: dict[str, Tensor], values: dict[str, Any]) -> dict[str, Tensor]:
    """The weights under the names of Wan's own files, with an encoder's beside them."""
    config = config_from_json(values)
    renamed = {
        vae_to_original(k, config.blocks, staged=config.is_residual): v for k, v in state.items()
    }
    return renamed | {"conv1.weight": torch.ones(1), "encoder.conv1.weight": torch.ones(1)}


@pytest.mark.parametrize("name", CONFIGS)
def test_original_names_map_to_those_of_diffusers_and_back(name: str) -> None:
    config = config_from_json(CONFIGS[name])
    with torch.device("meta"):
        names = list(StockVae(config).state_dict())
    old = [vae_to_original(key, config.blocks, staged=config.is_residual) for key in names]
    assert len(set(old)) == len(names)
    assert [vae_to_diffusers(key, config.blocks) for key in old] == names
    assert not any("block" in key or "conv_" in key or "post" in key for key in old)


def test_original_names_are_those_that_diffusers_converts() -> None:
    """Of Wan2.1's layout, the one that diffusers knows."""
    state = decoding(theirs(SMALL).state_dict())
    convert: Any = convert_wan_vae_to_diffusers
    converted = convert(dict(original(state, SMALL)))
    assert set(state) <= set(converted)
    assert all(torch.equal(converted[key], state[key]) for key in state)


@pytest.mark.parametrize("name", CONFIGS)
def test_folders_and_original_files_load(name: str, tmp_path: Path) -> None:
    values = CONFIGS[name]
    model = theirs(values)
    latents = noise(values, 2)
    expected = stream(ours(model, values), latents)
    model.save_pretrained(tmp_path / "vae")
    folder = load_stock_decoder(tmp_path / "vae", latent_space="toy")
    assert torch.equal(stream(folder, latents), expected)
    torch.save(original(decoding(model.state_dict()), values), tmp_path / "vae.pth")
    config = config_from_json(values)
    file = load_stock_decoder(tmp_path / "vae.pth", latent_space="toy", config=config)
    assert torch.equal(stream(file, latents), expected)


def test_differences_are_listed(tmp_path: Path) -> None:
    state = decoding(theirs(SMALL).state_dict())
    state["decoder.extra"] = state.pop("decoder.conv_in.weight")
    state["decoder.norm_out.gamma"] = torch.ones(3)
    save_file(state, tmp_path / "vae.safetensors")
    with pytest.raises(CheckpointError) as error:
        load_stock_decoder(
            tmp_path / "vae.safetensors", latent_space="toy", config=StockVaeConfig(**SMALL)
        )
    for part in (
        "3 weights are wrong",
        "missing decoder.conv_in.weight [32, 4, 3, 3, 3]",
        "unexpected decoder.extra",
        "decoder.norm_out.gamma must be [8, 1, 1, 1], is [3]",
    ):
        assert part in str(error.value)


def test_what_cannot_be_loaded_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot read"):
        load_stock_decoder(tmp_path, latent_space="toy")
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="must hold an object"):
        load_stock_decoder(tmp_path, latent_space="toy")
    (tmp_path / "config.json").write_text(json.dumps({"base_dim": 8, "decoder_type": "flat"}))
    with pytest.raises(ConfigError, match="decoder_type"):
        load_stock_decoder(tmp_path, latent_space="toy")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="holds no"):
        load_stock_decoder(tmp_path, latent_space="toy")
    save_file({"blocks.0": torch.ones(1)}, tmp_path / "a.safetensors")
    with pytest.raises(ConfigError, match="WAN21_VAE"):
        load_stock_decoder(tmp_path / "a.safetensors", latent_space="toy")
    with pytest.raises(CheckpointError, match="begin with 'decoder.'; found blocks.0"):
        load_stock_decoder(tmp_path / "a.safetensors", latent_space="toy", config=WAN21_VAE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dim_mult": (1, 2)}, "one entry less"),
        ({"patch_size": 2}, "out_channels must be 3"),
        ({"latents_mean": (0.0,)}, "must have 16 numbers"),
    ],
)
def test_configurations_that_break_a_rule_are_refused(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        StockVaeConfig(**changes)
