"""When a run stands still, and who is to blame: pure rules, which `dvla.runtime.supervisor` applies."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

K = TypeVar("K")


class Stillness(Generic[K]):
    """For how many looks each of some numbers has not changed.

    Looks are counted rather than seconds: who was suspended itself, as jobs and machines are, has not looked meanwhile, and
    takes nobody for dead.
    """

    def __init__(self) -> None:
        self._last: dict[K, tuple[float, int]] = {}

    def look(self, numbers: Mapping[K, float]) -> dict[K, int]:
        """Look at `numbers`; 0 for one that has changed or is new."""
        for key, number in numbers.items():
            last, looks = self._last.get(key, (number, -1))
            self._last[key] = number, looks + 1 if number == last else 0
        return {key: self._last[key][1] for key in numbers}


@dataclass(frozen=True, slots=True)
class LaneReport:
    """What a lane was at when its run stood still."""

    rank: int
    lane: str
    activity: str
    """As in `dvla.telemetry.lane_clock`."""
    what: str
    whom: str
    """The name of the lane it waits for, of this rank or another; none for a lane at work by itself."""
    quiet_s: float
    """Since it last got on."""

    def __str__(self) -> str:
        """Name it."""
        return f"lane {self.lane} of rank {self.rank}"

    @property
    def doing(self) -> str:
        """In words."""
        return f"{self.activity}{f', {self.what}' if self.what else ''}"


def culprit(reports: Sequence[LaneReport], silent: Sequence[int]) -> str:
    """Who holds up all others, in words: from a grpo lane along the waits, the nearest that waits for no lane.

    All have been quiet for long, so one that works by itself hangs. A lane of a rank that was silent is to blame whatever it
    says later. Where all wait for each other nobody is nearest: then all are named.

    Args:
        reports: Of all lanes of all ranks that could still tell.
        silent: Ranks that gave no sign of life.
    """
    lanes = sorted((r for r in reports if r.activity in ("busy", "waiting")), key=lambda r: (r.lane != "grpo", r.rank))
    guilty = [f"rank {rank} was silent (stopped, or its interpreter held up)" for rank in silent]
    queue = deque([lane for lane in lanes if lane.rank not in silent][:1])
    came_from: dict[LaneReport, LaneReport | None] = dict.fromkeys(queue)
    while queue:
        lane = queue.popleft()
        if lane.rank in silent if silent else not lane.whom:
            path = [] if silent else [f"{lane} ({lane.doing}) has not got on for {lane.quiet_s:.0f} s"]
            waiting = came_from[lane]
            while waiting is not None:
                path.append(f"{waiting} ({waiting.doing}) waits for {lane}")
                lane, waiting = waiting, came_from[waiting]
            return "; ".join(guilty + path)
        for other in lanes:
            if other.lane == lane.whom and other not in came_from:
                came_from[other] = lane
                queue.append(other)
    return "; ".join(guilty or ["lanes wait for each other: " + ", ".join(f"{lane} ({lane.doing})" for lane in lanes)])
