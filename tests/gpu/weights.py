"""The weight plane with a GPU at both ends: exact, fast, and shared by two ranks."""

from __future__ import annotations

import torch
from batches import make_batch, make_policy
from ranks import run_ranks

from dvla.config import Precision
from dvla.planes.weights import Publication, learner_digest
from gpu.check import VLA_MODULES, Findings, check
from gpu.rank_of_one import WeightPlane, on_device, rank_of_one, wide_policy
from gpu.timing import gigabytes_per_second

VERSIONS = 4


def _send_versions(found: Findings, name: str) -> None:
    """Train and publish, in both precisions; learner and replica must have the same bits each time."""
    with rank_of_one(found.device) as world:
        batch = on_device(make_batch(make_policy(name), 4, 0), found.device)
        for precision in Precision:
            plane = WeightPlane(world, make_policy(name), precision)
            found.demand(plane.host.buffers[0].is_pinned() or not found.on_gpu, "host buffers are pinned")
            digests = set()
            for version in range(VERSIONS):
                buffer = plane.write(version)
                sent = learner_digest(plane.manifest, plane.learner.parameters())
                plane.exchange.gather(Publication(version, buffer, sent))
                plane.replica.apply(plane.host.buffers[buffer])
                found.demand(plane.replica.digest() == sent, f"{name} {precision.name} version {version}: equal bits")
                digests.add(sent)
                plane.train(batch, version)
            found.demand(len(digests) == VERSIONS, f"{name} {precision.name}: each step changes the weights")
            found.figure(f"{name} {precision.name} KiB", plane.manifest.num_bytes / 2**10)
            plane.host.close()


@check()
def weights_arrive_exactly(found: Findings) -> None:
    """The perceptron's versions arrive bit by bit as the learner has them, in fp32 and bf16."""
    _send_versions(found, "mlp")


@check(limit_s=90, needs=VLA_MODULES)
def vla_weights_arrive_exactly(found: Findings) -> None:
    """The same as weights_arrive_exactly, for both vision-language-action models."""
    for name in ("openvla_oft", "pi05"):
        _send_versions(found, name)


@check(limit_s=90)
def weights_travel_fast(found: Findings) -> None:
    """Writing and applying a version run at nearly the speed of a plain copy from and to pinned memory."""
    device = found.device
    with rank_of_one(device) as world:
        for precision in Precision:
            plane = WeightPlane(world, wide_policy(8192 if found.on_gpu else 512, 3), precision)
            size, buffer, name = plane.manifest.num_bytes, plane.host.buffers[0], precision.name
            there = torch.empty(size, dtype=torch.uint8, device=device)
            plain_in = gigabytes_per_second(lambda b=buffer, t=there: t.copy_(b, non_blocking=True), size, device)
            plain_out = gigabytes_per_second(lambda b=buffer, t=there: b.copy_(t, non_blocking=True), size, device)
            write = gigabytes_per_second(lambda p=plane: p.write(0), size, device)
            apply = gigabytes_per_second(lambda p=plane, b=buffer: p.replica.apply(b), size, device)

            def publish(plane: WeightPlane = plane) -> None:
                buffer = plane.write(0)
                plane.exchange.gather(Publication(0, buffer, None))
                plane.replica.apply(plane.host.buffers[buffer])

            found.figure(f"{name} GB", size / 1e9)
            found.figure(f"{name} write GB/s", write)
            found.figure(f"{name} apply GB/s", apply)
            found.figure(f"{name} write to applied GB/s", gigabytes_per_second(publish, size, device))
            found.figure(f"{name} plain to host GB/s", plain_out)
            found.figure(f"{name} plain to device GB/s", plain_in)
            if found.on_gpu:
                found.demand(write > plain_out / 2, f"{name}: writing is at least half as fast as a plain copy")
                found.demand(apply > plain_in / 2, f"{name}: applying is at least half as fast as a plain copy")
            plane.host.close()


def _share_one_device(world, kind: str) -> list[tuple]:
    """One of two ranks: the learner on the CPU, the replica on the one device that both use; (sent, received)."""
    device = torch.device(kind)
    plane = WeightPlane(world, make_policy("mlp"), Precision.bf16, device)
    assert plane.host.buffers[0].is_pinned() or kind == "cpu"
    batch = make_batch(make_policy("mlp"), 4, world.rank)
    seen = []
    for version in range(VERSIONS):
        buffer = plane.write(version)
        sent = learner_digest(plane.manifest, plane.learner.parameters())
        publication = Publication(version, buffer, sent)
        plane.exchange.gather(publication)
        plane.replica.apply(plane.host.buffers[buffer])
        seen.append((sent, plane.replica.digest()))
        plane.exchange.await_applied(publication)
        plane.train(batch, version)
    plane.host.close()
    return seen


@check(limit_s=120)
def two_ranks_share_host_buffers(found: Findings) -> None:
    """Two ranks pin the same host buffers, write a half each over gloo, and both replicas on one GPU get the whole."""
    # NCCL refuses two ranks on one GPU: so the learners are on the CPU.
    one, other = run_ranks(_share_one_device, 2, found.device.type, timeout_s=90)
    found.demand(one == other, "both ranks see the same versions")
    found.demand(all(sent == received for sent, received in one), "every version arrives bit by bit")
    found.demand(len({sent for sent, _ in one}) == VERSIONS, "each step changes the weights")
    found.figure("versions", len(one))
