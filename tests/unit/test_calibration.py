"""Profiles from run folders written by hand, and `dvla.plan` with them."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest
import yaml

from dvla.config import Config, ConfigError, EnvConfig, ModelConfig, RuntimeConfig, Schedule, to_plain
from dvla.planning.calibration import calibrate

CONFIG = Config(env=EnvConfig(cameras=()), model=ModelConfig(), runtime=RuntimeConfig(num_envs=4, num_workers=2))
SUMMARY = {
    "exit": "completed",
    "device": "cpu",
    "world_size": 2,
    "nodes": 1,
    "groups": 20,
    "groups_dropped": 5,
    "env_steps_raw": 7000,
    "decisions_per_s": 10.0,
    "wall_s": 100.0,
    "weight_bytes": 4000,
}
SPANS = [
    *[("decide", 0.01 + 0.002 * size, {"size": size}) for size in (1, 2, 3, 4) * 10],
    *[("gradient", factor * 0.04, {"size": 32}) for factor in (0.5, 1.5) * 20],
    *[("handle", 0.0001, {"what": "observed", "decision": 0, "simulator_s": 0.3})] * 40,
    *[("handle", 0.0001, {"what": "observed", "decision": 1, "simulator_s": 0.1})] * 40,
    *[("handle", 0.0001, {"what": "finished", "decision": 2, "simulator_s": 0.2})] * 40,
    *[("collect", 0.002, {})] * 60,
    *[("optimise", seconds, {}) for seconds in (0.01, 0.01, 0.9, 0.9)],
    *[(name, 0.005, {}) for name in ("agree", "cut", "add up", "report", "publish", "gather", "apply")],
]


def write_run(folder, spans=SPANS, summary=SUMMARY, config=CONFIG):
    """Spans come after a fifth of other ones, as in the warm-up."""
    (folder / "traces").mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(to_plain(config)))
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "metrics.jsonl").write_text(json.dumps({"policy_version": 1, "memory/environment/used_bytes": 19200}))
    names = [name for name, *_ in spans]
    cold = [(n, 99.0, args) for n, _, args in spans for _ in [0] if names.count(n)]
    first = {n: [event for event in cold if event[0] == n][: names.count(n) // 4] for n in set(names)}
    events = [event for group in first.values() for event in group] + spans
    lines = [
        {"ph": "X", "pid": 0, "tid": 0, "ts": 1e6 + number, "dur": 1e6 * seconds, "name": name, "args": args}
        for number, (name, seconds, args) in enumerate(events)
    ]
    (folder / "traces" / "rank00000.json").write_text(json.dumps({"traceEvents": lines}))
    return str(folder)


def test_profile(tmp_path):
    known = calibrate([write_run(tmp_path / "run")])
    profile = known.profile
    assert (profile.decide.fixed_s, profile.decide.each_s) == pytest.approx((0.01, 0.002))
    assert profile.decide.factors == pytest.approx([1.0] * 20)
    # One size only: in proportion.
    assert (profile.gradient.fixed_s, profile.gradient.each_s) == pytest.approx((0.0, 0.04 / 32))
    assert sorted(set(profile.gradient.factors)) == pytest.approx([0.5, 1.5])
    assert profile.chunk.fixed_s == pytest.approx(0.15)
    assert profile.reset_s == pytest.approx(0.3)
    assert profile.handle_s == pytest.approx(0.001, rel=0.1)
    assert profile.optimise_s == 0.01  # the others wait for their peers
    assert (profile.agree_s, profile.report_s, profile.publish_s) == pytest.approx((0.01, 0.01, 0.005))
    assert set(profile.episode_decisions) == {3}
    assert profile.steps_per_decision == 7.0
    assert profile.dropped_share == 0.25
    assert profile.trained_parameters == 1000
    assert profile.slot_bytes == 19200 // CONFIG.slots_per_sampler(2, 2)
    assert json.dumps(to_plain(known.config)) == json.dumps(to_plain(CONFIG))
    assert (known.num_nodes, known.ranks_per_node) == (1, 2)


def test_a_serial_run_waits_while_it_collects(tmp_path):
    on_policy = replace(CONFIG.algo, max_staleness=0)
    serial = replace(CONFIG, algo=on_policy, runtime=replace(CONFIG.runtime, schedule=Schedule.serial))
    assert calibrate([write_run(tmp_path / "run", config=serial)]).profile.handle_s == pytest.approx(0.0001)


def test_two_runs_tell_what_a_batch_simulator_costs(tmp_path):
    folders = []
    for num_envs in (4, 8):
        options = {"sim_backend": "gpu"}
        config = Config(
            env=EnvConfig(cameras=(), options=options), runtime=RuntimeConfig(num_envs=num_envs, num_workers=1)
        )
        seconds = 0.1 + 0.01 * num_envs
        spans = [(n, s, a | ({"simulator_s": seconds} if n == "handle" else {})) for n, s, a in SPANS]
        folders.append(write_run(tmp_path / str(num_envs), spans, config=config))
    chunk = calibrate(folders).profile.chunk
    assert (chunk.fixed_s, chunk.each_s) == pytest.approx((0.1, 0.01))
    alone = calibrate(folders[:1]).profile
    assert (alone.chunk.fixed_s, alone.chunk.each_s) == pytest.approx((0.14, 0.0))
    assert alone.is_batch_simulator


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("telemetry.trace=true", {"spans": [span for span in SPANS if span[0] != "decide"]}),
        ("no episode ended", {"spans": [span for span in SPANS if span[2].get("what") != "finished"]}),
        ("failed", {"summary": SUMMARY | {"exit": "failed"}}),
    ],
)
def test_runs_that_tell_too_little(message, changes, tmp_path):
    with pytest.raises(ConfigError, match=message):
        calibrate([write_run(tmp_path / "run", **changes)])


def test_no_run(tmp_path):
    with pytest.raises(ConfigError, match=r"from_run=.*there is no config\.yaml"):
        calibrate([str(tmp_path)])


def plan(*arguments):
    command = [sys.executable, "-m", "dvla.plan", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_command_line(tmp_path):
    run = write_run(tmp_path / "run")
    answer = plan(f"from_run=[{run}]", "++change.placement.name=separated", "++change.runtime.num_envs=8", "json=true")
    assert answer.returncode == 0, answer.stderr
    told = json.loads(answer.stdout)
    (option,) = told["options"]
    assert (option["placement.name"], option["runtime.num_envs"]) == ("separated", 8)
    assert option["step_s"] > 0
    assert option["footprint"]["learner_bytes"] == 16 * 1000
    # A profile that was printed is one that can be read.
    (tmp_path / "profile.json").write_text(json.dumps(told["profile"]))
    answer = plan(f"profile={tmp_path}/profile.json", "ranks_per_node=2", "search=true")
    assert answer.returncode == 0, answer.stderr
    assert "steps/s" in answer.stdout
    assert "colocated" in answer.stdout


@pytest.mark.parametrize(
    ("message", "arguments"),
    [
        ("profile=nowhere: there is no such file", ["profile=nowhere"]),
        ("placement.ratio", ["from_run=[RUN]", "++change.placement.name=separated", "++change.placement.ratio=x"]),
        ("nodes must be at least 1", ["from_run=[RUN]", "nodes=0"]),
    ],
)
def test_command_line_names_the_key(message, arguments, tmp_path):
    run = write_run(tmp_path / "run")
    answer = plan(*(argument.replace("RUN", run) for argument in arguments))
    assert answer.returncode == 2
    assert message in answer.stderr
