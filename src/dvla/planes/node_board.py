"""What the ranks of a node tell each other about themselves: a few numbers in shared memory, each written by one rank only."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from dvla.runtime.memory import MEMORY_TAGS
from dvla.telemetry.lane_clock import LaneUse
from dvla.telemetry.lane_names import LANES

if TYPE_CHECKING:
    from collections.abc import Sequence

_FREE_SLOTS, _RESTARTS, _OPEN_GROUPS, _GROUP_SECONDS, _MEASURED_AT, _HAS_STALLED, _LIFE = range(7)
_HALF_LIFE_S = 30.0
_NUM_USES = len(LaneUse._fields)
_NUM_LANE_NUMBERS = len(LANES) * _NUM_USES


class Life(NamedTuple):
    """The signs of life of a rank."""

    pid: int = 0
    tick: int = 0
    """Grows as long as the rank's interpreter runs; 0 before its lanes have begun, -1 once they have ended."""
    beats: int = 0
    """Of all its lanes (`dvla.telemetry.lane_clock`)."""
    is_patient: bool = False
    """Whether one of them does what may take long without a beat."""


_NUM_COUNTS = _LIFE + len(Life._fields)


def board_bytes(num_ranks: int) -> int:
    """Size of the board of `num_ranks` ranks."""
    return 8 * num_ranks * (_NUM_COUNTS + _NUM_LANE_NUMBERS + len(MEMORY_TAGS))


class NodeBoard:
    """The numbers of all ranks of a node, by local rank.

    Args:
        memory: (board_bytes,) uint8, shared.
        num_ranks: Ranks of the node.
    """

    def __init__(self, memory: np.ndarray, num_ranks: int) -> None:
        numbers = memory[: board_bytes(num_ranks)].view(np.float64).reshape(num_ranks, -1)
        self._counts = numbers[:, :_NUM_COUNTS]
        rest = numbers[:, _NUM_COUNTS:]
        self._uses = rest[:, :_NUM_LANE_NUMBERS].reshape(num_ranks, len(LANES), _NUM_USES)
        self._memory = rest[:, _NUM_LANE_NUMBERS:]

    def note_free_slots(self, rank: int, count: int) -> None:
        """Say how many episode slots of this rank are free; its sampling lane only."""
        self._counts[rank, _FREE_SLOTS] = count

    def count_restart(self, rank: int) -> None:
        """Say that a simulator worker of this rank was replaced; its sampling lane only."""
        self._counts[rank, _RESTARTS] += 1

    def note_groups(self, rank: int, num_open: int, seconds: float) -> None:
        """Say how many groups this rank has to finish, and what one takes; its sampling lane only."""
        self._counts[rank, [_OPEN_GROUPS, _GROUP_SECONDS, _MEASURED_AT]] = num_open, seconds, time.monotonic()

    def groups(self, ranks: Sequence[int]) -> tuple[list[float], list[float]]:
        """Groups that each of `ranks` has to finish, and the seconds one takes there (0 if not measured yet).

        What an idle rank once measured counts less and less, so that it is tried again.
        """
        counts = self._counts[ranks]
        num_open = counts[:, _OPEN_GROUPS]
        idle_s = np.where(num_open > 0, 0.0, time.monotonic() - counts[:, _MEASURED_AT])
        return num_open.tolist(), (counts[:, _GROUP_SECONDS] * 0.5 ** (idle_s / _HALF_LIFE_S)).tolist()

    def free_slots(self) -> int:
        """Free episode slots of all ranks."""
        return int(self._counts[:, _FREE_SLOTS].sum())

    def restarts(self, rank: int) -> int:
        """Simulator workers of `rank` replaced so far."""
        return int(self._counts[rank, _RESTARTS])

    def note_life(self, rank: int, life: Life) -> None:
        """Give a sign of life; the rank's supervisor only."""
        self._counts[rank, _LIFE:] = life

    def lives(self) -> list[Life]:
        """The signs of life of all ranks."""
        return [
            Life(int(pid), int(tick), int(beats), bool(patient))
            for pid, tick, beats, patient in self._counts[:, _LIFE:]
        ]

    def note_stall(self, rank: int) -> None:
        """Have all ranks leave, as the run stands still."""
        self._counts[rank, _HAS_STALLED] = 1

    def has_stalled(self) -> bool:
        """Whether a rank found that the run stands still."""
        return bool(self._counts[:, _HAS_STALLED].any())

    def note_use(self, rank: int, lane: str, use: LaneUse) -> None:
        """Say what a lane of this rank has done so far; its main thread only."""
        self._uses[rank, LANES.index(lane)] = use

    def use(self, lane: str) -> LaneUse:
        """What `lane` has done so far, a mean over the ranks that have it; items are added up."""
        rows = self._uses[:, LANES.index(lane)]
        rows = rows[rows[:, 0] > 0]
        if not len(rows):
            return LaneUse()
        wall_s, busy_s, wait_s, _ = rows.mean(0).tolist()
        return LaneUse(wall_s, busy_s, wait_s, int(rows[:, 3].sum()))

    def note_memory(self, rank: int, usage: dict[str, float]) -> None:
        """Say what this rank's memory pools hold; its main thread only."""
        self._memory[rank] = [usage[tag] for tag in MEMORY_TAGS]

    def memory(self) -> dict[str, float]:
        """What the pools of the node's ranks hold, of each figure the largest."""
        return dict(zip(MEMORY_TAGS, self._memory.max(0).tolist(), strict=True))
