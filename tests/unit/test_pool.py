"""Real worker processes: what they write, when they stop stepping, and how their faults show."""

import os
import re
import signal
from pathlib import Path

import numpy as np
import pytest

from dvla.config import ConfigError, EnvConfig, RenderConfig
from dvla.envs.messages import Kind, Record, unpack
from dvla.envs.pool import WorkerError, WorkerPool
from dvla.planes.semaphore import wait_any
from dvla.planes.slots import create_memory, layout_bytes, map_memory, slot_arrays, slot_layout

K, T = 4, 3


@pytest.fixture
def start(tmp_path):
    pools = []

    def make(num_envs=1, num_workers=1, terminate_on_success=True, cameras=("top",), **options):
        config = EnvConfig(
            name="counting_env:CountingEnv",
            cameras=cameras,
            image_size=(2, 2),
            max_episode_steps=10,
            terminate_on_success=terminate_on_success,
            options=options,
        )
        pool = WorkerPool(
            config,
            RenderConfig(),
            num_envs=num_envs,
            num_workers=num_workers,
            logs=tmp_path,
            setup_timeout_s=60,
            step_timeout_s=60,
            title="dvla:test",
        )
        pools.append(pool)
        layout = slot_layout(pool.spec(), num_slots=4, max_decisions=T, num_action_chunks=K, record={})
        descriptor = create_memory("dvla-test", layout_bytes(layout))
        arrays = slot_arrays(map_memory(descriptor, layout_bytes(layout)), layout)
        pool.attach(descriptor, layout, arrays)
        os.close(descriptor)
        return pool, arrays

    yield make
    for pool in pools:
        pool.close()


def answers(pool, count):
    records = []
    while len(records) < count:
        assert wait_any(pool.workers, 30), "no answer"
        for worker in pool.workers:
            if wait_any([worker], 0):
                records += pool.receive(worker)
    return records


def test_an_episode_runs_in_chunks_and_is_cut_at_the_horizon(start):
    pool, slots = start()
    pool.reset(0, 2, task=0, seed=123, ticket=77)
    assert answers(pool, 1) == [Record(Kind.observed, 0, 2, 0)]
    assert slots["state"][2, 0].tolist() == [123, 0, 0, 0]
    slots["actions"][2] = 0.5
    for decision in range(2):
        pool.act([(0, 2, decision, 0)])
        assert answers(pool, 1) == [Record(Kind.observed, 0, 2, decision + 1)]
        assert slots["state"][2, decision + 1].tolist() == [123, 0, 4 * (decision + 1), 2.0 * (decision + 1)]
        assert (slots["images"][2, decision + 1] == 4 * (decision + 1)).all()
    pool.act([(0, 2, 2, 0)])
    (end,) = answers(pool, 1)
    assert end == Record(Kind.finished, 0, 2, 2)
    assert 0 < end.seconds < 60
    assert slots["executed_steps"][2].tolist() == [4, 4, 2]
    assert slots["rewards"][2].tolist() == [2.0, 2.0, 1.0]
    assert (slots["num_decisions"][2], slots["success"][2], slots["ticket"][2]) == (3, 0, 77)


@pytest.mark.parametrize(("terminate", "steps"), [(True, [2, 0, 0]), (False, [4, 4, 2])])
def test_nothing_steps_after_the_episodes_end(start, terminate, steps):
    pool, slots = start(terminate_on_success=terminate)
    pool.reset(0, 0, task=0, seed=1, ticket=0)
    answers(pool, 1)
    slots["actions"][0] = 0.0
    slots["actions"][0, 0, 1, 0] = 1.0
    slots["executed_steps"][0] = 0
    kind, decision = None, 0
    while kind is not Kind.finished:
        pool.act([(0, 0, decision, 0)])
        kind, decision = answers(pool, 1)[0].kind, decision + 1
    assert slots["executed_steps"][0].tolist() == steps
    assert slots["success"][0] == 1


def test_failure_of_the_environment_ends_the_episode(start):
    pool, slots = start()
    pool.reset(0, 0, task=0, seed=1, ticket=0)
    answers(pool, 1)
    slots["actions"][0] = -1.0
    pool.act([(0, 0, 0, 0)])
    assert answers(pool, 1)[0].kind is Kind.finished
    assert (slots["executed_steps"][0, 0], slots["success"][0], slots["num_decisions"][0]) == (1, 0, 1)


