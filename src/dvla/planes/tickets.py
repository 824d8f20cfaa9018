"""Tickets, groups, and the book that admits them.

A ticket is the order to run one episode. A group is `group_size` tickets of one task from one initial state. The book
numbers groups, decides when the next may start (`dvla.rl.admission`), and remembers at which version each began.
"""

from __future__ import annotations

import threading
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


@dataclass(frozen=True, slots=True)
class Group:
    """A finished group: the slots of its episodes, ordered by member."""

    id: int
    task: int
    slots: tuple[int, ...]


def make_tickets(
    seed: int, group: int, group_size: int, success: Sequence[float], task_sampling: str = "uniform"
) -> list[Ticket]:
    """The tickets of group number `group`.

    Its initial state depends on (seed, group) alone, its task as well, unless tasks are sampled by how they succeed.
    """
    rng = np.random.default_rng(np.random.SeedSequence((seed, group)))
    task = choose_task(task_sampling, group, rng.random(), success)
    init_seed = int(rng.integers(2**31))
    return [Ticket(group * group_size + member, group, member, task, init_seed) for member in range(group_size)]


class TicketBook:
    """Which groups of this rank have started, finished, been dropped or been trained on.

    Shared by the sampling lane (starts groups) and the grpo lane (drops and takes them); `_lock` guards every field.
    Group numbers of the ranks interleave: rank r of R takes first_group + r, first_group + R + r, ...
    """

    def __init__(
        self,
        *,
        seed: int,
        rank: int,
        world_size: int,
        group_size: int,
        groups_per_batch: int,
        max_staleness: int,
        num_tasks: int,
        num_batches: int,
        task_sampling: str = "uniform",
    ) -> None:
        self._seed, self._group_size, self._task_sampling = seed, group_size, task_sampling
        self._groups_per_batch, self._max_staleness = groups_per_batch, max_staleness
        self._num_batches = num_batches
        self._stride = world_size
        self._next_group = rank
        self._lock = threading.Lock()
        self._begun_at: dict[int, int] = {}  # groups no batch has taken yet
        self._started = 0
        self._dropped = 0
        self._taken = 0
        self._success = [0.0] * num_tasks  # running rates

    def start_group(self, batch_version: int) -> list[Ticket] | None:
        """Admit the next group at the version the replica has; None while it may not start yet."""
        with self._lock:
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
            return make_tickets(self._seed, group, self._group_size, self._success, self._task_sampling)

    def choose(self, finished: Sequence[int]) -> int | None:
        """Which of the `finished` groups to train on next; None to wait for one that must come first."""
        with self._lock:
            return choose_group(
                finished,
                self._begun_at,
                groups_taken=self._taken,
                max_staleness=self._max_staleness,
                groups_per_step=self._groups_per_batch,
            )

    def drop(self, group: int) -> None:
        """Forget a group without a signal; another may start in its place."""
        with self._lock:
            del self._begun_at[group]
            self._dropped += 1

    def take(self, group: int) -> None:
        """Count a group as part of a batch."""
        with self._lock:
            del self._begun_at[group]
            self._taken += 1

    def note(self, task: int, success_rate: float) -> None:
        """Learn how a group of `task` went."""
        with self._lock:
            self._success[task] = running_success(self._success[task], success_rate)

    def cursor(self) -> dict[str, Any]:
        """Where this rank's groups go on, for checkpoints."""
        with self._lock:
            return {"next_group": self._next_group, "success": list(self._success)}

    def num_open(self) -> int:
        """Groups that have begun and that no batch has taken: lost, if the run ends now."""
        with self._lock:
            return len(self._begun_at)

    def restore(self, *, next_group: int, success: Sequence[float], batches_done: int) -> None:
        """Go on after a checkpoint: groups in flight then are lost, and count neither as started nor as dropped.

        Starting the count at what was taken keeps the admission rule from admitting a burst.
        """
        with self._lock:
            self._next_group = next_group
            if len(success) == len(self._success):  # else the environment has other tasks now
                self._success = list(success)
            self._started = self._taken = batches_done * self._groups_per_batch
            self._dropped = 0
            self._begun_at.clear()
