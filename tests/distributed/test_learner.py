"""The sharded learner against a plain single-process one."""

import pytest
import torch
from batches import SPEC, K, make_batch, make_policy, part_of, without_weight
from ranks import run_ranks
from torch.distributed.tensor import DTensor

from dvla.config import AlgoConfig, ModelConfig, RuntimeConfig
from dvla.lanes.learner import Learner, learning_rate
from dvla.models.policy_source import prepare_policy
from dvla.rl.losses import LossSettings, policy_loss

SIZE, STEPS = 12, 5
ALGO = AlgoConfig(group_size=4, groups_per_step=4, lr=1e-4, max_grad_norm=0.2, weight_decay=0.01)


def reference(name):
    """Five steps of AdamW on the whole batch in one plain process, without any of the learner's code."""
    policy = make_policy(name)
    batches = [make_batch(make_policy(name), SIZE, seed) for seed in range(STEPS)]
    trainable = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=ALGO.lr, betas=ALGO.adam_betas, weight_decay=ALGO.weight_decay)
    settings = LossSettings(
        logprob_type="token", objective="decoupled", clip_ratio_low=0.2, clip_ratio_high=0.28, dual_clip=3.0,
        behavior_ratio_cap=5.0, entropy_coef=0.0,
    )  # fmt: skip
    norms = []
    for batch in batches:
        logprobs, entropy = policy(batch.observation, batch.record)
        loss, _ = policy_loss(
            logprobs, behavior_logprobs=batch.behavior_logprobs, prox_logprobs=None, entropy=entropy,
            advantages=batch.advantages, weights=batch.weights, action_mask=batch.action_mask, settings=settings,
        )  # fmt: skip
        optimizer.zero_grad()
        (loss / (ALGO.group_size * ALGO.groups_per_step)).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(trainable, ALGO.max_grad_norm)))
        optimizer.step()
    return norms, {n: p.detach() for n, p in policy.named_parameters()}


def train(world, name, cuts, sync_every_micro_batch, **options):
    """The same five steps on this rank's share, cut into micro-batches as told; rank r gets rows r::R."""
    runtime = RuntimeConfig(sync_every_micro_batch=sync_every_micro_batch, **options)
    learner = Learner(make_policy(name), world, ALGO, runtime)
    assert all(isinstance(p, DTensor) for p in learner.model.parameters() if p.requires_grad)
    assert learner.parameters().keys() == dict(make_policy(name).named_parameters()).keys()
    norms = []
    for seed in range(STEPS):
        batch = part_of(make_batch(make_policy(name), SIZE, seed), slice(world.rank, None, world.world_size))
        rows = cuts[world.rank]
        rounds = max(len(cut) for cut in cuts)
        start = 0
        for index in range(rounds):
            if index < len(rows):
                part, start = part_of(batch, slice(start, start + rows[index])), start + rows[index]
            else:
                part = without_weight(part_of(batch, slice(0, 1)))
            learner.accumulate(part, is_last=index == rounds - 1)
        assert start == len(batch.weights)
        norms.append(learner.step(seed)["train/grad_norm"])
    full = {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach() for n, p in learner.parameters().items()}
    return norms, full


def train_all(world, name, cases):
    return [train(world, name, cuts, sync) for cuts, sync in cases]


CASES = {  # micro-batch sizes of each rank, and whether gradients are reduced after each
    1: [([[12]], False), ([[5, 4, 3]], True)],
    2: [([[6], [6]], False), ([[2, 2, 2], [6]], False), ([[1, 5], [3, 2, 1]], True)],
}


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["mlp", "openvla_oft", "pi05"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_training_does_not_depend_on_ranks_or_cut(name, world_size):
    norms, parameters = reference(name)
    assert max(norms) > ALGO.max_grad_norm, "clipping must act in this test"
    for results in run_ranks(train_all, world_size, name, CASES[world_size]):
        for (case_norms, case_parameters), case in zip(results, CASES[world_size], strict=True):
            assert case_norms == pytest.approx(norms, rel=1e-5), case
            for key, value in parameters.items():
                assert (case_parameters[key] - value).abs().max() <= 1e-6, (case, key)


def train_in_replicas(world, name):
    assert world.learner_mesh.mesh_dim_names == ("replicate", "shard")
    return train(world, name, [[3, 3]] * world.world_size, False, activation_checkpointing=True)


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["openvla_oft", "pi05"])
def test_replicas_and_activation_checkpointing_change_nothing(name):
    norms, parameters = reference(name)
    for case_norms, case_parameters in run_ranks(train_in_replicas, 2, name, replicate_size=2):
        assert case_norms == pytest.approx(norms, rel=1e-5)
        for key, value in parameters.items():
            assert (case_parameters[key] - value).abs().max() <= 1e-6, key


def train_partly(world, model, spec):
    """One step from a checkpoint-less source with frozen parts or adapters; what moved, and what the learner shards."""
    source = prepare_policy(model, spec=spec, seed=0)
    before = {name: parameter.detach().clone() for name, parameter in source.policy.named_parameters()}
    learner = Learner(source.policy, world, ALGO, RuntimeConfig(), frozen=source.frozen)
    batch = part_of(make_batch(make_policy(model.name), SIZE, 0), slice(world.rank, None, world.world_size))
    learner.accumulate(batch, is_last=True)
    learner.step(0)
    full = {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach() for n, p in learner.parameters().items()}
    moved = {name for name in before if not torch.equal(before[name], full[name])}
    return moved, {name for name, p in learner.parameters().items() if isinstance(p, DTensor)}


@pytest.mark.distributed
def test_only_what_is_trained_moves_and_frozen_parts_are_not_sharded():
    frozen = ModelConfig(name="pi05", preset="nano", num_action_chunks=K, freeze=("vlm",))
    adapted = ModelConfig(name="openvla_oft", preset="nano", num_action_chunks=K, lora_rank=4)
    for moved, sharded in run_ranks(train_partly, 2, frozen, SPEC):
        assert "expert_layers.0.self_attn.q_proj.weight" in moved
        assert not any(name.startswith(("vision", "projector", "embed_tokens", "prefix")) for name in moved | sharded)
        assert "action_in_proj.weight" in sharded
    for moved, sharded in run_ranks(train_partly, 2, adapted, SPEC):
        assert {".lora_A." in name or ".lora_B." in name for name in moved} == {True}
        assert "language_model.model.layers.0.mlp.up_proj.lora_B.default.weight" in moved
        assert "language_model.model.layers.0.self_attn.q_proj.base_layer.weight" in sharded


def test_the_rate_warms_up_linearly_and_stays():
    assert [learning_rate(1.0, 4, version) for version in (0, 1, 3, 4, 50)] == [0.25, 0.5, 1.0, 1.0, 1.0]
    assert learning_rate(2.0, 0, 0) == 2.0


def break_gradient(world):
    learner = Learner(make_policy("mlp"), world, ALGO, RuntimeConfig())
    batch = make_batch(make_policy("mlp"), 4, 0)
    batch.advantages[2] = float("nan")
    learner.accumulate(batch, is_last=True)
    with pytest.raises(FloatingPointError, match=r"optimiser step 8 is not finite"):
        learner.step(7)
    return True


@pytest.mark.distributed
def test_a_gradient_that_is_not_finite_is_refused_with_the_step():
    assert run_ranks(break_gradient, 1) == [True]
