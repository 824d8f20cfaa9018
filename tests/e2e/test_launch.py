"""The scripts in launch/: signals end a run well, a dead rank is restarted, machines meet, and none waits for ever."""

import contextlib
import fcntl
import os
import pty
import signal
import socket
import subprocess
import sys
import termios
import threading
import time

import psutil
import pytest

from e2e.launch import QUICK, REPOSITORY, Run, finish, ranks_of, wait_for_file, wait_for_step

pytestmark = [pytest.mark.e2e, pytest.mark.alone]

ENDLESS = (*QUICK, "algo.num_steps=100000")


def launch(script, root, *overrides, **settings):
    """Start one of the scripts in the background, its output in one pipe."""
    return subprocess.Popen(
        [REPOSITORY / "launch" / script, f"run.root={root}", *overrides],
        env=os.environ | settings,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def family(process):
    """All processes a script has started, torchrun first."""
    return psutil.Process(process.pid).children(recursive=True)


def ranks(process):
    """The ranks among them."""
    found = []
    for parent in psutil.Process(process.pid).children():
        with contextlib.suppress(psutil.NoSuchProcess):  # the script also starts small helpers, which end again
            found += parent.children()
    return found


def wait_until(condition, timeout_s=60):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def has_latest(run):
    version = run.summary["policy_version"]
    return (run.folder / "checkpoints" / "latest").readlink().name == f"step_{version:06d}"


class Terminal:
    """A script in a terminal of its own, whose keys can be pressed."""

    def __init__(self, *command):
        self._keyboard, screen = pty.openpty()
        self.process = subprocess.Popen(
            ["env", "--default-signal", *command],  # as from a login; what runs the tests may ignore Ctrl-C itself
            stdin=screen,
            stdout=screen,
            stderr=screen,
            start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
        )
        os.close(screen)
        self.text = ""
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self):
        while True:
            try:
                self.text += os.read(self._keyboard, 65536).decode(errors="replace")
            except OSError:  # the last program has closed the terminal
                return

    def press(self, key):
        os.write(self._keyboard, key)

    def end(self, root, timeout_s=60):
        try:
            code = self.process.wait(timeout_s)
        finally:
            self.process.kill()
        self._reader.join(timeout_s)
        os.close(self._keyboard)
        return Run(code, self.text, root / "test")


def test_ctrl_c_in_a_terminal_ends_with_a_checkpoint_and_nothing_else(tmp_path):
    terminal = Terminal(REPOSITORY / "launch" / "one_node.sh", f"run.root={tmp_path}", *ENDLESS)
    wait_for_step(terminal.process, tmp_path / "test", 2)
    terminal.press(b"\x03")
    run = terminal.end(tmp_path)
    assert run.code == 0, run.output
    assert (run.summary["exit"], run.summary["world_size"]) == ("stopped", 2)
    assert has_latest(run)
    assert "Traceback" not in run.output
    assert "torch/" not in run.output, "torchrun has nothing to say"
    assert "stopped: " in run.output


def test_a_signal_before_the_ranks_listen_is_not_lost(tmp_path):
    process = launch("one_node.sh", tmp_path, *ENDLESS)
    wait_until(lambda: len(ranks(process)) == 2)
    process.send_signal(signal.SIGTERM)
    run = finish(process, tmp_path)
    assert run.code == 0, run.output
    assert run.summary["exit"] == "stopped"
    assert run.summary["policy_version"] <= 1
    assert "Traceback" not in run.output


def test_a_signal_to_every_process_ends_the_run_as_well(tmp_path):
    """As SLURM sends it: a worker that died of it would be a failure, of which this run bears none."""
    process = launch("one_node.sh", tmp_path, *ENDLESS, "runtime.num_workers=4", "runtime.max_worker_failures=0")
    wait_for_step(process, tmp_path / "test", 2)
    for member in family(process):
        member.send_signal(signal.SIGUSR1)
    run = finish(process, tmp_path)
    assert run.code == 0, run.output
    assert (run.summary["exit"], run.summary["worker_restarts"]) == ("stopped", 0)


