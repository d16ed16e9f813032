"""Schedules against the published levels, formulas against the closed form."""

import pytest
import torch
from torch import Tensor

from rtgen.config import SamplingConfig
from rtgen.errors import ConfigError
from rtgen.sampling.schedulers import FlowMatchSchedule, shifted_sigmas

# What the public few-step models feed their networks: (listed, shift, warp, fed).
SELF_FORCING = (1000.0, 750.0, 500.0, 250.0)
PUBLISHED = {
    "self_forcing": (SELF_FORCING, 5.0, True, (1000.0, 937.5, 833.3333333, 625.0)),
    "self_forcing_at_shift_8": (SELF_FORCING, 8.0, True, (1000.0, 960.0, 888.8888889, 727.2727273)),
    "rolling_forcing": (
        (1000.0, 800.0, 600.0, 400.0, 200.0),
        5.0,
        True,
        (1000.0, 952.3809524, 882.3529412, 769.2307692, 555.5555556),
    ),
    "causvid": ((1000.0, 757.0, 522.0), 8.0, False, (1000.0, 757.0, 522.0)),
    "stream_diffusion_v2_text": (
        (1000.0, 750.0, 500.0, 250.0),
        8.0,
        False,
        (1000.0, 750.0, 500.0, 250.0),
    ),
    "stream_diffusion_v2_video": (
        (700.0, 500.0, 400.0, 200.0),
        8.0,
        False,
        (700.0, 500.0, 400.0, 200.0),
    ),
}


