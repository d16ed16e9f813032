"""The page's pure modules (states, words, numbers), tested in JavaScript by Node's own runner."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STATIC = ROOT / "webrtc" / "static"
FILES = sorted((Path(__file__).parent / "js").glob("*.test.mjs"))
LEAST = (20, 19)  # the first of its line that takes ES modules from .js files


def node() -> str:
    """Path of a Node that can run the tests; skips without one."""
    path = shutil.which("node")
    if path is None:
        pytest.skip("needs node (20.19 or newer)")
    answer = subprocess.run([path, "--version"], capture_output=True, text=True, check=True)
    version = tuple(int(part) for part in re.findall(r"\d+", answer.stdout)[:2])
    if version < LEAST:
        pytest.skip(f"needs node 20.19 or newer, found {answer.stdout.strip()}")
    return path


def test_the_javascript_tests_pass() -> None:
    # One process for all files; Node's own way is one each.
    imports = "".join(f"await import({json.dumps(path.as_uri())});" for path in FILES)
    run = subprocess.run(
        [node(), "--test-reporter=tap", "--input-type=module", "--eval", imports],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
    passed = re.search(r"^# pass (\d+)$", run.stdout, re.MULTILINE)
    assert passed is not None
    assert int(passed[1]) > 40


def foreign_addresses(text: str) -> list[str]:
    """Addresses of other hosts that a page would load; names of XML namespaces do not load."""
    found = re.findall(r"""(?:https?:)?//[a-z0-9-]+(?:\.[a-z0-9-]+)+[^\s"')]*""", text, re.I)
    return [address for address in found if not address.startswith("http://www.w3.org/")]


def test_the_page_loads_nothing_from_elsewhere() -> None:
    for path in sorted(path for path in STATIC.rglob("*.*") if path.is_file()):
        assert foreign_addresses(path.read_text(encoding="utf-8")) == [], path


@pytest.mark.parametrize(
    "planted",
    [
        '<link href="https://fonts.example.com/css">',
        "@import url(//cdn.example.net/x.css);",
        'import x from "http://unpkg.example.org/x.js"',
    ],
)
def test_a_planted_address_is_found(planted: str) -> None:
    assert len(foreign_addresses(planted)) == 1


def test_every_file_that_the_page_names_exists() -> None:
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    names = re.findall(r"""(?:href|src)="/static/([^"]+)\"""", page)
    assert len(names) >= 6
    for name in names:
        assert (STATIC / name).is_file(), name
    for path in sorted((STATIC / "js").glob("*.js")):
        for name in re.findall(r"""from "\./([^"]+)\"""", path.read_text(encoding="utf-8")):
            assert (STATIC / "js" / name).is_file(), f"{path.name} imports {name}"


def test_scripts_and_styles_are_files_so_that_a_strict_policy_holds() -> None:
    page = (STATIC / "index.html").read_text(encoding="utf-8")
    assert re.search(r"<script(?![^>]*\bsrc=)", page) is None
    assert re.search(r"<style|\sstyle=|\son[a-z]+=", page) is None
