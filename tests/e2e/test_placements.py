"""Placements under real torchrun: they learn the same, stop and die in order, evaluate, and refuse what cannot work."""

import json
import signal
import time

import psutil
import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from e2e.launch import QUICK, finish, ranks_of, start, train, wait_for_file, wait_for_step

pytestmark = [pytest.mark.e2e, pytest.mark.alone]

SEPARATED = ("placement=separated", "placement.ratio=1:1")
HYBRID_ALL = ("placement=hybrid", "placement.ratio=1:1")
HYBRID = ("placement=hybrid", "placement.ratio=1:1:1")
CUSTOM = ("placement=custom", "placement.sampling=[1,2]", "placement.inference=[2]", "placement.training=[0]")


def saved(folder):
    """What the newest checkpoint of a run holds: {"model": {name: tensor}, "optimizer": ...}."""
    file = folder / "all.pt"
    dcp_to_torch_save(folder / "checkpoints" / "latest", file)
    return torch.load(file, weights_only=False)


# -- the same learning step ----------------------------------------------------------------------------------------------

# On-policy, every group kept, every decision a batch of its own: all that a placement may change is who does what, and in
# which order numbers are added. Rewards are dense, so that every group has a gradient.
STEP = (
    *("env=reach", "env.reward_mode=dense", "env.cameras=[top]", "env.max_episode_steps=8", "run.name=test"),
    *("algo.max_staleness=0", "algo.filter_zero_signal=false", "algo.group_size=4", "algo.groups_per_step=4"),
    *("algo.num_steps=2", "algo.micro_batch_size=64", "runtime.num_envs=4", "runtime.max_batch=1"),
    *("runtime.torch_threads=1", "runtime.verify_weights=true", "telemetry.tensorboard=false"),
)
ONE_AT_A_TIME = "runtime.num_slots=4"  # groups are played, and their gradients added, in order
MODELS = {
    "openvla_oft": ("model=openvla_oft_nano",),
    "pi05": ("model=pi05_nano", "algo.logprob_type=chunk"),
}
MEASURED = ("time/", "perf/", "lane/", "plane/", "memory/", "checkpoint/")
PLACEMENTS = {  # ranks and overrides
    "colocated": (2, ()),
    "separated": (2, (*SEPARATED, ONE_AT_A_TIME)),
    "hybrid-train-on-all": (2, HYBRID_ALL),
    "hybrid": (3, (*HYBRID, ONE_AT_A_TIME)),
    "custom": (3, CUSTOM),
}


def learnt(metrics):
    """Metrics without what depends on the machine and its load."""
    return [{key: value for key, value in line.items() if not key.startswith(MEASURED)} for line in metrics]


@pytest.fixture(scope="module")
def references(tmp_path_factory):
    """Of each model, the run on one rank that does everything, once asked for."""
    done = {}

    def reference(model):
        if model not in done:
            run = train(tmp_path_factory.mktemp(model), *STEP, *MODELS[model], ONE_AT_A_TIME, ranks=1)
            assert run.code == 0, run.output
            done[model] = run, saved(run.folder)
        return done[model]

    return reference


@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("model", MODELS)
def test_every_placement_takes_the_same_step_from_the_same_episodes(references, model, placement, tmp_path):
    reference, wanted = references(model)
    ranks, overrides = PLACEMENTS[placement]
    run = train(tmp_path, *STEP, *MODELS[model], *overrides, ranks=ranks)
    assert run.code == 0, run.output
    assert run.summary["weight_syncs"] == reference.summary["weight_syncs"] == 2  # each verified on every replica
    for line, want in zip(run.metrics, reference.metrics, strict=True):
        for key in ("policy_version", "env_steps", "rollout/success_rate", "staleness/max"):
            assert line[key] == want[key]
        # Version 0 is the same to the bit, and so are its episodes; the next is as equal as the step before.
        assert line["rollout/return"] == pytest.approx(want["rollout/return"], abs=1e-5)
        assert line["train/grad_norm"] == pytest.approx(want["train/grad_norm"], rel=1e-5)
        assert line["train/grad_norm"] > 0
        assert line["train/loss"] == pytest.approx(want["train/loss"], abs=1e-5)
        assert line["train/entropy"] == pytest.approx(want["train/entropy"], abs=1e-5)
    state = saved(run.folder)
    assert state["model"].keys() == wanted["model"].keys()
    far = max((state["model"][name] - tensor).abs().max().item() for name, tensor in wanted["model"].items())
    assert far <= 1e-5
    if placement in ("separated", "hybrid"):  # one learner, as in the reference
        assert all(torch.equal(state["model"][name], tensor) for name, tensor in wanted["model"].items())
        assert learnt(run.metrics) == learnt(reference.metrics)


# -- stop and kill -------------------------------------------------------------------------------------------------------

ENDLESS = (*QUICK, "algo.num_steps=100000", "run.checkpoint_every=2", "runtime.torch_threads=1")


