"""What a batch was like, added up over its groups and all ranks."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from dvla.rl.advantages import has_signal
from dvla.rl.episodes import episode_returns
from dvla.rl.losses import LossStats
from dvla.telemetry.metrics import Histogram

if TYPE_CHECKING:
    from torch import Tensor

    from dvla.planes.transport import Parcel

# Fixed, so that ranks add up and runs compare. Zero, where there is no signal, is in the middle of a bin.
_ADVANTAGE_EDGES = tuple(half / 2 - 3.75 for half in range(16))
_STALENESS_EDGES = tuple(steps + 0.5 for steps in range(16))


def _no_counts(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float64)


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
    groups_without_signal: float = 0
    """Their episodes were all paid alike; dropped ones included."""
    groups_failed: float = 0
    """Those without signal in which no episode succeeded."""
    groups_succeeded: float = 0
    """Those in which every episode did."""
    agreement_sum: float = 0
    """Correlations of advantage and success within trained groups, summed."""
    groups_compared: float = 0
    """Trained groups that have such a correlation: both differ between episodes."""
    staleness_sum: float = 0
    trained_decisions: float = 0
    worker_restarts: float = 0
    groups_moved: float = 0
    """Ordered from another sampling rank than whose turn it was."""
    staleness_max: float = 0
    logprob_gap_max: float = -1
    """-1 while no decision was made with the weights that train."""
    tasks: Tensor = field(default_factory=lambda: _no_counts(1, 2))
    """(tasks, 2) float64: episodes and successes of each task."""
    advantage_counts: Tensor = field(default_factory=lambda: _no_counts(len(_ADVANTAGE_EDGES) + 1))
    """(bins,) float64: trained decisions by advantage."""
    staleness_counts: Tensor = field(default_factory=lambda: _no_counts(len(_STALENESS_EDGES) + 1))
    """(bins,) float64: trained decisions by staleness; the last bin is open."""
    loss: LossStats = field(default_factory=LossStats.zeros)

    @classmethod
    def zeros(cls, *, num_tasks: int, device: torch.device) -> BatchTally:
        """Make an empty tally; `device` is where the loss is computed."""
        return cls(tasks=_no_counts(num_tasks, 2), loss=LossStats.zeros(device))

    def add_episodes(self, group: Parcel, slots: dict[str, Tensor]) -> tuple[Tensor, float]:
        """Count a finished group; its returns (G,) float64 and the share of its episodes that succeeded."""
        members = torch.tensor(group.slots)
        lengths = slots["num_decisions"][members]
        returns = episode_returns(slots["rewards"][members], lengths)
        self.groups += 1
        self.episodes += len(members)
        successes = float(slots["success"][members].sum())
        self.successes += successes
        self.tasks[group.task] += torch.tensor([len(members), successes], dtype=torch.float64)
        if not has_signal(returns):
            self.groups_without_signal += 1
            self.groups_failed += successes == 0
            self.groups_succeeded += successes == len(members)
        self.return_sum += float(returns.sum())
        self.env_steps += float(episode_returns(slots["executed_steps"][members], lengths).sum())
        self.decisions += float(lengths.sum())
        return returns, successes / len(members)

    def add_trained(self, staleness: Tensor, advantages: Tensor) -> None:
        """Count decisions that are trained on: their staleness (B,) int64 and advantages (B,) float32."""
        self.trained_decisions += staleness.numel()
        self.staleness_sum += float(staleness.sum())
        self.staleness_max = max(self.staleness_max, float(staleness.max()))
        for counts, values, edges in (
            (self.staleness_counts, staleness, _STALENESS_EDGES),
            (self.advantage_counts, advantages, _ADVANTAGE_EDGES),
        ):
            bins = torch.bucketize(values.double(), torch.tensor(edges, dtype=torch.float64), right=True)
            counts += torch.bincount(bins, minlength=len(counts))

    def add_agreement(self, advantages: Tensor, success: Tensor) -> None:
        """Count whether the advantages (G,) float32 of a trained group go with the success (G,) bool of its episodes."""
        centred = [values.double() - values.double().mean() for values in (advantages, success)]
        if all(has_signal(values) for values in centred):
            ours, theirs = centred
            self.agreement_sum += float(ours @ theirs / (ours.norm() * theirs.norm()))
            self.groups_compared += 1

    def reduce(self, group: dist.ProcessGroup) -> None:
        """Join the tallies of all ranks; collective over the group of the training ranks."""
        scalars = torch.tensor([getattr(self, name) for name in _SUMS], dtype=torch.float64)
        vectors = [getattr(self, name) for name in _VECTORS]
        parts = [scalars, self.loss.sums.cpu(), *(vector.flatten() for vector in vectors)]
        added = torch.cat(parts)
        largest = torch.tensor([getattr(self, name) for name in _MAXIMA], dtype=torch.float64)
        largest = torch.cat([largest, self.loss.maxima.cpu()])
        dist.all_reduce(added, dist.ReduceOp.SUM, group=group)
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=group)
        scalars, loss_sums, *flat = added.split([len(part) for part in parts])
        for name, value in [*zip(_SUMS, scalars.tolist()), *zip(_MAXIMA, largest.tolist())]:  # noqa: B905 - losses follow
            setattr(self, name, value)
        for name, vector, values in zip(_VECTORS, vectors, flat, strict=True):
            setattr(self, name, values.view_as(vector))
        self.loss = LossStats(loss_sums, largest[len(_MAXIMA) :])

    def metrics(self) -> dict[str, float | None]:
        """Values by metric tag (docs/metrics.md)."""
        episodes, groups = max(self.episodes, 1.0), max(self.groups, 1.0)
        values = {
            "rollout/success_rate": self.successes / episodes,
            "rollout/return": self.return_sum / episodes,
            "rollout/episode_len": self.env_steps / episodes,
            "rollout/zero_signal_frac": self.groups_without_signal / groups,
            "rollout/all_failed_frac": self.groups_failed / groups,
            "rollout/all_succeeded_frac": self.groups_succeeded / groups,
            "rollout/groups_dropped": self.groups_dropped,
            "rollout/worker_restarts": self.worker_restarts,
            "rollout/groups_moved": self.groups_moved,
            "staleness/mean": self.staleness_sum / max(self.trained_decisions, 1.0),
            "staleness/max": self.staleness_max,
            "train/logprob_gap": None if self.logprob_gap_max < 0 else self.logprob_gap_max,
            "train/groups_without_signal": self.groups_without_signal - self.groups_dropped,
            "train/groups_compared": self.groups_compared,
            "train/advantage_success": self.agreement_sum / self.groups_compared if self.groups_compared else None,
            **self.loss.metrics(),
        }
        if len(self.tasks) > 1:
            values |= {
                f"rollout/task_{task:02d}/success_rate": successes / episodes
                for task, (episodes, successes) in enumerate(self.tasks.tolist())
                if episodes
            }
        return values

    def histograms(self) -> dict[str, Histogram]:
        """Counts of the trained decisions by metric tag."""
        return {
            "train/advantage_hist": Histogram(_ADVANTAGE_EDGES, self.advantage_counts.tolist()),
            "staleness/hist": Histogram(_STALENESS_EDGES, self.staleness_counts.tolist()),
        }


_VECTORS = ("tasks", "advantage_counts", "staleness_counts")
_MAXIMA = ("staleness_max", "logprob_gap_max")
_SUMS = tuple(entry.name for entry in fields(BatchTally) if entry.name not in {*_VECTORS, *_MAXIMA, "loss"})
