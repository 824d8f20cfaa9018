"""The learner: the sharded policy, its optimiser, and what one micro-batch and one step do to them. No threads, no lanes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from dvla.models.sharding import shard_policy
from dvla.rl.losses import LogprobType, LossSettings, LossStats, Objective, policy_loss

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor, nn

    from dvla.config import AlgoConfig, RuntimeConfig
    from dvla.models.policy import Observation
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
    """(B,) float32."""
    weights: Tensor
    """(B,) float32; 0 for padding."""
    action_mask: Tensor
    """(B, K) bool: control steps that were executed."""
    is_current: Tensor
    """(B,) bool: decided with the very weights the learner has now."""


def learning_rate(base: float, warmup_steps: int, policy_version: int) -> float:
    """Rate of the optimiser step that follows `policy_version`: linear warm-up, then constant."""
    return base * min(1.0, (policy_version + 1) / max(1, warmup_steps))


class Learner:
    """Owns parameters, gradients and optimiser state of one rank.

    Args:
        policy: The plain fp32 policy, on the rank's device or on ``meta``; it is sharded in place.
        world: Ranks and mesh.
        algo: Loss and optimiser settings.
        runtime: Precision, gradient traffic, how to compute.
        frozen: Names of modules that are frozen as a whole.
        load: Fills the sharded policy with its weights; None when it has them.
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
    ) -> None:
        self._algo = algo
        self._sync_always = runtime.sync_every_micro_batch
        if runtime.activation_checkpointing or runtime.compile_learner:
            # Imports transformers, which not every model needs.
            from dvla.models.compute_options import checkpoint_activations, compile_layers

            if runtime.activation_checkpointing:
                checkpoint_activations(policy)
            if runtime.compile_learner:
                compile_layers(policy)
        self.model = shard_policy(
            policy,
            world.learner_mesh,
            precision=runtime.precision,
            reshard_after_forward=self._sync_always,
            frozen=frozen,
        )
        if load is not None:
            self.model.to_empty(device=world.device)
            load(self.model)
        self.model.train()
        self.device = world.device
        self._trainable = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = torch.optim.AdamW(
            self._trainable, lr=algo.lr, betas=algo.adam_betas, weight_decay=algo.weight_decay
        )
        self._settings = LossSettings(
            logprob_type=cast("LogprobType", algo.logprob_type.name),
            objective=cast("Objective", algo.objective.name),
            clip_ratio_low=algo.clip_ratio_low,
            clip_ratio_high=algo.clip_ratio_high,
            dual_clip=algo.dual_clip,
            behavior_ratio_cap=algo.behavior_ratio_cap,
            entropy_coef=algo.entropy_coef,
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
        )
        (loss * self._loss_scale).backward()
        logprobs = logprobs.detach()
        comparable = (batch.is_current & (batch.weights > 0))[:, None, None] & batch.action_mask[:, :, None]
        gap = (logprobs - batch.behavior_logprobs).abs().masked_fill(~comparable, -1.0).max()
        return logprobs, stats, gap

    def step(self, policy_version: int) -> dict[str, float]:
        """Clip the gradient and take the optimiser step that follows `policy_version`.

        Raises:
            FloatingPointError: The gradient is not finite.
        """
        lr = learning_rate(self._algo.lr, self._algo.warmup_steps, policy_version)
        for parameters in self.optimizer.param_groups:
            parameters["lr"] = lr
        norm = torch.nn.utils.clip_grad_norm_(self._trainable, self._algo.max_grad_norm)
        grad_norm = float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
        if not grad_norm < float("inf"):
            raise FloatingPointError(
                f"the gradient of optimiser step {policy_version + 1} is not finite ({grad_norm}): lower algo.lr, or "
                "look for NaN in observations and rewards"
            )
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return {"train/grad_norm": grad_norm, "train/lr": lr}

    def abandon(self) -> None:
        """Forget gradients accumulated since the last step."""
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        self.optimizer.zero_grad(set_to_none=True)
