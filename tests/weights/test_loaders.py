from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch import Tensor
from torch.testing import assert_close

from rtgen.errors import CheckpointError, ConfigError
from rtgen.models.denoiser import CausalDenoiser
from rtgen.weights.loaders import (
    CONFIG_NAME,
    WEIGHTS_NAME,
    denoiser_config_from_json,
    load_checkpoint,
    load_denoiser,
    load_strict,
    save_denoiser,
    save_weights,
)
from tests.toy import (
    avatar_config,
    randomise,
    text_config,
    toy_conditioning,
    toy_config,
    toy_denoiser,
    toy_latents,
    toy_timesteps,
)


def output(denoiser: CausalDenoiser) -> Tensor:
    prepared = denoiser.prepare(toy_conditioning(denoiser.config, 2))
    out: Tensor = denoiser(toy_latents(2), toy_timesteps(2), prepared)
    return out


def test_a_saved_denoiser_comes_back_with_config_and_bits(tmp_path: Path) -> None:
    denoiser = toy_denoiser(avatar_config())
    save_denoiser(denoiser, tmp_path / "model")
    again = load_denoiser(tmp_path / "model")
    assert again.config == denoiser.config
    assert not again.training
    assert not any(p.requires_grad for p in again.parameters())
    assert torch.equal(output(again), output(denoiser))


def test_weights_may_be_saved_and_loaded_in_bfloat16(tmp_path: Path) -> None:
    denoiser = toy_denoiser(avatar_config())
    save_denoiser(denoiser, tmp_path, torch.bfloat16)
    again = load_denoiser(tmp_path, dtype=torch.bfloat16)
    assert again.proj_out.weight.dtype == torch.bfloat16
    assert again.scale_shift_table.dtype == torch.float32
    assert_close(output(again), output(denoiser), atol=0.1, rtol=0.1)
    assert load_denoiser(tmp_path).proj_out.weight.dtype == torch.float32


def test_a_folder_saved_by_diffusers_loads_as_it_is(tmp_path: Path) -> None:
    config = text_config()
    theirs: Any = WanTransformer3DModel(  # type: ignore[no-untyped-call]
        num_attention_heads=2,
        attention_head_dim=24,
        in_channels=4,
        out_channels=4,
        text_dim=32,
        ffn_dim=96,
        num_layers=2,
    )
    randomise(theirs)
    theirs.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    ours = load_denoiser(tmp_path)
    assert ours.config == config
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name


def test_every_weight_that_does_not_fit_is_listed() -> None:
    denoiser = toy_denoiser()
    state = dict(denoiser.state_dict())
    before = {name: value.clone() for name, value in state.items()}
    del state["proj_out.bias"]
    state["extra.weight"] = torch.zeros(3)
    state["patch_embedding.bias"] = torch.zeros(7)
    state["scale_shift_table"] = torch.zeros(1, 2, 48, dtype=torch.int64)
    with pytest.raises(CheckpointError) as error:
        load_strict(denoiser, state, "model.safetensors")
    text = str(error.value)
    assert "model.safetensors does not fit CausalDenoiser, 4 weights are wrong" in text
    for line in (
        "missing proj_out.bias [16]",
        "unexpected extra.weight [3]",
        "patch_embedding.bias must be [48], is [7]",
        "scale_shift_table must be torch.float32, is torch.int64",
    ):
        assert line in text
    assert all(torch.equal(before[n], v) for n, v in denoiser.state_dict().items())


def test_weights_of_another_model_do_not_load(tmp_path: Path) -> None:
    save_denoiser(toy_denoiser(), tmp_path)
    values = json.loads((tmp_path / CONFIG_NAME).read_text())
    (tmp_path / CONFIG_NAME).write_text(json.dumps(values | {"num_layers": 3}))
    with pytest.raises(CheckpointError, match="missing blocks.2"):
        load_denoiser(tmp_path)


@pytest.mark.parametrize(
    ("content", "name"),
    [(b"not weights", "a.safetensors"), (b"not weights", "a.pt"), (b"", "a.pt"), (b"", "a.bin")],
)
def test_damaged_files_are_reported_with_their_path(
    tmp_path: Path, content: bytes, name: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=f"cannot read weights from .*{name}"):
        load_checkpoint(path)


def test_missing_and_foreign_files_are_reported(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="absent"):
        load_checkpoint(tmp_path / "absent.safetensors")
    with pytest.raises(CheckpointError, match=r"expected a \.safetensors"):
        load_checkpoint(tmp_path / "weights.onnx")
    with pytest.raises(CheckpointError, match=CONFIG_NAME):
        load_denoiser(tmp_path)
    (tmp_path / CONFIG_NAME).write_text("{}")
    with pytest.raises(CheckpointError, match="holds no"):
        load_denoiser(tmp_path)


class _Code:
    def __reduce__(self) -> tuple[Any, ...]:
        return (print, ("this must never run",))


def test_a_pickle_that_carries_code_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.save({"weights": _Code()}, tmp_path / "evil.pt")
    with pytest.raises(CheckpointError, match=r"evil\.pt"):
        load_checkpoint(tmp_path / "evil.pt")
    assert "never" not in capsys.readouterr().out


def test_pt_files_of_tensors_are_read(tmp_path: Path) -> None:
    torch.save({"generator": {"a": torch.ones(2)}}, tmp_path / "a.pt")
    assert torch.equal(load_checkpoint(tmp_path / "a.pt")["generator"]["a"], torch.ones(2))


def test_a_file_that_cannot_be_written_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / WEIGHTS_NAME).mkdir()
    with pytest.raises(CheckpointError, match="cannot write weights"):
        save_weights(tmp_path / WEIGHTS_NAME, {"a": torch.ones(1)})
    assert [path.name for path in tmp_path.iterdir()] == [WEIGHTS_NAME]


def test_configurations_of_other_models_are_refused() -> None:
    known = {
        "num_attention_heads": 2,
        "attention_head_dim": 24,
        "in_channels": 4,
        "out_channels": 4,
        "ffn_dim": 96,
        "num_layers": 2,
        "patch_size": [1, 2, 2],
        "rope_max_seq_len": 1024,
        "image_dim": None,
        "_class_name": "WanTransformer3DModel",
    }
    assert denoiser_config_from_json(known) == toy_config()
    with pytest.raises(ConfigError, match="image_dim = 1280"):
        denoiser_config_from_json(known | {"image_dim": 1280})
    with pytest.raises(ConfigError, match="vace_layers"):
        denoiser_config_from_json(known | {"vace_layers": [0, 5]})
    with pytest.raises(ConfigError, match="incomplete"):
        denoiser_config_from_json({"num_layers": 2})
