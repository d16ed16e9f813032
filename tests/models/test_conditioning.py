from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from rtgen.errors import ConfigError, ShapeError
from rtgen.models.conditioning import Conditioning, PreparedConditioning
from tests.toy import avatar_config, frames_of, toy_conditioning, toy_config, toy_denoiser

CONFIG = avatar_config()
PARTS = ("prompt_embeds", "audio", "state", "event", "control")


def changed(**parts: Tensor | None) -> Conditioning:
    base = toy_conditioning(CONFIG, 5, batch=2)
    return Conditioning(**{**{name: getattr(base, name) for name in PARTS}, **parts})


@pytest.mark.parametrize("part", PARTS)
def test_parts_are_given_exactly_when_the_model_has_them(part: str) -> None:
    changed().validate(CONFIG)
    Conditioning().validate(toy_config())
    with pytest.raises(ConfigError, match=f"needs {part}"):
        changed(**{part: None}).validate(CONFIG)
    with pytest.raises(ConfigError, match=f"has no {part}"):
        Conditioning(**{part: getattr(changed(), part)}).validate(toy_config())


@pytest.mark.parametrize(
    ("part", "value", "match"),
    [
        ("prompt_embeds", torch.zeros(2, 6, 31), r"\[B, any, 32\], got \[2, 6, 31\]"),
        ("audio", torch.zeros(2, 5, 4, 12), r"\[B, any, 3, 12\]"),
        ("audio", torch.zeros(2, 5, 36), r"\[B, any, 3, 12\]"),
        ("state", torch.zeros(2, 5), "int64, got torch.float32"),
        ("event", torch.zeros(2, 5, 1, dtype=torch.int64), r"\[B, any\]"),
        ("control", torch.zeros(2, 4, 2), r"T in \[4, 5\]"),
        ("control", torch.zeros(3, 5, 2), r"B in \[2, 3\]"),
    ],
)
def test_shapes_and_dtypes_are_checked(part: str, value: Tensor, match: str) -> None:
    with pytest.raises(ShapeError, match=match):
        changed(**{part: value}).validate(CONFIG)


def assert_same(a: PreparedConditioning, b: PreparedConditioning) -> None:
    for name in ("text", "audio", "temb"):
        assert_close(getattr(a, name), getattr(b, name), atol=1e-6, rtol=1e-5)


def test_stacking_rows_commutes_with_preparing() -> None:
    denoiser = toy_denoiser(CONFIG)
    rows = [toy_conditioning(CONFIG, 5, seed=seed) for seed in range(3)]
    together = denoiser.prepare(Conditioning.stack(rows))
    assert_same(PreparedConditioning.stack([denoiser.prepare(row) for row in rows]), together)


def test_joining_chunks_commutes_with_preparing_and_first_frames_undoes_it() -> None:
    denoiser = toy_denoiser(CONFIG)
    whole = toy_conditioning(CONFIG, 5)
    prepared = denoiser.prepare(whole)
    chunks = [denoiser.prepare(frames_of(whole, a, b), prepared) for a, b in ((0, 2), (2, 5))]
    assert_same(PreparedConditioning.join_frames(chunks), prepared)
    assert_same(prepared.first_frames(2), chunks[0])


def test_chunks_of_different_prompts_do_not_join() -> None:
    denoiser = toy_denoiser(CONFIG)
    chunks = [denoiser.prepare(toy_conditioning(CONFIG, 1, seed=seed)) for seed in (1, 2)]
    with pytest.raises(ConfigError, match="different prompts"):
        PreparedConditioning.join_frames(chunks)


def test_rows_that_do_not_fit_together_are_refused() -> None:
    with pytest.raises(ConfigError, match="audio is given for 1 of 2"):
        Conditioning.stack([changed(), changed(audio=None)])
    with pytest.raises(ShapeError, match="control must have one shape"):
        Conditioning.stack([changed(), changed(control=torch.zeros(2, 4, 2))])
