"""The unit autoencoder: each pixel frame has its own channels and nothing else changes it."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from decoders.unit_conv import UnitAutoencoder, UnitConvConfig, UnitDecoder, decoder_flops
from rtgen.errors import ConfigError, ShapeError

CONFIG = UnitConvConfig(size=32, widths=(8, 16, 24))


def model(seed: int = 0) -> UnitAutoencoder:
    """A small autoencoder whose residual branches and canvas are not zero."""
    torch.manual_seed(seed)
    net = UnitAutoencoder(CONFIG)
    for module in net.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.normal_(module.weight, std=0.15)
    net.set_canvas(torch.rand(3, 32, 32) - 0.5)
    return net.eval().requires_grad_(False)


def pixels(seed: int = 1) -> Tensor:
    return torch.rand(2, 8, 3, 32, 32, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def test_geometry_is_four_frames_to_one_latent_frame_of_sixteen_channels() -> None:
    net = model()
    latents = net.encoder(pixels())
    assert latents.shape == (2, 2, 16, 2, 2)
    assert net.decoder(latents).shape == (2, 8, 3, 32, 32)


@pytest.mark.parametrize("frame", range(4))
def test_a_frame_touches_only_its_own_channels(frame: int) -> None:
    net, video = model(), pixels()
    changed = video.clone()
    changed[:, frame] += 0.3
    difference = (net.encoder(changed) - net.encoder(video)).abs().amax((0, 3, 4))  # [T, C]
    own = slice(4 * frame, 4 * frame + 4)
    assert difference[0, own].min() > 1e-4
    difference[0, own] = 0
    assert difference.max() == 0


@pytest.mark.parametrize("frame", range(4))
def test_channels_paint_only_their_own_frame(frame: int) -> None:
    net = model()
    latents = net.encoder(pixels())
    changed = latents.clone()
    changed[:, 1, 4 * frame : 4 * frame + 4] += 0.5
    difference = (net.decoder(changed) - net.decoder(latents)).abs().amax((0, 2, 3, 4))
    assert difference[4 + frame] > 1e-4
    difference[4 + frame] = 0
    assert difference.max() == 0


def test_channels_in_another_order_would_be_noticed() -> None:
    """The planted bug: channels interleaved by frame instead of stacked."""
    net = model()
    latents = net.encoder(pixels())
    mixed = latents.reshape(2, 2, 4, 4, 2, 2).transpose(2, 3).reshape_as(latents)
    assert (net.decoder(mixed) - net.decoder(latents)).abs().max() > 1e-2


def test_a_unit_decodes_alone_as_in_a_run() -> None:
    net = model()
    latents = net.encoder(pixels())
    whole = net.decoder(latents)
    torch.testing.assert_close(net.decoder(latents[:, 1:]), whole[:, 4:])


def test_zero_output_paints_the_canvas() -> None:
    net = model()
    last = net.decoder.layers[-1]
    assert isinstance(last, nn.Conv2d)
    nn.init.zeros_(last.weight)
    nn.init.zeros_(last.bias)  # type: ignore[arg-type]
    out = net.decoder(torch.randn(1, 1, 16, 2, 2))
    torch.testing.assert_close(out[0, 0], net.decoder.canvas)


@pytest.mark.parametrize("blocks", [(1, 2, 3), (2, 1, 1)])
def test_analytic_flops_are_what_torch_counts(blocks: tuple[int, int, int]) -> None:
    config = dataclasses.replace(CONFIG, decoder_blocks=blocks)
    decoder = UnitDecoder(config)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        decoder(torch.zeros(1, 1, 16, 2, 2))
    assert decoder_flops(config) == counter.get_total_flops()


def test_bad_sizes_are_refused() -> None:
    with pytest.raises(ConfigError, match="multiple of 16"):
        UnitConvConfig(size=40)
    with pytest.raises(ConfigError, match="multiples of 8"):
        UnitConvConfig(widths=(8, 12, 16))
    with pytest.raises(ShapeError, match="multiple of 4"):
        model().encoder(pixels()[:, :6])
    with pytest.raises(ShapeError, match="latents must be"):
        model().decoder(torch.zeros(1, 1, 12, 2, 2))
