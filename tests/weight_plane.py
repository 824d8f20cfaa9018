"""The weight plane of one rank with a thread that stands for the inference lane; and ranks that pretend to be on nodes."""

from __future__ import annotations

import copy
import os
import sys
import threading

import torch
import torch.distributed as dist
from ranks import free_port

from dvla.config import AlgoConfig, Device, RuntimeConfig
from dvla.lanes.lane import ErrorBoard
from dvla.lanes.learner import Learner
from dvla.lanes.meeting_points import MeetingPoints
from dvla.lanes.param_dist import ParamDistLane
from dvla.planes.exchange import WeightExchange
from dvla.planes.manifest import make_manifest
from dvla.planes.semaphore import StopFlag
from dvla.planes.shared_transport import SharedTransport
from dvla.planes.weights import HostBuffers, Publication, Replica, ShardWriter, learner_digest
from dvla.runtime.world import World, join_world
from dvla.telemetry.durations import Durations
from dvla.telemetry.lane_clock import LaneClock
from dvla.telemetry.trace import Tracer

CPU = torch.device("cpu")


def leave(world) -> int:
    """Leave all groups; returns a port to meet again at."""
    port = [free_port()]
    dist.broadcast_object_list(port, group=world.control_pg)
    dist.barrier(world.control_pg)
    dist.destroy_process_group()
    return port[0]


def as_nodes(world, num_nodes, replicate_size=None, timeout_s=60.0) -> World:
    """Join again, as if the ranks were spread over `num_nodes` nodes."""
    port = leave(world)
    local = world.world_size // num_nodes
    os.environ |= {
        "LOCAL_RANK": str(world.rank % local),
        "LOCAL_WORLD_SIZE": str(local),
        "GROUP_RANK": str(world.rank // local),
        "MASTER_PORT": str(port),
    }
    return join_world(Device.cpu, timeout_s, replicate_size)


class Plane:
    """Learner, host buffers, param_dist lane and replica of one rank.

    Args:
        world: The rank.
        policy: The same on all ranks.
        dtype: In which weights travel.
        delta: Whether only what changes crosses between nodes.
    """

    def __init__(self, world, policy, dtype=torch.float32, *, delta=False):
        self.manifest = make_manifest(policy, dtype)
        self.replica = Replica(copy.deepcopy(policy).to(dtype), self.manifest, CPU)
        self.learner = Learner(policy, world, AlgoConfig(lr=1e-2), RuntimeConfig())
        self.host = HostBuffers(self.manifest, world.weights_pg, CPU)
        self.writer = ShardWriter(self.manifest, self.learner.parameters(), self.host, CPU)
        self.exchange = WeightExchange(world, self.manifest, self.writer.extents, self.host.buffers, delta=delta)
        stop = StopFlag()
        self.meet = MeetingPoints.create(stop=stop, timeout_s=60)
        self.lane = ParamDistLane(
            meet=self.meet,
            stop=stop,
            exchange=self.exchange,
            trains=True,
            infers=True,
            peers=SharedTransport(world.rank, [], stop, 60),
            syncs=Durations(),
            clock=LaneClock(),
            tracer=Tracer(0, False),
        )
        self.errors = ErrorBoard(stop)

    def run(self, versions, publish, look):
        """Call ``publish(version)`` on this thread and ``look(arrival)`` on another, for each version."""
        thread = self.lane.start(self.errors)

        def receive():
            for _ in range(versions):
                arrival = self.meet.arrived.get()
                self.replica.apply(self.host.buffers[arrival.buffer])
                self.meet.staging_free.release()
                look(arrival)

        receiver = threading.Thread(target=receive, daemon=True)
        receiver.start()
        try:
            for version in range(versions):
                publish(version)
            receiver.join(60)
            self.meet.published.put(None)
            thread.join(60)
        finally:
            if self.errors.first is not None:
                sys.stderr.write(f"lane {self.errors.first}\n")
        assert self.errors.first is None
        assert not receiver.is_alive() and not thread.is_alive()

    def publish(self, version, *, verify=False):
        """What the grpo lane does."""
        self.meet.host_free.acquire()
        buffer = version % self.writer.num_buffers
        self.writer.write(buffer)
        digest = learner_digest(self.manifest, self.learner.parameters()) if verify else None
        self.meet.published.put(Publication(version, buffer, digest))
