"""The stock decoder against diffusers' `AutoencoderKLWan` with the same weights, float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from diffusers import AutoencoderKLWan
from torch import Tensor

from decoders import stock_layers, stock_vae
from decoders.base import StreamingDecoder
from decoders.stock_layers import Algorithm, CausalConv3d, Resample, RMSNorm, Tails
from decoders.stock_vae import WAN21_VAE, WAN22_VAE, StockVae, StockVaeConfig, config_from_json
from rtgen.errors import ConfigError
from tests.decoders.stock import (
    CONFIGS,
    OTHER_RESIDUAL,
    RESIDUAL,
    SMALL,
    check,
    noise,
    ours,
    stream,
    theirs,
    whole,
)


@pytest.mark.parametrize("algorithm", ["conv3d", "conv2d", "winograd"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_stream_equals_diffusers_whole_clip(name: str, algorithm: Algorithm) -> None:
    values = CONFIGS[name]
    model = theirs(values)
    latents = noise(values, frames=5)
    expected = whole(model, latents)
    per_latent = config_from_json(values).frames_per_latent
    assert len(expected) == 1 + 4 * per_latent
    check(stream(ours(model, values, algorithm), latents), expected)


def test_winograds_way_is_taken_in_float32_where_its_kernels_fit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    network = ours(theirs(SMALL), SMALL).network

    def algorithms() -> set[str]:
        network.prepare()
        return {m.algorithm for m in network.modules() if isinstance(m, CausalConv3d)}

    assert algorithms() == {"winograd"}
    monkeypatch.setattr(stock_vae, "_WINOGRAD_BYTES", 1000)
    assert algorithms() == {"conv2d"}
    network.bfloat16()
    assert algorithms() == {"conv3d"}
    with pytest.raises(ConfigError, match="needs float32"):
        network.prepare("winograd")


@pytest.mark.parametrize("size", [(1, 1), (4, 1), (2, 5)])
def test_any_size_equals_diffusers(size: tuple[int, int]) -> None:
    model = theirs(SMALL, seed=1)
    latents = noise(SMALL, 3, size)
    check(stream(ours(model, SMALL), latents), whole(model, latents))


@pytest.mark.slow
def test_real_width_equals_diffusers() -> None:
    """Wan2.1's widest and narrowest stages: 384, 384 and 96 channels."""
    values = {
        "base_dim": 32,
        "decoder_base_dim": 96,
        "z_dim": 16,
        "dim_mult": [1, 4, 4],
        "temperal_downsample": [True, True],
        "num_res_blocks": 0,
    }
    model = theirs(values)
    latents = noise(values, 2)
    check(stream(ours(model, values), latents), whole(model, latents))


def test_decoding_another_clip_in_between_changes_no_bit() -> None:
    model = theirs(SMALL)
    decoder, latents = ours(model, SMALL), noise(SMALL, 4)
    expected = stream(decoder, latents)
    state = decoder.new_state(3, 2, torch.float32, "cpu")
    out = []
    for row in latents:
        stream(decoder, noise(SMALL, 2, (2, 2)))
        out += decoder.step([state], row[None, None])
    assert torch.equal(torch.cat(out), expected)


def test_thirty_latents_equal_the_whole_clip() -> None:
    values = SMALL | {"base_dim": 4, "num_res_blocks": 0}
    model = theirs(values)
    latents = noise(values, 30, (1, 2))
    check(stream(ours(model, values), latents), whole(model, latents))


def test_bfloat16_is_not_further_from_float32_than_diffusers_is() -> None:
    model = theirs(SMALL)
    latents = noise(SMALL, 3).bfloat16()
    exact = whole(model, latents.float())
    network = ours(model, SMALL).network
    decoder = StreamingDecoder(network.bfloat16().prepare(), latent_space="toy")
    error = (stream(decoder, latents) - exact).square().mean()
    assert 0 < error <= 1.1 * (whole(model.bfloat16(), latents).float() - exact).square().mean()


# ---- planted bugs


def planted(values: dict[str, Any], frames: int = 4) -> None:
    model = theirs(values)
    latents = noise(values, frames)
    with pytest.raises(AssertionError):
        check(stream(ours(model, values), latents), whole(model, latents))


def test_planted_restart_at_every_latent_fails_the_gate() -> None:
    model = theirs(SMALL)
    latents, decoder = noise(SMALL, 3), ours(theirs(SMALL), SMALL)
    restarted = torch.cat([stream(decoder, latents[i : i + 1]) for i in range(3)])
    with pytest.raises(AssertionError):
        check(restarted, whole(model, latents))


def test_planted_tail_of_one_frame_fails_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = CausalConv3d.forward

    def forgetful(self: CausalConv3d, buffer: Tensor, tails: Tails) -> Tensor:
        out = forward(self, buffer, tails)
        tails.new[self.slot][0] = 0
        return out

    monkeypatch.setattr(CausalConv3d, "forward", forgetful)
    planted(SMALL)


