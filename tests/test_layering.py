"""Who may import whom, read from the source, and what importing loads."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("rtgen", "decoders", "pipelines", "webrtc")
# Modules of ours, by prefix, that each package may import besides itself.
ALLOWED: dict[str, tuple[str, ...]] = {
    "rtgen": (),
    "decoders": ("rtgen",),
    "pipelines": ("rtgen", "decoders"),
    "webrtc": (
        "rtgen.config", "rtgen.errors", "rtgen.types", "rtgen.timing", "rtgen.frame_link",
    ),
}  # fmt: skip
FORBIDDEN: dict[str, tuple[str, ...]] = {"webrtc": ("torch",)}


def imports(source: str, module: str) -> Iterator[str]:
    """Names of the modules that a source imports anywhere, also inside functions.

    `from a import b` gives "a.b", which may name a module or a thing in one.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = module.split(".")[: -node.level]
                base = ".".join([*parent, base]).strip(".")
            yield from (f"{base}.{alias.name}" for alias in node.names)


def is_within(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


def violations(source: str, module: str) -> list[str]:
    """Imports of a module that its package may not make."""
    package = module.split(".")[0]
    found = []
    for name in imports(source, module):
        ours = name.split(".")[0] in PACKAGES and not is_within(name, package)
        allowed = any(is_within(name, prefix) for prefix in ALLOWED[package])
        forbidden = any(is_within(name, prefix) for prefix in FORBIDDEN.get(package, ()))
        if (ours and not allowed) or forbidden:
            found.append(f"{module} imports {name}")
    return found


def modules() -> Iterator[tuple[str, str]]:
    """Name and source of every module of the four packages."""
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            yield ".".join(parts), path.read_text(encoding="utf-8")


def test_no_module_imports_against_the_direction() -> None:
    found = [line for module, source in modules() for line in violations(source, module)]
    assert found == []


def test_the_test_reads_all_four_packages() -> None:
    assert {module.split(".")[0] for module, _ in modules()} == set(PACKAGES)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("rtgen.engine.engine", "import pipelines.avatar"),
        ("rtgen.engine.engine", "def f():\n    from decoders import frame_decoder"),
        ("rtgen.cli", "from pipelines.render import render"),
        ("decoders.base", "from pipelines import audio"),
        ("pipelines.render", "import webrtc.server"),
        ("webrtc.session", "import torch"),
        ("webrtc.session", "import torch.nn as nn"),
        ("webrtc.session", "from rtgen.engine import Engine"),
        ("webrtc.session", "from rtgen import models"),
        ("webrtc.session", "if True:\n    import pipelines"),
        ("decoders.flash", "from ..pipelines import base"),
    ],
)
def test_a_planted_import_against_the_direction_is_found(module: str, source: str) -> None:
    assert len(violations(source, module)) == 1


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("rtgen.engine.engine", "from rtgen.types import Unit\nimport torch"),
        ("rtgen.engine.engine", "from . import lanes\nfrom .clock import RealClock"),
        ("pipelines.render", "from rtgen.engine import Engine\nfrom decoders import base"),
        ("webrtc.session", "from rtgen.types import Unit\nfrom rtgen import errors\nimport av"),
        ("pipelines.audio", "import torchaudio_like"),
    ],
)
def test_imports_with_the_direction_pass(module: str, source: str) -> None:
    assert violations(source, module) == []


def test_the_four_packages_share_one_parent_folder() -> None:
    parents = set()
    for package in PACKAGES:
        module = importlib.import_module(package)
        assert module.__file__ is not None, package
        parents.add(Path(module.__file__).resolve().parent.parent)
    assert len(parents) == 1, f"another distribution shadows one of {PACKAGES}: {parents}"


def loaded_after(statement: str, name: str) -> bool:
    """Whether a module is loaded after a statement in a fresh interpreter."""
    source = f"import sys\n{statement}\nsys.exit(100 if {name!r} in sys.modules else 0)"
    code = subprocess.run([sys.executable, "-c", source], cwd=ROOT, check=False).returncode
    assert code in (0, 100), f"{statement!r} failed"
    return code == 100


@pytest.mark.parametrize(
    "statement",
    [
        "import rtgen",
        "import rtgen.config, rtgen.errors, rtgen.types, rtgen.timing, rtgen.assets",
        "import webrtc",
        "import rtgen.cli",
        "import pipelines.audio_reader, pipelines.video_io",
    ],
)
def test_light_modules_load_no_torch(statement: str) -> None:
    assert not loaded_after(statement, "torch")


def test_webrtc_loads_no_pipeline() -> None:
    assert not loaded_after("import webrtc", "pipelines")


def test_the_load_test_sees_a_loaded_module() -> None:
    assert loaded_after("import json", "json")