def make(timesteps: tuple[float, ...], shift: float, warp: bool, **more: object) -> SamplingConfig:
    return SamplingConfig(timesteps=timesteps, shift=shift, warp=warp, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", PUBLISHED)
def test_timesteps_are_the_published_ones(name: str) -> None:
    listed, shift, warp, fed = PUBLISHED[name]
    schedule = FlowMatchSchedule.from_config(make(listed, shift, warp))
    assert schedule.timesteps == pytest.approx(fed, abs=1e-6)
    assert schedule.num_steps == len(listed)


@pytest.mark.parametrize("name", PUBLISHED)
def test_sigma_is_the_table_entry_nearest_to_the_timestep(name: str) -> None:
    listed, shift, warp, _ = PUBLISHED[name]
    schedule = FlowMatchSchedule.from_config(make(listed, shift, warp))
    # The table as the public code makes it: 1000 levels from 1, without the closing 0.
    linear = torch.linspace(1, 0, 1001, dtype=torch.float64)[:-1]
    table = shift * linear / (1 + (shift - 1) * linear)
    for timestep, sigma in zip(schedule.timesteps, schedule.sigmas, strict=True):
        nearest = table[(1000 * table - timestep).abs().argmin()]
        assert sigma == pytest.approx(float(nearest), abs=1e-12)


def test_shift_8_is_not_taken_for_shift_5() -> None:
    at_5 = FlowMatchSchedule.from_config(make(SELF_FORCING, 5.0, True))
    at_8 = FlowMatchSchedule.from_config(make(SELF_FORCING, 8.0, True))
    assert at_5.timesteps[0] == at_8.timesteps[0] == 1000.0
    assert all(a < b for a, b in zip(at_5.timesteps[1:], at_8.timesteps[1:], strict=True))


def test_default_shift_is_that_of_self_forcing() -> None:
    config = SamplingConfig(timesteps=SELF_FORCING, warp=True)
    assert FlowMatchSchedule.from_config(config).timesteps[1] == pytest.approx(937.5)


def test_causvid_levels_differ_from_their_timesteps_by_the_table_spacing() -> None:
    schedule = FlowMatchSchedule.from_config(make((1000.0, 757.0, 522.0), 8.0, False))
    assert schedule.sigmas[1] == pytest.approx(8 * 0.28 / (1 + 7 * 0.28), abs=1e-12)
    assert abs(schedule.sigmas[1] - 0.757) > 1e-4


def test_shifted_table_runs_from_one_to_zero() -> None:
    for shift in (1.0, 3.0, 5.0, 8.0):
        table = shifted_sigmas(shift)
        assert (len(table), table[0], table[-1]) == (1001, 1.0, 0.0)
        assert all(a > b for a, b in zip(table, table[1:], strict=False))
    assert shifted_sigmas(1.0)[250] == pytest.approx(0.75)


def test_warp_refuses_a_fractional_index() -> None:
    with pytest.raises(ConfigError, match="whole numbers"):
        FlowMatchSchedule.from_config(make((1000.0, 750.5), 5.0, True))


def test_schedule_refuses_lists_of_different_lengths() -> None:
    with pytest.raises(ConfigError, match="one entry per step"):
        FlowMatchSchedule(timesteps=(1000.0, 500.0), sigmas=(1.0,))


def test_context_noise_sets_the_clean_timestep() -> None:
    schedule = FlowMatchSchedule.from_config(make((1000.0,), 5.0, True, context_noise=0.1))
    assert schedule.context_sigma == 0.1
    assert schedule.context_timestep == pytest.approx(100.0)


def line(shape: tuple[int, ...] = (2, 3, 4, 4)) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


@pytest.mark.parametrize("sigma", [1.0, 0.9375, 0.5, 0.004975])
def test_x0_is_exact_for_the_true_flow(sigma: float) -> None:
    schedule = FlowMatchSchedule.from_config(make(SELF_FORCING, 5.0, True))
    x0, noise = line()
    latents = schedule.add_noise(x0, noise, sigma)
    torch.testing.assert_close(schedule.predict_x0(latents, noise - x0, sigma), x0)


def test_sample_prediction_is_x0_itself() -> None:
    schedule = FlowMatchSchedule.from_config(make(SELF_FORCING, 5.0, True), "sample")
    x0, noise = line()
    latents = schedule.add_noise(x0, noise, 0.7)
    predicted = schedule.predict_x0(latents, x0.bfloat16(), 0.7)
    assert predicted.dtype == torch.float32
    assert torch.equal(predicted, x0.bfloat16().float())


def test_x0_keeps_the_dtype_of_the_latents_and_is_computed_wide() -> None:
    schedule = FlowMatchSchedule.from_config(make((1000.0,), 5.0, True))
    latents = torch.tensor([1.0 + 2.0**-23])
    output = torch.tensor([1.0], dtype=torch.bfloat16)
    x0 = schedule.predict_x0(latents, output, 1.0)
    assert x0.dtype == torch.float32
    assert float(x0) == 2.0**-23


@pytest.mark.parametrize("steps", [(1000.0,), (1000.0, 500.0), SELF_FORCING])
def test_path_is_exact_for_a_constant_velocity(steps: tuple[float, ...]) -> None:
    """Euler is exact where the flow does not depend on place or time: any steps reach x0."""
    schedule = FlowMatchSchedule.from_config(make(steps, 5.0, True, renoise="ode"))
    x0, noise = line()
    flow, latents = noise - x0, noise
    for step, sigma in enumerate(schedule.sigmas):
        torch.testing.assert_close(latents, schedule.add_noise(x0, noise, sigma))
        predicted = schedule.predict_x0(latents, flow, sigma)
        if step + 1 < schedule.num_steps:
            next_sigma = schedule.sigmas[step + 1]
            euler = latents + (next_sigma - sigma) * flow
            latents = schedule.follow_path(latents, predicted, sigma, next_sigma)
            torch.testing.assert_close(latents, euler)
    torch.testing.assert_close(predicted, x0)


def test_path_oracle_catches_a_step_to_the_wrong_level() -> None:
    schedule = FlowMatchSchedule.from_config(make(SELF_FORCING, 5.0, True, renoise="ode"))
    x0, noise = line()
    wrong = schedule.follow_path(noise, x0, 1.0, schedule.sigmas[2])
    with pytest.raises(AssertionError):
        torch.testing.assert_close(wrong, schedule.add_noise(x0, noise, schedule.sigmas[1]))


def test_fresh_noise_keeps_unit_variance_on_unit_data() -> None:
    """(1-s)^2 + s^2 is the variance of a re-noised latent whose data has variance 1."""
    schedule = FlowMatchSchedule.from_config(make(SELF_FORCING, 5.0, True))
    x0, noise = line((256, 4, 16, 16))
    for sigma in schedule.sigmas:
        variance = float(schedule.add_noise(x0, noise, sigma).var())
        assert variance == pytest.approx((1 - sigma) ** 2 + sigma**2, rel=0.02)
