"""The weight plane between real ranks: bit-exact, whole, bounded, no other route; nodes are made up on one machine."""

import copy
import os
import threading
from functools import partial

import psutil
import pytest
import torch
from batches import make_batch, make_policy
from ranks import run_ranks
from weight_plane import CPU, Plane, as_nodes

from dvla.planes.exchange import WeightExchange
from dvla.planes.manifest import Manifest, ManifestEntry, make_manifest
from dvla.planes.weights import HostBuffers, Publication, Replica, WeightPlaneError

pytestmark = pytest.mark.alone


def send_versions(world, cases, versions):
    """Train and publish `versions` times in each case; digests of learner and replica of each version."""
    results = []
    for num_nodes, replicate_size, name, dtype in cases:
        world = as_nodes(world, num_nodes, replicate_size)
        plane = Plane(world, make_policy(name), dtype)
        digests = []

        def publish(version, plane=plane, name=name):
            plane.publish(version, verify=True)
            plane.learner.accumulate(make_batch(make_policy(name), 2, version), is_last=True)
            plane.learner.step(version)

        def look(arrival, plane=plane, digests=digests):
            digests.append((arrival.version, arrival.digest, plane.replica.digest()))

        plane.run(versions, publish, look)
        results.append(digests)
    return results


CASES = {  # ranks: (nodes, replicate_size, policy, dtype)
    1: [(1, 1, "mlp", torch.float32)],
    2: [
        (1, 1, "openvla_oft", torch.float32),
        (1, 1, "openvla_oft", torch.bfloat16),
        (1, 2, "mlp", torch.float32),  # replicas on one node
        (2, 1, "openvla_oft", torch.bfloat16),  # sharded across nodes
    ],
    3: [(1, 1, "mlp", torch.float32), (3, 1, "mlp", torch.bfloat16)],
    4: [(2, 2, "mlp", torch.float32), (2, 4, "mlp", torch.float32)],  # replicated across nodes
}


@pytest.mark.distributed
@pytest.mark.parametrize("world_size", CASES)
def test_every_version_arrives_whole_and_bit_exact_on_every_rank(world_size):
    cases = CASES[world_size]
    ranks = run_ranks(send_versions, world_size, cases, 6)
    assert all(results == ranks[0] for results in ranks)
    for case, digests in zip(cases, ranks[0], strict=True):
        assert [version for version, _, _ in digests] == list(range(6)), case
        assert all(sent == received for _, sent, received in digests), case
        assert len({sent for _, sent, _ in digests}) == 6, "each step must change the weights, or this proves nothing"


