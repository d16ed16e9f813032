"""Where models and sounds are found, and what is said when they are not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rtgen import assets
from rtgen.assets import assets_root, default_model, find_asset, list_assets, model_facts
from rtgen.errors import CheckpointError, ConfigError
from tests.toy_pipeline import write_toy_model


def shelf(root: Path, *models: str) -> Path:
    """An assets folder with empty models and one sound."""
    for name in models:
        (root / "models" / name).mkdir(parents=True)
    (root / "audio").mkdir(parents=True)
    (root / "audio" / "hello.wav").touch()
    return root


def test_the_checkout_has_an_assets_folder() -> None:
    assert assets_root() == Path(assets.__file__).resolve().parent.parent / "assets"


def test_an_installation_carries_its_own_and_prefers_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(assets, "__file__", str(tmp_path / "rtgen" / "assets.py"))
    with pytest.raises(CheckpointError, match=r"_assets \(installed\) or .*assets \(checkout\)"):
        assets_root()
    (tmp_path / "assets").mkdir()
    assert assets_root() == tmp_path / "assets"
    (tmp_path / "rtgen" / "_assets").mkdir(parents=True)
    assert assets_root() == tmp_path / "rtgen" / "_assets"


def test_names_are_looked_up_in_the_assets(tmp_path: Path) -> None:
    root = shelf(tmp_path, "small", "large", ".hidden")
    (root / "models" / "README").touch()
    assert list_assets("model", root) == ("large", "small")
    assert list_assets("audio", root) == ("hello.wav",)
    assert find_asset("model", "small", root) == root / "models" / "small"
    assert find_asset("audio", "hello.wav", root) == root / "audio" / "hello.wav"


def test_an_unknown_name_is_answered_with_what_there_is(tmp_path: Path) -> None:
    root = shelf(tmp_path, "small", "large")
    with pytest.raises(ConfigError, match="unknown model 'huge'; there is: large, small"):
        find_asset("model", "huge", root)
    with pytest.raises(ConfigError, match="there is: none"):
        find_asset("model", "huge", tmp_path / "models" / "small")


def test_a_name_with_a_separator_is_a_path(tmp_path: Path) -> None:
    shelf(tmp_path, "mine")
    folder = f"{tmp_path / 'models' / 'mine'}{os.sep}"
    assert find_asset("model", folder, tmp_path) == tmp_path / "models" / "mine"
    with pytest.raises(ConfigError, match="no such folder"):
        find_asset("model", tmp_path / "audio" / "hello.wav", tmp_path)
    with pytest.raises(ConfigError, match="no such file"):
        find_asset("audio", folder, tmp_path)


def test_the_default_model_is_the_only_one(tmp_path: Path) -> None:
    assert default_model(shelf(tmp_path / "one", "small")) == "small"
    with pytest.raises(ConfigError, match="there is: large, small"):
        default_model(shelf(tmp_path / "two", "small", "large"))
    with pytest.raises(ConfigError, match="there is: none"):
        default_model(shelf(tmp_path / "none"))


def test_a_models_facts_are_read_from_its_description(tmp_path: Path) -> None:
    folder = write_toy_model(tmp_path / "toy")
    assert model_facts(folder) == {
        "name": "toy", "avatars": ["ada", "bo"], "steps": [2, 1], "default_steps": 2,
    }  # fmt: skip


@pytest.mark.parametrize("text", ["", "[]", '{"samplings": [{}]}', '{"avatars": 3}'])
def test_a_broken_description_is_told_not_raised(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.json").write_text(text)
    facts = model_facts(tmp_path)
    assert facts["name"] == tmp_path.name
    assert facts["error"].startswith("model.json cannot be read: ")
