"""The contract between a model and the lanes: implement `Policy` to train your own.

A policy is an ``nn.Module``. The inference lane calls `act` on a plain replica; the learner calls the module itself
(`forward`), so that FSDP2's hooks run, and gets the log-probabilities of the same decisions again. Both must agree to
rounding when the weights are the same: same temperature, masks, padding and dtype.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Observation:
    """A batch of B observations, on the policy's device."""

    images: Tensor
    """(B, cameras, H, W, 3) uint8 RGB; cameras may be 0."""
    state: Tensor
    """(B, state_dim) float32."""
    task: Tensor
    """(B,) int64, an index into the environment's instructions."""


@dataclass(frozen=True, slots=True)
class Decision:
    """A batch of B decisions: one chunk of K actions of A dimensions each."""

    actions: Tensor
    """(B, K, A) float32 in [-1, 1]: what the simulator executes."""
    logprobs: Tensor
    """(B, K, A) float32: log-probability of each action element under the behaviour policy."""
    record: dict[str, Tensor]
    """What `forward` needs to find these log-probabilities again, keys and shapes as in `Policy.record_spec`."""


@dataclass(frozen=True, slots=True)
class RecordField:
    """Shape (without the batch axis) and dtype of one entry of a decision's record."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class Policy(Protocol):
    """A trainable policy; implementations are ``nn.Module``s.

    One of your own is made by ``MyPolicy(preset=…, spec=EnvSpec, num_action_chunks=…, temperature=…, **model.options)``.
    An attribute ``reads_images = False`` spares it the pictures, if it has no use for them.
    A method ``freezable() -> dict[str, list[nn.Module]]`` may name parts for ``model.freeze``.
    """

    record_spec: dict[str, RecordField]

    def act(self, obs: Observation, keys: Tensor, *, greedy: bool = False) -> Decision:
        """Choose one action chunk per observation.

        Args:
            obs: B observations.
            keys: (B,) int64 noise keys, see `dvla.rl.noise`: all randomness must come from them, so that a decision
                does not depend on which others share its batch.
            greedy: Choose the likeliest actions, for evaluation; log-probabilities and record mean nothing then.
        """

    def forward(self, obs: Observation, record: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies (B, K, A) float32 of recorded decisions, differentiable."""

    def fsdp_units(self) -> list[torch.nn.Module]:
        """Submodules to shard as units of their own, in forward order; the rest goes to the root unit."""


def reads_images(policy: Policy) -> bool:
    """Whether a policy looks at pictures: all do, but those with an attribute of this name that says they do not."""
    return getattr(policy, "reads_images", True)


class Assessor(Policy, Protocol):
    """A policy with a feature that a value head (`dvla.models.value_head`) can judge states by: what PPO needs."""

    value_feature_size: int
    """Elements F of the feature."""

    def evaluate(self, obs: Observation, record: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Log-probabilities and entropies as of `forward`, and the feature (B, F) of the same pass, differentiable."""

    def value_feature(self, obs: Observation) -> Tensor:
        """The feature (B, F) alone; it depends on nothing but the observation."""


class Imitator(Policy, Protocol):
    """A policy that can be trained by behaviour cloning, too (`dvla.cloning`)."""

    num_imitated_steps: int
    """Control steps H whose actions one sample gives."""

    def imitation_loss(self, obs: Observation, actions: Tensor, keys: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        """How far the policy is from demonstrated actions.

        Args:
            obs: B observations.
            actions: (B, H, A) float32, what the demonstrator did from there on, in the environment's units. Steps beyond
                the end of an episode are the caller's to leave out.
            keys: (B,) int64 noise keys: all randomness must come from them.

        Returns:
            The loss (B, H, A) float32, differentiable; the absolute error (B, H, A) of the policy's best guess in
            the environment's units; and whether that is the demonstrated action (B, H, A) bool, None where actions are no
            choice among few.
        """
