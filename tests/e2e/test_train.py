"""The main job on the built-in reach, under real torchrun: outputs, overlap, bounds, reproducibility, stop and resume."""

import json
import os
import re
import signal

import psutil
import pytest
import yaml
from metric_tags import documented
from pages import Page
from spans import overlap_seconds

from dvla.telemetry.spans import read_spans
from dvla.telemetry.summary import SUMMARY_KEYS
from e2e.launch import QUICK, finish, ranks_of, start, train, wait_for_file, wait_for_step

pytestmark = [pytest.mark.e2e, pytest.mark.alone]

TIMES = ("time/", "perf/", "lane/", "plane/", "memory/", "checkpoint/")  # of the machine, not of the training


def without_times(metrics):
    return [{key: value for key, value in line.items() if not key.startswith(TIMES)} for line in metrics]


@pytest.fixture(scope="module")
def overlapped(tmp_path_factory):
    """One overlapped run on two ranks that several tests look at."""
    return train(
        tmp_path_factory.mktemp("runs"),
        *QUICK,
        "algo.num_steps=12",
        "algo.max_staleness=2",
        "algo.lr=3e-3",
        "telemetry.trace=true",
        "runtime.verify_weights=true",
        "runtime.num_workers=2",
        "run.checkpoint_every=5",
    )


def test_a_run_leaves_what_others_rely_on(overlapped):
    assert overlapped.code == 0, overlapped.output
    summary = overlapped.summary
    assert set(SUMMARY_KEYS) <= set(summary)
    assert (summary["exit"], summary["error"], summary["world_size"]) == ("completed", None, 2)
    assert summary["policy_version"] == 12
    assert summary["episodes"] == 4 * summary["groups"]
    assert summary["groups"] - summary["groups_dropped"] == 4 * 12
    assert summary["groups_lost"] == 0
    assert summary["env_steps_valid"] <= summary["groups"] * 4 * 32
    assert [line["policy_version"] for line in overlapped.metrics] == list(range(1, 13))
    assert next(iter(overlapped.metrics[0])) == "policy_version"
    names = {path.name for path in overlapped.folder.iterdir()}
    assert names == {
        "config.yaml",
        "env.json",
        "metrics.jsonl",
        "tb",
        "checkpoints",
        "logs",
        "traces",
        "summary.json",
        "report.html",
    }
    assert sorted(path.name for path in (overlapped.folder / "checkpoints").iterdir()) == [
        "latest", "step_000010", "step_000012",
    ]  # fmt: skip
    assert (overlapped.folder / "checkpoints" / "latest").readlink().name == "step_000012"
    assert yaml.safe_load((overlapped.folder / "config.yaml").read_text())["algo"]["num_steps"] == 12


def test_every_metric_is_documented(overlapped):
    patterns = documented()
    unknown = [
        tag
        for tag in overlapped.metrics[0]
        if tag not in {"policy_version", "env_steps"} and not any(pattern.fullmatch(tag) for pattern in patterns)
    ]
    assert unknown == []


def test_four_lanes_of_every_rank_are_alive_together_and_overlap(overlapped):
    for rank in range(2):
        spans = read_spans(overlapped.folder / "traces" / f"rank{rank:05d}.json")
        alive = {}
        for span in spans:
            begin, end = alive.get(span.lane, (span.start_s, span.end_s))
            alive[span.lane] = (min(begin, span.start_s), max(end, span.end_s))
        del alive["checkpoint"]  # the thread that writes them is no lane
        assert set(alive) == {"sampling", "inference", "grpo", "param_dist"}
        assert max(begin for begin, _ in alive.values()) < min(end for _, end in alive.values())
        assert overlap_seconds(spans, "inference", "grpo") > 0
        assert overlap_seconds(spans, "sampling", "grpo") > 0


def test_the_report_shows_the_run(overlapped):
    text = (overlapped.folder / "report.html").read_text()
    assert not re.search(r"https?:|//\w|@import|url\(", text)
    page, metrics = Page(text), overlapped.metrics
    for title, tag in (
        ("Success", "rollout/success_rate"),
        ("Gradient norm", "train/grad_norm"),
        ("Loss", "train/loss"),
    ):
        assert page.charts()[title][0]["points"] == [
            [line["policy_version"], pytest.approx(line[tag], rel=1e-5)] for line in metrics
        ]
    assert "completed" in page.text
    lanes = [attributes["title"] for attributes in page.all("div") if attributes.get("title")]
    names = ("sampling", "inference", "grpo", "param_dist")
    assert lanes == [f"rank {rank}, {lane}" for rank in range(2) for lane in names]
    assert re.search(r"Optimiser steps \d+ to 12 took .* s\. \w+ bounds them \d+ % of the time", page.text)