def fill_versions(world, num_nodes, versions):
    """Publish versions whose every value is the version's number, under load; what the replica saw that was not uniform."""
    world = as_nodes(world, num_nodes)
    plane = Plane(world, make_policy("mlp"))
    over = threading.Event()
    torn, seen, memory = [], [], []

    def load():  # what inference and simulators do to the machine
        matrix = torch.ones(256, 256)
        while not over.is_set():
            matrix @ matrix

    def publish(version):
        for parameter in plane.learner.parameters().values():
            parameter.detach().to_local().fill_(version)
        plane.publish(version)
        if version in (versions // 10, versions - 1):
            memory.append(psutil.Process().memory_info().rss)

    def look(arrival):
        seen.append(arrival.version)
        for _ in range(2):  # the version must stay while the next one is on its way
            values = torch.cat([p.detach().flatten() for p in plane.replica.policy.parameters()])
            if not bool((values == arrival.version).all()):
                torn.append((arrival.version, values.unique().tolist()))

    thread = threading.Thread(target=load)
    thread.start()
    try:
        plane.run(versions, publish, look)
    finally:
        over.set()
        thread.join()
    assert seen == list(range(versions))
    return torn, memory


@pytest.mark.distributed
@pytest.mark.parametrize(("num_nodes", "versions"), [(1, 1000), (2, 200)])
def test_a_thousand_versions_under_load_are_never_torn_and_take_no_memory(num_nodes, versions):
    for torn, (early, late) in run_ranks(fill_versions, 2, num_nodes, versions):
        assert torn == []
        assert late - early < 8 * 2**20


def publish_differently(world):
    plane = Plane(world, make_policy("mlp"))
    plane.meet.published.put(Publication(4 + world.rank, 0, None))
    with pytest.raises(WeightPlaneError, match="versions 4 to 5"):
        plane.lane.step()
    plane.meet.published.put(Publication(6, 0, 0xABABABABABABABA if world.rank else 0xCDCDCDCDCDCDCDC))
    with pytest.raises(WeightPlaneError, match=r"content a(ba){7} to c(dc){7}"):
        plane.lane.step()
    return True


@pytest.mark.distributed
def test_ranks_that_publish_different_versions_stop():
    assert run_ranks(publish_differently, 2) == [True, True]


def miss_a_version(world, folder, *, dies):
    """Rank 1, a node of its own, does not come to the exchange, or dies in it; what rank 0 says goes to a file."""
    world = as_nodes(world, 2, timeout_s=2.0)
    plane = Plane(world, make_policy("mlp"))
    if world.rank == 1 and not dies:
        return
    plane.meet.published.put(Publication(7, 0, None))
    if world.rank == 1:
        plane.exchange._exchange = lambda *_: os._exit(9)
    with pytest.raises(WeightPlaneError) as caught:
        plane.lane.step()
    (folder / "said").write_text(str(caught.value))


@pytest.mark.distributed
def test_a_wait_for_a_rank_that_does_not_come_is_bounded_and_says_what_for(tmp_path):
    run_ranks(partial(miss_a_version, dies=False), 2, tmp_path)
    said = (tmp_path / "said").read_text()
    assert "rank 0 waited in vain for the leaders of the other nodes to have all their shards, at version 7: " in said


@pytest.mark.distributed
def test_a_rank_that_dies_amid_a_transfer_ends_the_wait_of_the_others(tmp_path):
    with pytest.raises(AssertionError, match="rank 1 died"):
        run_ranks(partial(miss_a_version, dies=True), 2, tmp_path)
    said = (tmp_path / "said").read_text()
    assert "rank 0 waited in vain for the leaders of the other nodes to send and receive, at version 7: " in said
    assert "by peer" in said  # closed or reset


def ask_for_too_much(world):
    entry = ManifestEntry("w", (2**48,), 0, 2**50)
    with pytest.raises(MemoryError, match=r"host buffers of 1073741824 MiB .* are free\): set runtime.precision=bf16"):
        HostBuffers(Manifest((entry,), torch.float32, 2**50), world.weights_pg, CPU)
    return True


@pytest.mark.distributed
def test_a_host_buffer_larger_than_the_memory_is_refused_on_all_ranks():
    assert run_ranks(ask_for_too_much, 2) == [True, True]


def leave_bytes_without_owner(world):
    manifest = make_manifest(make_policy("mlp"), torch.float32)
    size = manifest.num_bytes
    for owned, wrong in (
        ([(0, 64), (128, size)], (64, 128)),
        ([(0, size - 64), (size - 64, size - 64)], (size - 64, size)),
        ([(0, 128), (64, size)], (64, 128)),
    ):
        with pytest.raises(WeightPlaneError, match=f"bytes {wrong[0]} to {wrong[1]} of the weights have no single own"):
            WeightExchange(world, manifest, [owned[world.rank]], [])
    return True


@pytest.mark.distributed
def test_bytes_without_owner_or_with_two_are_found_at_the_start():
    assert run_ranks(leave_bytes_without_owner, 2) == [True, True]


def test_the_manifest_is_dense_aligned_and_leaves_out_what_is_frozen():
    policy = make_policy("openvla_oft")
    manifest = make_manifest(policy, torch.bfloat16)
    assert [e.name for e in manifest.entries] == [n for n, p in policy.named_parameters() if p.requires_grad]
    assert all(entry.offset % 64 == 0 for entry in manifest.entries)
    ends = [0, *(entry.offset + entry.num_bytes for entry in manifest.entries)]
    assert all(0 <= entry.offset - end < 64 for entry, end in zip(manifest.entries, ends, strict=False))
    assert make_manifest(policy, torch.float32).digest() != manifest.digest()


def test_a_replica_keeps_its_frozen_weights_and_reads_versions_where_they_lie():
    policy = make_policy("openvla_oft")
    manifest = make_manifest(policy, torch.float32)
    replica = Replica(copy.deepcopy(policy), manifest, CPU)
    before = {n: (p.data_ptr(), p.clone()) for n, p in replica.policy.named_parameters()}
    assert all(torch.equal(value, dict(policy.named_parameters())[n]) for n, (_, value) in before.items())
    trainable = {entry.name: entry for entry in manifest.entries}
    version = torch.full((manifest.num_bytes,), 63, dtype=torch.uint8)
    replica.apply(version)
    for name, parameter in replica.policy.named_parameters():
        pointer, value = before[name]
        if name in trainable:
            assert parameter.data_ptr() == version.data_ptr() + trainable[name].offset
            assert not torch.equal(parameter, value)
        else:
            assert parameter.data_ptr() == pointer
            assert torch.equal(parameter, value)
