"""Two machines on one: network namespaces with names and addresses of their own, joined by a cable (veth).

They hang on a process that holds them open, and go with it: nothing is left behind, whatever ends the test.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

REPOSITORY = Path(__file__).parents[1]
INTERFACE = "dvla0"
PORT = 29400  # nobody else is in the namespace


@dataclass(frozen=True)
class Node:
    """One of the machines."""

    index: int
    pid: int
    """The process that holds its namespaces."""

    @property
    def address(self) -> str:
        """Its IP address."""
        return f"10.77.0.{self.index + 1}"

    def command(self, *words: str) -> list[str]:
        """A command line that runs `words` there."""
        return ["nsenter", "-t", str(self.pid), "-n", "-u", "-m", "--", "env", "-C", str(REPOSITORY), *words]

    def torchrun(self, *words: str, ranks: int = 2) -> subprocess.Popen:
        """Start this node's share of a torchrun over two nodes in the background, its output in one pipe."""
        start = (
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", str(ranks)),
            *("--node-rank", str(self.index), "--master-addr", "10.77.0.1", "--master-port", str(PORT)),
        )
        return subprocess.Popen(
            self.command(*start, *words),
            env=os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": INTERFACE},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )


def torchrun(nodes: list[Node], *words: str, timeout_s: float = 200.0) -> list[tuple[int, str]]:
    """Run to the end on all nodes; exit code and output of each."""
    return finish([node.torchrun(*words) for node in nodes], timeout_s)


def finish(processes: list[subprocess.Popen], timeout_s: float = 200.0) -> list[tuple[int, str]]:
    """Wait for all to end; exit code and output of each."""
    try:
        return [(process.communicate(timeout=timeout_s)[0], process.returncode)[::-1] for process in processes]
    finally:
        for process in processes:
            process.kill()  # their ranks die with them
            process.wait()


def bytes_on_link(interface: str = INTERFACE) -> int:
    """Bytes that `interface` of the caller's namespace has sent and received since it is there."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == interface:
            return int(counts.split()[0]) + int(counts.split()[8])
    raise LookupError(f"there is no interface {interface}")


@contextmanager
def two_nodes() -> Iterator[list[Node]]:
    """Two nodes that reach each other and nothing else; skips the test where that is not allowed."""
    if missing := [tool for tool in ("unshare", "nsenter", "ip") if shutil.which(tool) is None]:
        pytest.skip(f"needs {', '.join(missing)} (util-linux, iproute2)")
    holders = []
    try:
        for index in range(2):
            script = (
                f"set -e; hostname node{index}; hosts=$(mktemp); "
                f"printf '127.0.0.1 localhost\\n10.77.0.1 node0\\n10.77.0.2 node1\\n' >$hosts; "
                f"mount --bind $hosts /etc/hosts; rm $hosts; ip link set lo up; echo ready; exec cat"
            )
            holder = subprocess.Popen(
                ["unshare", "--net", "--uts", "--mount", "sh", "-c", script],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            holders.append(holder)
            assert holder.stdout is not None
            if holder.stdout.readline() != "ready\n":
                pytest.skip(f"network namespaces are not allowed here: {holder.communicate()[1].strip()}")
        nodes = [Node(index, holder.pid) for index, holder in enumerate(holders)]
        one, other = (str(node.pid) for node in nodes)
        ends = (INTERFACE, "netns", one, "type", "veth", "peer", "name", INTERFACE, "netns", other)
        subprocess.run(["ip", "link", "add", *ends], check=True)
        for node in nodes:
            subprocess.run(node.command("ip", "addr", "add", f"{node.address}/24", "dev", INTERFACE), check=True)
            subprocess.run(node.command("ip", "link", "set", INTERFACE, "mtu", "9000", "up"), check=True)
        yield nodes
    finally:
        for holder in holders:
            holder.communicate()  # closes its input, and so ends it
