"""While a run lives, no one else can reach it: no port on any network, no memory that another user could open."""

import contextlib
import stat
from pathlib import Path

import psutil
import pytest

from e2e.launch import QUICK, finish, wait_for_step
from e2e.test_launch import family, launch

pytestmark = [pytest.mark.e2e, pytest.mark.distributed]


def listening(processes):
    """Addresses that they accept connections on."""
    connections = [one for process in processes for one in process.net_connections("inet")]
    return [one.laddr.ip for one in connections if one.status == psutil.CONN_LISTEN]


def shared_memory(process):
    """Modes of the anonymous files that a process has open."""
    modes = []
    for link in Path(f"/proc/{process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            if str(link.readlink()).startswith("/memfd:dvla"):
                modes.append(stat.S_IMODE(link.stat().st_mode))
    return modes


def test_no_port_on_a_network_and_no_memory_for_others(tmp_path):
    endless = "algo.num_steps=100000"
    process = launch("one_node.sh", tmp_path, *QUICK, endless, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="")
    try:
        wait_for_step(process, tmp_path / "test", 1)
        processes = family(process)
        addresses = listening(processes)
        modes = [mode for one in processes for mode in shared_memory(one)]
    finally:
        process.terminate()
        run = finish(process, tmp_path)
    assert run.code == 0, run.output
    assert len(processes) == 1 + 2 + 2  # torchrun, ranks, workers
    assert len(addresses) >= 3  # the store, and gloo on each rank
    assert set(addresses) <= {"127.0.0.1", "::1"}
    assert len(modes) >= 2  # episode slots of each rank
    assert set(modes) == {0o600}