def test_planted_doubling_of_the_first_frame_fails_the_gate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forward = Resample.forward

    def doubling(self: Resample, x: Tensor, tails: Tails) -> Tensor:
        return forward(self, x, Tails(tails.old, False, tails.new))

    monkeypatch.setattr(Resample, "forward", doubling)
    planted(SMALL)


def test_planted_first_frame_in_the_history_of_time_fails_the_gate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forward = Resample.forward

    def remembering(self: Resample, x: Tensor, tails: Tails) -> Tensor:
        out = forward(self, x, tails)
        if self.time_conv is not None and tails.is_first:
            tails.new[self.time_conv.slot] = torch.cat((torch.zeros_like(x), x))
        return out

    monkeypatch.setattr(Resample, "forward", remembering)
    planted(SMALL)


def test_planted_rows_before_columns_in_a_patch_fail_the_gate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Tensor, "transpose", lambda self, a, b: self)
    model, latents = ours(theirs(RESIDUAL), RESIDUAL), noise(RESIDUAL, 2)
    wrong = stream(model, latents)
    monkeypatch.undo()
    with pytest.raises(AssertionError):
        check(wrong, whole(theirs(RESIDUAL), latents))


def test_planted_shortcut_of_the_first_doubled_frame_fails_the_gate(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    add = stock_layers.add_repeated

    def first_of_two(y: Tensor, x: Tensor, *, temporal: bool, is_first: bool) -> Tensor:
        if not (temporal and is_first):
            return add(y, x, temporal=temporal, is_first=is_first)
        doubled = add(torch.zeros_like(torch.cat((y, y))), x, temporal=True, is_first=False)
        return y + doubled[:1]

    monkeypatch.setattr(stock_vae, "add_repeated", first_of_two)
    planted(OTHER_RESIDUAL)


def test_planted_norm_by_the_mean_square_fails_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    forward = RMSNorm.forward

    def eps_inside(self: RMSNorm, x: Tensor, out: Tensor, *, silu: bool) -> None:
        forward(self, x * (1 + 1e-3), out, silu=silu)
        out *= 1 + 1e-3

    monkeypatch.setattr(RMSNorm, "forward", eps_inside)
    planted(SMALL)


# ---- parts


def test_first_and_steady_step_are_one_graph_each() -> None:
    values = {"base_dim": 4, "z_dim": 4, "dim_mult": [1, 2], "num_res_blocks": 0}
    values["temperal_downsample"] = [True]
    network = ours(theirs(values), values).network
    latents, memory = noise(values, 4), network.new_memory(3, 2)
    run: Any = torch.compile(network.stream, backend="eager", fullgraph=True, dynamic=False)
    with torch.inference_mode():
        for index, frame in enumerate(latents):
            expected, left = network.stream(frame, memory, index == 0)
            found, memory = run(frame, memory, index == 0)
            torch.testing.assert_close(found, expected)
    torch.testing.assert_close(memory, left)


def test_the_memory_is_two_frames_of_every_causal_convolution() -> None:
    """The sum that diffusers' cache of 480x832 comes to: 944 M numbers for Wan2.1."""
    with torch.device("meta"):
        memory = StockVae(WAN21_VAE).new_memory(60, 104)
        large = StockVae(WAN22_VAE).new_memory(30, 52)
    assert len(memory) == 32
    assert sum(tensor.numel() for tensor in memory) == pytest.approx(944e6, rel=1e-3)
    assert sum(tensor.numel() for tensor in large) * 2 / 2**20 == pytest.approx(1359, rel=1e-3)


@pytest.mark.parametrize(("config", "millions"), [(WAN21_VAE, 73.30), (WAN22_VAE, 555.05)])
def test_real_configurations_have_the_real_number_of_parameters(
    config: StockVaeConfig, millions: float
) -> None:
    with torch.device("meta"):
        decoder = StockVae(config).decoder
    count = sum(parameter.numel() for parameter in decoder.parameters())
    assert count / 1e6 == pytest.approx(millions, abs=0.01)


def test_the_moments_of_wan21_are_those_of_diffusers() -> None:
    with torch.device("meta"):
        model: Any = AutoencoderKLWan(dim_mult=[1], temperal_downsample=[])  # type: ignore[no-untyped-call]
    config = model.config
    assert tuple(config.latents_mean) == WAN21_VAE.latents_mean
    assert tuple(config.latents_std) == WAN21_VAE.latents_std


def test_an_unprepared_network_is_refused() -> None:
    decoder = StreamingDecoder(StockVae(StockVaeConfig(**SMALL)), latent_space="toy")
    state = decoder.new_state(1, 1, torch.float32, "cpu")
    with pytest.raises(ConfigError, match="call prepare"):
        decoder.step([state], torch.zeros(1, 1, 4, 1, 1))
