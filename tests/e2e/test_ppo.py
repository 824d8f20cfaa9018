"""PPO behind the same lanes: overlapped on two ranks, and resumed to the bit."""

import pytest
import torch
from metric_tags import documented

from dvla.envs.reach import ReachEnv
from dvla.models.trained import as_config, run_config, trained_policy
from e2e.launch import QUICK, train
from e2e.test_train import without_times

pytestmark = pytest.mark.e2e

PPO = (*QUICK, "algo=ppo", "algo.group_size=1", "algo.groups_per_step=8", "algo.lr=1e-3", "algo.micro_batch_size=8")


def test_ppo_trains_overlapped_on_two_ranks_and_keeps_its_value_head_to_itself(tmp_path):
    run = train(
        tmp_path, *PPO, "algo.num_steps=6", "algo.update_epochs=2", "algo.value_type=action", "algo.value_clip=0.5",
        "runtime.verify_weights=true",
    )  # fmt: skip
    assert run.code == 0, run.output
    assert [line["policy_version"] for line in run.metrics] == [2, 4, 6]
    assert run.summary["episodes"] == run.summary["groups"] == 24
    assert all(line["train/value_loss"] >= 0 for line in run.metrics)
    patterns = documented()
    assert all(any(p.fullmatch(tag) for p in patterns) for tag in run.metrics[-1] if "/" in tag)
    checkpoint = run.folder / "checkpoints" / "latest"
    names = torch.distributed.checkpoint.FileSystemReader(checkpoint.resolve()).read_metadata().state_dict_metadata
    assert "model.value_head.net.0.weight" in names
    config = as_config(run_config(checkpoint))
    policy = trained_policy(config.model, spec=ReachEnv(cameras=()).spec, seed=0, checkpoint=checkpoint)
    assert not any("value_head" in name for name, _ in policy.named_parameters())


def test_a_resumed_serial_ppo_run_goes_on_to_the_bit(tmp_path):
    serial = (*PPO, "runtime.schedule=serial", "algo.max_staleness=0")
    whole = train(tmp_path / "whole", *serial, ranks=0)
    assert whole.code == 0, whole.output
    assert train(tmp_path, *serial, "algo.num_steps=2", ranks=0).code == 0
    more = train(tmp_path, *serial, "resume=auto", ranks=0)
    assert more.code == 0, more.output
    assert without_times(more.metrics) == without_times(whole.metrics)
    assert all(line["train/logprob_gap"] < 1e-4 for line in more.metrics)
