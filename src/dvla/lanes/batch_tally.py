"""What a batch was like, added up over its groups and all ranks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from dvla.rl.episodes import episode_returns
from dvla.rl.losses import LossStats

if TYPE_CHECKING:
    from torch import Tensor

    from dvla.planes.transport import Parcel


@dataclass(slots=True)
class BatchTally:
    """Counts of one batch on one rank, or after `reduce` on all."""

    episodes: float = 0
    successes: float = 0
    return_sum: float = 0
    env_steps: float = 0
    decisions: float = 0
    groups: float = 0
    groups_dropped: float = 0
    staleness_sum: float = 0
    trained_decisions: float = 0
    worker_restarts: float = 0
    groups_moved: float = 0
    """Ordered from another sampling rank than whose turn it was."""
    staleness_max: float = 0
    logprob_gap_max: float = -1
    """-1 while no decision was made with the weights that train."""
    loss: LossStats = field(default_factory=LossStats.zeros)

    def add_episodes(self, group: Parcel, slots: dict[str, Tensor]) -> tuple[Tensor, float]:
        """Count a finished group; its returns (G,) float64 and the share of its episodes that succeeded."""
        members = torch.tensor(group.slots)
        lengths = slots["num_decisions"][members]
        returns = episode_returns(slots["rewards"][members], lengths)
        self.groups += 1
        self.episodes += len(members)
        successes = float(slots["success"][members].sum())
        self.successes += successes
        self.return_sum += float(returns.sum())
        self.env_steps += float(episode_returns(slots["executed_steps"][members], lengths).sum())
        self.decisions += float(lengths.sum())
        return returns, successes / len(members)

    def add_staleness(self, staleness: Tensor) -> None:
        """Count the staleness (B,) int64 of decisions that are trained on."""
        self.trained_decisions += staleness.numel()
        self.staleness_sum += float(staleness.sum())
        self.staleness_max = max(self.staleness_max, float(staleness.max()))

    def reduce(self, group: dist.ProcessGroup) -> None:
        """Join the tallies of all ranks; collective over the group of the training ranks."""
        sums = [name for name in _SUMS if name not in _MAXIMA]
        added = torch.tensor([getattr(self, name) for name in sums], dtype=torch.float64)
        added = torch.cat([added, self.loss.sums.cpu()])
        largest = torch.tensor([getattr(self, name) for name in _MAXIMA], dtype=torch.float64)
        largest = torch.cat([largest, self.loss.maxima.cpu()])
        dist.all_reduce(added, dist.ReduceOp.SUM, group=group)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        for name, value in [*zip(sums, added.tolist()), *zip(_MAXIMA, largest.tolist())]:  # noqa: B905 - losses follow
            setattr(self, name, value)
        self.loss = LossStats(added[len(sums) :], largest[len(_MAXIMA) :])

    def metrics(self) -> dict[str, float | None]:
        """Values by metric tag (docs/metrics.md)."""
        episodes = max(self.episodes, 1.0)
        return {
            "rollout/success_rate": self.successes / episodes,
            "rollout/return": self.return_sum / episodes,
            "rollout/episode_len": self.env_steps / episodes,
            "rollout/groups_dropped": self.groups_dropped,
            "rollout/worker_restarts": self.worker_restarts,
            "rollout/groups_moved": self.groups_moved,
            "staleness/mean": self.staleness_sum / max(self.trained_decisions, 1.0),
            "staleness/max": self.staleness_max,
            "train/logprob_gap": None if self.logprob_gap_max < 0 else self.logprob_gap_max,
            **self.loss.metrics(),
        }


_SUMS = tuple(name for name in BatchTally.__dataclass_fields__ if name != "loss")
_MAXIMA = ("staleness_max", "logprob_gap_max")
