"""Where the lanes of a rank meet: every semaphore and channel between them, in one place.

`replies` is not here: the semaphore an environment waits on is its worker's socket (`dvla.envs.pool.WorkerPool.act`),
since the waiting side is another process.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

from dvla.planes.semaphore import Channel, Semaphore, StopFlag

if TYPE_CHECKING:
    from dvla.lanes.evaluation_episodes import Outcome
    from dvla.lanes.sampling import Request
    from dvla.planes.tickets import Group
    from dvla.planes.weights import Arrival, Publication


@dataclass(slots=True)
class MeetingPoints:
    """The semaphores of a co-located rank; a channel is a semaphore whose permits carry what they are about."""

    num_envs: int
    slots_free: Channel[int]
    """Starts with all slots. grpo -> sampling: a group was trained on or dropped."""
    requests: Channel[Request]
    """sampling -> inference: an observation is complete."""
    groups: Channel[Group]
    """sampling -> grpo: all members are done."""
    host_free: Semaphore
    """Starts at 2. param_dist -> grpo: a host buffer may be written again."""
    published: Channel[Publication | None]
    """grpo -> param_dist: this rank's shards lie in a host buffer. None: there will be no more."""
    staging_free: Semaphore
    """Starts at 1. inference -> param_dist: the last version has been applied."""
    arrived: Channel[Arrival]
    """param_dist -> inference: a whole version lies ready. Tried between two batches, never waited for while serving."""
    admission: Semaphore
    """inference (new weights are in use) and grpo (a group was dropped) -> sampling: another group may start now."""
    rounds: Channel[int]
    """grpo -> sampling: evaluate the version, or a newer one, on all evaluation episodes."""
    outcomes: Channel[Outcome]
    """sampling -> grpo: an evaluation episode is over."""
    applied_version: int = -1
    """Optimiser steps behind the weights in use; written by inference alone, read by sampling."""
    worker_restarts: int = 0
    """Simulator workers replaced so far; written by sampling alone, read by grpo."""

    @classmethod
    def create(
        cls, *, num_envs: int, num_slots: int, stop: StopFlag, timeout_s: float, num_evaluation_episodes: int = 0
    ) -> MeetingPoints:
        """All meeting points at their starting values."""
        slots_free: Channel[int] = Channel("slots_free", num_slots, stop, timeout_s)
        for slot in range(num_slots):
            slots_free.put(slot)
        return cls(
            num_envs=num_envs,
            slots_free=slots_free,
            # One for each environment, and while inference is at work any number from workers that were replaced since.
            requests=Channel("requests", sys.maxsize, stop, timeout_s),
            groups=Channel("groups", num_slots, stop, timeout_s),
            host_free=Semaphore("host_free", 2, stop, timeout_s),
            published=Channel("published", 3, stop, timeout_s),
            staging_free=Semaphore("staging_free", 1, stop, timeout_s),
            arrived=Channel("arrived", 1, stop, timeout_s),
            admission=Semaphore("admission", 0, stop, timeout_s),
            rounds=Channel("rounds", 1, stop, timeout_s),
            outcomes=Channel("outcomes", num_evaluation_episodes, stop, timeout_s),
        )
