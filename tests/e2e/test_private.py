"""While a run lives, no one else can reach it: no port on any network, no memory that another user could open. What it leaves
holds no secret of whoever started it.
"""

import contextlib
import stat
from pathlib import Path

import psutil
import pytest

from e2e.launch import QUICK, finish, train, wait_for_step
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


def test_no_file_of_a_run_has_a_secret(tmp_path, monkeypatch):
    secret = "hf_0123456789"
    monkeypatch.setenv("MY_HF_TOKEN", secret)
    run = train(tmp_path / secret, *QUICK, "algo.num_steps=2", "run.checkpoint_every=1", ranks=1)
    assert run.code == 0, run.output
    # torch notes the folder's own path in .metadata
    files = [path for path in run.folder.rglob("*") if path.is_file() and path.name != ".metadata"]
    assert {"train_state.json", "config.yaml", "summary.json", "COMPLETE.json"} <= {path.name for path in files}
    assert [path for path in files if secret.encode() in path.read_bytes()] == []
