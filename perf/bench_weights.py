"""The weight plane of two ranks on one node, 256 MiB a version: run ``python perf/bench_weights.py``.

In each round, in turn, every other time in reverse, with one compute thread a rank:

* memcpy: rank 0 alone copies a version's bytes from memory to memory; the machine's bandwidth;
* publish: both ranks publish a version through the real lanes; from the first rank's start until the last replica has it;
* own shard: both ranks copy the learner's shards, one after the other, to their places in a host buffer, casting;
* broadcast: gloo's, of a version's bytes from rank 0 to rank 1.

`weights.vs_memcpy` and `weights.vs_gloo_broadcast` are quotients of bandwidths (bytes of a version by seconds).
`weights.learner_blocked_frac` is the time that publishing holds up the learner's thread, by that of copying its own shard;
both of the slower rank. All are of medians over the rounds.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

ROUNDS = 31
WIDTH = 1024
LAYERS = {torch.float32: 64, torch.bfloat16: 128}  # 256 MiB as they travel


class Policy(nn.Module):
    """As many parameters of each kind as a small transformer has."""

    def __init__(self, num_layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))

    def fsdp_units(self) -> list[nn.Module]:
        """What is sharded as one."""
        return list(self.layers)


def measure(dtype: torch.dtype) -> dict[str, float]:
    """Seconds of each piece of work, medians; collective."""
    from weight_plane import Plane

    plane = Plane(WORLD, Policy(LAYERS[dtype]), dtype)
    size = plane.manifest.num_bytes
    plain, other = torch.ones(2, size, dtype=torch.uint8)
    learner = plane.learner.parameters()
    shards = [
        (entry, learner[entry.name].detach().to_local(), shard_rows(learner[entry.name]))
        for entry in plane.manifest.entries
    ]
    seconds: dict[str, list[float]] = {}
    own_seconds: dict[str, list[float]] = {}

    def timed(name, work, then=lambda: None):
        """Do `work`, then wait for what follows from it, on both ranks at once; time all of it, and this rank's work."""
        dist.barrier(WORLD.control_pg)
        begin = time.monotonic()
        work()
        done = time.monotonic()
        then()
        spans = [(0.0, 0.0)] * 2
        dist.all_gather_object(spans, (begin, time.monotonic()), group=WORLD.control_pg)
        seconds.setdefault(name, []).append(max(end for _, end in spans) - min(start for start, _ in spans))
        own_seconds.setdefault(name, []).append(done - begin)

    def copy_plainly():
        if WORLD.rank == 0:
            other.copy_(plain)

    applied = threading.Semaphore(0)

    def publish(version):
        free = plane.host.buffers[(version + 1) % len(plane.host.buffers)]
        places = [(plane.manifest.view(free, entry)[slice(*rows)], shard) for entry, shard, rows in shards]

        def copy_shards():
            for place, shard in places:
                place.copy_(shard)

        work = [
            ("memcpy", copy_plainly),
            ("own shard", copy_shards),
            ("publish", lambda: plane.publish(version), applied.acquire),
            ("broadcast", lambda: dist.broadcast(plain, 0, group=WORLD.control_pg)),
        ]
        for piece in work if version % 2 else reversed(work):
            timed(*piece)

    plane.run(ROUNDS + 1, publish, lambda _: applied.release())
    own = [{}] * 2
    dist.all_gather_object(own, {n: statistics.median(v[1:]) for n, v in own_seconds.items()}, group=WORLD.control_pg)
    return {name: statistics.median(values[1:]) for name, values in seconds.items()} | {
        "bytes": size,
        "blocked": max(medians["publish"] for medians in own),
        "copied": max(medians["own shard"] for medians in own),
    }


def rows(dtype: torch.dtype) -> list[dict]:
    """What a dtype's measurements say."""
    m = measure(dtype)
    suffix = "" if dtype is torch.float32 else ".bf16"
    speeds = {name: m["bytes"] / m[name] / 1e9 for name in ("publish", "memcpy", "broadcast")}
    values = [(f"weights.{name}", speed, "GB/s") for name, speed in speeds.items()]
    values += [
        ("weights.vs_memcpy", speeds["publish"] / speeds["memcpy"], "ratio"),
        ("weights.vs_gloo_broadcast", speeds["publish"] / speeds["broadcast"], "ratio"),
        ("weights.learner_blocked_frac", m["blocked"] / m["copied"], "ratio"),
    ]
    return [{"name": name + suffix, "value": value, "unit": unit} for name, value, unit in values]


if __name__ == "__main__":
    if "RANK" not in os.environ:
        here = Path(__file__)
        paths = os.pathsep.join([str(here.parents[1] / "tests"), os.environ.get("PYTHONPATH", "")])
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(here)]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": paths}
        sys.exit(subprocess.run([sys.executable, *torchrun], env=environment, check=False).returncode)
    from runs import store

    from dvla.config import Device
    from dvla.planes.weights import shard_rows
    from dvla.runtime.world import join_world

    torch.set_num_threads(1)
    sys.setswitchinterval(0.0005)  # as the runner does
    WORLD = join_world(Device.cpu, 600.0)
    found = rows(torch.float32) + rows(torch.bfloat16)
    if WORLD.is_main:
        store("bench_weights", found)
    dist.barrier(WORLD.control_pg)
    os._exit(0)