def test_every_weight_transfer_was_verified(overlapped):
    # A transfer that is not bit-exact ends the run (runtime.verify_weights); versions 0 to 11 were sent.
    assert overlapped.summary["weight_syncs"] == 12


def test_staleness_and_logprob_gap_keep_their_bounds(overlapped):
    staleness = [line["staleness/max"] for line in overlapped.metrics]
    assert max(staleness) <= 2
    assert max(staleness) >= 1, "a run that never trains on stale data proves no bound"
    gaps = [line["train/logprob_gap"] for line in overlapped.metrics if line["train/logprob_gap"] is not None]
    assert gaps
    assert max(gaps) < 1e-4


def test_max_staleness_zero_is_on_policy(tmp_path):
    run = train(tmp_path, *QUICK, "algo.max_staleness=0")
    assert run.code == 0, run.output
    assert [line["staleness/max"] for line in run.metrics] == [0] * 4
    assert all(line["train/logprob_gap"] < 1e-4 for line in run.metrics)


def test_update_epochs_take_several_steps_on_a_batch(tmp_path):
    more = ("algo.lr=3e-3", "algo.micro_batch_size=7", "telemetry.trace=true")
    run = train(tmp_path, *QUICK, "algo.update_epochs=2", "algo.num_steps=6", *more)
    assert run.code == 0, run.output
    assert [line["policy_version"] for line in run.metrics] == [2, 4, 6]
    assert run.summary["groups"] - run.summary["groups_dropped"] == 12
    assert max(line["staleness/max"] for line in run.metrics) <= 2  # one batch is two optimiser steps
    for path in (run.folder / "traces").iterdir():
        sizes: list[list[int]] = [[]]
        for span in read_spans(path):
            if span.name == "gradient":
                sizes[-1].append(span.args["size"])
            elif span.name == "optimise":
                sizes.append([])
        assert len(sizes) == 7
        for of_step in sizes[:-1]:  # groups share micro-batches: at most one is not full, but for padding (1)
            assert 7 in of_step
            assert sum(size not in (1, 7) for size in of_step) <= 1


SERIAL = (
    *QUICK,
    "runtime.schedule=serial",
    "algo.max_staleness=0",
    "algo.num_steps=6",
    "run.checkpoint_every=3",
    "algo.reference_kl_coef=0.1",  # a resumed run must find the first weights again
)


@pytest.fixture(scope="module")
def serial(tmp_path_factory):
    return train(tmp_path_factory.mktemp("runs"), *SERIAL, "runtime.num_workers=2")


def test_serial_twice_gives_the_same_metrics_to_the_bit(serial, tmp_path):
    assert serial.code == 0, serial.output
    again = train(tmp_path, *SERIAL, "runtime.num_workers=1")
    assert without_times(again.metrics) == without_times(serial.metrics)
    other = train(tmp_path, *SERIAL, "run.name=other", "seed=1")
    assert without_times(other.metrics) != without_times(serial.metrics)


def test_a_resumed_serial_run_goes_on_to_the_bit(serial, tmp_path):
    first = train(tmp_path, *SERIAL, "algo.num_steps=3")
    assert first.code == 0, first.output
    second = train(tmp_path, *SERIAL, "resume=auto")
    assert second.code == 0, second.output
    assert without_times(second.metrics) == without_times(serial.metrics)
    assert second.summary["episodes"] == serial.summary["episodes"]


@pytest.mark.parametrize("ranks", [0, 2], ids=["alone", "torchrun"])
def test_a_signal_stops_at_a_step_with_a_checkpoint_and_auto_goes_on(tmp_path, ranks):
    endless = (*QUICK, "algo.num_steps=100000")
    process = start(tmp_path, *endless, ranks=ranks)
    wait_for_step(process, tmp_path / "test", 2)
    targets = [psutil.Process(process.pid)] if ranks == 0 else ranks_of(process)[1:]
    assert targets
    targets[0].send_signal(signal.SIGTERM)  # one rank alone: all must agree
    run = finish(process, tmp_path)
    assert run.code == 0, run.output
    assert run.summary["exit"] == "stopped"
    version = run.summary["policy_version"]
    assert (run.folder / "checkpoints" / "latest").readlink().name == f"step_{version:06d}"
    more = train(tmp_path, *QUICK, f"algo.num_steps={version + 2}", "resume=auto", ranks=ranks)
    assert more.code == 0, more.output
    assert [line["policy_version"] for line in more.metrics] == list(range(1, version + 3))


def test_ctrl_c_on_torchrun_leaves_a_checkpoint(tmp_path):
    process = start(tmp_path, *QUICK, "algo.num_steps=100000")
    wait_for_step(process, tmp_path / "test", 2)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: torchrun, ranks and workers at once
    run = finish(process, tmp_path)
    assert run.summary["exit"] == "stopped", run.output
    assert (run.folder / "checkpoints" / "latest" / "COMPLETE.json").exists()


