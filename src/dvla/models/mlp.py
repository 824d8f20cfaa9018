"""A small Gaussian policy on the state vector: for environments without images, tests and smoke runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dvla.envs.protocol import EnvSpec
from dvla.models.policy import Decision, Observation, RecordField
from dvla.rl.noise import normal

_ACTIVATIONS: dict[str, type[nn.Module]] = {"tanh": nn.Tanh, "silu": nn.SiLU}
_LAST_LAYER_SCALE = 0.01  # of the usual initial weights: actions start near zero, whatever the state


@dataclass(frozen=True, kw_only=True, slots=True)
class MLPConfig:
    """Sizes of the perceptron."""

    hidden_sizes: Sequence[int] = (256, 256, 256)
    """Width of each hidden layer."""
    activation: str = "tanh"
    """``tanh`` or ``silu``."""
    initial_std: float = 0.6
    """Initial standard deviation of every action element, > 0; actions live in [-1, 1]."""

    def __post_init__(self) -> None:
        if self.activation not in _ACTIVATIONS:
            raise ValueError(f"activation must be one of {', '.join(_ACTIVATIONS)}, got {self.activation!r}")
        if not self.hidden_sizes or min(self.hidden_sizes) < 1:
            raise ValueError(f"hidden_sizes must name at least one positive width, got {self.hidden_sizes}")
        if self.initial_std <= 0:
            raise ValueError(f"initial_std must be positive, got {self.initial_std}")


PRESETS: dict[str, MLPConfig] = {
    "nano": MLPConfig(hidden_sizes=(64, 64)),
    "default": MLPConfig(),
}


class MLPPolicy(nn.Module):
    """The policy; implements `dvla.models.policy.Policy`.

    Every action element has its own mean, a function of the state, and its own learned standard deviation, which is not.
    The record holds the raw sample; the environment gets it clipped to [-1, 1]. Log-probabilities are of the raw sample:
    clipping belongs to the environment.
    """

    reads_images = False

    def __init__(self, config: MLPConfig, *, spec: EnvSpec, num_action_chunks: int, temperature: float) -> None:
        """Build the model.

        Args:
            config: Sizes.
            spec: The environment: state and action sizes, and the number of tasks.
            num_action_chunks: Control steps K of one decision.
            temperature: Multiplies the variance, as dividing a density's logarithm does.
        """
        super().__init__()
        if not spec.state_dim:
            raise ValueError(f"model.name: mlp acts on the state vector, but {spec.name} has none")
        if temperature <= 0:
            raise ValueError(f"temperature must be positive, got {temperature}")
        self.temperature = temperature
        self.num_tasks = len(spec.instructions)
        shape = (num_action_chunks, spec.action_dim)
        self.record_spec = {"sample": RecordField(shape, torch.float32)}

        # One task needs no name; of several, the policy is told which by a one-hot code.
        width = spec.state_dim + (self.num_tasks if self.num_tasks > 1 else 0)
        layers: list[nn.Module] = []
        for hidden in config.hidden_sizes:
            layers += [nn.Linear(width, hidden), _ACTIVATIONS[config.activation]()]
            width = hidden
        last = nn.Linear(width, math.prod(shape))
        with torch.no_grad():
            last.weight *= _LAST_LAYER_SCALE
            last.bias.zero_()
        self.net = nn.Sequential(*layers, last)
        self.value_feature_size = width
        self.log_std = nn.Parameter(torch.full(shape, math.log(config.initial_std)))

    def act(self, obs: Observation, keys: Tensor, *, greedy: bool = False) -> Decision:
        """Sample one action chunk per observation, see `dvla.models.policy.Policy.act`."""
        with torch.no_grad():
            mean, log_std = self._gaussian(self._hidden(obs))
            sample = mean if greedy else mean + log_std.exp() * normal(keys, *log_std.shape)
            return Decision(
                actions=sample.clamp(-1, 1),
                logprobs=_log_density(sample, mean, log_std),
                record={"sample": sample},
            )

    def forward(self, obs: Observation, record: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of recorded samples, see `dvla.models.policy.Policy.forward`."""
        return self.evaluate(obs, record)[:2]

    def evaluate(self, obs: Observation, record: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """The same and the last hidden layer, see `dvla.models.policy.Assessor.evaluate`."""
        hidden = self._hidden(obs)
        mean, log_std = self._gaussian(hidden)
        entropy = log_std + 0.5 * (1 + math.log(2 * math.pi))
        # A copy, because FSDP2 warns of modules that return views.
        return _log_density(record["sample"], mean, log_std), entropy.expand_as(mean).clone(), hidden

    def fsdp_units(self) -> list[nn.Module]:
        """None: the whole model is one small unit."""
        return []

    def value_feature(self, obs: Observation) -> Tensor:
        """The last hidden layer (B, F)."""
        return self._hidden(obs)

    def _hidden(self, obs: Observation) -> Tensor:
        features = obs.state.to(self.log_std.dtype)
        if self.num_tasks > 1:
            code = nn.functional.one_hot(obs.task, self.num_tasks).to(features.dtype)
            features = torch.cat((features, code), dim=-1)
        return self.net[:-1](features)

    def _gaussian(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Mean (B, K, A) and log standard deviation (K, A), float32, from the last hidden layer."""
        mean = self.net[-1](hidden).float().unflatten(-1, self.log_std.shape)
        return mean, self.log_std.float() + 0.5 * math.log(self.temperature)


def _log_density(sample: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """Logarithm of the normal density, elementwise."""
    deviation = (sample - mean) * (-log_std).exp()
    return -0.5 * (deviation.square() + math.log(2 * math.pi)) - log_std
