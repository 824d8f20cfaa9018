"""A batch simulator behind the pool's interface: episodes are those of a worker, none is lost, the device is asked rarely."""

import queue
import threading

import numpy as np
import pytest
import torch
from batch_reach import BatchReach, WalledReach

from dvla.envs.batch_pool import BatchPool, batch_slots
from dvla.envs.batch_protocol import BatchEnvironment, BatchStep
from dvla.envs.errors import SimulationError
from dvla.envs.maniskill import ManiSkillEnv
from dvla.envs.messages import Kind, Record
from dvla.envs.worker import Episode
from dvla.planes.semaphore import wait_any
from dvla.planes.slots import slot_layout

K, T, MAX_STEPS = 4, 8, 30  # the last chunk is cut at the horizon
NUM_ENVS, NUM_SLOTS = 8, 12


def layout(spec, num_slots=NUM_SLOTS):
    record = {"tokens": ((2,), "int64")}
    return slot_layout(spec, num_slots=num_slots, max_decisions=T, num_action_chunks=K, record=record)


def decide(slots, slot, decision):
    """Write the actions of a wavering policy that often finds the target, and often a wall; a function of the ticket."""
    random = np.random.default_rng((int(slots["ticket"][slot]), decision))
    x, y, target_x, target_y = slots["state"][slot, decision][:4]
    heading = np.clip(np.array([target_x - x, target_y - y]) * 4, -1, 1)
    actions = random.uniform(-1.5, 1.5, slots["actions"].shape[2:])
    actions[:, :2] += heading * (0.5 if slots["ticket"][slot] % 3 else -1.0)
    slots["actions"][slot, decision] = actions


def what_is_left(slots, slot):
    """All that the learner will read of an episode."""
    num = int(slots["num_decisions"][slot])
    per_decision = ("images", "state", "actions", "executed_steps", "rewards", "step_rewards")
    whole = ("ticket", "task", "num_decisions", "success", "initial_state")
    return [slots[name][slot, :num].tobytes() for name in per_decision] + [
        slots[name][slot].tobytes() for name in whole
    ]


def played_alone(env, ticket, seed, task, terminate_on_success):
    """The episode as a worker process plays it."""
    slots = {field.name: np.zeros(field.shape, field.dtype) for field in layout(env.spec, 1)}
    episode = Episode(env, slots, terminate_on_success=terminate_on_success, videos=None)
    episode.reset(Record(Kind.reset, 0, 0, 0, task, seed, ticket))
    decision, over = 0, False
    while not over:
        decide(slots, 0, decision)
        over = episode.act(0, decision)
        decision += 1
    return what_is_left(slots, 0)


def start(env, terminate_on_success=True, num_slots=NUM_SLOTS):
    pool = BatchPool(env, terminate_on_success=terminate_on_success)
    slots = batch_slots(layout(pool.spec(), num_slots), torch.device("cpu"))
    pool.attach_tensors(slots)
    return pool, {name: tensor.numpy() for name, tensor in slots.items()}


def reach(num_envs=NUM_ENVS, **options):
    return BatchReach(num_envs, "cpu", max_episode_steps=MAX_STEPS, image_size=(8, 8), num_tasks=2, **options)


def answers(pool):
    assert wait_any(pool.workers, 30), "the pool sees nothing to do"
    return pool.receive(pool.workers[0])


def seed_of(ticket):
    return 1000 + ticket // 4  # groups of 4


