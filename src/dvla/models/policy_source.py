"""From a config to a policy that can be filled with its weights: plain or sharded, on any device, in any dtype.

What checkpoints and adapters need is imported when they are asked for: a run of the perceptron must not pay for it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from dvla.config import ConfigError, ModelConfig
from dvla.envs.protocol import EnvSpec
from dvla.models.registry import build_policy, check_model, known_model

if TYPE_CHECKING:
    from dvla.models.normalization import Statistics


@dataclass(slots=True)
class PolicySource:
    """A plain policy and the way to its weights."""

    policy: Any
    """With weights on the CPU if they are random; on ``meta``, without any, if they come from a checkpoint."""
    load: Callable[[nn.Module], None] | None
    """Fills a policy made from this one once it has memory; None when the weights are there already."""
    frozen: list[str] = field(default_factory=list)
    """Names of modules that are frozen as a whole."""

    def replica(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        """A copy on `device` in `dtype`."""
        if self.load is None:
            return copy.deepcopy(self.policy).to(device, dtype)
        replica = copy.deepcopy(self.policy).to(dtype).to_empty(device=device)
        self.load(replica)
        return replica


def prepare_policy(
    model: ModelConfig,
    *,
    spec: EnvSpec,
    seed: int,
    without_weights: bool = False,
    statistics: Statistics | None = None,
) -> PolicySource:
    """Build what ``model`` describes, with its frozen parts and adapters.

    Args:
        model: The policy.
        spec: The environment it is for.
        seed: Of random weights.
        without_weights: Build it on ``meta`` in any case, to look at it only.
        statistics: Normalisation for random weights, or instead of the checkpoint's.

    Raises:
        ConfigError: A setting does not fit the model, the environment or the checkpoint.
    """
    load = None
    if model.checkpoint is None:
        with torch.device("meta") if without_weights else nullcontext():
            policy: Any = build_policy(
                model.name,
                model.preset,
                model.options,
                spec=spec,
                num_action_chunks=model.num_action_chunks,
                temperature=model.temperature,
                seed=seed,
                **({} if statistics is None else {"statistics": statistics}),
            )
    else:
        from dvla.models.checkpoint import build_from_checkpoint, open_checkpoint

        checkpoint = open_checkpoint(model, statistics=statistics)
        policy = build_from_checkpoint(known_model(model.name, "nano", {})[0], checkpoint, spec, model)

        def load(target: nn.Module) -> None:
            checkpoint.load(target, seed)

    frozen = _freeze(policy, model.freeze)
    if model.lora_rank:
        from dvla.models.lora import add_lora, initialise_new

        alpha = model.lora_rank if model.lora_alpha is None else model.lora_alpha
        add_lora(policy, rank=model.lora_rank, alpha=alpha, targets=model.lora_targets)
        if load is None and not without_weights:
            initialise_new({n: p for n, p in policy.named_parameters() if ".lora_" in n}, seed)
    if not any(parameter.requires_grad for parameter in policy.parameters()):
        raise ConfigError("model.freeze leaves nothing to train")
    return PolicySource(policy, load, frozen)


def check_policy(model: ModelConfig, cameras: tuple[str, ...], action_dim: int | None = None) -> None:
    """Find what is wrong with the model's settings and checkpoint before a simulator starts.

    The environment is not known yet: this one has the cameras of the config, and the sizes of the checkpoint.

    Args:
        model: The policy.
        cameras: The environment's.
        action_dim: Length of the environment's actions, if it is known without starting it.

    Raises:
        ConfigError: As `prepare_policy`, as far as it does not depend on the environment.
    """
    state_dim = 8
    if model.checkpoint is None and ":" in model.name:
        check_model(model.name, model.preset, model.options)
        return
    if model.checkpoint is not None:
        from dvla.models.checkpoint import open_checkpoint

        checkpoint = open_checkpoint(model)
        state_dim = checkpoint.state_dim or state_dim
        if checkpoint.statistics is not None:
            action_dim = action_dim or len(checkpoint.statistics.action.low)
    spec = EnvSpec(
        name="the environment",
        cameras=cameras,
        image_size=(64, 64) if cameras else (0, 0),
        state_dim=state_dim,
        action_dim=action_dim or 7,
        max_episode_steps=1,
        instructions=("move",),
        gripper_open=1.0,
    )
    prepare_policy(model, spec=spec, seed=0, without_weights=True)


def _freeze(policy: Any, names: tuple[str, ...]) -> list[str]:
    """Freeze the named parts; the names of their modules."""
    parts: dict[str, list[nn.Module]] = policy.freezable() if hasattr(policy, "freezable") else {}
    chosen: list[nn.Module] = []
    for name in names:
        if name not in parts:
            raise ConfigError(f"model.freeze: this model has no part {name!r}; it has: {', '.join(parts) or 'none'}")
        chosen += parts[name]
    for module in chosen:
        module.requires_grad_(False)
    return [name for name, module in policy.named_modules() if any(module is other for other in chosen)]