def test_a_torn_checkpoint_is_passed_over(tmp_path):
    first = train(tmp_path, *QUICK, "run.checkpoint_every=2", ranks=0)
    assert first.code == 0, first.output
    newest = first.folder / "checkpoints" / "step_000004"
    data = next(path for path in newest.iterdir() if path.suffix == ".distcp")
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1  # of the right size still
    data.write_bytes(content)
    second = train(tmp_path, *QUICK, "algo.num_steps=5", "resume=auto", ranks=0)
    assert second.code == 0, second.output
    assert [line["policy_version"] for line in second.metrics] == [1, 2, 3, 4, 5]
    assert "step_000004 is torn" in second.output


def test_going_back_to_an_older_checkpoint_takes_back_the_newer_ones(tmp_path):
    first = train(tmp_path, *QUICK, "run.checkpoint_every=1", "run.keep_checkpoints=4", ranks=0)
    assert first.code == 0, first.output
    checkpoints = first.folder / "checkpoints"
    again = train(tmp_path, *QUICK, "algo.num_steps=2", f"resume={checkpoints / 'step_000001'}", ranks=0)
    assert again.code == 0, again.output
    assert sorted(path.name for path in checkpoints.iterdir()) == ["latest", "step_000001", "step_000002"]
    assert (checkpoints / "latest").readlink().name == "step_000002"
    assert [line["policy_version"] for line in again.metrics] == [1, 2]


def test_a_run_is_not_resumed_as_another_policy(tmp_path):
    """Neither training on nor the export of what is there may be spoilt by a mistaken command."""
    small = (*QUICK, "env.cameras=[top]", "model=openvla_oft_nano", "model.lora_rank=2", "algo.num_steps=1")
    assert train(tmp_path, *small, ranks=0).code == 0
    before = (tmp_path / "test" / "config.yaml").read_text()
    for change, key in (("model.lora_rank=4", "model.lora_rank"), ("seed=7", "seed")):
        again = train(tmp_path, *small, "resume=auto", change, ranks=0)
        assert again.code == 2
        assert f"error: {key}=" in again.output
        assert "was made with" in again.output
    assert (tmp_path / "test" / "config.yaml").read_text() == before


def test_a_run_resumed_into_a_new_folder_has_a_checkpoint_of_its_own(tmp_path):
    first = train(tmp_path, *QUICK, ranks=0)
    more = train(
        tmp_path, *QUICK, "run.name=other", f"resume={first.folder / 'checkpoints' / 'latest'}", ranks=0
    )  # nothing is left to train
    assert more.code == 0, more.output
    assert (more.folder / "checkpoints" / "latest").readlink().name == "step_000004"


@pytest.fixture(scope="module")
def serial_alone(tmp_path_factory):
    """As `serial`, on one rank."""
    return train(tmp_path_factory.mktemp("runs"), *SERIAL, ranks=0)


@pytest.mark.parametrize("after", [0, 2], ids=["before the first step", "after two steps"])
def test_a_serial_run_that_was_stopped_goes_on_to_the_bit(serial_alone, tmp_path, after):
    process = start(tmp_path, *SERIAL, ranks=0)
    if after:
        wait_for_step(process, tmp_path / "test", after)
    else:
        wait_for_file(process, tmp_path / "test" / "config.yaml")
    process.send_signal(signal.SIGTERM)
    stopped = finish(process, tmp_path)
    assert stopped.code == 0, stopped.output
    assert stopped.summary["exit"] == "stopped"
    more = train(tmp_path, *SERIAL, "resume=auto", ranks=0)
    assert more.code == 0, more.output
    assert without_times(more.metrics) == without_times(serial_alone.metrics)


def test_a_step_may_take_longer_than_a_wait(tmp_path):
    run = train(
        tmp_path,
        *QUICK,
        "env.name=counting_env:CountingEnv",
        "+env.options.fault=slow",
        "env.max_episode_steps=10",
        "algo.groups_per_step=12",
        "algo.filter_zero_signal=false",
        "algo.num_steps=1",
        "runtime.wait_timeout_s=4",
        ranks=0,
    )
    assert run.code == 0, run.output
    assert run.summary["wall_s"] > 5, "or it would prove nothing"


def test_a_checkpoint_loads_on_another_number_of_ranks(tmp_path):
    assert train(tmp_path, *QUICK, "algo.num_steps=2", ranks=2).code == 0
    run = train(tmp_path, *QUICK, "algo.num_steps=4", "resume=auto", ranks=1)
    assert run.code == 0, run.output
    assert [line["policy_version"] for line in run.metrics] == [1, 2, 3, 4]
    state = json.loads((run.folder / "checkpoints" / "step_000004" / "train_state.json").read_text())
    assert state["policy_version"] == 4


