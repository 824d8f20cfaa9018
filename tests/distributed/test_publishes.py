"""A thousand versions from ranks that train to ranks that do not, under load: none torn, none lost, no memory."""

import copy
import os
import threading

import psutil
import pytest
import torch
from batches import make_policy
from ranks import run_ranks
from weight_plane import CPU, leave

from dvla.config import AlgoConfig, Device, Placement, PlacementConfig, RuntimeConfig
from dvla.lanes.inference import InferenceLane
from dvla.lanes.lane import ErrorBoard
from dvla.lanes.learner import Learner
from dvla.lanes.meeting_points import MeetingPoints
from dvla.lanes.param_dist import ParamDistLane
from dvla.planes.exchange import WeightExchange
from dvla.planes.manifest import make_manifest
from dvla.planes.semaphore import StopFlag
from dvla.planes.shared_transport import SharedTransport, connect_node
from dvla.planes.weights import HostBuffers, Publication, Replica, ShardWriter
from dvla.runtime.world import join_world
from dvla.telemetry.durations import Durations
from dvla.telemetry.lane_clock import LaneClock
from dvla.telemetry.trace import Tracer

LIMIT_S = 60.0


def as_placed(world, placement):
    """Join again with the roles of `placement`."""
    os.environ["MASTER_PORT"] = str(leave(world))
    return join_world(Device.cpu, LIMIT_S, 1, placement)


class FilledReplica(Replica):
    """Every value of version v must be v, from the moment it is taken over until the next one is."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.seen, self.torn, self.memory = [], [], {}
        self.has_new = threading.Condition()

    def look(self):
        """The version in use; notes when it is a mix."""
        values = torch.cat([parameter.detach().flatten() for parameter in self.policy.parameters()])
        if not bool((values == values[0]).all()):
            self.torn.append((self.seen[-1:], values.unique().tolist()))
        return int(values[0])

    def apply(self, buffer):
        if self.seen and self.look() != self.seen[-1]:
            self.torn.append((self.seen[-1], "overwritten while in use"))
        super().apply(buffer)
        with self.has_new:
            self.seen.append(self.look())
            self.memory[self.seen[-1]] = psutil.Process().memory_info().rss
            self.has_new.notify()

    def wait_for(self, count):
        with self.has_new:
            return self.has_new.wait_for(lambda: len(self.seen) >= count, LIMIT_S)


def make_inference(world, replica, host, meet, stop):
    """The inference lane of a rank that nobody asks."""
    return InferenceLane(
        rank=world.rank,
        replica=replica,
        host=host,
        slots=None,
        pool=None,
        samplers=None,
        meet=meet,
        stop=stop,
        device=CPU,
        seed=0,
        num_envs=1,
        stages=None,
        runtime=RuntimeConfig(),
        balances=False,
        group_size=2,
        clock=LaneClock(),
        tracer=Tracer(0, False),
    )


def publish_to_others(world, placement, versions):
    """Distribute `versions` versions; of this rank (roles, versions seen, torn ones, memory early and late)."""
    world = as_placed(world, placement)
    roles, rank = world.roles, world.rank
    trains, infers = rank in roles.training, rank in roles.inference
    stop, policy = StopFlag(), make_policy("mlp")
    manifest = make_manifest(policy, torch.float32)
    pairs = [("weights", learner, other) for learner in roles.training for other in roles.followers_of(learner)]
    links = connect_node(world.node_pg, pairs, 64, LIMIT_S)
    os.close(links.descriptor)
    ends = links.first.get("weights", []) + links.second.get("weights", [])
    meet = MeetingPoints.create(stop=stop, timeout_s=LIMIT_S)
    host = HostBuffers(manifest, world.weights_pg, CPU)
    errors, lanes, extents = ErrorBoard(stop), [], []
    if infers:
        replica = FilledReplica(copy.deepcopy(policy), manifest, CPU)
        lanes.append(make_inference(world, replica, host, meet, stop))
    if trains:
        learner = Learner(policy, world, AlgoConfig(), RuntimeConfig())
        writer = ShardWriter(manifest, learner.parameters(), host, CPU)
        extents = writer.extents
    param_dist = ParamDistLane(
        meet=meet,
        stop=stop,
        exchange=WeightExchange(world, manifest, extents, host.buffers),
        trains=trains,
        infers=infers,
        peers=SharedTransport(rank, ends, stop, LIMIT_S),
        syncs=Durations(),
        clock=LaneClock(),
        tracer=Tracer(0, False),
    )
    over = threading.Event()

    def load():  # what simulators and gradients do to the machine
        matrix = torch.ones(256, 256)
        while not over.is_set():
            matrix @ matrix

    loader = threading.Thread(target=load)
    loader.start()
    threads = [lane.start(errors) for lane in lanes]
    distributing = param_dist.start(errors)
    memory = {}
    try:
        for version in range(versions if trains else 0):
            meet.host_free.acquire()
            for parameter in learner.parameters().values():
                parameter.detach().to_local().fill_(version)
            writer.write(version % writer.num_buffers)
            meet.published.put(Publication(version, version % writer.num_buffers, None))
            memory[version] = psutil.Process().memory_info().rss
        if infers:
            assert replica.wait_for(versions), (errors.first, len(replica.seen))
            assert replica.look() == versions - 1
        if trains:
            meet.published.put(None)
        distributing.join(LIMIT_S)
        assert not distributing.is_alive(), "the word that there will be no more did not arrive"
    finally:
        over.set()
        stop.set()
        for thread in [*threads, loader]:
            thread.join(LIMIT_S)
    assert errors.first is None
    memory = memory or replica.memory
    seen, torn = (replica.seen, replica.torn) if infers else (None, [])
    return roles.of(rank), seen, torn, (memory[versions // 10], memory[versions - 1])


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("placement", "versions", "num_replicas"),
    [
        ({"name": Placement.separated, "ratio": "2:1"}, 1000, 2),
        ({"name": Placement.custom, "sampling": (1, 2), "inference": (1, 2), "training": (0, 1)}, 100, 2),
    ],
    ids=["a learner and two replicas", "two learners, a replica of one's own and one apart"],
)
def test_versions_reach_ranks_that_do_not_train_whole_under_load(placement, versions, num_replicas):
    results = run_ranks(publish_to_others, 3, PlacementConfig(**placement), versions)
    assert sum(seen is not None for _, seen, _, _ in results) == num_replicas
    for roles, seen, torn, (early, late) in results:
        assert torn == [], roles
        assert seen is None or seen == list(range(versions)), roles
        assert late - early < 8 * 2**20, roles
