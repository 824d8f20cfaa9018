"""Log-probabilities of flow-matching policies (pi_RL, arXiv 2510.25889), as pure functions.

Time runs from 1 (noise) to 0 (data): ``x_t = t noise + (1 - t) action`` with velocity ``v = noise - action``. N denoising
steps of length ``1/N`` start at ``t_i = 1 - i/N``. A step of the ODE has no density; two ways give it one:

* **Flow-SDE**: a step adds noise of ``sigma = a sqrt(t / (1 - t))`` and corrects the drift, so that the marginals stay those
  of the ODE. The drift printed in the paper (Eq. 8-9) mixes two conventions of time and diverges; this form does not.
* **Flow-Noise**: the ODE's mean with a learned standard deviation.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

NOISE_STD_RANGE = (0.08, 0.16)
"""Smallest and largest standard deviation that Flow-Noise can learn."""


def step_times(steps: Tensor, num_steps: int) -> Tensor:
    """Time at which denoising step `steps` (any shape, int64) of `num_steps` begins, float32."""
    return (num_steps - steps).float() / num_steps


def ode_step(x: Tensor, velocity: Tensor, num_steps: int) -> Tensor:
    """Where a noise-free step leads; shapes and dtype of `x`."""
    return x - velocity / num_steps


def sde_step(x: Tensor, velocity: Tensor, time: Tensor, num_steps: int, noise_level: float) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation of a Flow-SDE step.

    Args:
        x: (B, ...) samples at `time`.
        velocity: (B, ...) of the model there.
        time: (B,) in (0, 1]; at 1, where sigma has no value, it takes the one that a denominator of 1/N gives.
        num_steps: N.
        noise_level: a, positive.

    Returns:
        Mean (B, ...) and standard deviation, broadcastable to it.
    """
    delta = 1.0 / num_steps
    t = time.to(x.dtype).view(-1, *[1] * (x.dim() - 1))
    variance = noise_level**2 * t / torch.where(t < 1.0, 1.0 - t, delta)  # sigma squared
    mean = x - delta * velocity - (variance * delta / (2.0 * t)) * (x + (1.0 - t) * velocity)
    return mean, (variance * delta).sqrt()


def noise_std(raw: Tensor) -> Tensor:
    """Standard deviation of Flow-Noise from the noise head's output, within `NOISE_STD_RANGE`."""
    low, high = (2.0 * math.log(std) for std in NOISE_STD_RANGE)
    return (0.5 * (low + (high - low) * (torch.tanh(raw) + 1.0) / 2.0)).exp()


def gaussian_logprob(sample: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Logarithm of the normal density, elementwise; the three are broadcast."""
    return -0.5 * (((sample - mean) / std).square() + math.log(2.0 * math.pi)) - std.log()


def gaussian_entropy(std: Tensor) -> Tensor:
    """Entropy of a normal distribution, elementwise, nats."""
    return std.log() + 0.5 * math.log(2.0 * math.pi * math.e)