def test_a_killed_script_takes_its_ranks_along(tmp_path):
    process = launch("one_node.sh", tmp_path, *ENDLESS)
    wait_for_step(process, tmp_path / "test", 2)
    started = family(process)
    assert len(started) >= 1 + 2 + 2  # torchrun, ranks, workers
    process.kill()
    run = finish(process, tmp_path)  # the pipe closes when the last of them has ended
    _, alive = psutil.wait_procs(started, timeout=30)
    assert not alive
    assert run.summary["exit"] == "stopped"
    assert has_latest(run)


def test_ranks_that_are_started_again_resume(tmp_path):
    overrides = (*QUICK, "algo.num_steps=30", "run.checkpoint_every=2")
    process = launch("one_node.sh", tmp_path, *overrides, MAX_RESTARTS="1")
    wait_for_file(process, tmp_path / "test" / "checkpoints" / "latest" / "COMPLETE.json")
    ranks(process)[1].kill()
    run = finish(process, tmp_path)
    assert run.code == 0, run.output
    assert (run.summary["exit"], run.summary["policy_version"]) == ("completed", 30)
    assert [line["policy_version"] for line in run.metrics] == list(range(1, 31))
    assert sorted(path.name for path in (run.folder / "logs").iterdir()) == ["attempt_1", "attempt_2", "latest"]
    assert "resuming from" in run.output


def test_bare_torchrun_resumes_too_when_it_starts_its_ranks_again(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    process = subprocess.Popen(
        [
            *command,
            "-m",
            "dvla.train",
            f"run.root={tmp_path}",
            *QUICK,
            "algo.num_steps=30",
            "run.checkpoint_every=2",
            "run.clean=true",
        ],
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    wait_for_file(process, tmp_path / "test" / "checkpoints" / "latest" / "COMPLETE.json")
    ranks_of(process)[1].kill()
    run = finish(process, tmp_path)
    assert run.code == 0, run.output
    assert [line["policy_version"] for line in run.metrics] == list(range(1, 31))
    assert "resuming from" in run.output


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return str(one.getsockname()[1])


def test_two_nodes_stop_together_when_one_gets_a_signal(tmp_path):
    meet = {"HEAD": "localhost", "PORT": free_port(), "NNODES": "2", "JOIN_TIMEOUT": "60"}
    nodes = [launch("several_nodes.sh", tmp_path, *ENDLESS, **meet) for _ in range(2)]
    wait_for_step(nodes[0], tmp_path / "test", 2)
    nodes[1].send_signal(signal.SIGTERM)
    runs = [finish(node, tmp_path) for node in nodes]
    assert [run.code for run in runs] == [0, 0], runs
    assert (runs[0].summary["exit"], runs[0].summary["nodes"], runs[0].summary["world_size"]) == ("stopped", 2, 4)
    assert has_latest(runs[0])


def test_a_node_that_never_comes_is_not_waited_for_for_ever(tmp_path):
    meet = {"HEAD": "localhost", "PORT": free_port(), "NNODES": "2", "JOIN_TIMEOUT": "4"}
    run = finish(launch("several_nodes.sh", tmp_path, *QUICK, **meet), tmp_path, timeout_s=60)
    assert run.code == 1
    assert "RendezvousTimeoutError" in run.output
    told = f"not all could meet: NNODES=2 machines at HEAD=localhost, PORT={meet['PORT']} within JOIN_TIMEOUT=4 s"
    assert told in run.output


@pytest.mark.parametrize("missing", ["HEAD", "NNODES"])
def test_a_missing_setting_is_named(tmp_path, missing):
    settings = {"HEAD": "localhost", "NNODES": "2"} | {missing: ""}
    run = finish(launch("several_nodes.sh", tmp_path, *QUICK, **settings), tmp_path)
    assert run.code == 1
    assert f"{missing}: set it to" in run.output
