"""Where the shipped models, avatars and sounds are.

An installed wheel carries them as `rtgen/_assets`; in a checkout they are `assets/` beside the
packages. A model and an avatar are folders there, named as on the command line.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from rtgen.errors import CheckpointError, ConfigError

__all__ = ["Kind", "assets_root", "find_asset", "list_assets"]

Kind = Literal["model", "avatar", "audio"]

FOLDERS: dict[Kind, str] = {"model": "models", "avatar": "avatars", "audio": "audio"}


def assets_root() -> Path:
    """Returns the folder that holds models/, avatars/ and audio/.

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
        kind: "model" and "avatar" are folders, "audio" files.
        root: another assets folder.
    """
    folder = (root or assets_root()) / FOLDERS[kind]
    if not folder.is_dir():
        return ()
    found = (entry for entry in folder.iterdir() if not entry.name.startswith("."))
    return tuple(sorted(entry.name for entry in found if entry.is_dir() == (kind != "audio")))


def find_asset(kind: Kind, name: str | os.PathLike[str], root: Path | None = None) -> Path:
    """Returns the folder of a model or avatar, or a sound file.

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
