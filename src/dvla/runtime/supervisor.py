"""The supervisor of a rank: a thread that sees whether the run gets on, and ends it with an explanation if not.

A run stands still when a lane has waited for another for longer than it may (`runtime.wait_timeout_s`); when no lane of any
rank beats for `runtime.watchdog_s`, as in a collective to which one does not come; or when it was asked to stop that long
ago. A rank of this node that gives no sign of life for half of either time is stopped, or its interpreter held up. Slow but
healthy runs do not look like it:

* A simulator that builds, resets or steps for long: the lane's wait for it has the shorter limit, and a worker that is
  replaced is a beat.
* An evaluation, a large batch, a rank or node faster than the others: each record, inference batch, group, micro-batch and
  version is a beat, whoever's it is. That one lane is quiet shows nothing: an idle inference lane is healthy.
* A checkpoint, the first gradient of a compiled learner: nobody can tell how long these take, so while one is under way (a
  patient lane) the limit is `runtime.collective_timeout_s`, after which the other ranks give up anyhow. Inference that
  compiles is bounded by the lanes that wait for it.
* Set-up and what follows the lanes: only their time is watched.
* A disk that hangs for a while: on one node nothing here reads or writes until the run stands still.
* A job or a machine that was suspended: looks are counted, not seconds.

Who finds that the run stands still says so on the node's board, and for other nodes by a file. Then every rank writes down
what its lanes are at, its semaphores, slots and the stacks of its threads (``stall_rankNNNNN.txt``), reads what the others
wrote, and leaves with `EXIT_STALLED`, all with the same words. A stopped rank is made to go on for that.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import threading
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, NoReturn, Self

from dvla.planes.node_board import Life
from dvla.planes.semaphore import WaitTimeoutError
from dvla.runtime.failure import EXIT_STALLED, Failure, announce, describe, write_failure
from dvla.runtime.stall import LaneReport, Stillness, culprit
from dvla.telemetry.atomic_file import write_atomically

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path
    from types import TracebackType

    from dvla.config import RuntimeConfig
    from dvla.planes.node_board import NodeBoard
    from dvla.planes.semaphore import StopFlag
    from dvla.runtime.world import World
    from dvla.telemetry.lane_clock import LaneClock

_LOOK_S = 1.0
_REPORT_S = 5.0  # how long the ranks wait for each other's reports
_FINISH_S = 10.0
_LEAVE_S = 40.0  # after which the process ends whatever holds it up


class Supervisor:
    """Watches over the lanes of a rank while they run: a context to run them in.

    Args:
        world: This rank.
        runtime: How long what may take.
        logs: Folder of this attempt's logs.
        board: The node's.
        clocks: Of the lanes of this rank, by name.
        state: Tells more about them, for the report.
        stop: Ends the lanes.
        stop_request: The user's wish.
        finish: Gives the terminal back and writes the summary, if this rank is the one whose number it is given.
    """

    def __init__(
        self,
        *,
        world: World,
        runtime: RuntimeConfig,
        logs: Path,
        board: NodeBoard,
        clocks: Mapping[str, LaneClock],
        state: Callable[[], str],
        stop: StopFlag,
        stop_request: StopFlag,
        finish: Callable[[str, int], None],
    ) -> None:
        self._world, self._logs, self._board, self._clocks = world, logs, board, clocks
        self._state, self._stop, self._stop_request, self._finish = state, stop, stop_request, finish
        silent_s = min(runtime.watchdog_s, runtime.wait_timeout_s) / 2
        self._look_s = min(_LOOK_S, silent_s / 10)
        self._limit_s, self._limit = runtime.watchdog_s, runtime.watchdog_s / self._look_s
        self._silence, self._patience = silent_s / self._look_s, runtime.collective_timeout_s / self._look_s
        self._tick, self._looks_since_asked = 0, 0
        self._ticks, self._beats, self._nodes = Stillness[int](), Stillness[str](), Stillness[int]()
        self._has_ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="dvla-supervisor", daemon=True)
        self._log = (logs / f"rank{world.rank:05d}.log").open("a")

    def __enter__(self) -> Self:
        """Begin to watch; from now on a crash leaves its stacks in the rank's log, too."""
        faulthandler.enable(self._log)
        self._show_life()  # before the lanes begin: who hangs at once is missed, too
        self._thread.start()
        return self

    def note_error(self, failure: Failure, error: BaseException) -> None:
        """Tell the other ranks of the first error of a lane here.

        Having waited in vain shows that the run stands still. Then this does not return, and the lanes stay as they are, to be
        looked at.
        """
        write_failure(self._logs, failure)
        if isinstance(error, WaitTimeoutError):
            self._declare(failure.message, [])
            self._thread.join()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """The lanes have ended. If the run stands still, and they therefore, this does not return."""
        if isinstance(error, WaitTimeoutError):
            self._declare(describe(error), [])
        self._has_ended.set()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        self._board.note_life(self._world.local_rank, self._life()._replace(tick=-1, is_patient=False))

    # -- watching ----------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        while True:
            has_ended = self._has_ended.wait(self._look_s)
            self._show_life()
            if self._world.num_nodes > 1 and self._world.local_rank == 0:
                with contextlib.suppress(OSError):
                    if self._found():
                        self._board.note_stall(0)
            if self._board.has_stalled():
                self._leave()
            if has_ended:
                return
            if found := self._judge():
                why, silent = found
                self._declare(why, silent)
                self._leave()

    def _show_life(self) -> None:
        # Should the interpreter be held up, so that it is not called again, this ends the process without it.
        faulthandler.dump_traceback_later(2 * self._limit_s, exit=True, file=self._log)
        self._tick += 1
        self._board.note_life(self._world.local_rank, self._life())

    def _life(self) -> Life:
        clocks = self._clocks.values()
        # Lanes that are being stopped beat no more, and have little time to end.
        is_patient = self._stop.is_set() or any(clock.now.is_patient for clock in clocks)
        return Life(os.getpid(), self._tick, sum(clock.beats for clock in clocks), is_patient)

    def _judge(self) -> tuple[str, list[int]] | None:
        """Why the run stands still, and which ranks are silent; None while it gets on."""
        lives = self._board.lives()
        if any(life.tick == 0 for life in lives):  # the lanes of a rank have not begun
            return None
        looks = self._ticks.look({self._rank(local): life.tick for local, life in enumerate(lives) if life.tick > 0})
        if silent := [rank for rank, count in looks.items() if count > self._silence]:
            return f"no sign of life for {self._silence * self._look_s:.0f} s", silent
        limit = self._patience if any(life.is_patient for life in lives) else self._limit
        seconds = (
            f"{limit * self._look_s:.0f} s (runtime.{'watchdog_s' if limit == self._limit else 'collective_timeout_s'})"
        )
        self._looks_since_asked += self._stop_request.is_set()
        if self._looks_since_asked > limit:
            return f"asked to stop, and not done after {seconds}", []
        if self._world.local_rank == 0:
            (quiet,) = self._beats.look({"": sum(life.beats for life in lives)}).values()
            if self._are_others_quiet(quiet, limit) and quiet > limit:
                return f"no lane has got on for {seconds}", []
        return None

    def _are_others_quiet(self, quiet: int, limit: float) -> bool:
        """Whether no other node gets on; tells them whether this one does, by touching a file."""
        world = self._world
        if world.num_nodes == 1:
            return True
        files = [self._logs / f"alive_node{node:05d}" for node in range(world.num_nodes)]
        with contextlib.suppress(OSError):
            if quiet == 0 or (limit == self._patience and quiet <= limit):
                files[world.node].touch()
            if quiet < limit / 10:  # the disk is spared while all is well
                self._nodes = Stillness[int]()
                return False
            times = {node: file.stat().st_mtime_ns for node, file in enumerate(files) if node != world.node}
            return all(looks > limit for looks in self._nodes.look(times).values())
        return False  # a node has not begun, or the disk cannot be read

    def _rank(self, local: int) -> int:
        return self._world.node * self._world.local_world_size + local

    # -- leaving -----------------------------------------------------------------------------------------------------

    def _found(self) -> list[dict[str, Any]]:
        """What ranks have found, the first first."""
        found = [json.loads(path.read_text()) for path in self._logs.glob("stall_found_by_rank*.json")]
        return sorted(found, key=lambda stall: stall["time"])

    def _declare(self, why: str, silent: list[int]) -> None:
        """Tell all ranks that the run stands still."""
        found = {"why": why, "silent": silent, "time": time.time()}
        with contextlib.suppress(OSError):
            write_atomically(self._logs / f"stall_found_by_rank{self._world.rank:05d}.json", [json.dumps(found)])
        self._board.note_stall(self._world.local_rank)

    def _leave(self) -> NoReturn:
        """Write down how this rank stands, find out with the others who is to blame, and end the process."""
        faulthandler.dump_traceback_later(_LEAVE_S, exit=True, file=self._log)
        rank = self._world.rank
        stall: dict[str, Any] = {"why": "the reason could not be written", "silent": [], "time": time.time()}
        with contextlib.suppress(OSError):
            stall = [*self._found(), stall][0]
        silent = set(stall["silent"])
        is_first = rank == min(set(map(self._rank, range(self._world.local_world_size))) - silent, default=rank)
        if is_first:
            self._signal(silent, signal.SIGCONT)
        reports: list[LaneReport] = []
        with contextlib.suppress(OSError):
            self._report()
            reports = self._read_reports()
        told = {report.rank for report in reports}
        silent |= set(range(self._world.world_size)) - told
        message = (
            f"the run stood still: {stall['why']}: {culprit(reports, sorted(silent))}; see {self._logs}/stall_rank*.txt"
        )
        first = Failure(rank, stall["time"], message, "")
        write_failure(self._logs, first)
        awake = told - silent
        main = self._world.main_rank
        writer = main if main in awake else min(awake, default=rank)
        finishing = threading.Thread(target=self._finish, args=(message, writer), daemon=True)
        finishing.start()
        finishing.join(_FINISH_S)  # whatever holds up the lanes may hold up this, too
        announce(first, rank)
        if is_first:
            self._signal(silent - told, signal.SIGABRT)  # its stacks go to its log
        sys.stdout.flush()
        os._exit(EXIT_STALLED)

    def _signal(self, ranks: set[int], number: signal.Signals) -> None:
        """Send a signal to those of `ranks` that are of this node."""
        for local, life in enumerate(self._board.lives()):
            if self._rank(local) in ranks:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(life.pid, number)

    def _report(self) -> None:
        reports = [
            LaneReport(self._world.rank, name, clock.activity, clock.now.what, clock.now.whom, clock.quiet_s())
            for name, clock in self._clocks.items()
        ]
        path = self._logs / f"stall_rank{self._world.rank:05d}.txt"
        with path.open("w") as file:
            for report in reports:
                whom = f" (needs {report.whom})" if report.whom else ""
                file.write(f"{report}: {report.doing}{whom}, got on {report.quiet_s:.0f} s ago\n")
            file.write(self._state() + "\n")
            file.writelines(f"Thread 0x{thread.ident:016x} is {thread.name}\n" for thread in threading.enumerate())
            file.flush()
            faulthandler.dump_traceback(file)
        write_atomically(path.with_suffix(".json"), [json.dumps([asdict(report) for report in reports])])

    def _read_reports(self) -> list[LaneReport]:
        """What the ranks say that can."""
        deadline = time.monotonic() + _REPORT_S
        while True:
            paths = [self._logs / f"stall_rank{rank:05d}.json" for rank in range(self._world.world_size)]
            found = [path for path in paths if path.exists()]
            if len(found) == len(paths) or time.monotonic() > deadline:
                return [LaneReport(**values) for path in found for values in json.loads(path.read_text())]
            time.sleep(0.1)
