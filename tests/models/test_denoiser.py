"""The denoiser by itself: causality, gradients, precision, and what it refuses."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from rtgen.config import CacheConfig, DenoiserConfig
from rtgen.errors import ConfigError, ShapeError
from rtgen.models.conditioning import Conditioning, PreparedConditioning
from rtgen.models.denoiser import CachePass, CausalDenoiser, block_causal_mask, cast_weights
from rtgen.models.flops import flops
from rtgen.models.layers import Linear, PatchEmbedding
from tests.toy import (
    HEIGHT,
    TOKENS,
    WIDTH,
    avatar_config,
    frames_of,
    text_config,
    toy_conditioning,
    toy_config,
    toy_denoiser,
    toy_latents,
    toy_timesteps,
)

FRAMES = 6


def dense(denoiser: CausalDenoiser, latents: Tensor, mask: Tensor | None = None) -> Tensor:
    conditioning = toy_conditioning(denoiser.config, FRAMES, len(latents))
    timestep = toy_timesteps(FRAMES, len(latents))
    out: Tensor = denoiser(latents, timestep, denoiser.prepare(conditioning), mask=mask)
    return out


@pytest.mark.parametrize("backend", ["sdpa", "naive"])
def test_later_latents_leave_earlier_outputs_bit_equal(backend: str) -> None:
    denoiser = toy_denoiser(avatar_config())
    denoiser.attention_backend = backend
    latents, changed = toy_latents(FRAMES), toy_latents(FRAMES)
    changed[:, 4:] += 1
    mask = block_causal_mask(FRAMES, TOKENS, 2, window=4)
    a, b = dense(denoiser, latents, mask), dense(denoiser, changed, mask)
    assert torch.equal(a[:, :4], b[:, :4])
    assert ((a - b)[:, 4:].abs().amax((0, 2, 3, 4)) > 1e-3).all()


def test_planted_leak_of_one_later_token_breaks_causality() -> None:
    denoiser = toy_denoiser(avatar_config())
    latents, changed = toy_latents(FRAMES), toy_latents(FRAMES)
    changed[:, 4:] += 1
    mask = block_causal_mask(FRAMES, TOKENS, 2, window=4)
    mask[5, 4 * TOKENS] = True
    a, b = dense(denoiser, latents, mask), dense(denoiser, changed, mask)
    assert not torch.equal(a[:, :4], b[:, :4])


def test_audio_of_a_frame_reaches_no_other_frame_in_its_first_layer() -> None:
    config = avatar_config(num_layers=1)
    denoiser = toy_denoiser(config)
    conditioning = toy_conditioning(config, FRAMES)
    assert conditioning.audio is not None
    audio = conditioning.audio.clone()
    audio[:, 3] += 1
    latents, timestep = toy_latents(FRAMES), toy_timesteps(FRAMES)
    # Alone in its frame, attention sees its own frame only.
    mask = block_causal_mask(FRAMES, TOKENS, 1, window=1)
    outs = []
    for track in (conditioning.audio, audio):
        prepared = denoiser.prepare(
            Conditioning(
                prompt_embeds=conditioning.prompt_embeds,
                audio=track,
                state=conditioning.state,
                event=conditioning.event,
                control=conditioning.control,
            )
        )
        outs.append(denoiser(latents, timestep, prepared, mask=mask))
    changed = (outs[0] - outs[1]).abs().amax((0, 2, 3, 4)) > 0
    assert changed.tolist() == [False, False, False, True, False, False]


@pytest.mark.parametrize(
    ("window", "sink", "chunk", "rows"),
    [
        (2, 0, 1, ["100000", "110000", "011000", "001100", "000110", "000011"]),
        (3, 1, 1, ["100000", "110000", "111000", "101100", "100110", "100011"]),
        (4, 0, 2, ["110000", "110000", "111100", "111100", "001111", "001111"]),
        (3, 1, 2, ["110000", "110000", "101100", "101100", "100011", "100011"]),
        (5, 1, 4, ["111100", "111100", "111100", "111100", "101111", "101111"]),
    ],
)
def test_block_causal_mask_shows_sink_window_and_own_chunk(
    window: int, sink: int, chunk: int, rows: list[str]
) -> None:
    mask = block_causal_mask(6, 1, chunk, window, sink)
    assert ["".join(str(int(x)) for x in row) for row in mask] == rows
    wide = block_causal_mask(6, 3, chunk, window, sink)
    assert torch.equal(wide[::3, 2::3], mask)
    assert wide.shape == (18, 18)


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("backend", ["sdpa", "naive"])
def test_training_reaches_every_parameter(backend: str, autocast: bool) -> None:
    denoiser = toy_denoiser(avatar_config(), requires_grad=True)
    denoiser.attention_backend = backend
    mask = block_causal_mask(FRAMES, TOKENS, 1, window=4, sink=1)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        out = dense(denoiser, toy_latents(FRAMES, batch=2), mask)
    parameters = dict(denoiser.named_parameters())
    grads = torch.autograd.grad(out.float().square().mean(), list(parameters.values()))
    for name, grad in zip(parameters, grads, strict=True):
        assert grad.isfinite().all(), name
        assert grad.any(), name


def test_autocast_stays_near_float32() -> None:
    denoiser = toy_denoiser(avatar_config())
    exact = dense(denoiser, toy_latents(FRAMES))
    with torch.autocast("cpu", torch.bfloat16):
        out = dense(denoiser, toy_latents(FRAMES))
    assert out.dtype == torch.float32
    assert 0 < (out - exact).square().mean().sqrt() < 0.05


def test_a_new_model_predicts_zero_and_ignores_state_until_trained() -> None:
    denoiser = CausalDenoiser(avatar_config())
    assert not dense(denoiser, toy_latents(FRAMES)).any()
    torch.nn.init.normal_(denoiser.proj_out.weight)
    embedder = denoiser.condition_embedder
    addition = embedder.embed_frame(toy_conditioning(denoiser.config, FRAMES))
    assert addition is not None
    assert not addition.any()
    assert dense(denoiser, toy_latents(FRAMES)).any()


@pytest.mark.parametrize("part", ["prompt_embeds", "audio", "state", "event", "control"])
def test_every_part_of_the_conditioning_changes_the_output(part: str) -> None:
    config = avatar_config()
    denoiser = toy_denoiser(config)
    latents, timestep = toy_latents(FRAMES), toy_timesteps(FRAMES)
    base, other = (toy_conditioning(config, FRAMES, seed=seed) for seed in (3, 4))
    names = ("prompt_embeds", "audio", "state", "event", "control")
    mixed = Conditioning(**{n: getattr(other if n == part else base, n) for n in names})
    a, b = (denoiser(latents, timestep, denoiser.prepare(c)) for c in (base, mixed))
    assert (a - b).abs().max() > 1e-3


def test_positions_shift_without_effect_and_stretch_with_one() -> None:
    denoiser = toy_denoiser()
    latents, timestep = toy_latents(3), toy_timesteps(3)
    prepared = denoiser.prepare(Conditioning())
    outs = [
        denoiser(latents, timestep, prepared, frame_positions=positions)
        for positions in (range(3), range(5000, 5003), (0, 2, 4))
    ]
    assert_close(outs[1], outs[0], atol=2e-5, rtol=1e-4)
    assert (outs[2] - outs[0]).abs().max() > 1e-3


def test_learned_positions_tell_tokens_apart_and_fix_the_size() -> None:
    denoiser = toy_denoiser(toy_config(position_grid=(2, 2)))
    wide = torch.randn(1, 1, 4, 4, 6)
    with pytest.raises(ShapeError, match="2x2"):
        denoiser(wide, torch.zeros(1, 1), denoiser.prepare(Conditioning()))
    without = copy.deepcopy(denoiser)
    torch.nn.init.zeros_(without.position_embedding)
    assert (dense(denoiser, toy_latents(6)) - dense(without, toy_latents(6))).abs().max() > 1e-3


def test_cast_weights_keeps_islands_in_float32_and_the_output_near() -> None:
    denoiser = toy_denoiser(avatar_config())
    exact = dense(denoiser, toy_latents(FRAMES))
    cast_weights(denoiser, torch.bfloat16)
    kinds = {name: p.dtype for name, p in denoiser.named_parameters()}
    for name in (
        "condition_embedder.time_embedder.linear_1.weight",
        "blocks.0.scale_shift_table",
        "scale_shift_table",
        "blocks.1.norm2.weight",
        "blocks.1.attn1.norm_q.weight",
        "position_embedding",
    ):
        assert kinds[name] == torch.float32, name
    for name in ("blocks.0.attn1.to_q.weight", "patch_embedding.weight", "proj_out.bias"):
        assert kinds[name] == torch.bfloat16, name
    out = dense(denoiser, toy_latents(FRAMES))
    assert 0 < (out - exact).square().mean().sqrt() < 0.05


def test_bfloat16_weights_stream_through_a_bfloat16_ring() -> None:
    denoiser = cast_weights(toy_denoiser(avatar_config()), torch.bfloat16)
    conditioning = toy_conditioning(denoiser.config, FRAMES)
    latents, timestep = toy_latents(FRAMES), toy_timesteps(FRAMES)
    mask = block_causal_mask(FRAMES, TOKENS, 1, window=4, sink=1)
    expected = denoiser(latents, timestep, denoiser.prepare(conditioning), mask=mask)
    cache = denoiser.new_cache(CacheConfig(window=4, sink=1), HEIGHT, WIDTH)
    assert cache.dtype == torch.bfloat16
    for i in range(FRAMES):
        part = slice(i, i + 1)
        with torch.inference_mode():
            out = denoiser(
                latents[:, part],
                timestep[:, part],
                denoiser.prepare(frames_of(conditioning, i, i + 1)),
                caches=[CachePass(cache, i, (1,))],
            )
        cache.commit(1)
        assert_close(out, expected[:, part], atol=5e-2, rtol=5e-2)


@pytest.mark.parametrize(
    ("latents", "timestep", "match"),
    [
        ((1, 4, 4, 4), (1, 1), r"latents must be \[B, T, 4, h, w\]"),
        ((1, 1, 5, 4, 4), (1, 1), r"latents must be \[B, T, 4, h, w\]"),
        ((1, 2, 4, 4, 4), (1, 3), r"timestep must be \[1, 2\]"),
        ((1, 2, 4, 4, 4), (1,), r"timestep must be \[1, 2\]"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    latents: tuple[int, ...], timestep: tuple[int, ...], match: str
) -> None:
    denoiser = toy_denoiser()
    with pytest.raises(ShapeError, match=match):
        denoiser(torch.zeros(latents), torch.zeros(timestep), PreparedConditioning())
    with pytest.raises(ConfigError, match="multiple of 2x2"):
        denoiser(torch.zeros(1, 1, 4, 5, 4), torch.zeros(1, 1), PreparedConditioning())


def test_prepared_conditioning_that_does_not_fit_is_refused() -> None:
    config = avatar_config()
    denoiser = toy_denoiser(config)
    latents, timestep = toy_latents(2), toy_timesteps(2)
    with pytest.raises(ConfigError, match="prepared text"):
        denoiser(latents, timestep, PreparedConditioning())
    three = denoiser.prepare(toy_conditioning(config, 3))
    with pytest.raises(ShapeError, match=r"prepared audio is for \[1, 3\]"):
        denoiser(latents, timestep, three)
    with pytest.raises(ShapeError, match="prepared temb"):
        denoiser(
            latents,
            timestep,
            PreparedConditioning(
                text=three.text, audio=three.first_frames(2).audio, temb=three.temb
            ),
        )


def test_cached_passes_that_do_not_fit_are_refused() -> None:
    denoiser = toy_denoiser()
    cache = denoiser.new_cache(CacheConfig(window=4), HEIGHT, WIDTH)
    other = denoiser.new_cache(CacheConfig(window=4), HEIGHT, 2 * WIDTH)
    one = (toy_latents(1), toy_timesteps(1), PreparedConditioning())
    mask = torch.ones(TOKENS, TOKENS).bool()
    with pytest.raises(ConfigError, match="no gradients"):
        denoiser(*one, caches=[CachePass(cache, 0, (1,))])
    with torch.inference_mode():
        with pytest.raises(ShapeError, match="groups of 1 frames"):
            denoiser(*one, caches=[CachePass(cache, 0, (2,))])
        with pytest.raises(ShapeError, match="1 rows"):
            denoiser(*one, caches=[])
        with pytest.raises(ShapeError, match="8 tokens per frame"):
            denoiser(*one, caches=[CachePass(other, 0, (1,))])
        with pytest.raises(ConfigError, match="commit the frames before"):
            denoiser(*one, caches=[CachePass(cache, 1, (1,))])
        with pytest.raises(ConfigError, match="neither with caches"):
            denoiser(*one, caches=[CachePass(cache, 0, (1,))], mask=mask)


def test_flops_count_what_linears_and_attention_do() -> None:
    config = DenoiserConfig(
        num_attention_heads=2,
        attention_head_dim=24,
        in_channels=4,
        out_channels=4,
        ffn_dim=96,
        num_layers=2,
        audio_dim=12,
        audio_tokens=3,
        text_dim=32,
    )
    denoiser = toy_denoiser(config)
    counted = 0

    def count(module: torch.nn.Module, args: tuple[Tensor, ...], out: Tensor) -> None:
        nonlocal counted
        weight = module.get_parameter("weight")
        counted += 2 * out.numel() * weight[0].numel()

    for module in denoiser.modules():
        if isinstance(module, Linear | PatchEmbedding):
            module.register_forward_hook(count)
    conditioning = toy_conditioning(config, 2)
    prepared = denoiser.prepare(conditioning)
    counted = 0
    denoiser(toy_latents(2), toy_timesteps(2), prepared)
    attended = 2 * TOKENS + 512 + 3
    attention = config.num_layers * 2 * 2 * (2 * TOKENS) * attended * config.inner_dim
    assert flops(config, HEIGHT, WIDTH, frames=2, window=2) == counted + attention


def test_a_text_model_shares_prepared_text_between_chunks() -> None:
    config = text_config()
    denoiser = toy_denoiser(config)
    conditioning = toy_conditioning(config, 1)
    first = denoiser.prepare(conditioning)
    again = denoiser.prepare(conditioning, first)
    assert again.same_text(first)
    assert not denoiser.prepare(conditioning).same_text(first)
