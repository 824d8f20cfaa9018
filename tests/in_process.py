"""Whole training runs in one process, one after another, each a world of one rank: stopped or failed at a given moment.

What a run changes in its process (loggers, signals of a crash, torch's threads) is not undone, so tests give it a process of
its own (`Child`).
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import json
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

DEADLINE_S = 120.0
"""After which a run that has not ended is said to hang."""
QUICK = (
    *("env=reach", "env.reward_mode=dense", "model.preset=nano", "algo.group_size=2", "algo.groups_per_step=2"),
    *("algo.filter_zero_signal=false", "algo.num_steps=100000", "runtime.num_envs=2", "telemetry.console=false"),
    "telemetry.tensorboard=false",
)
SAVING = ("run.checkpoint_every=1",)
EVALUATING = ("run.eval_every=1", "evaluation.episodes_per_task=4")


class FailedOnPurposeError(RuntimeError):
    """What a call raises that is to fail."""


class Gate:
    """Stands before a method: lets calls pass, then from one on holds them back, until it is opened or breaks.

    Args:
        owner: Module and name of the class, below ``dvla``.
        name: Its method.
        number: The first call that is held back, from 1 on.
        skips: Calls that are held back return None at once, as if there were nothing to do, instead of waiting.
    """

    def __init__(self, owner: str, name: str, number: int, *, skips: bool = False) -> None:
        self._owner, self._name, self._number, self._skips = resolve_name(f"dvla.{owner}"), name, number, skips
        self._calls, self._lock = 0, threading.Lock()
        self._decided = threading.Event()
        self.reached = threading.Event()
        """A call is held back."""
        self._breaks = False

    def open(self) -> None:
        """Let all go on."""
        self._decided.set()

    def fail(self) -> None:
        """Have the calls that are held back raise."""
        self._breaks = True
        self._decided.set()

    @contextlib.contextmanager
    def set_up(self) -> Iterator[Gate]:
        """Stand there within a block."""
        method = getattr(self._owner, self._name)

        def called(*arguments: Any, **keywords: Any) -> Any:
            with self._lock:
                self._calls += 1
                is_held = self._calls >= self._number
            if is_held:
                self.reached.set()
                if self._skips and not self._decided.is_set():
                    return None
                assert self._decided.wait(DEADLINE_S)
                if self._breaks:
                    raise FailedOnPurposeError("the arm fell off")
            return method(*arguments, **keywords)

        setattr(self._owner, self._name, called)
        try:
            yield self
        finally:
            self._decided.set()
            setattr(self._owner, self._name, method)


def play(
    root: Path, overrides: tuple[str, ...], meanwhile: Callable[[Any, dict], None] = lambda _stop_request, _lanes: None
) -> dict:
    """Run to the end, and let go of what a process usually keeps until its own end.

    Args:
        root: Where run folders lie.
        overrides: As on the command line.
        meanwhile: Called on a thread of its own with the stop request and the lanes by name, which come as they are made.

    Returns:
        The summary.
    """
    import torch.distributed as dist
    from hydra import compose, initialize_config_dir

    from dvla import runner
    from dvla.config import load, register
    from dvla.entry import CONFIG_FOLDER
    from dvla.planes.semaphore import StopFlag
    from dvla.runtime.failure import RunFailedError

    register()
    with initialize_config_dir(version_base="1.3", config_dir=str(CONFIG_FOLDER)):
        config = load(compose("train", [*QUICK, *overrides, f"run.root={root}", "run.name=test", "run.clean=true"]))
    stop_request, lanes = StopFlag(), {}

    class Watched(runner.RankLanes):
        def __init__(self, its_lanes, *others):
            super().__init__(its_lanes, *others)
            lanes.update(its_lanes)

    original, runner.RankLanes = runner.RankLanes, Watched
    thread = threading.Thread(target=meanwhile, args=(stop_request, lanes), name="meanwhile")
    faulthandler.dump_traceback_later(DEADLINE_S, exit=True)  # until the run's own supervisor does the same
    try:
        thread.start()
        runner.run(config, stop_request)
    except RunFailedError:
        pass  # the summary has it
    finally:
        thread.join()
        faulthandler.cancel_dump_traceback_later()
        runner.RankLanes = original
        dist.destroy_process_group()
        lanes.clear()
        gc.collect()
    return json.loads((config.run.folder / "summary.json").read_text())


STOPS: dict[str, tuple] = {
    "at once": ("", "", 1),
    "while simulators start": ("envs.pool.WorkerPool", "spec", 1),
    "while the policy is built": ("telemetry.reporter.Reporter", "phase", 2),
    "before the first order": ("lanes.grpo.GrpoLane", "_order", 1),
    "in the first reset": ("lanes.sampling.SamplingLane", "_begin", 1),
    "in a rollout": ("lanes.sampling.SamplingLane", "_handle", 9),
    "in a decision": ("lanes.inference.InferenceLane", "serve", 5),
    "while weights are applied": ("lanes.inference.InferenceLane", "apply_arrived", 2),
    "between groups of a batch": ("lanes.grpo.GrpoLane", "_train", 2),
    "in an optimiser step": ("lanes.grpo.GrpoLane", "_finish_step", 2),
    "in a publication": ("lanes.grpo.GrpoLane", "publish", 2),
    "in a weight exchange": ("planes.exchange.WeightExchange", "gather", 3),
    "in a checkpoint": ("runtime.checkpoint_writer.CheckpointWriter", "_commit", 1, SAVING),
    "in an evaluation": ("lanes.grpo.GrpoLane", "_await_evaluation", 1, EVALUATING),
    "in the report of a step": ("telemetry.reporter.Reporter", "step", 3),
}
"""Moments of a run: a call of a method, and the settings with which it comes to it."""


def stop_at(root: Path, owner: str, name: str, number: int, overrides: tuple[str, ...] = ()) -> dict:
    """Play a run that is asked to stop at a moment of `STOPS`."""
    if not owner:
        return play(root, overrides, lambda stop_request, _: stop_request.set())
    gate = Gate(owner, name, number)

    def meanwhile(stop_request, _):
        gate.reached.wait(DEADLINE_S)
        stop_request.set()
        gate.open()

    with gate.set_up():
        summary = play(root, overrides, meanwhile)
    assert gate.reached.is_set(), f"{name} was not called {number} times"
    return summary


def end_while_blocked(
    root: Path, held_back: tuple, blocked: dict[str, str], overrides: tuple[str, ...], *, fails: bool
) -> dict:
    """Play a run until lanes wait for what is held back; then ask it to stop, or have what is held back fail.

    Args:
        root: Where run folders lie.
        held_back: Arguments of its `Gate`.
        blocked: By lane, (a part of) what it must be waiting for.
        overrides: As on the command line.
        fails: How it ends.
    """
    *arguments, skips = held_back
    gate, seen = Gate(*arguments, skips=skips), {}

    def meanwhile(stop_request, lanes):
        deadline = time.monotonic() + DEADLINE_S
        while time.monotonic() < deadline:
            seen.update({name: (lane.clock.activity, lane.clock.now.what) for name, lane in lanes.items()})
            if all(seen.get(n, ("",))[0] == "waiting" and what in seen[n][1] for n, what in blocked.items()):
                seen["as wished"] = True
                break
            time.sleep(0.002)
        if fails:
            gate.fail()
        else:
            stop_request.set()
            gate.open()

    with gate.set_up():
        summary = play(root, overrides, meanwhile)
    assert "as wished" in seen, seen
    return summary


def held() -> dict[str, int]:
    """What this process holds: descriptors, threads, child processes, mappings of shared memory, parts of runs, hooks."""
    import psutil

    process = psutil.Process()
    return {
        "descriptors": process.num_fds(),
        "threads": threading.active_count(),
        "children": len(process.children()),
        "parts": sum(
            str(type(thing)).startswith(("<class 'dvla.lanes", "<class 'dvla.planes")) for thing in gc.get_objects()
        ),
        "excepthook": id(sys.excepthook),  # of hooks around hooks none goes
        "segments": sum(line.split()[1].endswith("s") for line in Path("/proc/self/maps").read_text().splitlines()),
    }


class Child:
    """A process that calls functions one after another."""

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._link, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,))
        self._process.start()
        theirs.close()

    def call(self, function: Callable, *arguments: Any, **keywords: Any) -> Any:
        """What the function returns there.

        Raises:
            AssertionError: It raised, or hangs; the stacks are in the child's stderr.
        """
        self._link.send((function, arguments, keywords))
        if not self._link.poll(2 * DEADLINE_S):
            self._process.kill()
            raise AssertionError("no answer: it hangs")
        try:
            is_good, value = self._link.recv()
        except EOFError:
            raise AssertionError("the process ended: its stacks are in stderr") from None
        assert is_good, value
        return value

    def close(self) -> None:
        """End it."""
        self._link.close()
        self._process.join(10)
        self._process.kill()
        self._process.join()


def _serve(link: Any) -> None:
    import torch

    torch.set_num_threads(1)
    with contextlib.suppress(EOFError):
        while True:
            function, arguments, keywords = link.recv()
            try:
                link.send((True, function(*arguments, **keywords)))
            except BaseException:
                link.send((False, traceback.format_exc()))
    os._exit(0)