def run_all(pool, slots, tickets, act):
    """A sampling lane: keep environments busy until all tickets are played; what is left of each."""
    left, idle, free, done, busy = list(tickets), list(range(NUM_ENVS)), list(range(NUM_SLOTS)), {}, 0
    while left or busy:
        while left and idle and free:
            ticket = left.pop(0)
            pool.reset(idle.pop(0), free.pop(0), task=ticket // 4 % 2, seed=seed_of(ticket), ticket=ticket)
            busy += 1
        for record in answers(pool):
            if record.kind is Kind.observed:
                act(record)
                continue
            ticket = int(slots["ticket"][record.slot])
            assert ticket not in done
            assert record.decision == slots["num_decisions"][record.slot] - 1
            done[ticket] = what_is_left(slots, record.slot)
            idle.append(record.env)
            free.append(record.slot)
            busy -= 1
    return done


def test_it_follows_the_protocol():
    assert isinstance(reach(), BatchEnvironment)


@pytest.mark.parametrize("terminate_on_success", [True, False])
@pytest.mark.parametrize("wall", [True, False])
def test_every_episode_is_the_one_a_worker_plays(terminate_on_success, wall):
    pool, slots = start(reach(wall=wall), terminate_on_success)

    def act(record):
        decide(slots, record.slot, record.decision)
        pool.act([(record.env, record.slot, record.decision, 0)])

    done = run_all(pool, slots, range(48), act)
    one = WalledReach(wall=wall, max_episode_steps=MAX_STEPS, image_size=(8, 8), num_tasks=2)
    for ticket in range(48):
        alone = played_alone(one, ticket, seed_of(ticket), ticket // 4 % 2, terminate_on_success)
        assert done[ticket] == alone, ticket
    executed = {np.frombuffer(kept[3], np.int32)[-1] for kept in done.values()}
    successes = sum(kept[9] == b"\1" for kept in done.values())
    assert len(executed) > 1 or not (wall or terminate_on_success)  # chunks ended at several places
    assert 5 < successes < 43


@pytest.mark.parametrize("max_batch", [1, 3, 8])
def test_actions_come_from_another_thread(max_batch):
    pool, slots = start(reach(wall=True))
    requests: queue.Queue = queue.Queue()

    def infer():
        while (record := requests.get()) is not None:
            batch = [record]
            while len(batch) < max_batch and not requests.empty():
                batch.append(requests.get())
            for record in batch:
                decide(slots, record.slot, record.decision)
            pool.act([(record.env, record.slot, record.decision) for record in batch])

    thread = threading.Thread(target=infer)
    thread.start()
    try:
        done = run_all(pool, slots, range(64), requests.put)
    finally:
        requests.put(None)
        thread.join()
    one = WalledReach(wall=True, max_episode_steps=MAX_STEPS, image_size=(8, 8), num_tasks=2)
    assert sorted(done) == list(range(64))
    for ticket in (0, 17, 40, 63):
        assert done[ticket] == played_alone(one, ticket, seed_of(ticket), ticket // 4 % 2, True)


def test_a_chunk_waits_for_all_that_observed_and_for_nobody_else():
    env = reach()
    pool, _ = start(env)
    for number in (0, 3, 5):
        pool.reset(number, number, task=0, seed=number, ticket=number)
    assert answers(pool) == [Record(Kind.observed, number, number, 0) for number in (0, 3, 5)]
    assert env.num_pictures == 1
    pool.act([(0, 0, 0), (5, 5, 0)])
    assert not wait_any(pool.workers, 0)
    pool.act([(3, 3, 0)])
    assert answers(pool) == [Record(Kind.observed, number, number, 1) for number in (0, 3, 5)]
    assert (env.num_steps, env.num_pictures) == (K, 2)
    assert not env._places[[1, 2, 4, 6, 7]].any()  # nobody moved the idle ones
    assert not wait_any(pool.workers, 0)
    pool.act([(0, 0, 1)])
    pool.reset(1, 1, task=0, seed=1, ticket=1)
    assert answers(pool) == [Record(Kind.observed, 1, 1, 0)]
    assert env.num_steps == K


def test_an_episode_that_begins_does_not_hold_up_the_others():
    """In the serial schedule all busy environments must answer before anyone decides again."""
    calls = []

    class Told(BatchReach):
        def reset(self, env, task, seed):
            calls.append(env)
            return super().reset(env, task, seed)

        def step(self, actions):
            calls.append("step")
            return super().step(actions)

    env = Told(NUM_ENVS, "cpu")
    pool, _ = start(env)
    for number in range(2):
        pool.reset(number, number, task=0, seed=number, ticket=number)
    answers(pool)
    pool.act([(0, 0, 0), (1, 1, 0)])
    pool.reset(2, 2, task=0, seed=2, ticket=2)
    expected = [Record(Kind.observed, 0, 0, 1), Record(Kind.observed, 1, 1, 1), Record(Kind.observed, 2, 2, 0)]
    assert answers(pool) == expected
    assert calls == [0, 1, *["step"] * K, 2]  # the chunk comes first: it would move the one that begins
    assert env.num_pictures == 2  # one for those who go on and for the new one


@pytest.mark.parametrize("terminate_on_success", [True, False])
def test_what_happens_after_the_end_within_a_chunk_does_not_count(terminate_on_success):
    class Told(BatchReach):
        def step(self, actions):
            first, reward = actions.unbind(1)
            return BatchStep(reward, first == 1, first == -1)

    pool, slots = start(Told(3, "cpu"), terminate_on_success)
    for number in range(3):
        pool.reset(number, number, task=0, seed=number, ticket=number)
    answers(pool)
    slots["actions"][:, 0, :, 1] = [1e8, 1, -1e8, 1000]  # their sum in single precision would differ
    slots["actions"][0, 0, 1:3, 0] = [-1, 1]  # fails, then succeeds
    slots["actions"][1, 0, 2, 0] = 1
    pool.act([(number, number, 0) for number in range(3)])
    kinds = [record.kind for record in answers(pool)]
    goes_on = Kind.finished if terminate_on_success else Kind.observed
    assert kinds == [Kind.finished, goes_on, Kind.observed]
    assert slots["success"][:3].tolist() == [0, 1, 0]
    assert slots["rewards"][:3, 0].tolist() == [1e8, 1 if terminate_on_success else 1001, 1001]
    assert slots["executed_steps"][:3, 0].tolist() == [2, 3 if terminate_on_success else 4, 4]


def test_nothing_is_simulated_or_drawn_beyond_the_last_episodes_end():
    env = reach()
    pool, slots = start(env)
    pool.reset(0, 0, task=0, seed=0, ticket=0)
    for decision in range(T):
        assert answers(pool) == [Record(Kind.observed, 0, 0, decision)]
        pool.act([(0, 0, decision)])  # actions of zero: it stays where it is
    assert answers(pool) == [Record(Kind.finished, 0, 0, T - 1)]
    assert (env.num_steps, env.num_pictures) == (MAX_STEPS, T)
    assert slots["executed_steps"][0].tolist() == [K] * (T - 1) + [MAX_STEPS - K * (T - 1)]


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("actions", "the policy's actions are not finite"),
        ("reward", "rewards of a chunk add up to nan"),
        ("state", "a state is not finite"),
    ],
)
def test_what_is_not_finite_is_refused(fault, words):
    env = reach()
    pool, slots = start(env)
    for number in range(3):
        pool.reset(number, number, task=0, seed=number, ticket=number)
    answers(pool)
    env.fault = fault
    if fault == "actions":
        slots["actions"][1, 0, 2] = np.nan
    pool.act([(number, number, 0) for number in range(3)])
    with pytest.raises(SimulationError, match=words):
        answers(pool)


def test_faults_of_environments_without_an_episode_do_not_matter():
    env = reach()
    pool, _ = start(env)
    pool.reset(0, 0, task=0, seed=0, ticket=0)
    answers(pool)
    env.fault = "reward"  # of environment 1
    pool.act([(0, 0, 0)])
    assert answers(pool) == [Record(Kind.observed, 0, 0, 1)]


def test_what_policies_see_and_write_lies_on_the_device():
    slots = batch_slots(layout(reach().spec), torch.device("meta"))
    on_device = {name for name, tensor in slots.items() if tensor.is_meta}
    assert on_device == {"images", "state", "actions", "logprobs", "record.tokens"}


def test_leaving_the_pool_closes_the_simulator():
    env = reach()
    with BatchPool(env, terminate_on_success=True):
        assert env._places.numel()
    assert not env._places.numel()


def test_a_batch_of_one_of_maniskill_is_its_environment():
    options = {"task": "PickCube-v1", "image_size": (32, 32), "max_episode_steps": MAX_STEPS}
    env, one = ManiSkillEnv.batch(1, torch.device("cpu"), **options), ManiSkillEnv(**options)
    assert isinstance(env, BatchEnvironment)
    assert env.spec == one.spec
    pool, slots = start(env, num_slots=2)
    for ticket in range(2):
        pool.reset(0, ticket, task=0, seed=7, ticket=ticket)
        record = answers(pool)[0]
        while record.kind is Kind.observed:
            decide(slots, record.slot, record.decision)
            pool.act([(0, record.slot, record.decision)])
            record = answers(pool)[0]
        assert what_is_left(slots, ticket) == played_alone(one, ticket, 7, 0, True)
    assert slots["initial_state"][0].tolist() == slots["initial_state"][1].tolist()
    assert slots["images"][0, 0].std() > 20
    pool.close()
    one.close()
