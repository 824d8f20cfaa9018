"""A program for torchrun: publish weights and do nothing else; rank 0 writes how many bytes that put on the link.

Arguments: where to write, runtime.replicate_size, and whether to send differences: versions then differ in one column of each
matrix only.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from namespaces import bytes_on_link
from torch import nn
from weight_plane import CPU, Plane

from dvla.config import Device
from dvla.runtime.processes import die_with_parent
from dvla.runtime.world import join_world

VERSIONS = 8


class Policy(nn.Module):
    """Enough of a policy to be sharded: 16 MiB in matrices, vectors and a row that no two ranks can share."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(1024, 1021) for _ in range(4))
        self.head = nn.Linear(1024, 1)

    def fsdp_units(self) -> list[nn.Module]:
        return list(self.layers)


def changing(parameter: torch.Tensor, delta: bool) -> torch.Tensor:
    return parameter[:, :1] if delta and parameter.ndim == 2 else parameter[:0] if delta else parameter


def main(out: Path, replicate_size: int | None, delta: bool) -> None:
    die_with_parent()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    world = join_world(Device.cpu, 60.0, replicate_size)
    policy = Policy()
    wanted = [parameter.detach().clone() for parameter in policy.parameters()]
    plane = Plane(world, policy, delta=delta)
    wrong = []

    def publish(version):
        for parameter in plane.learner.parameters().values():
            changing(parameter.detach().to_local(), delta).fill_(version)
        plane.publish(version)

    def look(arrival):
        for parameter, want in zip(plane.replica.policy.parameters(), wanted, strict=True):
            changing(want, delta).fill_(arrival.version)
            if not torch.equal(parameter, want):
                wrong.append(arrival.version)

    dist.barrier(world.control_pg)
    before = bytes_on_link()
    plane.run(VERSIONS, publish, look)
    crossed = bytes_on_link() - before
    faults = [None] * world.world_size
    dist.all_gather_object(faults, wrong, group=world.control_pg)
    if world.is_main:
        per_version = crossed / VERSIONS / plane.manifest.num_bytes
        axes = list(world.learner_mesh.mesh_dim_names or ())
        out.write_text(json.dumps({"models_per_version": per_version, "wrong": faults, "mesh": axes}))
    dist.barrier(world.control_pg)
    os._exit(0)


if __name__ == "__main__":
    assert CPU.type == "cpu"
    main(Path(sys.argv[1]), None if sys.argv[2] == "null" else int(sys.argv[2]), delta=sys.argv[3] == "true")
