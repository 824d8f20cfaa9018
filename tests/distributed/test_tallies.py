"""Tallies of two ranks join to what one rank with all groups would have counted."""

from types import SimpleNamespace

import pytest
import torch
from ranks import run_ranks

from dvla.lanes.batch_tally import BatchTally


def count(ranks):
    """A tally of what each of `ranks` has: another task, another outcome, other decisions, and one more of them."""
    tally = BatchTally.zeros(num_tasks=3, device=torch.device("cpu"))
    for rank in ranks:
        group = SimpleNamespace(slots=(0, 1), task=rank)
        slots = {
            "num_decisions": torch.tensor([1, 1]),
            "rewards": torch.tensor([[0.0], [float(rank)]]),
            "success": torch.tensor([0, rank], dtype=torch.uint8),
            "executed_steps": torch.tensor([[3], [4 + rank]]),
        }
        tally.add_episodes(group, slots)
        decisions = torch.arange(2 + rank)
        tally.add_trained(decisions + rank, decisions - 0.5)
        tally.add_agreement(torch.tensor([-1.0, 1.0]), slots["success"])
        tally.logprob_gap_max = max(tally.logprob_gap_max, 0.25 * rank)
        tally.loss.sums += torch.arange(len(tally.loss.sums)) * (rank + 1)
        tally.loss.maxima[0] = max(float(tally.loss.maxima[0]), 1.0 + rank)
    return tally


def reduce(world):
    tally = count([world.rank])
    tally.reduce(world.learners_pg)
    return tally.metrics(), tally.histograms(), tally.tasks.tolist()


@pytest.mark.distributed
def test_counts_and_histograms_of_two_ranks_add_up():
    whole = count([0, 1])
    first, second = run_ranks(reduce, 2)
    assert first == second
    metrics, histograms, tasks = first
    assert metrics == whole.metrics()
    assert histograms == whole.histograms()
    assert tasks == whole.tasks.tolist() == [[2, 0], [2, 1], [0, 0]]
    assert histograms["staleness/hist"].counts[:4] == [1, 2, 1, 1]
    assert sum(histograms["train/advantage_hist"].counts) == 5
    assert metrics["rollout/zero_signal_frac"] == metrics["rollout/all_failed_frac"] == 0.5
    assert metrics["train/advantage_success"] == pytest.approx(1.0)
    assert metrics["train/logprob_gap"] == 0.25
