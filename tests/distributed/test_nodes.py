"""Several nodes: who is where, what is refused, what crosses the link, training, a death and going on."""

import json
import os
from pathlib import Path

import psutil
import pytest
import torch.distributed as dist
from e2e.launch import QUICK, Run, wait_for_file
from namespaces import finish, torchrun, two_nodes
from ranks import free_port, run_ranks
from weight_plane import as_nodes, leave

from dvla.config import ConfigError, Device
from dvla.runtime import world as world_module
from dvla.runtime.world import JoinError, join_world

pytestmark = pytest.mark.alone

SCRIPT = Path(__file__).parent / "publish_on_nodes.py"


def describe_groups(world, sizes):
    """Node, axes of the mesh and ranks of the groups, of four ranks on two nodes with each replicate_size."""
    seen = []
    for replicate_size in sizes:
        world = as_nodes(world, 2, replicate_size)
        leaders = world.leaders_pg and dist.get_process_group_ranks(world.leaders_pg)
        shard = dist.get_process_group_ranks(world.learner_mesh["shard"].get_group())
        seen.append((world.node, dist.get_process_group_ranks(world.node_pg), leaders, shard))
    return seen


@pytest.mark.distributed
def test_a_node_has_a_group_leaders_have_one_and_shards_stay_on_a_node_unless_told_otherwise():
    here, there, everywhere = [0, 1], [2, 3], [0, 1, 2, 3]
    ranks = run_ranks(describe_groups, 4, (None, 1))
    assert ranks[0] == [(0, here, [0, 2], here), (0, here, [0, 2], everywhere)]
    assert ranks[1] == [(0, here, None, here), (0, here, None, everywhere)]
    assert ranks[2] == [(1, there, [0, 2], there), (1, there, [0, 2], everywhere)]
    assert ranks[3] == [(1, there, None, there), (1, there, None, everywhere)]


