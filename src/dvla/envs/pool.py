"""The worker processes of a rank: start them, talk to them, notice when one dies or hangs, replace it, end them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import astuple, replace
from typing import TYPE_CHECKING, Any, Self

from dvla.envs.errors import EnvironmentSetupError
from dvla.envs.messages import MAX_PACKET, Kind, Record, unpack
from dvla.envs.protocol import EnvSpec
from dvla.envs.registry import environment_arguments
from dvla.planes.semaphore import wait_any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    import numpy as np

    from dvla.config import EnvConfig, RenderConfig
    from dvla.planes.slots import SlotField

_LOG_TAIL = 4000  # characters of a dead worker's log that go into the rank's
_FOR_THE_RANKS = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1}
_ABORT_S = 2.0  # how long a hung worker has to write its stack down


class WorkerError(RuntimeError):
    """A worker process failed, died or hangs; the message says which one, why, and where its log lies.

    Attributes:
        details: The traceback, or the end of the worker's log.
    """

    def __init__(self, message: str, details: str = "") -> None:
        super().__init__(message)
        self.details = details


class Worker:
    """One worker process and the rank's end of its socket."""

    def __init__(self, number: int, order: dict, log: Path) -> None:
        self.number = number
        self.owed = 0
        """Orders it has not answered."""
        self.last_order = time.monotonic()
        self.is_built = False
        """Whether it has told its `EnvSpec`."""
        self._log = log
        self.link, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        # SLURM sends signals to every process of a job: they are for the ranks, whose workers end with their socket.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, _FOR_THE_RANKS)
        try:
            with remote, log.open("ab") as output:
                self._log_start = output.tell()
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "dvla.envs.worker", str(remote.fileno())],
                    pass_fds=[remote.fileno()],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    process_group=0,  # a terminal, too, sends its signals to the run's group
                    # One compute thread each: the defaults of several libraries take all cores for every worker.
                    env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
                )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.link.send(json.dumps(order).encode())

    @property
    def pid(self) -> int:
        """Process id."""
        return self._process.pid

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self.link.fileno()

    def receive(self) -> bytes:
        """Next packet of the worker.

        Raises:
            WorkerError: The worker failed or died.
            EnvironmentSetupError: Its simulators cannot be built.
        """
        try:
            packet = self.link.recv(MAX_PACKET)
        except ConnectionResetError:
            packet = b""
        if not packet:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
            raise self.error(f"(pid {self.pid}) died with {_exit_text(self._process.returncode)}")
        if packet[0] == Kind.failed:
            words, _, details = unpack(packet)[1].partition("\n")
            kind, _, told = words.partition(": ")
            if kind == EnvironmentSetupError.__name__:  # not the worker's fault: another one would say the same
                raise EnvironmentSetupError(told)
            raise self.error(words, details, mark=":")
        return packet

    def error(self, words: str, details: str = "", mark: str = "") -> WorkerError:
        """What happened to this worker, as an exception."""
        if not details:
            with self._log.open("rb") as log:
                log.seek(max(self._log_start, log.seek(0, os.SEEK_END) - _LOG_TAIL))
                details = log.read().decode(errors="replace")
        return WorkerError(f"simulator worker {self.number}{mark} {words} (its log: {self._log})", details)

    def send(self, records: Iterable[Record]) -> None:
        """Send orders in one packet; a dead worker shows at the next `receive`."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.link.send(b"".join(record.pack() for record in records))

    def abort(self) -> None:
        """End a worker that hangs, with its stack in its log."""
        self._process.send_signal(signal.SIGABRT)
        self.close(_ABORT_S)

    def close(self, seconds: float) -> None:
        """Close the link, on which the worker ends by itself; kill it if it has not after `seconds`."""
        self.link.close()
        try:
            self._process.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _exit_text(code: int | None) -> str:
    if code is None:
        return "an open process"
    if code < 0:
        return f"signal {-code}" + (" (out of memory?)" if code == -9 else "")
    return f"exit code {code}"


class WorkerPool:
    """All workers of a rank. Environment number e of the rank is environment e % n of worker e // n.

    The sampling lane owns it; `act` alone may be called from another thread.

    Args:
        config: The environment.
        render: How it draws.
        num_envs: Environments of the rank.
        num_workers: Processes they are shared out to.
        logs: Folder of the workers' logs.
        setup_timeout_s: Seconds a worker may take to build its simulators.
        step_timeout_s: Seconds one control step, picture or reset may take.
        title: Names the processes.
        videos: Folder for the videos of filmed episodes.
    """

    def __init__(
        self,
        config: EnvConfig,
        render: RenderConfig,
        *,
        num_envs: int,
        num_workers: int,
        logs: Path,
        setup_timeout_s: float,
        step_timeout_s: float,
        title: str,
        videos: Path | None = None,
    ) -> None:
        """Start the processes; they build their simulators while the rank goes on."""
        self._envs_per_worker = num_envs // num_workers
        self._setup_timeout_s, self._step_timeout_s = setup_timeout_s, step_timeout_s
        self._logs, self._title = logs, title
        self._order = {
            "env": config.name,
            "arguments": environment_arguments(config, render),
            "num_envs": self._envs_per_worker,
            "terminate_on_success": config.terminate_on_success,
            "videos": str(videos) if videos else "",
        }
        self._lock = threading.Lock()  # guards orders against the replacement of the worker they are for
        self._generations = [0] * num_workers
        self._slot_of: dict[int, int] = {}  # env -> slot of its episode
        self._spec: EnvSpec | None = None
        self._descriptor = -1
        self._layout = b""
        self._beats: np.ndarray | None = None
        self.workers = [self._start(number) for number in range(num_workers)]

    def _start(self, number: int) -> Worker:
        log = self._logs / f"{self._title.replace(':', '-')}-w{number}.log"
        return Worker(number, self._order | {"title": f"{self._title}:w{number}"}, log)

    def __enter__(self) -> Self:
        """Use the pool; leaving the block ends it."""
        return self

    def __exit__(self, *_: object) -> None:
        """End all workers."""
        self.close()

    def spec(self) -> EnvSpec:
        """Wait for all simulators to be built; what they agree to be.

        Raises:
            WorkerError: One failed, or took too long.
        """
        deadline = time.monotonic() + self._setup_timeout_s
        for worker in self.workers:
            if not wait_any([worker], max(0.0, deadline - time.monotonic())):
                raise worker.error(
                    f"was not ready after {self._setup_timeout_s:.0f} s: see its log, or raise runtime.setup_timeout_s"
                )
            self._take_spec(worker)
        assert self._spec is not None
        return self._spec

    def _take_spec(self, worker: Worker) -> None:
        told: dict[str, Any] = json.loads(worker.receive())
        values: dict[str, Any] = {key: tuple(x) if isinstance(x, list) else x for key, x in told.items()}
        spec = EnvSpec(**values)
        if self._spec not in (None, spec):
            raise WorkerError(f"the workers built different environments: {self._spec} and {spec}")
        self._spec, worker.is_built = spec, True

    def attach(self, descriptor: int, layout: Sequence[SlotField], slots: dict[str, np.ndarray]) -> None:
        """Hand the slot memory to all workers; the pool keeps a descriptor of its own for replacements."""
        self._layout = json.dumps([astuple(field) for field in layout]).encode()
        self._descriptor = os.dup(descriptor)
        self._beats = slots["beat"]
        for worker in self.workers:
            self._hand_over(worker)

    def _hand_over(self, worker: Worker) -> None:
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `receive` will say who died, and how
            socket.send_fds(worker.link, [self._layout], [self._descriptor])

    def generation(self, env: int) -> int:
        """How often the worker of `env` was replaced; replies carry it, and those for an older one are dropped."""
        return self._generations[env // self._envs_per_worker]

    def envs_of(self, worker: Worker) -> range:
        """The environments of a worker, counted over the rank."""
        first = worker.number * self._envs_per_worker
        return range(first, first + self._envs_per_worker)

    def reset(self, env: int, slot: int, *, task: int, seed: int, ticket: int, film: int | None = None) -> None:
        """Begin an episode on environment `env` of this rank; `film` records it as part of that evaluation round."""
        number, local = divmod(env, self._envs_per_worker)
        kind = Kind.reset if film is None else Kind.film
        with self._lock:
            self._slot_of[env] = slot
            self._send(self.workers[number], [Record(kind, local, slot, film or 0, task, seed, ticket)])

    def act(self, replies: Sequence[tuple[int, int, int, int]]) -> None:
        """Release `replies`: (env, slot, decision, generation) whose actions lie in their slots. One packet per worker."""
        orders: dict[int, list[Record]] = {}
        with self._lock:
            for env, slot, decision, generation in replies:
                number, local = divmod(env, self._envs_per_worker)
                if generation == self._generations[number]:
                    orders.setdefault(number, []).append(Record(Kind.act, local, slot, decision))
            for number, records in orders.items():
                self._send(self.workers[number], records)

    def _send(self, worker: Worker, records: list[Record]) -> None:
        worker.owed += len(records)
        worker.last_order = time.monotonic()
        worker.send(records)

    def receive(self, worker: Worker) -> list[Record]:
        """Records of one packet of `worker`, their `env` counted over the rank; none while it is being built.

        Raises:
            WorkerError: It failed or died: `replace` it.
        """
        if not worker.is_built:
            self._take_spec(worker)
            worker.last_order = time.monotonic()
            return []
        records, _ = unpack(worker.receive())
        with self._lock:
            worker.owed -= len(records)
        first = worker.number * self._envs_per_worker
        records = [replace(record, env=first + record.env) for record in records]
        for record in records:
            if record.kind is Kind.finished:
                del self._slot_of[record.env]  # another environment's beats may come from it now
        return records

    def overdue(self) -> list[tuple[Worker, WorkerError]]:
        """The workers whose simulator has not moved for longer than it may, ended, and what to say of each."""
        hung = []
        for worker in self.workers:
            seconds = self._step_timeout_s if worker.is_built else self._setup_timeout_s
            if worker.owed and time.monotonic() - self._last_sign(worker) > seconds:
                with self._lock:
                    self._generations[worker.number] += 1  # from now on nothing is sent to it
                worker.abort()
                key = "step_timeout_s" if worker.is_built else "setup_timeout_s"
                words = f"did not move for {seconds:.0f} s; raise runtime.{key} if it may take that long"
                hung.append((worker, worker.error(words)))
        return hung

    def _last_sign(self, worker: Worker) -> float:
        beats = [self.beat(env) for env in self.envs_of(worker)]
        return max(worker.last_order, *beats)

    def beat(self, env: int) -> float:
        """Monotonic time at which the simulator of `env` was last seen to move; 0 before its first episode."""
        return float(self._beats[self._slot_of[env]]) if self._beats is not None and env in self._slot_of else 0.0

    def replace(self, worker: Worker) -> None:
        """Put a new process in a worker's place. It builds its simulators first, then obeys what it was sent meanwhile."""
        with self._lock:
            self._generations[worker.number] += 1  # from now on nothing is sent to it
        worker.close(_ABORT_S)  # having failed it may still be writing its log
        fresh = self._start(worker.number)
        self._hand_over(fresh)
        with self._lock:
            self.workers[worker.number] = fresh

    def close(self, seconds: float = 10.0) -> None:
        """End all workers within about `seconds`."""
        deadline = time.monotonic() + seconds
        for worker in self.workers:
            worker.link.close()  # all begin to end before the first is waited for
        for worker in self.workers:
            worker.close(deadline - time.monotonic())
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
