"""Bytes that change behind the program's back are found, said, and not used."""

import pytest
from e2e.launch import QUICK, finish, start

pytestmark = [pytest.mark.chaos, pytest.mark.chaos_full]

RUN = (*QUICK, "run.checkpoint_every=1", "run.keep_checkpoints=2", "runtime.verify_weights=true")


def test_weights_that_changed_on_their_way_end_the_run(tmp_path):
    fault = "lane=grpo rank=1 point=publish step=2 do=corrupt"
    run = finish(start(tmp_path, *RUN, module="faulty_train", variables={"FAULT": fault}), tmp_path)
    assert run.code == 1
    error = "WeightPlaneError: the replica's weights of version 2 differ from the learner's (in lane inference)"
    assert error in run.summary["error"]
    assert set(run.last_words) == {0, 1}
    assert all(error in said for said in run.last_words.values())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_checkpoint_that_changed_on_the_disk_is_passed_over(rank, tmp_path):
    fault = f"lane=checkpoint rank={rank} point='checkpoint write' version=4 do=corrupt"
    run = finish(start(tmp_path, *RUN, module="faulty_train", variables={"FAULT": fault}), tmp_path)
    assert run.code == 0, run.output
    run = finish(start(tmp_path, *RUN, "resume=auto"), tmp_path)
    assert run.code == 0, run.output
    checkpoints = run.folder / "checkpoints"
    torn = (
        f"checkpoint {checkpoints / 'step_000004'} is torn and passed over: __{rank}_0.distcp is not what was written"
    )
    assert torn in run.output
    assert f"resuming from {checkpoints / 'step_000003'}" in run.output
    assert [line["policy_version"] for line in run.metrics] == [1, 2, 3, 4]
