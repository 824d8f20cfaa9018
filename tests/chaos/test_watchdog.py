"""A run that stands still ends by itself, says who is to blame, and leaves the stacks of everybody."""

import signal

import psutil
import pytest
from e2e.launch import QUICK, finish, ranks_of, start, train, wait_for_file, wait_for_step

pytestmark = [pytest.mark.chaos, pytest.mark.alone]
FULL = pytest.mark.chaos_full  # each waits for a deadline: `make test` has one of a kind

ENDLESS = (*QUICK, "algo.num_steps=100000", "runtime.balance=false", "runtime.torch_threads=1")
WATCHED = (*ENDLESS, "runtime.watchdog_s=12", "runtime.wait_timeout_s=12")


def everyone(process):
    return psutil.Process(process.pid).children(recursive=True)


def all_are_gone(processes, seconds):
    _, alive = psutil.wait_procs(processes, timeout=seconds)
    return alive == []


def reports(run):
    """The stall reports, by rank."""
    return {int(path.stem[-5:]): path.read_text() for path in run.folder.glob("logs/attempt_1/stall_rank*.txt")}


@pytest.mark.parametrize(
    ("schedule", "victim"),
    [pytest.param("overlapped", 0, marks=FULL), ("overlapped", 1), pytest.param("serial", 1, marks=FULL)],
)
def test_a_stopped_rank_is_named_and_all_end(schedule, victim, tmp_path):
    serial = ["algo.max_staleness=0", f"runtime.schedule={schedule}"]
    process = start(tmp_path, *WATCHED, *serial)
    wait_for_step(process, tmp_path / "test", 2)
    started = everyone(process)
    ranks_of(process)[victim].send_signal(signal.SIGSTOP)
    run = finish(process, tmp_path, timeout_s=60)
    assert all_are_gone(started, 5)
    assert run.code == 1  # torchrun's own
    assert "exitcode  : 3 " in run.output
    assert run.summary["exit"] == "failed"
    words = run.last_words
    assert set(words) == {0, 1}
    for said in (run.summary["error"], *words.values(), run.output.split("Root Cause")[1]):
        assert f"the run stood still: no sign of life for 6 s: rank {victim} was silent (stopped, or its" in said
    assert set(reports(run)) == {0, 1}
    for text in reports(run).values():
        assert "semaphore host_free: " in text
        assert "slot 0: ticket " in text
        assert "in wait" in text or "in step" in text or "in all_reduce" in text
    assert "collective: " in reports(run)[1 - victim]
    assert f"lane grpo of rank {1 - victim} (" in run.summary["error"]
    assert run.summary["policy_version"] >= 2


def faulty(root, fault):
    return start(root, *WATCHED, module="faulty_train", variables={"FAULT": fault})


@pytest.mark.parametrize(
    ("lane", "point", "call", "who", "found"),
    [
        ("grpo", "optimise", 3, "lane grpo of rank 0 (", "no lane has got on for 12 s (runtime.watchdog_s)"),
        pytest.param("param_dist", "gather", 4, "lane grpo of rank ", "waited 12 s for", marks=FULL),
        pytest.param("inference", "decide", 40, "lane sampling of rank 1 (", "waited 12 s for", marks=FULL),
        pytest.param(
            "sampling", "collect", 40, "lane grpo of rank ", "lane grpo waited 12 s for a finished group", marks=FULL
        ),
    ],
)
def test_a_lane_that_hangs_is_named_with_the_lanes_it_holds_up(lane, point, call, who, found, tmp_path):
    process = faulty(tmp_path, f"lane={lane} rank=1 point={point} call={call} do=hang")
    wait_for_file(process, tmp_path / "test" / "logs" / "attempt_1" / "dvla-r1-w0.log")
    started = everyone(process)
    run = finish(process, tmp_path, timeout_s=90)
    assert all_are_gone(started, 5)
    assert "exitcode  : 3 " in run.output
    for said in (run.summary["error"], *run.last_words.values()):
        assert found in said
        assert f"lane {lane} of rank 1 (busy" in said
        assert who in said
    assert "faults.py" in reports(run)[1]  # where it hangs
    assert set(reports(run)) == {0, 1}


def test_a_rank_whose_interpreter_is_held_up_is_silent_and_ended_with_its_stack(tmp_path):
    process = faulty(tmp_path, "lane=inference rank=1 point=decide call=40 do=hold")
    wait_for_file(process, tmp_path / "test" / "logs" / "attempt_1" / "dvla-r1-w0.log")
    started = everyone(process)
    run = finish(process, tmp_path, timeout_s=90)
    assert all_are_gone(started, 5)
    assert "rank 1 was silent" in run.last_words[0]
    assert "rank 1 was silent" in run.summary["error"]
    log = (run.folder / "logs" / "attempt_1" / "rank00001.log").read_text()
    assert "Fatal Python error: Aborted" in log
    assert "faults.py" in log


@pytest.mark.parametrize(
    ("lane", "rank", "point"), [("sampling", 0, "collect"), pytest.param("grpo", 1, "optimise", marks=FULL)]
)
def test_the_first_error_is_the_last_word_of_every_rank(lane, rank, point, tmp_path):
    fault = f"lane={lane} rank={rank} point={point} call=3 do=raise"
    run = finish(faulty(tmp_path, fault), tmp_path, timeout_s=90)
    error = f"ValueError: the arm fell off (in lane {lane})"
    assert run.last_words[rank] == f"dvla: rank {rank}: error: {error}"
    for other, said in run.last_words.items():
        assert other == rank or said == f"dvla: rank {other}: ended by the error of rank {rank}: {error}"
    assert run.summary["exit"] == "failed"
    assert run.summary["error"] == (error if rank == 0 else f"rank 1: {error}")
    report = run.output.split("Root Cause")[1]
    assert "exitcode  : 1 " in report
    assert "Traceback (most recent call last)" in report
    assert "in _raise" in report
    assert error in report


def test_of_a_run_whose_main_rank_was_killed_another_writes_the_summary(tmp_path):
    process = start(tmp_path, *ENDLESS)
    wait_for_step(process, tmp_path / "test", 2)
    ranks_of(process)[0].kill()
    run = finish(process, tmp_path, timeout_s=60)
    assert run.summary["exit"] == "failed"
    assert run.summary["error"]
    assert run.summary["policy_version"] >= 2
    assert set(run.last_words) == {1}


@FULL
def test_slow_and_idle_lanes_are_no_stall(tmp_path):
    """The evaluation takes several times the limits, and no lane but sampling and inference has anything to do."""
    run = train(
        tmp_path,
        *QUICK,
        "env.name=counting_env:CountingEnv",
        "+env.options.fault=slow",
        "env.max_episode_steps=4",
        "algo.filter_zero_signal=false",
        "algo.num_steps=1",
        "algo.groups_per_step=2",
        "model.num_action_chunks=2",
        "run.eval_every=1",
        "evaluation.episodes_per_task=250",
        "runtime.watchdog_s=6",
        "runtime.wait_timeout_s=6",
    )
    assert run.code == 0, run.output
    assert run.summary["wall_s"] > 15, "or it would prove nothing"