def join_unfit(world, other_port):
    """What this rank hears when nodes differ in size, and when one of them lacks its device."""
    os.environ |= {"MASTER_PORT": str(leave(world)), "GROUP_RANK": str(world.rank // 2)}
    os.environ |= {"LOCAL_RANK": str(world.rank % 2), "LOCAL_WORLD_SIZE": "21"[world.rank // 2]}
    with pytest.raises(ConfigError) as sizes:
        join_world(Device.cpu, 60.0)
    os.environ["MASTER_PORT"] = str(other_port)
    if world.rank == 2:

        def without_gpu(*_):
            raise ConfigError("no GPU")

        world_module.choose_device = without_gpu
    with pytest.raises(ConfigError) as device:
        join_world(Device.cpu, 60.0)
    return str(sizes.value), str(device.value)


@pytest.mark.distributed
def test_what_is_wrong_on_one_node_is_refused_on_all():
    (sizes, device), *others = run_ranks(join_unfit, 3, free_port())
    assert others == [(sizes, device)] * 2
    host = os.uname().nodename
    assert f"node 0 ({host}) has 2, node 1 ({host}) has 1: start every node with the same --nproc-per-node" in sizes
    assert device == f"rank 2 on {host}: no GPU"


def join_alone(world, absent):
    os.environ["MASTER_PORT"] = str(leave(world))
    if world.rank == absent:
        return None
    with pytest.raises(JoinError) as caught:
        join_world(Device.cpu, 60.0, join_timeout_s=1.0)
    return str(caught.value)


@pytest.mark.distributed
def test_a_rank_that_does_not_join_is_named():
    assert "waited 1 s for ranks [1] of 2, which did not join" in run_ranks(join_alone, 2, 1)[0]
    assert "rank 1 cannot reach the store of rank 0 at 127.0.0.1:" in run_ranks(join_alone, 2, 0)[1]


@pytest.mark.multinode
@pytest.mark.parametrize(
    ("replicate_size", "mesh", "delta", "expected"),
    [
        ("null", ["replicate", "shard"], "false", 1),  # (nodes - 1) x model bytes
        ("1", ["shard"], "false", 1),
        # The first of eight versions is sent whole; then a bit for each 32-bit word, and one word of a row of 1,024.
        ("null", ["replicate", "shard"], "true", (1 + 7 * (1 / 32 + 1 / 1024)) / 8),
    ],
)
def test_each_version_crosses_the_link_once(tmp_path, replicate_size, mesh, delta, expected):
    with two_nodes() as nodes:
        for code, output in torchrun(nodes, str(SCRIPT), str(tmp_path / "out.json"), replicate_size, delta):
            assert code == 0, output
    result = json.loads((tmp_path / "out.json").read_text())
    assert result["mesh"] == mesh
    assert result["wrong"] == [[], [], [], []]
    assert result["models_per_version"] == pytest.approx(expected, rel=0.05)


@pytest.mark.multinode
@pytest.mark.e2e
def test_two_nodes_train_lose_a_rank_and_go_on(tmp_path):
    settings = ("-m", "dvla.train", f"run.root={tmp_path}", *QUICK, "runtime.verify_weights=true")
    folder = tmp_path / "test"
    with two_nodes() as nodes:
        endless = ("algo.num_steps=100000", "run.checkpoint_every=2")
        processes = [node.torchrun(*settings, *endless) for node in nodes]
        wait_for_file(processes[0], folder / "checkpoints" / "latest" / "COMPLETE.json")
        ranks = [p for p in psutil.Process(processes[1].pid).children() if "dvla" in " ".join(p.cmdline())]
        assert len(ranks) == 2
        ranks[1].kill()
        for code, output in finish(processes, 60):
            assert code == 1, output
        failed = Run(1, "", folder).summary
        assert (failed["exit"], failed["nodes"], failed["world_size"]) == ("failed", 2, 4)
        # Whoever noticed first says where the other one was: closed or reset by peer, or, on its node, who it was.
        assert "by peer" in failed["error"] or f"rank 3 (pid {ranks[1].pid}) died" in failed["error"]

        last = int((folder / "checkpoints" / "latest").readlink().name.removeprefix("step_"))
        # It may go on in another layout: here sharded over all ranks before, sharded on each node now.
        more = ("resume=auto", f"algo.num_steps={last + 2}", "runtime.replicate_size=2", "runtime.weight_deltas=true")
        outcomes = torchrun(nodes, *settings, *more)
        for code, output in outcomes:
            assert code == 0, output
    run = Run(0, outcomes[0][1], folder)
    assert (run.summary["exit"], run.summary["policy_version"]) == ("completed", last + 2)
    assert [line["policy_version"] for line in run.metrics] == list(range(1, last + 3))
    assert run.summary["weight_syncs"] == 2  # each verified on every rank, against its own learner


@pytest.mark.multinode
@pytest.mark.e2e
@pytest.mark.parametrize("placement", ["separated", "hybrid"])
def test_a_placement_is_repeated_on_every_node(tmp_path, placement):
    settings = ("-m", "dvla.train", f"run.root={tmp_path}", *QUICK, "runtime.verify_weights=true")
    ends = (f"placement={placement}", "run.eval_every=2", "evaluation.episodes_per_task=5", "telemetry.trace=true")
    with two_nodes() as nodes:
        outcomes = torchrun(nodes, *settings, *ends)
        for code, output in outcomes:
            assert code == 0, output
    run = Run(0, outcomes[0][1], tmp_path / "test")
    assert (run.summary["exit"], run.summary["nodes"], run.summary["world_size"]) == ("completed", 2, 4)
    assert run.summary["eval_success_before"] is not None
    assert run.summary["eval_success_after"] is not None
    assert "between nodes, per step: weights" in run.output
    who_decides = [1, 3] if placement == "separated" else [0, 2]
    for rank in range(4):
        events = json.loads((run.folder / "traces" / f"rank{rank:05d}.json").read_text())["traceEvents"]
        decides = any(event["ph"] == "X" and event["name"] == "decide" for event in events)
        assert decides is (rank in who_decides), rank