def test_environments_and_workers_do_not_mix(start):
    pool, slots = start(num_envs=4, num_workers=2, num_tasks=2)
    for env in range(4):
        pool.reset(env, 3 - env, task=env % 2, seed=100 + env, ticket=env)
    assert sorted((r.env, r.slot) for r in answers(pool, 4)) == [(0, 3), (1, 2), (2, 1), (3, 0)]
    for env in range(4):
        assert slots["state"][3 - env, 0].tolist() == [100 + env, env % 2, 0, 0]
        slots["actions"][3 - env, 0] = env / 10
    pool.act([(env, 3 - env, 0, 0) for env in range(4)])
    answers(pool, 4)
    for env in range(4):
        assert slots["state"][3 - env, 1] == pytest.approx([100 + env, env % 2, 4, 4 * env / 10])


def test_the_initial_state_leaves_its_digest(start):
    pool, slots = start(num_envs=2)
    for slot, seed in enumerate((5, 5, 6)):
        pool.reset(0, slot, task=0, seed=seed, ticket=slot)
        answers(pool, 1)
    digests = slots["initial_state"]
    assert np.array_equal(digests[0], digests[1])
    assert not np.array_equal(digests[0], digests[2])


def test_an_exception_in_the_simulator_comes_through_with_its_words(start, tmp_path):
    pool, slots = start(fault="raise")
    slots["actions"][:] = 0
    for ticket in range(2):
        pool.reset(0, 0, task=0, seed=1, ticket=ticket)
        answers(pool, 1)
    pool.act([(0, 0, 0, 0)])
    with pytest.raises(WorkerError, match=r"worker 0: ValueError: the arm fell off \(its log: .*w0\.log\)"):
        answers(pool, 1)
    assert "Traceback" in (tmp_path / "dvla-test-w0.log").read_text()


def test_rewards_that_are_no_numbers_are_refused(start):
    pool, slots = start()
    pool.reset(0, 0, task=0, seed=1, ticket=0)
    answers(pool, 1)
    slots["actions"][0, 0] = (0.0, np.nan)
    pool.act([(0, 0, 0, 0)])
    with pytest.raises(WorkerError, match="SimulationError: the rewards of a chunk add up to nan"):
        answers(pool, 1)


def test_a_killed_worker_is_named_with_its_signal(start):
    pool, _ = start(num_envs=2, num_workers=2)
    os.kill(pool.workers[1].pid, signal.SIGKILL)
    with pytest.raises(WorkerError, match=r"worker 1 \(pid \d+\) died with signal 9"):
        answers(pool, 1)


def test_a_simulator_that_cannot_be_built_says_so(start):
    with pytest.raises(WorkerError, match="RuntimeError: no simulator today"):
        start(fault="build")


def test_a_simulator_that_asks_something_gets_no_answer_and_the_question_is_told(start):
    with pytest.raises(WorkerError, match="EOFError: EOF when reading a line") as caught:
        start(fault="ask")
    log = next(iter(re.findall(r"its log: (.+?)\)", str(caught.value))))
    assert "May I download the assets? [y/n]" in Path(log).read_text()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "reech"}, "env.name='reech' is no environment, did you mean reach?"),
        ({"name": "counting_env:Nothing"}, "env.name='counting_env:Nothing' cannot be loaded"),
        ({"name": "fractions:Fraction"}, "its constructor must take task, cameras"),
        ({"name": "counting_env:CountingEnv", "options": {"colour": 1}}, "env.options.colour is no option"),
        ({"name": "counting_env:CountingEnv", "options": {"task": 1}}, "env.options.task is no option"),
    ],
)
def test_faults_of_the_config_show_before_any_process_starts(changes, words, tmp_path):
    with pytest.raises(ConfigError) as caught:
        WorkerPool(
            EnvConfig(**changes),
            RenderConfig(),
            num_envs=1,
            num_workers=1,
            logs=tmp_path,
            setup_timeout_s=9,
            step_timeout_s=9,
            title="x",
        )
    assert words in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_records_survive_the_wire():
    records = [Record(Kind.reset, 1, 2, 0, 3, 2**31 - 1, 2**40), Record(Kind.act, 5, 6, 7)]
    assert unpack(b"".join(record.pack() for record in records)) == (records, "")
