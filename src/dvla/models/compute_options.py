"""How a policy is computed, without changing what it computes: activation checkpointing and torch.compile."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from dvla.config import ConfigError


def checkpoint_activations(policy: Any) -> None:
    """Keep only the inputs of each transformer layer for the backward pass, and compute the rest again.

    Raises:
        ConfigError: The policy has no such layers.
    """
    layers = [module for module in policy.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError("runtime.activation_checkpointing: this model has no transformer layers")
    for layer in layers:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False)


def compile_layers(policy: Any) -> None:
    """Compile the transformer layers with torch.compile, each for itself: compiled once, used by all that are alike."""
    for module in policy.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.compile(dynamic=True)
