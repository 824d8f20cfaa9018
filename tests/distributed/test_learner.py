"""The sharded learner against a plain single-process one."""

import copy

import pytest
import torch
from batches import SPEC, K, make_batch, make_policy, part_of, without_weight
from ranks import run_ranks
from torch.distributed.tensor import DTensor

from dvla.config import AlgoConfig, Algorithm, ModelConfig, RuntimeConfig, ValueType
from dvla.lanes.learner import Learner
from dvla.models.policy_source import prepare_policy
from dvla.models.value_head import ValueHead
from dvla.rl.losses import LossSettings, policy_loss
from dvla.rl.value_loss import value_loss

SIZE, STEPS = 12, 5
ALGO = AlgoConfig(group_size=4, groups_per_step=4, lr=1e-4, max_grad_norm=0.2, weight_decay=0.01, reference_kl_coef=0.5)


def reference(name):
    """Five steps of AdamW on the whole batch in one plain process, without any of the learner's code."""
    policy = make_policy(name)
    first = copy.deepcopy(policy)
    batches = [make_batch(make_policy(name), SIZE, seed) for seed in range(STEPS)]
    trainable = [p for p in policy.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=ALGO.lr, betas=ALGO.adam_betas, weight_decay=ALGO.weight_decay)
    settings = LossSettings(
        logprob_type="token", objective="decoupled", clip_ratio_low=0.2, clip_ratio_high=0.28, dual_clip=3.0,
        behavior_ratio_cap=5.0, entropy_coef=0.0, reference_kl_coef=0.5,
    )  # fmt: skip
    norms = []
    for batch in batches:
        logprobs, entropy = policy(batch.observation, batch.record)
        loss, _ = policy_loss(
            logprobs, behavior_logprobs=batch.behavior_logprobs, prox_logprobs=None, entropy=entropy,
            advantages=batch.advantages, weights=batch.weights, action_mask=batch.action_mask, settings=settings,
            reference_logprobs=first(batch.observation, batch.record)[0],
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


PPO = AlgoConfig(
    name=Algorithm.ppo, filter_zero_signal=False, value_type=ValueType.action, group_size=4, groups_per_step=4,
    lr=1e-4, value_lr=1e-3, value_coef=0.7, value_clip=0.2,
)  # fmt: skip


def valued_batch(policy, seed):
    """A batch with advantages, values and returns of each control step."""
    batch = make_batch(policy, SIZE, seed)
    generator = torch.Generator().manual_seed(seed)
    batch.advantages, batch.old_values, batch.returns = torch.randn(3, SIZE, K, generator=generator).unbind(0)
    return batch


def train_with_values(world, name):
    """Two steps on this rank's share and the values after them, beside the same in plain torch on all of it."""
    learner = Learner(make_policy(name), world, PPO, RuntimeConfig(), num_values=K, seed=5)
    plain = make_policy(name)
    head = ValueHead(plain.value_feature_size, K)
    head.initialise(5)
    optimizer = torch.optim.AdamW(
        [{"params": plain.parameters(), "lr": PPO.lr}, {"params": head.parameters(), "lr": PPO.value_lr}],
        betas=PPO.adam_betas, weight_decay=PPO.weight_decay,
    )  # fmt: skip
    for step in range(2):
        batch = valued_batch(make_policy(name), step)
        mine = part_of(batch, slice(world.rank, None, world.world_size))
        learner.values(mine.observation)  # as before every batch
        for rows in (slice(0, 4), slice(4, None)):
            learner.accumulate(part_of(mine, rows), is_last=rows.stop is None)
        norm = learner.step(step)["train/grad_norm"]

        logprobs, entropy, feature = plain.evaluate(batch.observation, batch.record)
        assert torch.equal(feature, plain.value_feature(batch.observation))
        loss, _ = policy_loss(
            logprobs, behavior_logprobs=batch.behavior_logprobs, prox_logprobs=None, entropy=entropy,
            advantages=batch.advantages, weights=batch.weights, action_mask=batch.action_mask, settings=LossSettings(),
        )  # fmt: skip
        of_values = value_loss(
            head(feature), returns=batch.returns, old_values=batch.old_values, weights=batch.weights,
            action_mask=batch.action_mask, value_clip=PPO.value_clip,
        )  # fmt: skip
        optimizer.zero_grad()
        ((loss + PPO.value_coef * of_values) / (PPO.group_size * PPO.groups_per_step)).backward()
        everything = [*plain.parameters(), *head.parameters()]
        assert norm == pytest.approx(float(torch.nn.utils.clip_grad_norm_(everything, PPO.max_grad_norm)), rel=1e-4)
        optimizer.step()
    wanted = dict(plain.named_parameters()) | {f"value_head.{n}": p for n, p in head.named_parameters()}
    found = learner.parameters()
    assert found.keys() == wanted.keys()
    apart = {n: (found[n].full_tensor() - wanted[n]).abs().max().item() for n in wanted}
    assert learner.values(batch.observation).abs().max() > 1e-4, "the head must have learnt something"
    return max(apart.values())


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["mlp", "openvla_oft", "pi05"])
def test_a_value_head_is_trained_as_without_sharding(name):
    assert max(run_ranks(train_with_values, 2, name)) < 0.05 * PPO.value_lr, "more than rounding before Adam explains"


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
    first, _, _ = learner.accumulate(batch, is_last=True)
    learner.step(0)
    parameters = learner.parameters()
    full = {n: (p.full_tensor() if isinstance(p, DTensor) else p).detach() for n, p in parameters.items()}
    moved = {name for name in before if not torch.equal(before[name], full[name])}
    second, _, _ = learner.accumulate(batch, is_last=True)
    reference = learner._reference(batch.observation, batch.record)
    assert (second - first).abs().max() > 1e-4
    assert torch.allclose(reference, first, atol=1e-5), "the reference is not what the run began with"
    return moved, {name for name, p in parameters.items() if isinstance(p, DTensor)}


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