def test_a_killed_worker_is_replaced_and_changes_nothing(tmp_path):
    """In the serial schedule every number of the run is the same as without the disaster."""
    counting = (
        *QUICK,
        "env.name=counting_env:CountingEnv",
        "+env.options.num_tasks=2",
        "algo.filter_zero_signal=false",
        "runtime.schedule=serial",
        "runtime.num_workers=2",
        "algo.max_staleness=0",
        "algo.num_steps=3",
    )
    calm = train(tmp_path / "calm", *counting)
    marker = tmp_path / "struck"
    killed = train(
        tmp_path / "killed", *counting, "+env.options.disaster='kill step 40'", f"+env.options.marker={marker}"
    )
    assert marker.exists()
    assert (calm.code, killed.code) == (0, 0), killed.output
    assert (calm.summary["worker_restarts"], killed.summary["worker_restarts"]) == (0, 1)
    numbers, wanted = without_times(killed.metrics), without_times(calm.metrics)
    assert sum(line.pop("rollout/worker_restarts") for line in numbers) == 1
    assert sum(line.pop("rollout/worker_restarts") for line in wanted) == 0
    assert numbers == wanted
    assert calm.summary["episodes"] == killed.summary["episodes"] == 48


def test_evaluation_goes_on_beside_training(tmp_path):
    run = train(
        tmp_path,
        *QUICK,
        "algo.num_steps=8",
        "algo.update_epochs=2",
        "run.eval_every=3",
        "evaluation.episodes_per_task=7",
        "env.cameras=[top]",
        "evaluation.videos_per_task=1",
    )
    assert run.code == 0, run.output
    rounds = [json.loads(line) for line in (run.folder / "evaluations.jsonl").read_text().splitlines()]
    versions = [line["policy_version"] for line in rounds]
    assert versions[0] == 0
    assert versions[-1] == 8
    assert set(versions) <= {0, 4, 6, 8}
    for line in rounds:
        assert line["eval/version"] == line["policy_version"] <= line["eval/newest_version"]
    assert all(line["eval/version"] == line["eval/newest_version"] for line in (rounds[0], rounds[-1]))
    assert run.summary["eval_success_before"] == rounds[0]["eval/success_rate"]
    assert run.summary["eval_success_after"] == rounds[-1]["eval/success_rate"]
    assert (run.folder / "videos" / "step_000008").is_dir()
    assert run.summary["groups"] - run.summary["groups_dropped"] == 4 * 4
    patterns = documented()
    assert all(any(pattern.fullmatch(tag) for pattern in patterns) for tag in rounds[0] if tag != "policy_version")


@pytest.mark.parametrize(
    "overrides",
    [
        ("algo.groups_per_step=2", "algo.max_staleness=0"),
        ("algo.groups_per_step=4", "algo.max_staleness=1", "runtime.num_slots=4", "runtime.num_envs=8"),
        ("algo.groups_per_step=2", "algo.max_staleness=0", "runtime.schedule=serial"),
    ],
    ids=str,
)
def test_evaluation_finds_room_where_training_holds_all_slots(tmp_path, overrides):
    run = train(
        tmp_path, *QUICK, *overrides, "run.eval_every=1", "evaluation.episodes_per_task=3", "runtime.wait_timeout_s=30"
    )
    assert run.code == 0, run.output
    rounds = [
        json.loads(line)["policy_version"] for line in (run.folder / "evaluations.jsonl").read_text().splitlines()
    ]
    assert (rounds[0], rounds[-1]) == (0, 4)


def test_a_final_evaluation_that_was_stopped_is_made_up_for(tmp_path):
    slow = (
        *QUICK,
        "env.name=counting_env:CountingEnv",
        "+env.options.fault=slow",
        "env.max_episode_steps=4",
        "algo.filter_zero_signal=false",
        "algo.num_steps=1",
        "algo.groups_per_step=2",
        "model.num_action_chunks=2",
        "run.eval_every=1",
        "evaluation.episodes_per_task=60",
    )
    process = start(tmp_path, *slow)
    wait_for_step(process, tmp_path / "test", 1)
    for rank in ranks_of(process):
        rank.send_signal(signal.SIGUSR1)
    run = finish(process, tmp_path)
    assert (run.summary["exit"], run.summary["policy_version"]) == ("stopped", 1), run.output
    assert run.summary["eval_success_after"] is None
    again = train(tmp_path, *slow, "resume=auto")
    assert again.code == 0, again.output
    assert again.summary["eval_success_after"] is not None
    assert again.summary["eval_success_before"] == run.summary["eval_success_before"]
