"""Where the shipped models and sounds are.

An installed wheel carries them as `rtgen/_assets`; in a checkout they are `assets/` beside the
packages. A model is a folder there, named as on the command line; it holds its avatars.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, Literal

from rtgen.errors import CheckpointError, ConfigError

__all__ = ["Kind", "assets_root", "default_model", "find_asset", "list_assets", "model_facts"]

Kind = Literal["model", "audio"]

MODEL_FILE = "model.json"
FOLDERS: dict[Kind, str] = {"model": "models", "audio": "audio"}


def assets_root() -> Path:
    """Returns the folder that holds models/ and audio/.

    Raises:
        CheckpointError: there is none, so this is neither a checkout nor a complete installation.
    """
    package = Path(__file__).resolve().parent
    places = (package / "_assets", package.parent / "assets")
    for place in places:
        if place.is_dir():
            return place
    raise CheckpointError(
        f"no assets found: expected {places[0]} (installed) or {places[1]} (checkout); "
        "install rtgen again or clone the whole repository"
    )


def list_assets(kind: Kind, root: Path | None = None) -> tuple[str, ...]:
    """Returns the names of what is there, sorted.

    Args:
        kind: "model" for folders, "audio" for files.
        root: another assets folder.
    """
    folder = (root or assets_root()) / FOLDERS[kind]
    if not folder.is_dir():
        return ()
    found = (entry for entry in folder.iterdir() if not entry.name.startswith("."))
    return tuple(sorted(entry.name for entry in found if entry.is_dir() == (kind != "audio")))


def find_asset(kind: Kind, name: str | os.PathLike[str], root: Path | None = None) -> Path:
    """Returns the folder of a model, or a sound file.

    Args:
        kind: what is looked for.
        name: a name in the assets; with a path separator in it, a path of one's own.
        root: another assets folder.

    Raises:
        ConfigError: there is none of that name; the message lists what there is.
    """
    text = os.fspath(name)
    separators = (os.sep, os.altsep or os.sep)
    if any(separator in text for separator in separators):
        path = Path(text)
        if path.exists() and path.is_dir() == (kind != "audio"):
            return path
        raise ConfigError(f"{kind} {text!r}: no such {'file' if kind == 'audio' else 'folder'}")
    names = list_assets(kind, root)
    if text in names:
        return (root or assets_root()) / FOLDERS[kind] / text
    there = ", ".join(names) or "none"
    raise ConfigError(f"unknown {kind} {text!r}; there is: {there} (in {root or assets_root()})")


def default_model(root: Path | None = None) -> str:
    """Returns the name of the shipped model.

    Raises:
        ConfigError: there is none, or several.
    """
    names = list_assets("model", root)
    if len(names) != 1:
        there = ", ".join(names) or f"none in {root or assets_root()}"
        raise ConfigError(f"choose a model by --model or RTGEN_MODEL; there is: {there}")
    return names[0]


def model_facts(folder: Path) -> dict[str, Any]:
    """Returns what a model's description says of it, for lists of models.

    The pipeline that runs the model validates the description; here it is only read.

    Returns:
        "name" of the folder; "avatars", "steps" and "default_steps" where the description has them;
        or "error".
    """
    try:
        values = json.loads((folder / MODEL_FILE).read_text(encoding="utf-8"))
        return {
            "name": folder.name,
            "avatars": list(values.get("avatars", ())),
            "steps": [len(sampling["timesteps"]) for sampling in values.get("samplings", ())],
            "default_steps": values.get("default_steps"),
        }
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        return {"name": folder.name, "error": f"{MODEL_FILE} cannot be read: {error}"}
