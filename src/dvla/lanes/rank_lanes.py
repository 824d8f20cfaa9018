"""The lanes of a rank at work: overlapped on a thread each, or in turn on one; and how they end in order."""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, cast

from dvla.lanes.lane import ErrorBoard, Lane
from dvla.planes.semaphore import Stopped

if TYPE_CHECKING:
    from collections.abc import Callable

    from dvla.lanes.grpo import GrpoLane
    from dvla.lanes.inference import InferenceLane
    from dvla.lanes.meeting_points import MeetingPoints
    from dvla.lanes.param_dist import ParamDistLane
    from dvla.lanes.sampling import SamplingLane
    from dvla.planes.node import Node
    from dvla.planes.semaphore import StopFlag
    from dvla.runtime.failure import Failure
    from dvla.runtime.world import World

_LOOK_S = 0.2  # how often a rank tells the board what its lanes do
_LOOK_AT_MEMORY_S = 2.0
_JOIN_S = 5.0  # how long a lane may take to notice that the run failed; it may sit in a collective with a dead rank


class RankLanes:
    """Runs the lanes that a rank has.

    A rank that trains ends with its grpo lane, another one when the training ranks have left it.

    Args:
        lanes: By name.
        node: What the rank shares with others.
        meet: Where its lanes meet.
        stop: Ends them all.
        world: This rank.
        memory_usage: What its memory pools hold.
    """

    def __init__(
        self,
        lanes: dict[str, Lane],
        node: Node,
        meet: MeetingPoints,
        stop: StopFlag,
        world: World,
        memory_usage: Callable[[], dict[str, float]],
    ) -> None:
        self._lanes, self._node, self._meet, self._stop, self._world = lanes, node, meet, stop, world
        self._memory_usage, self._next_look_at_memory = memory_usage, 0.0
        self._is_asked = False
        self.ended_well = False
        """Whether the lanes have ended without an error."""
        self._leads = next(name for name in ("grpo", "sampling", "inference") if name in lanes)

    def outcome(self) -> str:
        """`completed` or `stopped`, once the lanes have ended without an error; only who trains knows it."""
        if self._leads != "grpo":
            return "stopped" if self._is_asked else "completed"
        outcome = cast("GrpoLane", self._lanes["grpo"]).outcome
        assert outcome is not None
        return outcome

    def run_overlapped(
        self, stop_request: StopFlag, note_error: Callable[[Failure, BaseException], None] | None = None
    ) -> None:
        """Run every lane on a thread of its own until the one that leads ends, or one fails, of which `note_error` is told.

        Raises:
            Exception: The first error of any lane.
        """
        errors = ErrorBoard(self._stop, self._world.rank, note_error)
        self._tell_board()
        threads = {name: lane.start(errors) for name, lane in self._lanes.items()}
        while threads[self._leads].is_alive() and not self._stop.is_set():
            threads[self._leads].join(_LOOK_S)
            self._tell_board()
            if stop_request.is_set() and not self._is_asked:
                self._is_asked = True
                if self._leads != "grpo":
                    samples = "sampling" in self._lanes
                    self._node.wish_to_stop(self._world.roles.home_of(self._world.rank) if samples else None)
        if errors.first is None:
            if self._leads == "grpo":
                self._meet.published.put(None)
            # Lets the exchange under way, in which other ranks take part, come to its end; the supervisor keeps the time.
            while "param_dist" in threads and threads["param_dist"].is_alive() and not self._stop.is_set():
                threads["param_dist"].join(_LOOK_S)
            if errors.first is None:
                self._node.leave()
        self._stop.set()
        deadline = time.monotonic() + _JOIN_S
        for name in ("grpo", "param_dist", "inference", "sampling"):
            if name in threads:
                threads[name].join(max(0.0, deadline - time.monotonic()))
        self._tell_board()
        if errors.first is not None:
            raise errors.first
        self.ended_well = True

    def _tell_board(self) -> None:
        if time.monotonic() >= self._next_look_at_memory:
            self._next_look_at_memory = time.monotonic() + _LOOK_AT_MEMORY_S
            self._node.board.note_memory(self._world.local_rank, self._memory_usage())
        for name, lane in self._lanes.items():
            self._node.board.note_use(self._world.local_rank, name, lane.clock.total())

    def state(self) -> str:
        """Semaphores and episode slots as they are, for diagnostics."""
        lines = [f"semaphore {name}: {value}" for name, value in self._meet.values().items()]
        lines.append(f"free training slots of the node: {self._node.board.free_slots()}")
        slots, now = self._node.data.arrays, time.monotonic()
        for number, beat in enumerate(slots["beat"]):
            if beat:
                lines.append(
                    f"slot {number}: ticket {slots['ticket'][number]}, task {slots['task'][number]}, "
                    f"{slots['num_decisions'][number]} decisions, simulator moved {now - beat:.0f} s ago"
                )
        return "\n".join(lines)

    def run_serial(self) -> None:
        """Run the lanes in turn on this thread, each on everything there is, in a fixed order: reproducible to the bit."""
        grpo = cast("GrpoLane", self._lanes["grpo"])
        param_dist = cast("ParamDistLane", self._lanes["param_dist"])
        inference = cast("InferenceLane", self._lanes["inference"])
        sampling = cast("SamplingLane", self._lanes["sampling"])

        def distribute() -> None:
            with grpo.clock.waiting("the weights to be handed over", "param_dist"):
                with param_dist.clock.busy():
                    param_dist.step()
                with inference.clock.busy():
                    inference.apply_arrived()

        def sample(seconds: float) -> bool:
            with grpo.clock.waiting("a finished group", "sampling"):
                with sampling.clock.busy():
                    sampling.step_together()
                with inference.clock.busy():
                    inference.step_all()
            return True

        self._tell_board()
        grpo.after_publish = distribute
        grpo.wait_for = sample
        with contextlib.suppress(Stopped), grpo.clock.busy():
            while True:
                grpo.step()
        self.ended_well = True
