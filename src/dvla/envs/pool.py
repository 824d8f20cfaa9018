"""The worker processes of a rank: start them, talk to them, notice when one dies, end them."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
from dataclasses import astuple
from typing import TYPE_CHECKING, Any, Self

from dvla.envs.messages import MAX_PACKET, Kind, Record, unpack
from dvla.envs.protocol import EnvSpec
from dvla.envs.registry import environment_arguments
from dvla.planes.semaphore import wait_any

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from dvla.config import EnvConfig
    from dvla.planes.slots import SlotField


class WorkerError(RuntimeError):
    """A worker process failed or died; the message says which one, why, and where its log lies."""


class Worker:
    """One worker process and the rank's end of its socket."""

    def __init__(self, number: int, order: dict, log: Path) -> None:
        self.number = number
        self._log = log
        self.link, remote = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with remote, log.open("ab") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "dvla.envs.worker", str(remote.fileno())],
                pass_fds=[remote.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                process_group=0,  # signals sent to the run's group are for the ranks; workers end with their socket
                # One compute thread each: the defaults of several libraries take all cores for every worker.
                env=os.environ | {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
            )
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
        """
        try:
            packet = self.link.recv(MAX_PACKET)
        except ConnectionResetError:
            packet = b""
        if not packet:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
            raise WorkerError(
                f"simulator worker {self.number} (pid {self.pid}) died with {_exit_text(self._process.returncode)}; "
                f"its log: {self._log}"
            )
        if packet[0] == Kind.failed:
            raise WorkerError(f"simulator worker {self.number}: {unpack(packet)[1]} (its log: {self._log})")
        return packet

    def send(self, records: Iterable[Record]) -> None:
        """Send orders in one packet; a dead worker shows at the next `receive`."""
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            self.link.send(b"".join(record.pack() for record in records))

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
    """All workers of a rank. Environment number e of the rank is environment e % n of worker e // n."""

    def __init__(
        self, config: EnvConfig, *, num_envs: int, num_workers: int, logs: Path, timeout_s: float, title: str
    ) -> None:
        """Start the processes; they build their simulators while the rank goes on."""
        self._envs_per_worker = num_envs // num_workers
        self._timeout_s = timeout_s
        self.workers: list[Worker] = []
        order = {
            "env": config.name,
            "arguments": environment_arguments(config),
            "num_envs": self._envs_per_worker,
            "terminate_on_success": config.terminate_on_success,
        }
        for number in range(num_workers):
            self.workers.append(
                Worker(
                    number, order | {"title": f"{title}:w{number}"}, logs / f"{title.replace(':', '-')}-w{number}.log"
                )
            )

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
        deadline = time.monotonic() + self._timeout_s
        specs = []
        for worker in self.workers:
            if not wait_any([worker], max(0.0, deadline - time.monotonic())):
                raise WorkerError(
                    f"simulator worker {worker.number} was not ready after {self._timeout_s:.0f} s: see its log, or "
                    "raise runtime.setup_timeout_s"
                )
            told: dict[str, Any] = json.loads(worker.receive())
            values: dict[str, Any] = {key: tuple(x) if isinstance(x, list) else x for key, x in told.items()}
            specs.append(EnvSpec(**values))
        if any(spec != specs[0] for spec in specs):
            raise WorkerError(f"the workers built different environments: {specs}")
        return specs[0]

    def attach(self, descriptor: int, layout: Sequence[SlotField]) -> None:
        """Hand the slot memory to all workers."""
        packet = json.dumps([astuple(field) for field in layout]).encode()
        for worker in self.workers:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `receive` will say who died, and how
                socket.send_fds(worker.link, [packet], [descriptor])

    def reset(self, env: int, slot: int, *, task: int, seed: int, ticket: int) -> None:
        """Begin an episode on environment `env` of this rank."""
        worker, local = divmod(env, self._envs_per_worker)
        self.workers[worker].send([Record(Kind.reset, local, slot, 0, task, seed, ticket)])

    def act(self, replies: Sequence[tuple[int, int, int]]) -> None:
        """Release `replies`: (env, slot, decision) whose actions lie in their slots. One packet per worker."""
        orders: dict[int, list[Record]] = {}
        for env, slot, decision in replies:
            worker, local = divmod(env, self._envs_per_worker)
            orders.setdefault(worker, []).append(Record(Kind.act, local, slot, decision))
        for worker, records in orders.items():
            self.workers[worker].send(records)

    def receive(self, worker: Worker) -> list[Record]:
        """Records of one packet of `worker`, their `env` counted over the rank; raises `WorkerError`."""
        records, _ = unpack(worker.receive())
        first = worker.number * self._envs_per_worker
        return [Record(r.kind, first + r.env, r.slot, r.decision) for r in records]

    def close(self, seconds: float = 10.0) -> None:
        """End all workers within about `seconds`."""
        deadline = time.monotonic() + seconds
        for worker in self.workers:
            worker.close(deadline - time.monotonic())