def rank_process(process, rank):
    """The process of a rank."""
    (found,) = [p for p in ranks_of(process) if p.cmdline()[0].split()[0] == f"dvla:r{rank}"]
    return found


def go_on(run, root, placement, ranks):
    """Resume a run for two more steps."""
    version = int((run.folder / "checkpoints" / "latest").readlink().name.removeprefix("step_"))
    more = train(root, *QUICK, *placement, "resume=auto", f"algo.num_steps={version + 2}", ranks=ranks)
    assert more.code == 0, more.output
    assert (more.summary["exit"], more.summary["policy_version"]) == ("completed", version + 2)
    assert [line["policy_version"] for line in more.metrics] == list(range(1, version + 3))


@pytest.mark.parametrize(
    ("placement", "ranks", "rank", "early", "resumed"),
    [
        (SEPARATED, 2, 1, False, True),
        (HYBRID, 3, 1, False, True),
        (HYBRID, 3, 2, False, False),
        (HYBRID, 3, 1, True, False),
    ],
    ids=["samples and infers", "only infers", "only samples", "only infers, before the first step"],
)
def test_a_signal_to_a_rank_that_does_not_train_stops_all_at_one_step(tmp_path, placement, ranks, rank, early, resumed):
    process = start(tmp_path, *ENDLESS, *placement, ranks=ranks)
    if early:
        wait_for_file(process, tmp_path / "test" / "config.yaml")
    else:
        wait_for_step(process, tmp_path / "test", 2)
    rank_process(process, rank).send_signal(signal.SIGTERM)
    run = finish(process, tmp_path)
    assert run.code == 0, run.output
    summary = run.summary
    assert (summary["exit"], summary["error"]) == ("stopped", None)
    assert (run.folder / "checkpoints" / "latest").readlink().name == f"step_{summary['policy_version']:06d}"
    assert (run.folder / "checkpoints" / "latest" / "COMPLETE.json").exists()
    assert len(run.metrics if summary["policy_version"] else []) == summary["policy_version"]
    if resumed:  # once for each placement: the checkpoint does not tell who was asked to stop
        go_on(run, tmp_path, placement, ranks)


@pytest.mark.chaos
@pytest.mark.parametrize(
    ("placement", "ranks", "victim", "resumed"),
    [
        pytest.param(SEPARATED, 2, 1, False, marks=pytest.mark.chaos_full),
        (SEPARATED, 2, 0, True),
        (HYBRID, 3, 1, True),
        pytest.param(HYBRID, 3, 2, False, marks=pytest.mark.chaos_full),
    ],
    ids=["separated-sampling", "separated-training", "hybrid-inference", "hybrid-sampling"],
)
def test_a_killed_rank_ends_the_run_by_name_and_auto_goes_on(tmp_path, placement, ranks, victim, resumed):
    process = start(tmp_path, *ENDLESS, *placement, ranks=ranks)
    wait_for_file(process, tmp_path / "test" / "checkpoints" / "latest" / "COMPLETE.json")
    family = psutil.Process(process.pid).children(recursive=True)
    target = rank_process(process, victim)
    target.kill()
    begin = time.monotonic()
    run = finish(process, tmp_path, timeout_s=60)
    assert run.code != 0, run.output
    assert time.monotonic() - begin < 30
    errors = [line for line in run.output.splitlines() if line.startswith("dvla: rank")]
    assert errors
    assert any(f"rank {victim} (pid {target.pid}) died" in line for line in errors), run.output
    _, alive = psutil.wait_procs(family, timeout=10)
    assert alive == [], "simulators too end with their rank"
    if resumed:  # once for each placement
        go_on(run, tmp_path, placement, ranks)


# -- training goes on as everywhere --------------------------------------------------------------------------------------

UNEVEN = (
    *("placement=custom", "placement.sampling=[1,2,3]", "placement.inference=[2,3]", "placement.training=[0,1]"),
    "runtime.torch_threads=1",
)


@pytest.mark.parametrize(("placement", "ranks"), [(SEPARATED, 2), (HYBRID, 3)], ids=["separated", "hybrid"])
def test_evaluation_goes_on_beside_training_and_before_and_after(tmp_path, placement, ranks):
    run = train(
        tmp_path,
        *QUICK,
        *placement,
        "run.eval_every=2",
        "evaluation.episodes_per_task=4",
        "algo.max_staleness=0",
        ranks=ranks,
    )
    assert run.code == 0, run.output
    rounds = [json.loads(line) for line in (run.folder / "evaluations.jsonl").read_text().splitlines()]
    versions = [line["policy_version"] for line in rounds]
    assert (versions[0], versions[-1]) == (0, 4)
    assert all(line["eval/version"] == line["policy_version"] <= line["eval/newest_version"] for line in rounds)
    assert run.summary["eval_success_before"] == rounds[0]["eval/success_rate"]
    assert run.summary["eval_success_after"] == rounds[-1]["eval/success_rate"]


