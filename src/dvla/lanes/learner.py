"""The learner: the sharded policy, its optimiser, and what one micro-batch and one step do to them. No threads, no lanes."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from dvla.config import ConfigError
from dvla.models.reference import reference_copy, reference_without_adapters, trains_adapters_only
from dvla.models.sharding import shard_policy
from dvla.rl.learning_rate import lr_factor
from dvla.rl.losses import LogprobType, LossSettings, LossStats, Objective, policy_loss
from dvla.rl.value_loss import value_loss

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn
    from torch.distributed.device_mesh import DeviceMesh

    from dvla.config import AlgoConfig, RuntimeConfig
    from dvla.models.policy import Observation
    from dvla.models.reference import Reference
    from dvla.runtime.world import World


@dataclass(slots=True)
class MicroBatch:
    """B decisions to train on, on the learner's device."""

    observation: Observation
    record: dict[str, Tensor]
    behavior_logprobs: Tensor
    """(B, K, A) float32."""
    prox_logprobs: Tensor | None
    """(B, K, A) float32 under the weights just before the batch's first update; None while these are in use."""
    advantages: Tensor
    """(B,) float32, or (B, K) of each control step."""
    weights: Tensor
    """(B,) float32; 0 for padding."""
    action_mask: Tensor
    """(B, K) bool: control steps that were executed."""
    is_current: Tensor
    """(B,) bool: decided with the very weights the learner has now."""
    old_values: Tensor | None = None
    """(B, S) float32 before the batch's first update, with a value head of S values a decision."""
    returns: Tensor | None = None
    """(B, S) float32: what they are to become."""


