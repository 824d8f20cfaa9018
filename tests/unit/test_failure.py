"""Of the errors of many lanes and ranks, the first is the one that is told."""

import json
import subprocess
import sys
import threading

import pytest

from dvla.config import ConfigError
from dvla.lanes.lane import ErrorBoard
from dvla.planes.semaphore import StopFlag
from dvla.planes.transport import TransportError
from dvla.planes.weights import WeightPlaneError
from dvla.runtime import failure
from dvla.runtime.failure import Failure, announce, note_lane, settle, write_failure

DIED = TransportError("rank 1 (pid 7) died: its link to rank 0 broke")
CONSEQUENCES = [
    RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:3"),
    RuntimeError(
        "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:525] Read error [::1]:4: Connection reset by peer"
    ),
    WeightPlaneError("lane param_dist of rank 0 waited in vain for the other ranks, at version 3: Connection closed"),
    TransportError("sampling rank 2 left before the run's end"),
]


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch):
    monkeypatch.setattr(failure, "_SETTLE_S", 0.0)


def raised(error, lane="grpo"):
    """As it comes from a lane."""
    try:
        raise error
    except type(error) as caught:
        note_lane(caught, lane)
        return caught


@pytest.mark.parametrize("consequence", [DIED, *CONSEQUENCES], ids=lambda error: str(error)[:30])
def test_a_cause_comes_before_its_consequences_though_clocks_differ(consequence):
    cause = Failure(1, 1000.0, "ValueError: the arm fell off", "")
    after = Failure.of(0, consequence)
    assert cause.order < Failure(0, 1.0, after.message, "").order


@pytest.mark.parametrize("other", CONSEQUENCES, ids=lambda error: str(error)[:30])
def test_of_consequences_the_one_that_names_who_died_comes_first(other):
    assert Failure.of(0, DIED).order < Failure(2, 0.0, Failure.of(2, other).message, "").order


def test_of_two_causes_the_earlier_comes_first():
    assert Failure(1, 5.0, "ValueError: a", "").order < Failure(0, 6.0, "ValueError: b", "").order
    assert Failure(1, 5.0, "ValueError: rank 1 (pid 7) died", "").order[0] == 0  # not the transport's words


def test_the_time_is_that_of_the_error_though_it_is_raised_again_and_explained_later(monkeypatch):
    monkeypatch.setattr("time.time", lambda: 100.0)
    error = raised(MemoryError("all of it"))
    monkeypatch.setattr("time.time", lambda: 105.0)
    explained = RuntimeError("the model pool is full")
    explained.__cause__ = error
    for late in (error, explained):
        assert Failure.of(0, late).time == 100.0
    assert Failure.of(0, ValueError()).time == 105.0
    assert Failure.of(0, error).message == "MemoryError: all of it (in lane grpo)"
    assert "in raised\n    raise error\nMemoryError: all of it" in Failure.of(0, error).traceback


def test_every_rank_finds_the_same_first_failure(tmp_path):
    consequence = Failure(0, 1.0, Failure.of(0, DIED).message, "")
    cause = Failure(1, 2.0, "ValueError: a", "Traceback ...")
    write_failure(tmp_path, cause)
    assert settle(tmp_path, consequence) == [cause, consequence]
    assert settle(tmp_path, cause) == [cause, consequence]


def test_a_disk_that_cannot_be_written_hides_nothing(tmp_path):
    (tmp_path / "file").write_text("")
    mine = Failure(0, 1.0, "ValueError: a", "")
    assert settle(tmp_path / "file" / "no folder", mine) == [mine]


def test_the_board_tells_the_first_error_before_the_lanes_stop_and_logs_the_others(caplog):
    stop, told = StopFlag(), []
    board = ErrorBoard(stop, 3, lambda it, error: told.append((it.rank, it.message, error, stop.is_set())))
    with caplog.at_level("WARNING", logger="dvla"):
        board.report("param_dist", CONSEQUENCES[0])
        board.report("grpo", ValueError("the cause"))
        board.report("sampling", ValueError("another one"))
    assert str(board.first) == "the cause"
    assert [(rank, error, is_stopped) for rank, _, error, is_stopped in told] == [
        (3, CONSEQUENCES[0], False),
        (3, board.first, True),
    ]
    assert told[1][1] == "ValueError: the cause (in lane grpo)"
    later = [record.exc_info[1] for record in caplog.records]
    assert [str(error) for error in later] == [str(CONSEQUENCES[0]), "another one"]


def test_the_board_keeps_one_of_many_threads():
    stop, told = StopFlag(), []
    board = ErrorBoard(stop, 0, lambda failure, _: told.append(failure))
    start = threading.Barrier(8)

    def fail(number):
        start.wait()
        board.report("sampling", ValueError(str(number)))

    threads = [threading.Thread(target=fail, args=(number,)) for number in range(8)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert stop.is_set()
    assert told[-1].message == f"ValueError: {board.first} (in lane sampling)"
    assert min(told, key=lambda it: it.order) == told[-1]


@pytest.mark.parametrize(
    ("rank", "line"),
    [
        (1, "dvla: rank 1: error: ValueError: a\n"),
        (0, "dvla: rank 0: ended by the error of rank 1: ValueError: a\n"),
    ],
)
def test_all_ranks_announce_the_first_failure(rank, line, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    announce(Failure(1, 12.5, "ValueError: a", "Traceback (most recent call last):\n  ...\nValueError: a"), rank)
    assert capsys.readouterr().err == line
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

    found = ProcessFailure(rank, 7, 1, str(tmp_path / "error.json"))
    assert found.timestamp == 12
    report = str(ChildFailedError("dvla.train", {rank: found}))
    assert "Traceback (most recent call last):" in report
    last = [text for text in report.splitlines() if text.strip()][-2]  # before the border
    assert last.strip() == ("ValueError: a" if rank == 1 else "rank 1: ValueError: a")


def test_a_wrong_setting_has_its_own_words():
    assert Failure.of(0, ConfigError("x must be 1")).message == "ConfigError: x must be 1"


DEAF = """
import ctypes, threading, sys, time
from dvla.runtime import stop_request
stop_request._SAME_PRESS_S = 0.0
stop = stop_request.StopRequest()
stop.install()
def tell():
    import select
    select.select([stop], [], [])
    print("asked", flush=True)
threading.Thread(target=tell, daemon=True).start()
print("ready", flush=True)
mutex, libc = ctypes.create_string_buffer(64), ctypes.CDLL(None)
libc.pthread_mutex_lock(mutex)
libc.pthread_mutex_lock(mutex)  # for ever, outside of Python, and deaf to signals
"""


def test_signals_are_heard_whatever_the_main_thread_does():
    with subprocess.Popen([sys.executable, "-c", DEAF], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout.readline() == "ready\n"
            process.send_signal(15)
            assert process.stdout.readline() == "asked\n"
            process.send_signal(15)
            assert process.wait(30) == 128 + 15
        finally:
            process.kill()


def test_a_failure_can_be_read_by_programs(tmp_path):
    write_failure(tmp_path, Failure(2, 3.0, "ValueError: a", "tb"))
    (path,) = tmp_path.iterdir()
    assert json.loads(path.read_text()) == {"rank": 2, "time": 3.0, "message": "ValueError: a", "traceback": "tb"}
