"""The inference lane by itself: which requests make a batch, which wait for weights, and when weights are taken over."""

import time
from types import SimpleNamespace

import pytest
import torch
from transfers import make_arrays

from dvla.config import RuntimeConfig, WeightApplication
from dvla.lanes.inference import InferenceLane
from dvla.lanes.meeting_points import MeetingPoints
from dvla.models.mlp import MLPPolicy
from dvla.models.policy import Decision, reads_images
from dvla.planes.observations import SlotTensors
from dvla.planes.semaphore import StopFlag
from dvla.planes.transport import Kind, Parcel
from dvla.planes.weights import Arrival
from dvla.telemetry.lane_clock import LaneClock
from dvla.telemetry.trace import Tracer

GROUP_SIZE, RANK = 2, 0


class Pool:
    """Takes replies; environment 7 has a worker of generation 1."""

    def __init__(self):
        self.replies = []

    def generation(self, env):
        return 1 if env == 7 else 0

    def act(self, replies):
        self.replies.append([env for env, *_ in replies])


class Policy:
    """Remembers how it was asked."""

    def __init__(self):
        self.asked = []

    def act(self, observation, keys, *, greedy=False):
        self.asked.append((len(keys), greedy))
        shape = (len(keys), 4, 2)
        return Decision(torch.zeros(shape), torch.zeros(shape), {"tokens": torch.zeros(*shape, dtype=torch.uint8)})


class Lane:
    """An inference lane with everything around it."""

    def __init__(self, *, version=0, stages=None, balances=False, **runtime):
        stop = StopFlag()
        self.meet = MeetingPoints.create(stop=stop, timeout_s=5.0)
        self.pool, self.policy, self.applied = Pool(), Policy(), []
        self.tensors = {name: torch.from_numpy(array) for name, array in make_arrays(8).items()}
        self.tensors["ticket"][:] = torch.arange(8)
        replica = SimpleNamespace(policy=self.policy, apply=self.applied.append)
        self.lane = InferenceLane(
            rank=RANK, replica=replica, host=SimpleNamespace(buffers=["zero", "one", "two"]),
            slots=SlotTensors(self.tensors, torch.device("cpu")), pool=self.pool, samplers=None, meet=self.meet, stop=stop,
            device=torch.device("cpu"), seed=0, num_envs=8, stages=stages,
            runtime=RuntimeConfig(max_wait_s=0.0, **runtime), balances=balances, group_size=GROUP_SIZE,
            applied_version=version, clock=LaneClock(), tracer=Tracer(0, False).for_lane("inference"),
        )  # fmt: skip

    def ask(self, env, *, version=0, **fields):
        generation = fields.pop("generation", self.pool.generation(env))
        self.meet.requests.put(
            Parcel(Kind.request, RANK, (env,), id=env, version=version, generation=generation, **fields)
        )

    def arrive(self, version):
        self.meet.arrived.put(Arrival(version, version % 3, None))


def test_a_request_waits_for_the_weights_its_group_begins_with():
    lane = Lane(version=2)
    lane.ask(0, version=2)
    lane.ask(1, version=3)
    lane.lane.step_all()
    assert lane.pool.replies == [[0]]
    lane.arrive(3)
    lane.lane.step_all()
    assert lane.pool.replies == [[0], [1]]
    assert lane.tensors["behavior_version"][:2, 0].tolist() == [2, 3]
    assert lane.applied == ["zero"]


def test_nothing_is_decided_before_the_first_version():
    lane = Lane(version=-1)
    lane.ask(0, version=-1)
    lane.lane.step_all()
    assert lane.pool.replies == []
    lane.arrive(0)
    lane.lane.step_all()
    assert lane.pool.replies == [[0]]


def test_batches_mix_neither_stages_nor_ways_of_deciding_and_keep_the_order():
    lane = Lane(stages=2)
    for env, stage, greedy in ((0, 0, False), (1, 1, False), (2, 0, True), (3, 0, False), (4, 1, False)):
        lane.ask(env, stage=stage, greedy=greedy)
    lane.lane.step_all()
    assert lane.pool.replies == [[0, 3], [1, 4], [2]]
    assert lane.policy.asked == [(2, False), (2, False), (1, True)]


def test_a_stage_that_never_pauses_does_not_starve_another():
    lane = Lane(max_batch=2)
    for env in (0, 1, 2, 3):
        lane.ask(env, stage=0)
    lane.ask(4, stage=1)
    lane.lane.step_all()
    assert lane.pool.replies == [[0, 1], [4], [2, 3]]


def test_a_first_batch_that_compiles_or_warms_up_does_not_pass_for_the_pace_of_its_size(monkeypatch):
    lane, act = Lane(balances=True), Policy.act

    def slow(self, observation, keys, **how):
        time.sleep(0.3 if not self.asked else 0.01)
        return act(self, observation, keys, **how)

    monkeypatch.setattr(Policy, "act", slow)
    for size in (8, 4, 4, 4, 8):
        for env in range(size):
            lane.ask(env)
        lane.lane.step_all()
    assert [len(envs) for envs in lane.pool.replies] == [8, 4, 4, 4, 8]


def test_requests_of_a_replaced_worker_are_not_served():
    lane = Lane()
    lane.ask(7, generation=0)
    lane.ask(3)
    lane.lane.step_all()
    assert lane.pool.replies == [[3]]
    lane.ask(7, generation=0)
    lane.ask(7, generation=1)
    lane.lane.step_all()
    assert lane.pool.replies == [[3], [7]]


@pytest.mark.parametrize("rule", list(WeightApplication))
def test_between_groups_new_weights_wait_for_the_groups_under_way(rule):
    lane = Lane(apply_weights=rule)
    lane.ask(0)  # ticket 0: group 0
    lane.ask(3)  # ticket 3: group 1
    lane.lane.step_all()
    lane.arrive(1)
    lane.ask(1)  # another member of group 0
    lane.ask(4, version=1)  # of a group that begins with the next version
    lane.lane.step_all()
    versions = lane.tensors["behavior_version"][:, 0].tolist()
    if rule is WeightApplication.between_batches:
        assert versions[:5] == [0, 1, 0, 0, 1]
        return
    assert versions[1] == 0
    assert lane.pool.replies == [[0, 3], [1]]
    lane.meet.group_ends.put(0)
    lane.lane.step_all()
    assert lane.applied == []  # group 1 is not done
    lane.meet.group_ends.put(1)
    lane.lane.step_all()
    assert lane.applied == ["one"]
    assert lane.pool.replies == [[0, 3], [1], [4]]
    assert lane.tensors["behavior_version"][4, 0] == 1


def test_evaluation_episodes_hold_no_weights_back():
    lane = Lane(apply_weights=WeightApplication.between_groups)
    lane.ask(0, greedy=True)
    lane.lane.step_all()
    lane.arrive(1)
    lane.lane.step_all()
    assert lane.applied == ["one"]


def test_a_policy_that_does_not_look_gets_no_pictures():
    tensors = {"images": torch.ones(3, 5, 2, 8, 6, 3).byte(), "state": torch.rand(3, 5, 4), "task": torch.arange(3)}
    slots, decisions = torch.tensor([0, 2]), torch.tensor([4, 1])
    for wants in (True, False):
        seen = SlotTensors(tensors, torch.device("cpu"), with_images=wants).observation(slots, decisions)
        assert (seen.images.shape, seen.images.dtype) == ((2, 2 * wants, 8, 6, 3), torch.uint8)
        assert torch.equal(seen.state, tensors["state"][slots, decisions])
    assert [reads_images(policy) for policy in (Policy(), MLPPolicy)] == [True, False]