class Learner:
    """Owns parameters, gradients and optimiser state of one rank.

    Args:
        policy: The plain fp32 policy as the run begins, on the rank's device or on ``meta``; it is sharded in place.
        world: Ranks and mesh.
        algo: Loss and optimiser settings.
        runtime: Precision, gradient traffic, how to compute.
        frozen: Names of modules that are frozen as a whole.
        load: Fills the sharded policy with its weights; None when it has them.
        num_values: Values of a decision that a value head gives; 0 for none.
        seed: Of the value head's weights.

    Raises:
        ConfigError: The policy has no feature for a value head.
    """

    def __init__(
        self,
        policy: nn.Module,
        world: World,
        algo: AlgoConfig,
        runtime: RuntimeConfig,
        *,
        frozen: Sequence[str] = (),
        load: Callable[[nn.Module], None] | None = None,
        num_values: int = 0,
        seed: int = 0,
    ) -> None:
        self._algo = algo
        self._sync_always = runtime.sync_every_micro_batch
        self.device = world.device
        # Copied before anything happens to the policy; a checkpoint that is resumed from comes later, too.
        keeps_copy = algo.reference_kl_coef > 0 and not trains_adapters_only(policy)
        first = copy.deepcopy(policy).requires_grad_(False) if keeps_copy else None
        if runtime.activation_checkpointing or runtime.compile_learner:
            # Imports transformers, which not every model needs.
            from dvla.models.compute_options import checkpoint_activations, compile_layers

            if runtime.activation_checkpointing:
                checkpoint_activations(policy)
            if runtime.compile_learner:
                compile_layers(policy)
        if num_values:
            _add_value_head(policy, num_values, world.learner_mesh)

        def shard(policy: nn.Module, *, reshard_after_forward: bool) -> Any:
            mesh, precision = world.learner_mesh, runtime.precision
            model = shard_policy(
                policy, mesh, precision=precision, reshard_after_forward=reshard_after_forward, frozen=frozen
            )
            if load is not None:
                model.to_empty(device=world.device)
                load(model)
            return model

        self.model = shard(policy, reshard_after_forward=self._sync_always)
        self._reference: Reference | None = None
        if first is not None:
            self._reference = reference_copy(shard(first, reshard_after_forward=True), self.model, frozen)
        elif algo.reference_kl_coef:
            self._reference = reference_without_adapters(self.model)
        self.model.train()
        self._has_values = num_values > 0
        if self._has_values:
            self.model.value_head.initialise(seed)
            for method in ("evaluate", "value_feature"):
                register_fsdp_forward_method(self.model, method)
        self._trainable = [p for p in self.model.parameters() if p.requires_grad]
        names = [name for name, p in self.model.named_parameters() if p.requires_grad]
        rates = [algo.value_lr if name.startswith("value_head.") else algo.lr for name in names]
        self._rates = sorted(set(rates))
        groups = [[p for p, own in zip(self._trainable, rates, strict=True) if own == rate] for rate in self._rates]
        self.optimizer = torch.optim.AdamW(
            [{"params": group} for group in groups],
            lr=algo.lr,
            betas=algo.adam_betas,
            weight_decay=algo.weight_decay,
            fused=True,  # one call for all parameters, of which each costs more than its arithmetic
        )
        self._settings = LossSettings(
            logprob_type=cast("LogprobType", algo.logprob_type.name),
            objective=cast("Objective", algo.objective.name),
            clip_ratio_low=algo.clip_ratio_low,
            clip_ratio_high=algo.clip_ratio_high,
            dual_clip=algo.dual_clip,
            behavior_ratio_cap=algo.behavior_ratio_cap,
            entropy_coef=algo.entropy_coef,
            reference_kl_coef=algo.reference_kl_coef,
        )
        # FSDP averages gradients over ranks; the objective is a mean over all episodes of the batch, wherever they were
        # sampled and however they are cut. Both numbers are known beforehand, so no pass over the batch is needed.
        self._loss_scale = world.num_learners / (algo.groups_per_step * algo.group_size)

    def parameters(self) -> dict[str, Tensor]:
        """Named parameters, sharded."""
        return dict(self.model.named_parameters())

    def accumulate(self, batch: MicroBatch, *, is_last: bool) -> tuple[Tensor, LossStats, Tensor]:
        """Add the gradient of a micro-batch; all ranks must call it equally often, with the same `is_last`.

        Args:
            batch: The decisions.
            is_last: The step's last micro-batch: gradients are reduced over the ranks now.

        Returns:
            Log-probabilities (B, K, A) under the current weights, loss statistics, and the largest absolute difference
            of log-probabilities among the decisions made with these very weights (0-dim, -1 if there are none).
        """
        if not self._sync_always:
            self.model.set_requires_gradient_sync(is_last)
            self.model.set_reshard_after_backward(is_last)
        reference = None if self._reference is None else self._reference(batch.observation, batch.record)
        values = None
        if self._has_values:
            logprobs, entropy, feature = self.model.evaluate(batch.observation, batch.record)
            values = self.model.value_head(feature)
        else:
            logprobs, entropy = self.model(batch.observation, batch.record)
        loss, stats = policy_loss(
            logprobs,
            behavior_logprobs=batch.behavior_logprobs,
            prox_logprobs=batch.prox_logprobs,
            entropy=entropy,
            advantages=batch.advantages,
            weights=batch.weights,
            action_mask=batch.action_mask,
            settings=self._settings,
            reference_logprobs=reference,
        )
        if values is not None:
            assert batch.returns is not None
            assert batch.old_values is not None
            of_values = value_loss(
                values,
                returns=batch.returns,
                old_values=batch.old_values,
                weights=batch.weights,
                action_mask=batch.action_mask,
                value_clip=self._algo.value_clip,
            )
            stats.note_value_loss(of_values, batch.weights)
            loss = loss + self._algo.value_coef * of_values
        (loss * self._loss_scale).backward()
        logprobs = logprobs.detach()
        comparable = (batch.is_current & (batch.weights > 0))[:, None, None] & batch.action_mask[:, :, None]
        gap = (logprobs - batch.behavior_logprobs).abs().masked_fill(~comparable, -1.0).max()
        return logprobs, stats, gap

    @torch.no_grad()
    def values(self, observation: Observation) -> Tensor:
        """Values (B, S) float32 of B observations; all ranks must call it equally often."""
        return self.model.value_head(self.model.value_feature(observation))

    def step(self, policy_version: int) -> dict[str, float]:
        """Clip the gradient and take the optimiser step that follows `policy_version`.

        Raises:
            FloatingPointError: The gradient is not finite.
        """
        algo = self._algo
        factor = lr_factor(
            policy_version,
            warmup_steps=algo.warmup_steps,
            num_steps=algo.num_steps,
            schedule=algo.lr_schedule.value,
        )
        for parameters, rate in zip(self.optimizer.param_groups, self._rates, strict=True):
            parameters["lr"] = factor * rate
        norm = torch.nn.utils.clip_grad_norm_(self._trainable, self._algo.max_grad_norm)
        grad_norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        if not grad_norm < float("inf"):
            raise FloatingPointError(
                f"the gradient of optimiser step {policy_version + 1} is not finite ({grad_norm}): lower algo.lr, or "
                "look for NaN in observations and rewards"
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return {"train/grad_norm": grad_norm, "train/lr": factor * algo.lr}

    def abandon(self) -> None:
        """Forget gradients accumulated since the last step."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        self.optimizer.zero_grad(set_to_none=True)


def _add_value_head(policy: Any, num_values: int, mesh: DeviceMesh) -> None:
    """Give a plain policy a value head: a sharded unit of its own, in float32 whatever the policy computes in."""
    from dvla.models.value_head import ValueHead  # not every run needs one

    if not hasattr(policy, "value_feature_size"):
        raise ConfigError("algo.name=ppo: this model has no feature for a value head (dvla.models.policy.Assessor)")
    policy.value_head = ValueHead(policy.value_feature_size, num_values).to(next(policy.parameters()).device)
    fully_shard(policy.value_head, mesh=mesh, reshard_after_forward=False)
