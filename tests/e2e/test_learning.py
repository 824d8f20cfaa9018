"""It learns what can be learnt, and nothing where there is nothing to learn."""

import pytest

from e2e.launch import train

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_reach_from_scratch_is_learnt_on_every_seed(tmp_path, seed):
    run = train(tmp_path, "experiment=reach", "run.name=test", f"seed={seed}")
    assert run.code == 0, run.output
    assert run.summary["success_last"] >= 0.9
    early = [line["rollout/success_rate"] for line in run.metrics[:3]]
    assert max(early) < 0.4, "it must be learnt, not be there from the start"


def test_shuffled_rewards_teach_nothing(tmp_path):
    run = train(tmp_path, "experiment=reach", "run.name=test", "env.name=shuffled_reach:ShuffledReach")
    assert run.code == 0, run.output
    assert run.summary["success_last"] < 0.4
