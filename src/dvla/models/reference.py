"""The policy as the run began, frozen: what the KL penalty keeps the trained one close to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dvla.models.policy import Observation

Reference = Callable[[Observation, dict[str, Tensor]], Tensor]
"""Log-probabilities (B, K, A) float32 of recorded decisions, without gradient; collective over the learner's mesh."""


def trains_adapters_only(policy: nn.Module) -> bool:
    """Whether switching the adapters off gives back the weights the run began with."""
    return all(".lora_" in name for name, parameter in policy.named_parameters() if parameter.requires_grad)


def reference_without_adapters(model: Any) -> Reference:
    """The learner's own sharded policy with its adapters switched off: costs no memory."""

    @torch.no_grad()
    def logprobs(obs: Observation, record: dict[str, Tensor]) -> Tensor:
        with _adapters_off(model):
            return model(obs, record)[0]

    return logprobs


def reference_copy(copy: Any, model: nn.Module, frozen: Sequence[str]) -> Reference:
    """A sharded copy, which shares with the learner's policy what neither of them trains.

    Args:
        copy: With the weights of the run's start; gathered only while it computes.
        model: The learner's policy.
        frozen: Names of modules that are frozen as a whole: every rank has them whole, and needs them only once.
    """
    for name in frozen:
        copy.set_submodule(name, model.get_submodule(name))

    @torch.no_grad()
    def logprobs(obs: Observation, record: dict[str, Tensor]) -> Tensor:
        found = copy(obs, record)[0]
        copy.reshard()
        return found

    return logprobs


@contextmanager
def _adapters_off(model: nn.Module) -> Iterator[None]:
    from peft.tuners.lora import LoraLayer  # not every run has adapters

    # Not by peft's own switch, which would also freeze and thaw parameters that FSDP manages.
    layers = [module for module in model.modules() if isinstance(module, LoraLayer)]
    for layer in layers:
        layer.set_scale("default", 0.0)
    try:
        yield
    finally:
        for layer in layers:
            layer.set_scale("default", 1.0)
