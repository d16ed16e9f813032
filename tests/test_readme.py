"""README's numbers are those of the result files."""

from __future__ import annotations

import re

import pytest

from pipelines.readme import ROOT, fill, sections
from rtgen.errors import ConfigError


def test_the_tables_are_what_the_result_files_say() -> None:
    text = (ROOT / "README.md").read_text()
    assert fill(text, sections()) == text, "run `make readme`"


def test_an_edited_number_is_noticed() -> None:
    text = (ROOT / "README.md").read_text()
    edited = re.sub(
        r"(\d)x real time", lambda found: f"{9 - int(found[1])}x real time", text, count=1
    )
    assert edited != text
    assert fill(edited, sections()) != edited


def test_a_section_without_a_place_is_an_error() -> None:
    with pytest.raises(ConfigError, match="bench:none"):
        fill("# rtgen", {"bench:none": ""})
