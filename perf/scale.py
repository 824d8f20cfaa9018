"""Scale on paper: what ranks hold and links carry, 7 B to 1 T parameters on 8 to 4,096 ranks: run ``python perf/scale.py``.

OpenVLA-OFT with a larger and larger language model is built without memory (``meta``) and sharded by the learner's own
`shard_policy`, by ``fully_shard``, in a fake process group of so many ranks, as rank 0, whose shards are the largest. A step
of AdamW, also on ``meta``, makes the optimiser's state. What is counted are the sizes of the tensors that are there then.
Assumptions: docs/scale.md. Writes results/scale.json and docs/scale.svg.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist
from matplotlib import pyplot as plt
from runs import REPOSITORY, store
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from dvla.config import ModelConfig, Precision
from dvla.models.sharding import COMPUTE_DTYPE, shard_policy
from dvla.plan import PlanConfig, build_on_meta
from dvla.planes.manifest import make_manifest

RANKS_OF_NODE = 8
RANKS = (8, 64, 512, 4096)
GIB = 2**30
PRECISION = Precision.bf16


@dataclass(frozen=True)
class Size:
    """The language model of a policy."""

    hidden: int
    layers: int
    mlp: int


SIZES = {
    "7 B": Size(4096, 32, 11008),
    "70 B": Size(8192, 72, 28672),
    "400 B": Size(16384, 108, 53248),
    "1 T": Size(20480, 175, 65536),
}


def policy_of(size: Size):
    """The policy on ``meta``."""
    options = {
        "llm_hidden_size": size.hidden,
        "llm_layers": size.layers,
        "llm_heads": size.hidden // 128,
        "llm_mlp_size": size.mlp,
    }
    return build_on_meta(PlanConfig(model=ModelConfig(name="openvla_oft", preset="full", options=options)))[0]


def num_bytes(tensor: torch.Tensor) -> int:
    """Of this rank's part."""
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return local.numel() * local.element_size()


def measure(name: str, ranks: int, *, one_copy: bool) -> dict:
    """Shard a policy over `ranks`, as one copy or as one for each node, and count."""
    nodes = ranks // RANKS_OF_NODE
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        policy = policy_of(SIZES[name])
        weight_bytes = make_manifest(policy, COMPUTE_DTYPE[PRECISION]).num_bytes
        parameters = sum(parameter.numel() for parameter in policy.parameters())
        largest_unit = max(sum(p.numel() for p in unit.parameters()) for unit in policy.fsdp_units())
        if one_copy or nodes == 1:
            mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("shard",))
        else:
            mesh = init_device_mesh("cpu", (nodes, RANKS_OF_NODE), mesh_dim_names=("replicate", "shard"))
        model = shard_policy(policy, mesh, precision=PRECISION, reshard_after_forward=True)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-4, foreach=False)
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        held = {
            "weights": sum(map(num_bytes, model.parameters())),
            "gradients": sum(num_bytes(parameter.grad) for parameter in trained),
            "optimiser": sum(
                num_bytes(value)
                for state in optimizer.state.values()
                for value in state.values()
                if isinstance(value, torch.Tensor)
            ),
        }
    finally:
        dist.destroy_process_group()
    shards = ranks if one_copy else RANKS_OF_NODE
    copies = ranks // shards
    itemsize = COMPUTE_DTYPE[PRECISION].itemsize
    total = sum(parameter.numel() for parameter in trained)
    return {
        "model": name,
        "parameters": parameters,
        "ranks": ranks,
        "copies": copies,
        **{f"{key}_gib": value / GIB for key, value in held.items()},
        "state_gib": sum(held.values()) / GIB,
        "gathered_gib": 2 * itemsize * largest_unit / GIB,
        "replica_gib": weight_bytes / GIB,
        "host_buffers_gib": 2 * weight_bytes / GIB,
        "weights_per_node_gib": weight_bytes * (nodes - 1) / nodes / GIB,
        "reduce_scatter_gib": 4 * total * (shards - 1) / shards / GIB,
        "all_reduce_gib": 2 * 4 * total / shards * (copies - 1) / copies / GIB,
        "gather_gib": 2 * itemsize * total * (shards - 1) / shards / GIB,
    }


def draw(rows: list[dict]) -> None:
    """State of a rank against ranks, a line per model."""
    figure, panels = plt.subplots(1, 2, figsize=(10, 4), sharey=True, layout="constrained")
    for panel, title in zip(panels, ("one copy of the learner over all ranks", "one copy a node"), strict=True):
        for name in SIZES:
            own = [row for row in rows if row["model"] == name and (row["copies"] == 1) is (panel is panels[0])]
            panel.loglog(
                [row["ranks"] for row in own], [row["state_gib"] for row in own], "o-", label=f"{name} parameters"
            )
        for gib in (80, 141):
            panel.axhline(gib, color="grey", linewidth=0.8, linestyle=":")
            panel.annotate(f"{gib} GiB", (RANKS[0], gib), fontsize=7, color="grey", va="bottom")
        panel.set_title(title)
        panel.set_xlabel("ranks")
        panel.set_xticks(RANKS, [f"{ranks:,}" for ranks in RANKS])
    panels[0].set_ylabel("weights, gradients, optimiser of a rank, GiB")
    panels[0].legend()
    figure.savefig(REPOSITORY / "docs" / "scale.svg", metadata={"Date": None})


def main() -> None:
    """Count, store and draw."""
    rows = []
    for name in SIZES:
        for ranks in RANKS:
            for one_copy in (True, False) if ranks > RANKS_OF_NODE else (True,):
                rows.append(measure(name, ranks, one_copy=one_copy))
                sys.stderr.write(f"{rows[-1]}\n")
    store("scale", rows)
    draw(rows)


if __name__ == "__main__":
    main()
