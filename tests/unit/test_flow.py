"""Flow-matching steps: hand values, the published form coded anew, and the marginals that Flow-SDE must keep."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributions import Normal

from dvla.rl.flow import (
    NOISE_STD_RANGE,
    gaussian_entropy,
    gaussian_logprob,
    noise_std,
    ode_step,
    sde_step,
    step_times,
)

A = 0.5  # noise level of the marginal tests
TARGETS = [(2.0, 0.5), (0.7, 0.4)]  # mean and standard deviation of the data
Step = Callable[[Tensor, Tensor, Tensor, int, float], tuple[Tensor, Tensor]]


def test_step_times() -> None:
    times = step_times(torch.arange(5), 4)
    assert times.dtype == torch.float32
    assert times.tolist() == [1.0, 0.75, 0.5, 0.25, 0.0]
    assert step_times(torch.tensor([[2], [0]]), 5).tolist() == [[pytest.approx(0.6)], [1.0]]


def test_standard_deviations_of_four_steps() -> None:
    x = torch.zeros(4, 2, 3)
    mean, std = sde_step(x, x, step_times(torch.arange(4), 4), 4, 0.5)
    assert mean.shape == x.shape
    # sigma sqrt(1/4), with sigma = 1/2 sqrt(t / (1 - t)): 1/2 sqrt(4), 1/2 sqrt(3), 1/2, 1/2 sqrt(1/3)
    torch.testing.assert_close(std.flatten(), torch.tensor([0.5, 0.433013, 0.25, 0.144338]), atol=1e-6, rtol=0)
    assert (mean + std).shape == x.shape


def test_one_step_by_hand() -> None:
    # t = 1/2, 1/N = 1/4, a = 1/2: sigma^2 = 1/4 and sigma^2 / (2 N t) = 1/16.
    mean, _ = sde_step(torch.tensor([[3.0]]), torch.tensor([[2.0]]), torch.tensor([0.5]), 4, 0.5)
    assert mean.item() == pytest.approx(3 - 2 / 4 - (3 + 2 / 2) / 16)
    assert ode_step(torch.tensor([[3.0]]), torch.tensor([[2.0]]), 4).item() == 2.5


@given(
    num_steps=st.integers(1, 12),
    step=st.integers(0, 11),
    a=st.floats(0.05, 1.5),
    x=st.floats(-4, 4),
    v=st.floats(-4, 4),
)
def test_step_mixes_the_predicted_data_and_noise(num_steps: int, step: int, a: float, x: float, v: float) -> None:
    step %= num_steps
    t, delta = 1 - step / num_steps, 1 / num_steps
    variance = a * a * t / (1 - t if step else delta)
    data, noise = x - t * v, x + (1 - t) * v
    expected = data * (1 - (t - delta)) + noise * ((t - delta) - variance * delta / (2 * t))
    rows = torch.tensor([[x]], dtype=torch.float64), torch.tensor([[v]], dtype=torch.float64)
    mean, std = sde_step(*rows, torch.tensor([t], dtype=torch.float64), num_steps, a)
    assert mean.dtype == std.dtype == torch.float64
    assert mean.item() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert std.item() == pytest.approx(math.sqrt(variance * delta), rel=1e-9)
    # What float32 makes of the time is harmless.
    mean, _ = sde_step(*rows, step_times(torch.tensor([step]), num_steps), num_steps, a)
    assert mean.item() == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_every_row_has_its_own_time() -> None:
    generator = torch.Generator().manual_seed(0)
    x, v = torch.randn(2, 4, 3, 5, generator=generator)
    times = step_times(torch.tensor([3, 0, 2, 1]), 4)
    together = sde_step(x, v, times, 4, A)
    for i in range(4):
        alone = sde_step(x[i : i + 1], v[i : i + 1], times[i : i + 1], 4, A)
        assert torch.equal(alone[0][0], together[0][i]) and torch.equal(alone[1][0], together[1][i])


def test_without_noise_it_is_the_ode() -> None:
    x, v = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(0))
    mean, std = sde_step(x, v, step_times(torch.arange(4), 4), 4, 0.0)
    torch.testing.assert_close(mean, ode_step(x, v, 4))
    assert not std.any()


# ---------------------------------------------------------------------------------------------------------- marginals
#
# Data from a normal distribution of mean m and deviation s, mixed with noise e: x = t e + (1 - t) d has mean (1 - t) m and
# variance V = t^2 + (1 - t)^2 s^2; cov(e - d, x) = t - (1 - t) s^2. So the velocity field E[e - d | x] is the line
# -m + (t - (1 - t) s^2) / V (x - (1 - t) m).


def velocity(x: Tensor, t: float, m: float, s: float) -> Tensor:
    slope = (t - (1 - t) * s * s) / (t * t + (1 - t) ** 2 * s * s)
    return -m + slope * (x - (1 - t) * m)


def test_velocity_field_is_the_regression_of_samples() -> None:
    generator = torch.Generator().manual_seed(0)
    noise, data = torch.randn(2, 400_000, generator=generator, dtype=torch.float64)
    m, s, t = 2.0, 0.5, 0.3
    data = m + s * data
    x, target = t * noise + (1 - t) * data, noise - data
    slope = ((x - x.mean()) * (target - target.mean())).mean() / x.var()
    line = velocity(torch.tensor([0.0, 1.0], dtype=torch.float64), t, m, s)
    assert slope.item() == pytest.approx((line[1] - line[0]).item(), abs=0.02)
    assert target.mean().item() == pytest.approx(velocity(x.mean(), t, m, s).item(), abs=0.01)


def propagate(step: Step, m: float, s: float, num_steps: int) -> tuple[float, float]:
    """Mean and deviation after all steps, every one noisy; exact, because a step is linear and its noise normal."""
    mean, variance = 0.0, 1.0
    points = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    for i in range(num_steps):
        t = 1 - i / num_steps
        times = torch.full((2,), t, dtype=torch.float64)
        line, std = step(points, velocity(points, t, m, s), times, num_steps, A)
        offset, slope = line[0].item(), (line[1] - line[0]).item()
        mean, variance = offset + slope * mean, slope**2 * variance + std.flatten()[0].item() ** 2
    return mean, math.sqrt(variance)


def noisy_ode(x: Tensor, v: Tensor, time: Tensor, num_steps: int, a: float) -> tuple[Tensor, Tensor]:
    """Wrong: noise without a correction of the drift."""
    return ode_step(x, v, num_steps), sde_step(x, v, time, num_steps, a)[1]


def wrong_sign(x: Tensor, v: Tensor, time: Tensor, num_steps: int, a: float) -> tuple[Tensor, Tensor]:
    """Wrong: the correction is added."""
    mean, std = sde_step(x, v, time, num_steps, a)
    return 2 * ode_step(x, v, num_steps) - mean, std


def printed(x: Tensor, v: Tensor, time: Tensor, num_steps: int, a: float) -> tuple[Tensor, Tensor]:
    """Wrong, as in the paper: the formula of a time that runs from data to noise, in a time that runs from noise to data."""
    tau, v, delta = (1 - time).view(-1, 1), -v, 1 / num_steps
    variance = a * a * tau / torch.where(tau < 1, 1 - tau, delta)
    correction = torch.where(tau > 0, variance / (2 * tau.clamp(min=1e-9)) * (x + (1 - tau) * v), 0)
    return x + delta * (v + correction), (variance * delta).sqrt()


def half_correction(x: Tensor, v: Tensor, time: Tensor, num_steps: int, a: float) -> tuple[Tensor, Tensor]:
    """Wrong: half of the correction."""
    mean, std = sde_step(x, v, time, num_steps, a)
    return (ode_step(x, v, num_steps) + mean) / 2, std


@pytest.mark.parametrize(("m", "s"), TARGETS)
def test_noisy_steps_keep_the_marginals(m: float, s: float) -> None:
    for num_steps in (100, 400, 1600):
        mean, std = propagate(sde_step, m, s, num_steps)
        assert mean == pytest.approx(m, abs=1e-9)
        assert std == pytest.approx(s, rel=5e-3)


@pytest.mark.parametrize("wrong", [noisy_ode, wrong_sign, printed, half_correction])
@pytest.mark.parametrize(("m", "s"), TARGETS)
def test_wrong_drifts_do_not_keep_the_marginals(m: float, s: float, wrong: Step) -> None:
    for num_steps in (100, 800):  # shorter steps do not help them
        mean, std = propagate(wrong, m, s, num_steps)
        assert abs(mean - m) > 0.05 or abs(std - s) > 0.05


@pytest.mark.parametrize(("m", "s"), TARGETS)
def test_samples_reach_the_data(m: float, s: float) -> None:
    count, num_steps = 100_000, 100
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(count, 1, generator=generator)
    for i in range(num_steps):
        time = step_times(torch.full((count,), i), num_steps)
        mean, std = sde_step(x, velocity(x, 1 - i / num_steps, m, s), time, num_steps, A)
        x = mean + std * torch.randn(count, 1, generator=generator)
    expected_mean, expected_std = propagate(sde_step, m, s, num_steps)
    assert x.mean().item() == pytest.approx(expected_mean, abs=4 * s / math.sqrt(count))
    assert x.std().item() == pytest.approx(expected_std, abs=4 * s / math.sqrt(2 * count))
    assert x.mean().item() == pytest.approx(m, abs=5 * s / math.sqrt(count))
    assert x.std().item() == pytest.approx(s, abs=6 * s / math.sqrt(2 * count))


# --------------------------------------------------------------------------------------------------------- densities


def test_densities_equal_those_of_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    sample, mean = 2 * torch.randn(2, 50, 4, generator=generator, dtype=torch.float64)
    std = 0.05 + torch.rand(50, 1, generator=generator, dtype=torch.float64)
    reference = Normal(mean, std)
    torch.testing.assert_close(gaussian_logprob(sample, mean, std), reference.log_prob(sample))
    torch.testing.assert_close(gaussian_entropy(std).expand(50, 4), reference.entropy())


def test_density_by_hand() -> None:
    one, two = torch.tensor(1.0), torch.tensor(2.0)
    # (5 - 1) / 2 = 2 deviations from the mean
    assert gaussian_logprob(torch.tensor(5.0), one, two).item() == pytest.approx(-2 - 0.918939 - math.log(2), abs=1e-5)
    assert gaussian_entropy(one).item() == pytest.approx(1.418939, abs=1e-5)


def test_learned_deviations_stay_in_their_range() -> None:
    low, high = NOISE_STD_RANGE
    raw = torch.linspace(-30, 30, 4001, dtype=torch.float64)
    std = noise_std(raw)
    assert std.min().item() == pytest.approx(low) and std.max().item() == pytest.approx(high)
    assert (std.diff() >= 0).all() and (std.diff()[1900:2100] > 0).all()
    middle = noise_std(torch.zeros(1)).item()
    assert middle == pytest.approx(math.sqrt(low * high))  # the middle of the logarithms
    assert noise_std(torch.tensor([0.5]).atanh()).item() == pytest.approx(low * (high / low) ** 0.75)
    assert noise_std(torch.tensor([-math.inf, math.inf])).tolist() == [pytest.approx(low), pytest.approx(high)]
