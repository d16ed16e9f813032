"""Noise is a function of (seed, frame, step), is normal, and is independent between them.

The statistical tests are deterministic. For a generator that is what it should be, each of their
bounds fails with probability below 1e-6 over the choice of seeds; there are fewer than 40 bounds.
"""

import itertools
import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from rtgen.errors import ConfigError
from rtgen.sampling.noise import CLEAN_STEP, chunk_noise, frame_noise

SHAPE = (16, 32, 32)
Z_BOUND = 4.9  # two-sided normal tail 9.6e-7
KS_BOUND = 2.7  # Kolmogorov tail 2 exp(-2 * 2.7^2) = 9.3e-7

Noise = Callable[[int, int, int], Tensor]


def real(seed: int, frame: int, step: int) -> Tensor:
    return frame_noise(seed, frame, step, SHAPE)


def check_order_does_not_matter(noise: Noise) -> None:
    keys = list(itertools.product((0, 7), (0, 1, 1023), (0, 3, CLEAN_STEP)))
    forward = {key: noise(*key) for key in keys}
    for key in reversed(keys):
        assert torch.equal(noise(*key), forward[key]), key


def check_normal(noise: Noise) -> None:
    values = torch.cat([noise(1, frame, 0).flatten().double() for frame in range(16)])
    count = values.numel()
    assert abs(float(values.mean())) * math.sqrt(count) < Z_BOUND
    # Variances of the sample moments of a standard normal: x^2 has 2, x^3 has 15, x^4 has 96.
    for power, moment, variance in ((2, 1.0, 2.0), (3, 0.0, 15.0), (4, 3.0, 96.0)):
        deviation = float((values**power).mean()) - moment
        assert abs(deviation) * math.sqrt(count / variance) < Z_BOUND, power
    cdf = torch.special.ndtr(values.sort().values)
    steps = torch.arange(count + 1, dtype=torch.float64) / count
    distance = torch.maximum((cdf - steps[:-1]).abs().max(), (cdf - steps[1:]).abs().max())
    assert float(distance) * math.sqrt(count) < KS_BOUND


def check_uncorrelated(noise: Noise) -> None:
    keys = [
        (5, 9, 0),
        (5, 9, 1),
        (5, 9, CLEAN_STEP),
        (5, 10, 0),
        (6, 9, 0),
        (2**63, 9, 0),
        (9, 5, 0),
    ]
    draws = [noise(*key).flatten().double() for key in keys]
    for (key_a, a), (key_b, b) in itertools.combinations(zip(keys, draws, strict=True), 2):
        z = float((a * b).mean()) * math.sqrt(a.numel())
        assert abs(z) < Z_BOUND, (key_a, key_b)


def test_same_bits_in_any_call_order() -> None:
    check_order_does_not_matter(real)


def test_order_oracle_catches_noise_keyed_by_call_order() -> None:
    generator = torch.Generator().manual_seed(0)
    with pytest.raises(AssertionError):
        check_order_does_not_matter(lambda *_: torch.randn(SHAPE, generator=generator))


def test_noise_is_standard_normal() -> None:
    check_normal(real)


@pytest.mark.parametrize("scale", [0.985, 1.015])
def test_normality_oracle_catches_a_wrong_scale(scale: float) -> None:
    with pytest.raises(AssertionError):
        check_normal(lambda *key: real(*key) * scale)


def test_normality_oracle_catches_cut_tails() -> None:
    with pytest.raises(AssertionError):
        check_normal(lambda *key: real(*key).clamp(-3, 3))


def test_seeds_frames_and_steps_are_uncorrelated() -> None:
    check_uncorrelated(real)


@pytest.mark.parametrize("kept", [(1, 1, 0), (1, 0, 1), (0, 1, 1)])
def test_correlation_oracle_catches_an_ignored_key(kept: tuple[int, int, int]) -> None:
    with pytest.raises(AssertionError):
        check_uncorrelated(
            lambda *key: real(*(k * keep for k, keep in zip(key, kept, strict=True)))
        )


def test_correlation_oracle_catches_seed_and_frame_added_up() -> None:
    with pytest.raises(AssertionError):
        check_uncorrelated(lambda seed, frame, step: real(0, seed % 2**32 + frame, step))


def test_neighbouring_pixels_are_uncorrelated() -> None:
    values = real(2, 3, 4).double()
    for axis in range(3):
        pairs = values * values.roll(1, dims=axis)
        assert abs(float(pairs.mean())) * math.sqrt(pairs.numel()) < Z_BOUND, axis


def test_noise_has_the_asked_form() -> None:
    noise = frame_noise(0, 0, 0, (4, 2, 3))
    assert (noise.shape, noise.dtype, noise.device.type) == ((4, 2, 3), torch.float32, "cpu")


def test_chunk_noise_is_the_noise_of_its_frames() -> None:
    chunk = chunk_noise(3, 1022, 4, 2, (4, 2, 2), torch.device("cpu"))
    for index in range(4):
        assert torch.equal(chunk[index], frame_noise(3, 1022 + index, 2, (4, 2, 2)))


@pytest.mark.parametrize(
    ("seed", "frame", "step"), [(-1, 0, 0), (2**64, 0, 0), (0, -1, 0), (0, 0, -1), (0, 0, 2**32)]
)
def test_numbers_out_of_range_are_refused(seed: int, frame: int, step: int) -> None:
    with pytest.raises(ConfigError, match="must be in"):
        frame_noise(seed, frame, step, (1,))


def test_long_streams_have_noise() -> None:
    assert not torch.equal(frame_noise(0, 2**40, 0, (8,)), frame_noise(0, 2**40 + 1, 0, (8,)))
