"""Our denoiser against diffusers' `WanTransformer3DModel` with the same weights, float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import WanTransformer3DModel
from torch import Tensor, nn

from rtgen.config import DenoiserConfig
from rtgen.models import blocks
from rtgen.models.conditioning import Conditioning
from rtgen.models.denoiser import CausalDenoiser, cast_weights
from rtgen.models.layers import RMSNorm
from rtgen.models.rope import apply_rope
from tests.toy import randomise

SMALL: dict[str, Any] = {
    "num_attention_heads": 2,
    "attention_head_dim": 24,
    "in_channels": 4,
    "out_channels": 4,
    "text_dim": 32,
    "ffn_dim": 96,
    "num_layers": 2,
}
# Wan2.1-T2V-1.3B, two of its thirty layers.
REAL_WIDTH: dict[str, Any] = {
    "num_attention_heads": 12,
    "attention_head_dim": 128,
    "in_channels": 16,
    "out_channels": 16,
    "text_dim": 4096,
    "ffn_dim": 8960,
    "num_layers": 2,
}


def pair(values: dict[str, Any], seed: int = 0) -> tuple[CausalDenoiser, nn.Module]:
    """Ours and theirs with the same random weights; theirs are loaded strictly into ours."""
    theirs: Any = WanTransformer3DModel(**values)  # type: ignore[no-untyped-call]
    randomise(theirs, seed)
    with torch.device("meta"):
        ours = CausalDenoiser(DenoiserConfig(**values))
    ours.load_state_dict(theirs.state_dict(), strict=True, assign=True)
    return ours.eval(), theirs.eval()


def prompt(batch: int, text_dim: int, words: int, rows: int = 512) -> Tensor:
    """Prompt embeddings as the pipelines make them: zero rows behind the text."""
    embeds = torch.randn(batch, rows, text_dim)
    embeds[:, words:] = 0
    return embeds


@torch.no_grad()
def outputs(
    values: dict[str, Any],
    models: tuple[CausalDenoiser, nn.Module],
    timestep: Tensor,
    per_frame: bool,
    size: tuple[int, int] = (4, 6),
) -> tuple[Tensor, Tensor]:
    """Both outputs, [B, T, C, h, w], for timesteps [B, T]."""
    torch.manual_seed(4)
    batch, frames = timestep.shape
    latents = torch.randn(batch, frames, values["in_channels"], *size)
    embeds = prompt(batch, values["text_dim"], words=9)
    ours, theirs = models
    out = ours(latents, timestep, ours.prepare(Conditioning(prompt_embeds=embeds)))
    tokens = size[0] * size[1] // 4
    time = timestep.repeat_interleave(tokens, 1) if per_frame else timestep[:, 0]
    expected = theirs(latents.transpose(1, 2), time, embeds, return_dict=False)[0]
    return out, expected.transpose(1, 2)


def check(out: Tensor, expected: Tensor) -> None:
    """The gate: at most 1e-4 apart at an output rms of about 1."""
    rms = expected.square().mean().sqrt()
    assert 0.3 < rms < 3, f"the comparison says nothing at an output rms of {rms}"
    assert (out - expected).abs().max() <= 1e-4


SCALAR = torch.tensor([[937.5], [625.0]]).expand(2, 3)
PER_FRAME = torch.tensor([[0.0, 937.5, 1000.0], [833.25, 3.0, 500.0]])


@pytest.mark.parametrize(("timestep", "per_frame"), [(SCALAR, False), (PER_FRAME, True)])
@pytest.mark.parametrize("seed", [0, 1])
def test_small_model_equals_diffusers(timestep: Tensor, per_frame: bool, seed: int) -> None:
    check(*outputs(SMALL, pair(SMALL, seed), timestep, per_frame))


def test_without_cross_attention_norm_it_equals_diffusers() -> None:
    values = SMALL | {"cross_attn_norm": False}
    check(*outputs(values, pair(values), PER_FRAME, True))


@pytest.mark.slow
def test_real_width_slice_equals_diffusers() -> None:
    models = pair(REAL_WIDTH)
    check(*outputs(REAL_WIDTH, models, PER_FRAME[:1, :2], True))
    check(*outputs(REAL_WIDTH, models, SCALAR[:1, :2], False))


def test_every_row_of_the_padded_prompt_is_attended() -> None:
    ours, _ = pair(SMALL)
    latents, timestep = torch.randn(1, 2, 4, 4, 4), torch.full((1, 2), 500.0)
    embeds = prompt(1, 32, words=9)
    with torch.no_grad():
        full = ours(latents, timestep, ours.prepare(Conditioning(prompt_embeds=embeds)))
        cut = ours(latents, timestep, ours.prepare(Conditioning(prompt_embeds=embeds[:, :9])))
    assert (full - cut).abs().max() > 1e-2


def test_planted_zero_output_fails_the_gate() -> None:
    models = pair(SMALL)
    for model in models:
        nn.init.zeros_(model.get_parameter("proj_out.weight"))
        nn.init.zeros_(model.get_parameter("proj_out.bias"))
    with pytest.raises(AssertionError, match="says nothing"):
        check(*outputs(SMALL, models, PER_FRAME, True))


def test_planted_half_split_rotation_fails_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    def half_split(x: Tensor, rotation: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        pairs = torch.stack((x[..., :half], x[..., half:]), -1).flatten(-2)
        turned = apply_rope(pairs, rotation).unflatten(-1, (-1, 2))  # type: ignore[no-untyped-call]
        return torch.cat((turned[..., 0], turned[..., 1]), -1)

    monkeypatch.setattr(blocks, "apply_rope", half_split)
    with pytest.raises(AssertionError):
        check(*outputs(SMALL, pair(SMALL), PER_FRAME, True))


def test_planted_norm_over_single_heads_fails_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    def per_head(self: RMSNorm, x: Tensor) -> Tensor:
        heads = x.view(*x.shape[:-1], 2, -1)
        scale = torch.rsqrt(heads.square().mean(-1, keepdim=True) + 1e-6)
        return (heads * scale).flatten(-2) * self.weight

    monkeypatch.setattr(RMSNorm, "forward", per_head)
    with pytest.raises(AssertionError):
        check(*outputs(SMALL, pair(SMALL), PER_FRAME, True))


def test_planted_one_time_for_all_frames_fails_the_gate() -> None:
    out, _ = outputs(SMALL, pair(SMALL), PER_FRAME[:, :1].expand(2, 3), True)
    _, expected = outputs(SMALL, pair(SMALL), PER_FRAME, True)
    with pytest.raises(AssertionError):
        check(out, expected)


def test_bfloat16_is_not_further_from_float32_than_diffusers_is() -> None:
    models = pair(SMALL)
    _, exact = outputs(SMALL, models, PER_FRAME, True)
    ours, theirs = models
    fp32_parts = ("time_embedder", "scale_shift_table", "norm1", "norm2", "norm3")
    for name, parameter in theirs.named_parameters():
        if not any(part in name for part in fp32_parts):
            parameter.data = parameter.data.bfloat16()
    cast_weights(ours, torch.bfloat16)
    torch.manual_seed(4)
    latents = torch.randn(2, 3, 4, 4, 6)
    embeds = prompt(2, 32, words=9)
    with torch.no_grad():
        out = ours(latents, PER_FRAME, ours.prepare(Conditioning(prompt_embeds=embeds)))
        public = theirs(
            latents.transpose(1, 2).bfloat16(),
            PER_FRAME.repeat_interleave(6, 1),
            embeds.bfloat16(),
            return_dict=False,
        )[0].transpose(1, 2)
    error = (out - exact).square().mean().sqrt()
    assert 0 < error <= (public.float() - exact).square().mean().sqrt()
