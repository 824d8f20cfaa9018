"""Load-aware balance: who samples the next groups, and how requests make batches, from what was measured. Pure, no clock.

Beyond the paper, whose shares are fixed by hand. Three rules, each for one thing that makes lanes wait for each other:

* `deal_groups`: a rank whose simulators are slow gets fewer groups, so that training waits for none of them;
* `BatchTimes`: an inference batch waits for more requests only as long as that pays, and is no larger than it has to be;
* `EnvLimit`: as many environments are in flight as give the most steps, which need not be all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_TOLERANCE = 1.2
"""A group leaves the rank whose turn it is only if another one is to finish it so much earlier."""
_MEMORY = 0.95
"""Weight of the past of a call, in the running sums that inference times are fitted to."""
_FIXED_SHARE = 0.1
"""Largest share of a batch's time that its fixed cost may take before a larger batch would pay."""
_MARGIN = 1.03
"""A change of the number of environments counts as a gain from here on: less is noise."""
_PATIENCE = 8
"""Looks between two probes, once probing has failed."""


def deal_groups(count: int, loads: Sequence[float], seconds: Sequence[float], turn: int) -> list[int]:
    """Deal `count` groups to the sampling ranks of a node, one by one, each to who is to finish it first.

    Args:
        count: How many.
        loads: Groups that each rank has not finished yet.
        seconds: What each takes per group, by its own measure; 0 while it has none.
        turn: The group's place in the fixed rotation, which holds unless leaving it pays.

    Returns:
        The index of a rank, for each group.
    """
    known = [value for value in seconds if value > 0]
    mean = sum(known) / len(known) if known else 1.0
    pace = [value if value > 0 else mean for value in seconds]
    load = list(loads)
    dealt = []
    for number in range(turn, turn + count):
        finish = [(load[rank] + 1) * pace[rank] for rank in range(len(load))]
        chosen = number % len(load)
        best = min(range(len(load)), key=finish.__getitem__)
        if finish[chosen] > _TOLERANCE * finish[best]:
            chosen = best
        load[chosen] += 1
        dealt.append(chosen)
    return dealt


class BatchTimes:
    """Fits the time of an inference call to a fixed cost and a cost per request, and says which batches pay.

    Least squares over past calls, older ones weighing less.
    """

    def __init__(self) -> None:
        self._weight = self._size = self._time = self._size2 = self._product = 0.0

    def note(self, size: int, seconds: float) -> None:
        """Learn that a batch of `size` took `seconds`."""
        sums = (self._weight, self._size, self._time, self._size2, self._product)
        new = (1.0, size, seconds, size * size, size * seconds)
        self._weight, self._size, self._time, self._size2, self._product = (
            _MEMORY * old + value for old, value in zip(sums, new, strict=True)
        )

    def costs(self) -> tuple[float, float] | None:
        """Seconds of a call, and of each request in it; None while all calls were of one size."""
        if self._weight < 2:
            return None
        spread = self._weight * self._size2 - self._size**2
        if spread <= 1e-6 * self._size2 * self._weight:
            return None
        each = (self._weight * self._product - self._size * self._time) / spread
        fixed = (self._time - each * self._size) / self._weight
        return max(fixed, 0.0), max(each, 1e-9)

    def worth_waiting_s(self, size: int, otherwise: float) -> float:
        """How long a batch of `size` may wait for one more request.

        A request that joins saves the fixed cost of a call, and its coming delays all that wait.
        """
        costs = self.costs()
        return otherwise if costs is None else costs[0] / max(size, 1)

    def largest_batch(self, limit: int) -> int:
        """The size beyond which batches only let simulators wait: the fixed cost is small in it already."""
        costs = self.costs()
        if costs is None:
            return limit
        fixed, each = costs
        return max(1, min(limit, round((1 - _FIXED_SHARE) / _FIXED_SHARE * fixed / each)))


class GroupPace:
    """Seconds per group of a sampling rank, over the time in which it has any to play."""

    def __init__(self) -> None:
        self.num_open = 0
        self.seconds = 0.0
        """A running mean; 0 before the first group is done."""
        self._since = 0.0

    def begin(self, now: float) -> None:
        """A group was ordered at `now` (seconds)."""
        if self.num_open == 0:
            self._since = now
        self.num_open += 1

    def end(self, now: float) -> None:
        """A group was finished."""
        took, self._since = now - self._since, now
        self.seconds = took if self.seconds == 0 else 0.7 * self.seconds + 0.3 * took
        self.num_open -= 1


@dataclass(slots=True)
class EnvLimit:
    """How many environments of a rank may be in flight: climbs towards the number with the highest measured pace.

    It tries fewer and more in turn, keeps what is better, goes back from what is not, and then leaves it for a while.
    """

    lowest: int
    highest: int
    limit: int = 0
    _before: int = 0
    """The limit to go back to, while another is tried; 0 otherwise."""
    _pace: float = 0.0
    """At the limit to go back to."""
    _rest: int = 2
    _factor: float = 0.75

    def __post_init__(self) -> None:
        """Begin with all."""
        self.limit = self.highest

    def look(self, pace: float) -> int:
        """Take in the pace (steps per second) since the last look; the limit from now on."""
        if self._before:
            if pace > _MARGIN * self._pace:
                self._rest = 1
            else:
                self.limit, self._rest, self._factor = self._before, _PATIENCE, 1 / self._factor
            self._before = 0
        elif self._rest:
            self._rest -= 1
        else:
            tried = min(self.highest, max(self.lowest, round(self.limit * self._factor)))
            if tried == self.limit:
                self._factor, self._rest = 1 / self._factor, _PATIENCE
            else:
                self._before, self._pace, self.limit = self.limit, pace, tried
        return self.limit
