"""What a batch was like is counted as one would by hand."""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from metric_tags import documented

from dvla.lanes.batch_tally import BatchTally

CPU = torch.device("cpu")


def slots_of(rewards: list[list[float]], success: list[int]) -> dict[str, torch.Tensor]:
    count, decisions = len(rewards), len(rewards[0])
    return {
        "num_decisions": torch.full((count,), decisions),
        "rewards": torch.tensor(rewards),
        "success": torch.tensor(success, dtype=torch.uint8),
        "executed_steps": torch.full((count, decisions), 8),
    }


def tally_of(*groups: tuple[int, list[float], list[int]], num_tasks: int = 1) -> BatchTally:
    """A tally of groups: task, and return and success of each episode."""
    tally = BatchTally.zeros(num_tasks=num_tasks, device=CPU)
    for task, returns, success in groups:
        parcel: Any = SimpleNamespace(slots=tuple(range(len(returns))), task=task)
        tally.add_episodes(parcel, slots_of([[value] for value in returns], success))
    return tally


def test_groups_without_a_signal_by_how_they_ended() -> None:
    tally = tally_of(
        (0, [0.0, 0.0], [0, 0]),
        (0, [1.0, 1.0], [1, 1]),
        (0, [0.5, 0.5], [0, 1]),
        (0, [0.0, 1.0], [0, 1]),
        (0, [0.2, 0.3], [0, 0]),  # no success, but a signal
    )
    tally.groups_dropped = 2
    values = tally.metrics()
    assert values["rollout/zero_signal_frac"] == 3 / 5
    assert values["rollout/all_failed_frac"] == values["rollout/all_succeeded_frac"] == 1 / 5
    assert values["train/groups_without_signal"] == 1
    assert "rollout/task_00/success_rate" not in values


def test_success_of_each_task_that_was_played() -> None:
    values = tally_of((0, [0.0, 1.0], [0, 1]), (2, [1.0, 1.0], [1, 1]), (0, [0.0, 0.0], [0, 0]), num_tasks=3).metrics()
    assert {tag: value for tag, value in values.items() if "/task_" in tag} == {
        "rollout/task_00/success_rate": 1 / 4,
        "rollout/task_02/success_rate": 1.0,
    }


def test_histograms_by_hand() -> None:
    tally = BatchTally.zeros(num_tasks=1, device=CPU)
    tally.add_trained(torch.tensor([0, 0, 1, 15]), torch.tensor([0.0, 1.5, -0.5, -0.5]))
    tally.add_trained(torch.tensor([16, 40]), torch.tensor([9.0, -3.75]))
    histograms = tally.histograms()
    assert histograms["staleness/hist"].counts == [2, 1, *[0] * 13, 1, 2]
    # Bins of advantages: below -3.75, then half a unit each; 0 is in the middle one, the ninth.
    assert histograms["train/advantage_hist"].counts == [0, 1, 0, 0, 0, 0, 0, 2, 1, 0, 0, 1, 0, 0, 0, 0, 1]
    assert (tally.trained_decisions, tally.staleness_sum, tally.staleness_max) == (6, 72, 40)


@given(st.lists(st.tuples(st.integers(0, 30), st.floats(-10, 10, width=32)), min_size=1, max_size=40), st.data())
def test_histograms_count_every_decision_once_however_they_come(rows: list[tuple[int, float]], data: Any) -> None:
    cut = data.draw(st.integers(1, len(rows)))
    whole, parts = (BatchTally.zeros(num_tasks=1, device=CPU) for _ in range(2))
    for tally, pieces in ((whole, [rows]), (parts, [rows[:cut], rows[cut:]])):
        for piece in filter(None, pieces):
            staleness, advantages = zip(*piece, strict=True)
            tally.add_trained(torch.tensor(staleness), torch.tensor(advantages))
    assert whole.histograms() == parts.histograms()
    for tag, (edges, counts) in whole.histograms().items():
        assert sum(counts) == len(rows)
        values = [row[tag == "train/advantage_hist"] for row in rows]
        limits = [float("-inf"), *edges, float("inf")]
        assert counts == [sum(low <= value < high for value in values) for low, high in pairwise(limits)]


@pytest.mark.parametrize(
    ("advantages", "success", "expected"),
    [
        ([1.5, -0.5, -0.5, -0.5], [1, 0, 0, 0], 1.0),
        ([-1.5, 0.5, 0.5, 0.5], [1, 0, 0, 0], -1.0),
        ([1.0, -1.0, 1.0, -1.0], [1, 1, 0, 0], 0.0),
        ([2.0, -2.0, 0.0, 0.0], [1, 0, 0, 0], 2 / (8 * 3 / 4) ** 0.5),
        ([1.0, -1.0, 0.0, 0.0], [1, 1, 1, 1], None),
        ([0.0, 0.0, 0.0, 0.0], [1, 0, 0, 0], None),
    ],
)
def test_agreement_of_advantage_and_success(
    advantages: list[float], success: list[int], expected: float | None
) -> None:
    tally = BatchTally.zeros(num_tasks=1, device=CPU)
    tally.add_agreement(torch.tensor(advantages), torch.tensor(success, dtype=torch.uint8))
    value = tally.metrics()["train/advantage_success"]
    assert value == (None if expected is None else pytest.approx(expected))
    assert tally.groups_compared == (expected is not None)


def test_every_tag_is_documented() -> None:
    tally = tally_of((0, [0.0, 1.0], [0, 1]), num_tasks=2)
    tags = [*tally.metrics(), *tally.histograms(), "health/warnings", "health/success_trend"]
    assert [tag for tag in tags if not any(pattern.fullmatch(tag) for pattern in documented())] == []
