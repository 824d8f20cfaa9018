"""PPO's part of the grpo lane: the values of a batch's decisions, and the advantages they make of its rewards.

Values are computed here, when a group has arrived, and not by inference: so they are of the newest weights, and nothing
travels. An episode that is over is worth nothing afterwards, also when its time ran out: the task is to succeed in time.
To go on with the value of the last observation there, as is right for tasks without end, makes failing as good as going
on, and under a sparse reward the values then feed on themselves: nothing is learnt.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from dvla.config import ValueType
from dvla.rl.gae import explained_variance, generalized_advantages, moments, normalize

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from dvla.config import Config
    from dvla.lanes.learner import Learner
    from dvla.planes.observations import SlotTensors
    from dvla.planes.transport import Parcel


def values_per_decision(config: Config) -> int:
    """Values S that a decision has: one, or one of each control step."""
    return config.model.num_action_chunks if config.algo.value_type is ValueType.action else 1


def decisions_of(members: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Slots and numbers (B,) int64 of the first `lengths` (G,) decisions of each of the slots `members` (G,)."""
    return members.repeat_interleave(lengths), torch.cat([torch.arange(length) for length in lengths.tolist()])


@dataclass(frozen=True, slots=True)
class Assessment:
    """What became of a group of G episodes of at most T decisions; (G, T, S) float32 each."""

    advantages: Tensor
    """Normalised over the batch of all ranks."""
    values: Tensor
    returns: Tensor


class Critic:
    """Judges groups.

    Args:
        config: The run.
        learner: With a value head.
        slots: The slot memory.
        group: Of the training ranks.
    """

    def __init__(self, config: Config, learner: Learner, slots: SlotTensors, group: dist.ProcessGroup) -> None:
        self._algo, self._learner, self._slots, self._group = config.algo, learner, slots, group
        self._size = values_per_decision(config)
        # By slot and decision, until the batch is trained on.
        self._values = torch.zeros(*slots.tensors["state"].shape[:2], self._size)

    def looks(self, group: Parcel) -> list[tuple[Tensor, Tensor]]:
        """The observations of a group that need a value, in micro-batches: slots and decisions, (B,) int64 each."""
        members = torch.tensor(group.slots)
        lengths = self._slots.tensors["num_decisions"][members]  # each has an observation
        size = self._algo.micro_batch_size
        return list(zip(*(column.split(size) for column in decisions_of(members, lengths)), strict=True))

    def value(self, looks: Sequence[tuple[Tensor, Tensor]], rounds: int) -> None:
        """Compute the values of `looks`; all ranks take part in as many `rounds`."""
        nothing = torch.zeros(1, dtype=torch.int64)
        for index in range(rounds):
            slots, decisions = looks[index] if index < len(looks) else (nothing, nothing)
            values = self._learner.values(self._slots.observation(slots, decisions))
            if index < len(looks):
                self._values[slots, decisions] = values.cpu()

    def assess(self, groups: Sequence[Parcel]) -> tuple[list[Assessment], dict[str, float]]:
        """Judge the whole batch, once all its values are there; collective over the training ranks.

        Returns:
            An assessment of each group, and metrics.
        """
        raw = [self._advantages(torch.tensor(group.slots)) for group in groups]
        batch = torch.stack([moments(advantages, returns, lengths) for advantages, returns, lengths in raw]).sum(0)
        dist.all_reduce(batch, dist.ReduceOp.SUM, group=self._group)
        explained = explained_variance(batch)
        assessments = []
        for group, (advantages, returns, _) in zip(groups, raw, strict=True):
            shape = (len(group.slots), -1, self._size)
            values = self._values[torch.tensor(group.slots)]
            assessments.append(Assessment(normalize(advantages, batch).view(shape), values, returns.view(shape)))
        return assessments, {} if explained is None else {"train/explained_variance": explained}

    def _advantages(self, members: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Advantages and returns (G, T S) of the episodes in the slots `members` (G,), and their lengths (G,)."""
        slots = self._slots.tensors
        num_decisions, values = slots["num_decisions"][members], self._values[members]
        # Every chunk but an episode's last is executed whole, so control steps follow each other without gaps.
        executed = slots["executed_steps"][members].gather(1, num_decisions[:, None] - 1).squeeze(1)
        lengths = num_decisions if self._size == 1 else (num_decisions - 1) * self._size + executed
        rewards = slots["rewards"] if self._size == 1 else slots["step_rewards"]
        advantages, returns = generalized_advantages(
            rewards[members].flatten(1),
            values.flatten(1),
            lengths=lengths,
            gamma=self._algo.gamma,
            gae_lambda=self._algo.gae_lambda,
        )
        return advantages, returns, lengths
