"""Layers of the stock decoder against the operations that they replace."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from decoders import stock_winograd
from decoders.stock_layers import RMSNorm, Upsample
from decoders.stock_winograd import transform_kernels, winograd_conv
from tests.toy import randomise


def test_upsampling_by_phases_equals_repetition_and_a_convolution() -> None:
    layer = Upsample(5, 3)
    randomise(layer)
    layer.requires_grad_(False).prepare()
    x = torch.randn(2, 3, 4, 5)
    repeated = x.permute(0, 3, 1, 2).repeat_interleave(2, 2).repeat_interleave(2, 3)
    expected = torch.nn.functional.conv2d(repeated, layer.weight, layer.bias, padding=1)
    torch.testing.assert_close(layer(x).permute(0, 3, 1, 2), expected)


@pytest.mark.parametrize("size", [(1, 1), (4, 8), (5, 3), (9, 17)])
@pytest.mark.parametrize("block", [1, 1 << 20])
def test_winograds_convolution_equals_the_direct_one(
    size: tuple[int, int], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In float64, so that only a wrong formula can differ; in one block and in many."""
    monkeypatch.setattr(stock_winograd, "_BLOCK", block)
    buffer = torch.randn(5, *size, 6, dtype=torch.float64)
    weight = torch.randn(7, 6, 3, 3, 3, dtype=torch.float64)
    bias = torch.randn(7, dtype=torch.float64)
    out = winograd_conv(buffer, transform_kernels(weight), bias)
    volume = buffer.permute(3, 0, 1, 2)[None]
    expected = torch.nn.functional.conv3d(volume, weight, bias, padding=(0, 1, 1))
    torch.testing.assert_close(out, expected[0].permute(1, 2, 3, 0))


def test_winograds_rounding_is_near_that_of_the_direct_convolution(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Within three times; with the points of the textbook it is not."""
    random = torch.Generator().manual_seed(0)
    buffer = torch.randn(3, 16, 16, 96, generator=random)
    weight = torch.randn(16, 96, 3, 3, 3, generator=random) / 50
    bias, volume = torch.zeros(16), buffer.permute(3, 0, 1, 2)[None]
    exact = torch.nn.functional.conv3d(volume.double(), weight.double(), padding=(0, 1, 1))
    direct = torch.nn.functional.conv3d(volume, weight, padding=(0, 1, 1))

    def error(out: Tensor) -> float:
        return float((out - exact[0]).square().mean().sqrt())

    def winograd() -> float:
        stock_winograd.matrices.cache_clear()
        return error(winograd_conv(buffer, transform_kernels(weight), bias).permute(3, 0, 1, 2))

    assert winograd() < 4 * error(direct[0])
    monkeypatch.setattr(stock_winograd, "_POINTS", (0.0, 1.0, -1.0, 2.0, -2.0))
    assert winograd() > 4 * error(direct[0])
    monkeypatch.undo()
    assert winograd() < 4 * error(direct[0])


def test_the_norm_of_nothing_is_nothing() -> None:
    norm = RMSNorm(6).requires_grad_(False)
    out = torch.ones(1, 2, 2, 6)
    norm(torch.zeros(1, 2, 2, 6), out, silu=True)
    assert torch.equal(out, torch.zeros_like(out))
