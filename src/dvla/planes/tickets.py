"""Tickets, and the book that admits groups of them.

A ticket is the order to run one episode. A group is `group_size` tickets of one task from one initial state. The book
numbers groups, decides when the next may start (`dvla.rl.admission`), and remembers at which version each began.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from dvla.rl.admission import choose_group, may_start
from dvla.rl.task_sampling import choose_task, running_success

if TYPE_CHECKING:
    from collections.abc import Sequence


@dataclass(frozen=True, slots=True)
class Ticket:
    """The order to run one episode."""

    id: int
    """Unique in the run; the key of all its noise."""
    group: int
    member: int
    task: int
    seed: int
    """Decides the initial state; the same for all members of a group."""
    greedy: bool = False
    """Whether the policy takes its likeliest actions, for evaluation, or explores."""
    film: int | None = None
    """Record a video of the episode, for the evaluation round of this version."""
    version: int = -1
    """Its decisions are made with these weights, or newer ones."""


def make_tickets(seed: int, group: int, group_size: int, task: int, version: int) -> list[Ticket]:
    """The tickets of group number `group`, which plays `task`; its initial state depends on (seed, group) alone."""
    rng = np.random.default_rng(np.random.SeedSequence((seed, group)))
    rng.random()  # of the task, see `TicketBook.start_group`
    init_seed = int(rng.integers(2**31))
    return [
        Ticket(group * group_size + member, group, member, task, init_seed, version=version)
        for member in range(group_size)
    ]


def cursor_after_reshard(cursors: Sequence[dict[str, Any]], learner: int, num_learners: int) -> dict[str, Any]:
    """Where the groups of a learner go on after a checkpoint.

    With as many learners as before, where they were. With others, past all groups that have begun: none is played twice, and
    none is left out unless drops had made one learner run ahead of another. Success rates are then the learners' mean.

    Args:
        cursors: Of each learner that there was, as `TicketBook.cursor` gives it.
        learner: Its number.
        num_learners: Learners that there are now.
    """
    if len(cursors) == num_learners:
        return cursors[learner]
    first = max(cursor["next_group"] for cursor in cursors) - len(cursors) + 1
    rates = zip(*(cursor["success"] for cursor in cursors), strict=True)
    return {"next_group": first + learner, "success": [sum(of_task) / len(cursors) for of_task in rates]}


class TicketBook:
    """Which groups of a learner have started, been dropped or been trained on; its grpo lane has it.

    Group numbers of the learners interleave: learner l of L takes l, l + L, l + 2 L, ... (after a resume, from another
    beginning on).
    """

    def __init__(
        self,
        *,
        seed: int,
        learner: int,
        num_learners: int,
        groups_per_batch: int,
        max_staleness: int,
        num_tasks: int,
        num_batches: int,
        task_sampling: str = "uniform",
    ) -> None:
        self._seed, self._task_sampling = seed, task_sampling
        self._groups_per_batch, self._max_staleness = groups_per_batch, max_staleness
        self._num_batches = num_batches
        self._stride = num_learners
        self._next_group = learner
        self._begun_at: dict[int, int] = {}  # groups no batch has taken yet
        self._started = 0
        self._dropped = 0
        self._taken = 0
        self._success = [0.0] * num_tasks  # running rates

    def start_group(self, batch_version: int) -> tuple[int, int] | None:
        """Admit the next group, which begins at `batch_version`: (its number, its task); None while none may start.

        The task depends on (seed, group) alone, unless tasks are sampled by how they succeed.
        """
        # A group that no batch is left for would be sampled for nothing.
        needed = self._started - self._dropped < self._num_batches * self._groups_per_batch
        if not needed or not may_start(
            self._started,
            self._dropped,
            batch_version,
            max_staleness=self._max_staleness,
            groups_per_step=self._groups_per_batch,
        ):
            return None
        group = self._next_group
        self._next_group += self._stride
        self._started += 1
        self._begun_at[group] = batch_version
        draw = np.random.default_rng(np.random.SeedSequence((self._seed, group))).random()
        return group, choose_task(self._task_sampling, group, draw, self._success)

    def choose(self, finished: Sequence[int]) -> int | None:
        """Which of the `finished` groups to train on next; None to wait for one that must come first."""
        return choose_group(
            finished,
            self._begun_at,
            groups_taken=self._taken,
            max_staleness=self._max_staleness,
            groups_per_step=self._groups_per_batch,
        )

    def drop(self, group: int) -> None:
        """Forget a group without a signal; another may start in its place."""
        del self._begun_at[group]
        self._dropped += 1

    def take(self, group: int) -> None:
        """Count a group as part of a batch."""
        del self._begun_at[group]
        self._taken += 1

    def note(self, task: int, success_rate: float) -> None:
        """Learn how a group of `task` went."""
        self._success[task] = running_success(self._success[task], success_rate)

    def cursor(self) -> dict[str, Any]:
        """Where the learner's groups go on, for checkpoints."""
        return {"next_group": self._next_group, "success": list(self._success)}

    def num_open(self) -> int:
        """Groups that have begun and that no batch has taken: lost, if the run ends now."""
        return len(self._begun_at)

    def restore(self, *, next_group: int, success: Sequence[float], batches_done: int) -> None:
        """Go on after a checkpoint: groups in flight then are lost, and count neither as started nor as dropped.

        Starting the count at what was taken keeps the admission rule from admitting a burst.
        """
        self._next_group = next_group
        if len(success) == len(self._success):  # else the environment has other tasks now
            self._success = list(success)
        self._started = self._taken = batches_done * self._groups_per_batch
        self._dropped = 0
        self._begun_at.clear()
