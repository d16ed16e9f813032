from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rtgen.errors import CheckpointError
from rtgen.models.denoiser import CausalDenoiser
from rtgen.weights import key_maps
from rtgen.weights.key_maps import diffusers_to_wan, to_diffusers, unwrap, wan_to_diffusers
from rtgen.weights.loaders import load_strict
from tests.toy import text_config, toy_denoiser

# Every kind of name in Wan's original files, written down by hand.
ORIGINAL = {
    "patch_embedding.weight": "patch_embedding.weight",
    "time_embedding.0.weight": "condition_embedder.time_embedder.linear_1.weight",
    "time_embedding.2.bias": "condition_embedder.time_embedder.linear_2.bias",
    "text_embedding.0.bias": "condition_embedder.text_embedder.linear_1.bias",
    "text_embedding.2.weight": "condition_embedder.text_embedder.linear_2.weight",
    "time_projection.1.weight": "condition_embedder.time_proj.weight",
    "blocks.0.modulation": "blocks.0.scale_shift_table",
    "blocks.0.self_attn.q.weight": "blocks.0.attn1.to_q.weight",
    "blocks.1.self_attn.k.bias": "blocks.1.attn1.to_k.bias",
    "blocks.1.self_attn.o.weight": "blocks.1.attn1.to_out.0.weight",
    "blocks.1.self_attn.norm_q.weight": "blocks.1.attn1.norm_q.weight",
    "blocks.1.cross_attn.v.weight": "blocks.1.attn2.to_v.weight",
    "blocks.1.cross_attn.norm_k.weight": "blocks.1.attn2.norm_k.weight",
    "blocks.1.cross_attn.o.bias": "blocks.1.attn2.to_out.0.bias",
    "blocks.1.norm3.weight": "blocks.1.norm2.weight",
    "blocks.1.norm3.bias": "blocks.1.norm2.bias",
    "blocks.1.ffn.0.weight": "blocks.1.ffn.net.0.proj.weight",
    "blocks.1.ffn.2.bias": "blocks.1.ffn.net.2.bias",
    "head.modulation": "scale_shift_table",
    "head.head.weight": "proj_out.weight",
}


@pytest.mark.parametrize("name", ORIGINAL)
def test_original_names_map_to_those_of_diffusers_and_back(name: str) -> None:
    assert wan_to_diffusers(name) == ORIGINAL[name]
    assert diffusers_to_wan(ORIGINAL[name]) == name


def test_every_name_of_a_model_survives_the_round_trip() -> None:
    names = list(toy_denoiser(text_config()).state_dict())
    original = [diffusers_to_wan(name) for name in names]
    assert [wan_to_diffusers(name) for name in original] == names
    assert len(set(original)) == len(names)
    assert not any("attn1" in name or "to_q" in name or "embedder" in name for name in original)


def original_state(prefix: str = "") -> dict[str, Tensor]:
    state = toy_denoiser(text_config()).state_dict()
    return {prefix + diffusers_to_wan(name): value for name, value in state.items()}


def fsdp(name: str) -> str:
    return "model._fsdp_wrapped_module." + name.replace(
        "attn.", "attn._checkpoint_wrapped_module."
    ).replace("blocks.0.", "blocks.0._fsdp_wrapped_module.")


CHECKPOINTS: dict[str, Any] = {
    "bare": original_state(),
    "prefix": original_state("model."),
    "comfy": original_state("model.diffusion_model."),
    "generator": {"generator": original_state("model."), "step": 600},
    "ema, fsdp": {
        "generator": {},
        "generator_ema": {fsdp(name): value for name, value in original_state().items()},
    },
    "state_dict": {"state_dict": original_state("net.")},
    "critic left in": original_state("model.") | {"model._cls_pred_branch.0.weight": torch.ones(1)},
    "diffusers": toy_denoiser(text_config()).state_dict(),
}


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_wrapped_checkpoints_load_strictly(name: str) -> None:
    denoiser = CausalDenoiser(text_config())
    load_strict(denoiser, to_diffusers(CHECKPOINTS[name]), name)
    for key, value in toy_denoiser(text_config()).state_dict().items():
        assert torch.equal(denoiser.state_dict()[key], value), key


def test_planted_names_without_the_norm_swap_do_not_load(monkeypatch: pytest.MonkeyPatch) -> None:
    table = {old: new for old, new in key_maps._BLOCK.items() if not old.startswith("norm")}
    monkeypatch.setattr(key_maps, "_BLOCK", table)
    with pytest.raises(CheckpointError) as error:
        load_strict(CausalDenoiser(text_config()), to_diffusers(original_state()), "planted")
    assert "missing blocks.0.norm2.weight [48]" in str(error.value)
    assert "unexpected blocks.0.norm3.weight [48]" in str(error.value)


def test_ema_weights_are_preferred_unless_declined() -> None:
    both = {"generator": {"a": torch.zeros(1)}, "generator_ema": {"a": torch.ones(1)}}
    assert unwrap(both)["a"] == 1
    assert unwrap(both, use_ema=False)["a"] == 0


def test_checkpoints_that_are_no_state_dict_are_refused() -> None:
    with pytest.raises(CheckpointError, match="found int under 'step'"):
        unwrap({"step": 3})
    twice = {"model.a": torch.zeros(1), "a": torch.zeros(1)}
    with pytest.raises(CheckpointError, match="both called 'a'"):
        unwrap(twice)
