"""The weight plane between real ranks: bit-exact, whole, two buffers, no other route."""

import copy
import threading

import pytest
import torch
from batches import make_batch, make_policy
from ranks import run_ranks

from dvla.config import AlgoConfig, RuntimeConfig
from dvla.lanes.lane import ErrorBoard
from dvla.lanes.learner import Learner
from dvla.lanes.meeting_points import MeetingPoints
from dvla.lanes.param_dist import ParamDistLane
from dvla.planes.manifest import make_manifest
from dvla.planes.semaphore import StopFlag
from dvla.planes.weights import HostBuffers, Publication, Replica, learner_digest, shard_views, write_shards
from dvla.telemetry.lane_clock import LaneClock
from dvla.telemetry.trace import Tracer

CPU = torch.device("cpu")


def send_versions(world, name, dtype, versions):
    """Train and publish `versions` times through the real lane; digests of learner and replica of each."""
    policy = make_policy(name)
    manifest = make_manifest(policy, dtype)
    replica = Replica(copy.deepcopy(policy).to(dtype), manifest, CPU)
    learner = Learner(policy, world, AlgoConfig(lr=1e-2), RuntimeConfig())
    host = HostBuffers(manifest, world.weights_pg, CPU)
    stop = StopFlag()
    meet = MeetingPoints.create(num_envs=1, num_slots=8, stop=stop, timeout_s=60)
    lane = ParamDistLane(
        meet=meet, stop=stop, manifest=manifest, weights_pg=world.weights_pg, clock=LaneClock(), tracer=Tracer(0, False)
    )
    errors = ErrorBoard(stop)
    thread = lane.start(errors)
    digests = []

    def receive():
        for _ in range(versions):
            arrival = meet.arrived.get()
            replica.apply(host.buffers[arrival.buffer])
            digests.append((arrival.version, arrival.digest, replica.digest()))
            meet.staging_free.release()

    receiver = threading.Thread(target=receive)
    receiver.start()
    for version in range(versions):
        meet.host_free.acquire()
        parameters = learner.parameters()
        write_shards(shard_views(manifest, parameters, host.buffers[version % 2]), CPU)
        meet.published.put(Publication(version, version % 2, learner_digest(manifest, parameters)))
        learner.accumulate(make_batch(make_policy(name), 2, version), is_last=True)
        learner.step(version)
    receiver.join(60)
    meet.published.put(None)
    thread.join(60)
    assert errors.first is None, errors.first
    assert not thread.is_alive()
    return digests


@pytest.mark.distributed
@pytest.mark.parametrize(("world_size", "name", "dtype"), [
    (1, "mlp", torch.float32),
    (2, "openvla_oft", torch.float32),
    (2, "openvla_oft", torch.bfloat16),
    (3, "mlp", torch.float32),
])  # fmt: skip
def test_every_version_arrives_whole_and_bit_exact_on_every_rank(world_size, name, dtype):
    ranks = run_ranks(send_versions, world_size, name, dtype, 6)
    assert all(digests == ranks[0] for digests in ranks)
    assert [version for version, _, _ in ranks[0]] == list(range(6))
    assert all(sent == received for _, sent, received in ranks[0])
    assert len({sent for _, sent, _ in ranks[0]}) == 6, "each step must change the weights, or this proves nothing"


def disagree(world):
    manifest = make_manifest(make_policy("mlp"), torch.float32)
    stop = StopFlag()
    meet = MeetingPoints.create(num_envs=1, num_slots=8, stop=stop, timeout_s=60)
    lane = ParamDistLane(
        meet=meet, stop=stop, manifest=manifest, weights_pg=world.weights_pg, clock=LaneClock(), tracer=Tracer(0, False)
    )
    meet.published.put(Publication(4 + world.rank, 0, None))
    with pytest.raises(RuntimeError, match="versions 4 to 5"):
        lane.step()
    return True


@pytest.mark.distributed
def test_ranks_that_publish_different_versions_stop():
    assert run_ranks(disagree, 2) == [True, True]


def test_the_manifest_is_dense_aligned_and_leaves_out_what_is_frozen():
    policy = make_policy("openvla_oft")
    manifest = make_manifest(policy, torch.bfloat16)
    assert [e.name for e in manifest.entries] == [n for n, p in policy.named_parameters() if p.requires_grad]
    assert all(entry.offset % 64 == 0 for entry in manifest.entries)
    ends = [0, *(entry.offset + entry.num_bytes for entry in manifest.entries)]
    assert all(0 <= entry.offset - end < 64 for entry, end in zip(manifest.entries, ends, strict=False))
    assert make_manifest(policy, torch.float32).digest() != manifest.digest()


def test_a_replica_keeps_its_memory_and_its_frozen_weights():
    policy = make_policy("openvla_oft")
    manifest = make_manifest(policy, torch.float32)
    replica = Replica(copy.deepcopy(policy), manifest, CPU)
    before = {n: (p.data_ptr(), p.clone()) for n, p in replica.policy.named_parameters()}
    trainable = {n for n, p in policy.named_parameters() if p.requires_grad}
    replica.apply(torch.full((manifest.num_bytes,), 63, dtype=torch.uint8))
    for name, parameter in replica.policy.named_parameters():
        pointer, value = before[name]
        assert parameter.data_ptr() == pointer
        assert (not torch.equal(parameter, value)) == (name in trainable), name
