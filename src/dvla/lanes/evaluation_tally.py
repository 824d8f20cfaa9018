"""What an evaluation round has shown so far, per task, over all ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

if TYPE_CHECKING:
    from collections.abc import Sequence

    from dvla.lanes.evaluation_episodes import Outcome


class EvaluationTally:
    """Adds up the outcomes of one round.

    Args:
        num_states: Episodes of each task that make a whole round.
        version: Weights the round began with.
    """

    def __init__(self, num_states: Sequence[int], version: int) -> None:
        self.version = version
        self._wanted = sum(num_states)
        # by task: episodes, successes, control steps, reward
        self._own = torch.zeros(len(num_states), 4, dtype=torch.float64)
        self._all = self._own.clone()
        self._versions = torch.tensor([version])  # the newest that decided

    def add(self, outcome: Outcome) -> None:
        """Count an episode that was reported to this rank."""
        self._own[outcome.task] += torch.tensor([1.0, outcome.success, outcome.steps, outcome.reward]).double()
        self._versions = self._versions.clamp(min=outcome.last_version)

    def num_own(self) -> int:
        """Episodes reported to this rank so far."""
        return int(self._own[:, 0].sum())

    def reduce(self, group: dist.ProcessGroup) -> bool:
        """Join the ranks' counts; whether the round is complete. Collective over the training ranks."""
        self._all = self._own.clone()
        dist.all_reduce(self._all, dist.ReduceOp.SUM, group=group)
        dist.all_reduce(self._versions, dist.ReduceOp.MAX, group=group)
        return int(self._all[:, 0].sum()) == self._wanted

    def metrics(self) -> dict[str, float]:
        """Values of all ranks by metric tag (docs/metrics.md); after `reduce`."""
        episodes, successes, steps, reward = self._all.sum(0).tolist()
        values = {
            "eval/success_rate": successes / episodes,
            "eval/return": reward / episodes,
            "eval/episode_len": steps / episodes,
            "eval/version": float(self.version),
            "eval/newest_version": float(self._versions),
        }
        if len(self._all) > 1:
            values |= {
                f"eval/task_{task:02d}/success_rate": float(row[1] / row[0])
                for task, row in enumerate(self._all)
                if row[0]
            }
        return values