@pytest.mark.parametrize(
    ("placement", "ranks", "overrides"),
    [
        (SEPARATED, 2, ()),
        (HYBRID, 3, ()),
        # By turns alone, the groups that replace dropped ones would heap up on one sampling rank.
        (("placement=separated", "placement.ratio=2:1"), 3, ("algo.max_staleness=0",)),
        (UNEVEN, 4, ()),
    ],
    ids=["separated", "hybrid", "separated-2:1", "uneven"],
)
def test_several_epochs_and_dropped_groups(tmp_path, placement, ranks, overrides):
    run = train(
        tmp_path,
        *(
            *QUICK,
            *placement,
            *overrides,
            "algo.update_epochs=2",
            "algo.num_steps=16",
            "algo.max_dropped_per_step=1000",
        ),
        *("algo.max_staleness=1", "runtime.wait_timeout_s=30", *overrides),
        ranks=ranks,
    )
    assert run.code == 0, run.output
    assert [line["policy_version"] for line in run.metrics] == list(range(2, 17, 2))
    summary = run.summary
    assert summary["groups_dropped"] > 0
    assert summary["groups"] - summary["groups_dropped"] == 8 * 4
    assert summary["episodes"] == 4 * summary["groups"]
    assert summary["staleness_max"] <= 2  # one batch is two optimiser steps


def test_uneven_sets_of_ranks_keep_to_the_policy_of_the_step(tmp_path):
    """With a bound above 0: in test_several_epochs_and_dropped_groups."""
    on_policy = "algo.max_staleness=0"
    run = train(tmp_path, *QUICK, *UNEVEN, on_policy, "algo.num_steps=8", "runtime.wait_timeout_s=30", ranks=4)
    assert run.code == 0, run.output
    assert [line["policy_version"] for line in run.metrics] == list(range(1, 9))
    assert run.summary["staleness_max"] == 0
    assert "3 sampling ranks feed 2 training ranks in turn" in run.output
    assert all(run.summary["lanes"][lane]["items"] > 0 for lane in ("sampling", "inference", "grpo", "param_dist"))


def test_training_ranks_that_share_a_sampling_rank_never_wait_for_slots_of_each_other(tmp_path):
    """The least slots that are allowed: one group of each training rank."""
    run = train(
        tmp_path, *QUICK, *HYBRID_ALL, "runtime.num_slots=8", "algo.num_steps=8", "runtime.wait_timeout_s=30", ranks=2
    )
    assert run.code == 0, run.output
    assert run.summary["policy_version"] == 8


@pytest.mark.parametrize(
    ("ranks", "overrides"),
    [
        (0, ("placement.stages=2",)),
        (0, ("runtime.num_envs=3",)),
        (0, ("env.name=batch_reach:WalledReach", "+env.options.sim_backend=gpu", "env.cameras=[top]")),
        (3, (*SEPARATED[:1], "placement.ratio=1:2", "placement.stages=2")),
    ],
    ids=["stages", "few-envs", "batch", "separated"],
)
def test_between_groups_nothing_waits_for_weights_that_wait_for_it(tmp_path, ranks, overrides):
    run = train(
        *(tmp_path, *QUICK, "runtime.apply_weights=between_groups", "algo.max_staleness=2", "algo.num_steps=12"),
        *("run.eval_every=2", "evaluation.episodes_per_task=7", "runtime.num_envs=6", *overrides),
        "runtime.wait_timeout_s=30",
        ranks=ranks,
    )
    assert run.code == 0, run.output
    assert run.summary["policy_version"] == 12
    assert run.summary["staleness_max"] <= 2


# -- what people get wrong -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ranks", "overrides", "words"),
    [
        (0, SEPARATED, ["placement.ratio=1:1 needs a multiple of 2 ranks", "there are 1", "--nproc-per-node"]),
        (2, CUSTOM, ["placement.sampling=[1, 2]: the local ranks of a node are 0 to 1"]),
        (3, (*HYBRID, "runtime.apply_weights=between_groups"), ["runtime.apply_weights=between_groups"]),
        (
            2,
            (*SEPARATED, "placement.stages=1", "env.name=batch_reach:WalledReach", "+env.options.sim_backend=gpu"),
            ["rank 0", "placement.stages=1: a batch simulator steps all environments together"],
        ),
        (0, ("placement=nearby",), ["placement/nearby", "colocated", "hybrid", "separated"]),
    ],
    ids=lambda value: " ".join(value[:3]) if isinstance(value, tuple) else "",
)
def test_a_placement_that_cannot_work_is_refused_in_one_line(tmp_path, ranks, overrides, words):
    run = train(tmp_path, *QUICK, *overrides, ranks=ranks)
    assert run.code != 0
    if "placement=nearby" not in overrides:  # which Hydra itself refuses
        (line,) = [line for line in run.output.splitlines() if line.startswith("dvla: rank")]
        assert all(word in line for word in words), line
        assert ranks or "Traceback" not in run.output
    else:
        assert all(word in run.output for word in words), run.output
    assert not list(tmp_path.rglob("*-w0.log")), "before any simulator starts"
