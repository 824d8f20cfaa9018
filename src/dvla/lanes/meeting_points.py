"""Where the lanes of a rank meet: every semaphore and channel between them, in one place.

What lanes of different ranks may share, too, is not here: orders, finished groups and evaluations pass through the
transport between sampling and training ranks (`dvla.planes.transport`), `slots_free` among them, since a slot is free again
where the sampling rank hears of it. Nor is `replies`: the semaphore an environment waits on is its worker's socket
(`dvla.envs.pool.WorkerPool.act`).
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dvla.planes.semaphore import Channel, Semaphore, StopFlag

if TYPE_CHECKING:
    from dvla.planes.transport import Parcel
    from dvla.planes.weights import Arrival, Publication


@dataclass(slots=True)
class MeetingPoints:
    """The semaphores of a rank; a channel is a semaphore whose permits carry what they are about."""

    requests: Channel[Parcel]
    """sampling -> inference: an observation is complete."""
    group_ends: Channel[int]
    """sampling -> inference, with `apply_weights=between_groups`: all members of the group are done."""
    host_free: Semaphore
    """Starts at 2. param_dist -> grpo: a host buffer may be written again."""
    published: Channel[Publication | None]
    """grpo -> param_dist: this rank's shards lie in a host buffer. None: there will be no more."""
    staging_free: Semaphore
    """Starts at 1. inference -> param_dist: the last version has been applied."""
    arrived: Channel[Arrival]
    """param_dist -> inference: a whole version lies ready. Tried between two batches, never waited for while serving."""

    @classmethod
    def create(cls, *, stop: StopFlag, timeout_s: float) -> MeetingPoints:
        """All meeting points at their starting values."""
        return cls(
            # One for each environment, and while inference is at work any number from workers that were replaced since.
            requests=Channel("requests", sys.maxsize, stop, timeout_s),
            group_ends=Channel("group_ends", sys.maxsize, stop, timeout_s),
            host_free=Semaphore("host_free", 2, stop, timeout_s),
            published=Channel("published", 3, stop, timeout_s),
            staging_free=Semaphore("staging_free", 1, stop, timeout_s),
            arrived=Channel("arrived", 1, stop, timeout_s),
        )

    def values(self) -> dict[str, int]:
        """Free permits of each, by name, for diagnostics."""
        points: list[Semaphore | Channel[Any]] = [getattr(self, name) for name in self.__slots__]
        semaphores = [point.semaphore if isinstance(point, Channel) else point for point in points]
        return {semaphore.name: semaphore.value() for semaphore in semaphores}
