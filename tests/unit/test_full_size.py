"""The published sizes, without their memory: exact numbers of weights, and their shards over eight ranks."""

import json
import subprocess
import sys

import pytest

from dvla.config import ModelConfig
from dvla.plan import PlanConfig, build_on_meta

PUBLISHED = {"openvla_oft": 7_541_237_184, "pi05": 3_353_433_872}
RANKS = 8


def full(name, **model):
    return build_on_meta(PlanConfig(model=ModelConfig(name=name, preset="full", **model)))


def test_openvla_oft_has_the_published_number_of_parameters():
    policy, _ = full("openvla_oft")
    embeddings = policy.vision_backbone.dino.embeddings
    # DINOv2 of `transformers` has two things that checkpoints, which are of timm's, have not: a token for masked patches,
    # never used, and a position for the class token, which timm's has added to the token itself.
    width = embeddings.cls_token.shape[-1]
    assert embeddings.mask_token.numel() == width == 1024
    assert embeddings.position_embeddings.shape == (1, 1 + 256, width)
    own = embeddings.mask_token.numel() + embeddings.position_embeddings[:, :1].numel()
    assert sum(parameter.numel() for parameter in policy.parameters()) - own == PUBLISHED["openvla_oft"]


def test_pi05_has_the_published_number_of_parameters():
    policy, _ = full("pi05")
    assert sum(parameter.numel() for parameter in policy.parameters()) == PUBLISHED["pi05"]


def shards(name, shape, freeze):
    """What each of eight ranks says of its shards; rank by rank, in a process that can play any of them."""
    command = [sys.executable, __file__, name, json.dumps(shape), json.dumps(freeze)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("name", "shape"),
    [("openvla_oft", [8]), ("pi05", [8]), ("pi05", [2, 4])],
    ids=["oft-fsdp", "pi05-fsdp", "pi05-hsdp"],
)
def test_shards_over_eight_ranks(name, shape):
    ranks = shards(name, shape, [])
    copies = RANKS // shape[-1]
    assert len(ranks) == RANKS
    assert sum(rank["local"] for rank in ranks) == copies * ranks[0]["total"]
    for rank in ranks:
        assert rank["plain"] == []
        assert rank["units"] > 40
        assert rank["local"] == pytest.approx(rank["total"] / shape[-1], rel=0.01)


def test_what_is_frozen_is_whole_on_every_rank_and_narrow():
    for rank in shards("pi05", [8], ["vlm"]):
        assert set(rank["plain"]) == {"vision", "projector", "embed_tokens", "prefix_layers", "prefix_norm"}
        assert rank["plain_dtypes"] == ["torch.bfloat16"]
        assert rank["units"] == 1  # the expert lies in the root
        assert rank["local"] == pytest.approx(430.1e6 / RANKS, rel=0.01)


def play_ranks(name, shape, freeze):
    import torch
    from torch import distributed
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from dvla.config import Precision
    from dvla.models.sharding import shard_policy

    for rank in range(RANKS):
        distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=RANKS)
        mesh = init_device_mesh("cpu", tuple(shape), mesh_dim_names=("replicate", "shard")[-len(shape) :])
        policy, frozen = full(name, freeze=tuple(freeze))
        total = sum(parameter.numel() for parameter in policy.parameters())
        shard_policy(policy, mesh, precision=Precision.bf16, reshard_after_forward=True, frozen=frozen)
        sharded = [parameter for parameter in policy.parameters() if isinstance(parameter, DTensor)]
        assert all(parameter.to_local().is_meta for parameter in sharded)
        assert all(p.dtype == (torch.float32 if p.requires_grad else torch.bfloat16) for p in sharded)
        plain = [(name, p) for name, p in policy.named_parameters() if not isinstance(p, DTensor)]
        found = {
            "total": total,
            "local": sum(parameter.to_local().numel() for parameter in sharded),
            "units": sum(isinstance(module, FSDPModule) for module in policy.modules()),
            "plain": sorted({name.partition(".")[0] for name, _ in plain}),
            "plain_dtypes": sorted({str(parameter.dtype) for _, parameter in plain}),
        }
        sys.stdout.write(json.dumps(found) + "\n")
        distributed.destroy_process_group()


if __name__ == "__main__":
    play_ranks(sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3]))
