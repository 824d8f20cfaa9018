"""Whatever dies at whatever moment: the run ends soon and says why, or goes on; nothing is left behind, and nothing lost.

The moment is hit exactly: the process stands still within it (`standing`) until its victim has been killed. All 30
combinations run with ``python perf/chaos.py``; without ``chaos_full`` there are a few.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import signal
import time
from pathlib import Path

import psutil
import pytest
from e2e.launch import QUICK, finish, start, wait_for_file

from dvla.runtime.checkpoint import complete_checkpoints, fault_of

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(240)]

STEP, LAST, KEPT = 3, 6, 2  # at the third version two checkpoints have been begun, so that one is complete
RUN = (
    *(*QUICK, f"algo.num_steps={LAST}", "run.checkpoint_every=1", f"run.keep_checkpoints={KEPT}"),
    *(f"run.eval_every={STEP}", "evaluation.episodes_per_task=8", "runtime.torch_threads=1"),
    *("runtime.verify_weights=true", "telemetry.tensorboard=false"),
)
POINTS = {
    "reset": "lane=sampling point=reset greedy=False",
    "rollout": "lane=inference point=decide greedy=False",
    "backward": "lane=grpo point=gradient",
    "publish": "lane=grpo point=publish",
    "checkpoint": "lane=checkpoint point='checkpoint write'",  # the thread beside the lanes
    "evaluation": "lane=inference point=decide greedy=True",
}
LANE_POINTS = POINTS | {"checkpoint": "lane=grpo point=checkpoint"}
IN_WORKERS = {"reset": "reset", "rollout": "step"}  # moments of a worker itself
VICTIMS = ("worker", "lane", "rank 1", "rank 0", "agent")
QUICK_ONES = {
    ("worker", "rollout"),
    ("lane", "publish"),
    ("rank 1", "backward"),
    ("rank 0", "checkpoint"),
    ("agent", "evaluation"),
}
EXIT_S = 60


_PR_SET_CHILD_SUBREAPER = 36


@pytest.fixture
def descendants():
    """All processes that the test has started and that are alive; orphans among them become children of this process."""
    known = {process.pid for process in psutil.Process().children(recursive=True)}
    prctl = ctypes.CDLL(None).prctl
    assert prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    yield lambda: [process for process in psutil.Process().children(recursive=True) if process.pid not in known]
    prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def memory_of(processes):
    """The anonymous files and the named shared memory that processes hold open or map."""
    held = set()
    for process in processes:
        folder = Path(f"/proc/{process.pid}")
        try:
            for link in (folder / "fd").iterdir():
                if str(link.readlink()).startswith(("/memfd:dvla", "/dev/shm/")):
                    held.add(link.stat().st_ino)
            for line in (folder / "maps").read_text().splitlines():
                _, _, _, _, inode, *name = line.split(maxsplit=5)
                if name and name[0].startswith(("/memfd:dvla", "/dev/shm/")):
                    held.add(int(inode))
        except OSError:  # it has ended, or is another user's
            continue
    return held


def whole_checkpoints(folder):
    return [path for path in complete_checkpoints(folder) if fault_of(path, hashes=True) is None]


def fault_for(victim, moment, folder):
    """The fault of the run, what is added to its command line, and the file behind which somebody will stand."""
    rank, point = int(victim == "rank 1"), (LANE_POINTS if victim == "lane" else POINTS)[moment]
    where = f"{point} rank={rank} step={STEP}"
    if victim == "worker" and moment in IN_WORKERS:
        armed = folder / "armed"
        standing = ("env.name=standing_reach:StandingReach", f"+env.options.place={IN_WORKERS[moment]}")
        return (
            f"{where} do=touch file={armed}",
            (*standing, f"+env.options.armed={armed}"),
            folder / "armed.standing",
        )
    stands = folder / "standing"
    return f"{where} stand={stands} do={'raise' if victim == 'lane' else 'go'}", (), stands


def to_kill(victim, moment, agent, standing):
    """The process id, or None for a lane, which fails by itself."""
    if victim == "lane":
        return None
    if victim == "agent":
        return agent
    if victim == "worker" and moment not in IN_WORKERS:
        (worker,) = (p for p in psutil.Process(standing).children() if "dvla:" in " ".join(p.cmdline()))
        return worker.pid
    return standing


@pytest.mark.parametrize(
    ("victim", "moment"),
    [
        pytest.param(victim, moment, marks=[] if (victim, moment) in QUICK_ONES else [pytest.mark.chaos_full])
        for victim in VICTIMS
        for moment in POINTS
    ],
)
def test_a_run_ends_or_goes_on_and_loses_nothing(victim, moment, tmp_path, descendants, keep_outcome):
    checkpoints = tmp_path / "test" / "checkpoints"
    fault, overrides, stands = fault_for(victim, moment, tmp_path)
    process = start(tmp_path, *RUN, *overrides, module="faulty_train", variables={"FAULT": fault})
    wait_for_file(process, stands)
    memory = memory_of(descendants())
    assert memory, "or there would be nothing to be left behind"
    before = whole_checkpoints(checkpoints)
    assert before
    victim_pid = to_kill(victim, moment, process.pid, int(stands.read_text()))
    begin = time.monotonic()
    if victim_pid is not None:
        os.kill(victim_pid, signal.SIGKILL)
    stands.unlink()
    run = finish(process, tmp_path, timeout_s=EXIT_S)
    seconds = time.monotonic() - begin
    assert_nothing_is_left(descendants, memory)
    lost = [
        path.name
        for path in before
        if path not in whole_checkpoints(checkpoints)
        and sum(other.name > path.name for other in whole_checkpoints(checkpoints)) < KEPT
    ]
    assert lost == []
    error = check_end(victim, run, victim_pid, seconds)
    resumed_from = None
    if victim != "worker":
        newest = whole_checkpoints(checkpoints)[0]
        resumed_from = int(newest.name.removeprefix("step_"))
        assert newest >= before[0]
        run_on = finish(start(tmp_path, *RUN, "resume=auto"), tmp_path)
        assert run_on.code == 0, run_on.output
        assert f"resuming from {newest}" in run_on.output
        check_completed(run_on)
        assert_nothing_is_left(descendants, memory)
    keep_outcome(
        {
            "victim": victim,
            "moment": moment,
            "outcome": "goes on" if run.code == 0 else "ends",
            "seconds": round(seconds, 1),
            "exit_code": run.code,
            "error": error,
            "checkpoints_before": [path.name for path in before],
            "resumed_from": resumed_from,
        }
    )


def assert_nothing_is_left(descendants, memory):
    """No process of the run, and nobody at all who holds its `memory`."""
    _, alive = psutil.wait_procs(descendants(), timeout=5)
    assert not alive, f"orphans: {alive}"
    assert not memory & memory_of(psutil.process_iter())


def check_end(victim, run, victim_pid, seconds):
    """Whether the run ended as it should and said so; the error that it told."""
    assert seconds < EXIT_S
    if victim == "worker":
        assert run.code == 0, run.output
        assert run.summary["worker_restarts"] == 1
        check_completed(run)
        return None
    if victim == "agent":  # the kernel kills the ranks with it: nobody is left to say anything
        assert run.code == -signal.SIGKILL
        assert not (run.folder / "summary.json").exists()
        return None
    assert run.code == 1, run.output
    assert run.summary["exit"] == "failed"
    words, error = run.last_words, run.summary["error"]
    report = run.output.split("Root Cause")[1]
    if victim == "lane":
        first = re.fullmatch(r"ValueError: the arm fell off \(in lane \w+\)", error)
        assert first, error
        assert words == {
            0: f"dvla: rank 0: error: {error}",
            1: f"dvla: rank 1: ended by the error of rank 0: {error}",
        }
        assert error in report
        return error
    dead = int(victim.split()[1])
    assert set(words) == {1 - dead}
    assert error.startswith(f"TransportError: rank {dead} (pid {victim_pid}) died"), error
    assert words[1 - dead] == f"dvla: rank {1 - dead}: error: {error}"
    assert "exitcode  : -9 (" in run.output
    # torchrun looks now and then: it may see both at once, and then takes the one that could speak for the cause.
    assert error in report or (f"rank      : {dead} (" in report and "exitcode  : -9 (" in report)
    return error


def check_completed(run):
    """The run is whole: every step once, its last checkpoint complete, and no remains of saves."""
    assert (run.summary["exit"], run.summary["policy_version"]) == ("completed", LAST)
    assert [line["policy_version"] for line in run.metrics] == list(range(1, LAST + 1))
    assert run.summary["eval_success_after"] is not None
    checkpoints = run.folder / "checkpoints"
    assert whole_checkpoints(checkpoints)[0].name == f"step_{LAST:06d}"
    assert list(checkpoints.glob("*.tmp")) == []


@pytest.fixture
def keep_outcome(request):
    """Keeps what became of a combination in the folder that was asked for, if one was."""
    folder = request.config.getoption("outcomes")

    def keep(outcome):
        if folder is not None:
            name = f"{outcome['victim']} {outcome['moment']}".replace(" ", "_")
            Path(folder).mkdir(exist_ok=True)
            (Path(folder) / f"{name}.json").write_text(json.dumps(outcome))

    return keep
