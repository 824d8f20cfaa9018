"""What is refused before ranks look for each other."""

import pytest

from dvla.config import Device
from dvla.runtime.world import JoinError, join_world


def test_restarted_ranks_of_several_nodes_do_not_read_what_dead_ones_left(monkeypatch):
    settings = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    with pytest.raises(JoinError, match="TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"):
        join_world(Device.cpu, 1.0)
