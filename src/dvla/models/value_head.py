"""The value head of PPO: what a state is worth, from a feature of the policy.

It belongs to the learner alone: it is in its checkpoints and its optimiser, and neither travels nor is exported.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from dvla.models.weight_map import fill_parameter

_HIDDEN = (256, 128)


class ValueHead(nn.Module):
    """Perceptron from a feature (B, F) to values (B, S) float32: S = 1 (of the decision) or K (of each control step)."""

    def __init__(self, num_features: int, num_values: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(num_features, elementwise_affine=False)  # hidden states of transformers are large
        self.net = nn.Sequential(
            nn.Linear(num_features, _HIDDEN[0]),
            nn.GELU(),
            nn.Linear(_HIDDEN[0], _HIDDEN[1]),
            nn.GELU(),
            nn.Linear(_HIDDEN[1], num_values),
        )

    def forward(self, feature: Tensor) -> Tensor:
        """Values (B, S)."""
        return self.net(self.norm(feature.float()))

    def initialise(self, seed: int) -> None:
        """Draw the weights, plain or sharded, from `seed`; all values begin at 0, where most returns are, too."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            full = torch.zeros(parameter.shape)
            if parameter.ndim == 2 and not name.startswith(f"net.{len(self.net) - 1}."):
                full.normal_(std=1.0 / math.sqrt(parameter.shape[1]), generator=generator)
            fill_parameter(parameter, full)
