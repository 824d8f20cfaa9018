"""A real SLURM for tests: a controller and two compute nodes on this machine, without systemd, cgroups or accounts."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

NODES = ("n1", "n2")
_PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "scontrol")
_PACKAGES = ("slurm-wlm", "munge")


class SlurmMissing(Exception):  # noqa: N818 - a reason to skip, not an error
    """SLURM cannot be had on this machine."""


class Slurm:
    """A running SLURM; its commands are called with its configuration."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = os.environ | {"SLURM_CONF": str(folder / "slurm.conf"), "OMP_NUM_THREADS": "1"}
        self.daemons: list[subprocess.Popen] = []

    def start_daemon(self, *words: str) -> None:
        """Start one of SLURM's daemons as a child of this process."""
        with (self.folder / "daemons.log").open("ab") as log:
            self.daemons.append(subprocess.Popen(words, env=self.env, stdin=subprocess.DEVNULL, stdout=log, stderr=log))

    def answers(self) -> bool:
        """Whether the controller runs."""
        return subprocess.run(["scontrol", "ping"], env=self.env, capture_output=True, timeout=60).returncode == 0

    def wait_for(self, what: str, is_there: Callable[[], bool], timeout_s: float = 30) -> None:
        """Wait until a condition holds, as long as all daemons live."""
        deadline = time.monotonic() + timeout_s
        while not is_there():
            dead = [daemon.args for daemon in self.daemons if daemon.poll() is not None]
            if dead or time.monotonic() > deadline:
                log = (self.folder / "daemons.log").read_text()[-2000:]
                raise AssertionError(f"no {what} after {timeout_s:g} s, ended: {dead}; {log}")
            time.sleep(0.1)

    def call(self, *words: str, **more: str) -> str:
        """Output of a command of SLURM, run with the environment variables `more`."""
        done = subprocess.run(words, env=self.env | more, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{' '.join(words)}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, *words: str, folder: Path, **more: str) -> str:
        """Number of a job submitted by ``sbatch``, in `folder`."""
        return self.call("sbatch", "--parsable", f"--chdir={folder}", *words, **more).strip()

    def job(self, number: str) -> dict[str, str]:
        """What ``scontrol`` says of a job."""
        words = self.call("scontrol", "show", "job", number, "--oneliner").split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def wait_for_state(self, number: str, *states: str, timeout_s: float = 120) -> str:
        """Wait until a job is in one of `states`."""
        deadline = time.monotonic() + timeout_s
        while (state := self.job(number)["JobState"]) not in states:
            if time.monotonic() > deadline:
                raise AssertionError(f"job {number} is still {state}, not {states}: {self.job(number)}")
            time.sleep(0.1)
        return state


@contextlib.contextmanager
def running_slurm() -> Iterator[Slurm]:
    """Start SLURM, installing it first where that is possible, and stop it again.

    Raises:
        SlurmMissing: It cannot be installed or started, with the reason.
    """
    _install()
    # Short: the path of a socket has at most 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="dvla-slurm-", dir="/tmp"))
    slurm = Slurm(folder)
    try:
        _start(slurm)
        yield slurm
    finally:
        _stop(slurm)
        shutil.rmtree(folder, ignore_errors=True)


def _install() -> None:
    if "/usr/sbin" not in os.environ["PATH"].split(os.pathsep):
        os.environ["PATH"] += os.pathsep + "/usr/sbin"
    missing = [name for name in _PROGRAMS if shutil.which(name) is None]
    if not missing:
        return
    if os.geteuid() != 0 or shutil.which("apt-get") is None:
        raise SlurmMissing(f"no {', '.join(missing)}, and not root on a machine with apt-get")
    if Path("/run/systemd/system").exists():  # there the packages would start services, in a container they do not
        raise SlurmMissing(f"no {', '.join(missing)}: apt-get install --no-install-recommends {' '.join(_PACKAGES)}")
    apt = ["apt-get", "-y", "-q", "-o", "DPkg::Lock::Timeout=60"]
    commands = ([*apt, "install", "--no-install-recommends", *_PACKAGES], [*apt, "update"])
    for command in (commands[0], commands[1], commands[0]):
        try:
            done = subprocess.run(
                command,
                env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"},
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=90,
            )
        except subprocess.TimeoutExpired:
            raise SlurmMissing(f"{' '.join(command)} did not end within 90 s") from None
        if command is commands[0] and done.returncode == 0:
            return
    raise SlurmMissing(f"{' '.join(command)} failed: {done.stderr.strip().splitlines()[-1:]}")


def _start(slurm: Slurm) -> None:
    if os.geteuid() != 0:
        raise SlurmMissing("not root")  # its daemons run as root, or with accounts of their own
    slurm.folder.chmod(0o711)  # or munge refuses it
    munge = slurm.folder / "munge"
    munge.mkdir(mode=0o711)
    key = munge / "munge.key"
    key.touch(0o600)
    key.write_bytes(os.urandom(1024))
    (slurm.folder / "state").mkdir()
    (slurm.folder / "slurm.conf").write_text(_configuration(slurm.folder))
    named = [f"--{word}={munge / word.split('-')[0]}" for word in ("socket", "pid-file", "log-file", "seed-file")]
    try:
        slurm.start_daemon("munged", "--foreground", f"--key-file={key}", *named)
        slurm.wait_for("munge", lambda: (munge / "socket").exists())
        slurm.start_daemon("slurmctld", "-D", "-c")
        for node in NODES:
            slurm.start_daemon("slurmd", "-D", "-N", node)
        slurm.wait_for("the controller", slurm.answers)
        slurm.wait_for("nodes", lambda: slurm.call("sinfo", "-h", "-o", "%T %D").split() == ["idle", str(len(NODES))])
    except (AssertionError, subprocess.TimeoutExpired) as error:
        raise SlurmMissing(f"SLURM does not start here: {error}") from error


def _configuration(folder: Path) -> str:
    ports = _free_ports(1 + len(NODES))
    return (
        f"""
ClusterName=dvla-test
SlurmctldHost=localhost(127.0.0.1)
SlurmUser=root
SlurmdUser=root
SlurmctldPort={ports[0]}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/socket,cred_expire=5
CredType=cred/munge
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerParameters=sched_interval=1,sched_min_interval=0,batch_sched_delay=0,bf_interval=1
ReturnToService=2
MpiDefault=none
KillWait=5
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.%n.log
SlurmdParameters=config_overrides
"""
        + "".join(
            f"NodeName={node} NodeHostname={socket.gethostname()} NodeAddr=127.0.0.1 Port={port} CPUs=2 RealMemory=1000\n"
            for node, port in zip(NODES, ports[1:], strict=True)
        )
        + f"PartitionName=debug Nodes={','.join(NODES)} Default=YES MaxTime=INFINITE State=UP\n"
    )


def _free_ports(count: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _stop(slurm: Slurm) -> None:
    """End all jobs, then all daemons, by force what does not end by itself."""
    if slurm.answers():
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            slurm.call("scancel", "--user=root")
            slurm.wait_for("end of all jobs", lambda: not slurm.call("squeue", "-h").strip())
    left = []
    for daemon in reversed(slurm.daemons):
        with contextlib.suppress(psutil.NoSuchProcess):
            left += psutil.Process(daemon.pid).children(recursive=True)
        daemon.terminate()
    for daemon in reversed(slurm.daemons):
        try:
            daemon.wait(10)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()
    for process in left:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
