"""Synthetic training batches for a policy, the same for everyone who asks with the same seed."""

from __future__ import annotations

import torch

from dvla.envs.protocol import EnvSpec
from dvla.lanes.learner import MicroBatch
from dvla.models.policy import Observation
from dvla.models.registry import build_policy
from dvla.rl.noise import decision_keys

K, A = 4, 3
SPEC = EnvSpec(
    name="test",
    cameras=("top",),
    image_size=(64, 64),
    state_dim=5,
    action_dim=A,
    max_episode_steps=16,
    instructions=("push the cube", "lift the peg upright slowly"),
)


def make_policy(name: str, seed: int = 0, temperature: float = 1.0) -> torch.nn.Module:
    """A fresh policy for `SPEC`."""
    preset = {"mlp": "default", "openvla_oft": "nano", "pi05": "nano"}[name]
    return build_policy(name, preset, {}, spec=SPEC, num_action_chunks=K, temperature=temperature, seed=seed)


def make_batch(policy: torch.nn.Module, size: int, seed: int) -> MicroBatch:
    """`size` decisions of `policy` on random observations, with random advantages and partly executed chunks."""
    generator = torch.Generator().manual_seed(seed)
    observation = Observation(
        images=torch.randint(0, 256, (size, 1, 64, 64, 3), generator=generator, dtype=torch.uint8),
        state=torch.randn(size, 5, generator=generator),
        task=torch.randint(0, 2, (size,), generator=generator),
    )
    keys = decision_keys(seed, torch.arange(size), torch.zeros(size, dtype=torch.int64))
    with torch.no_grad():
        decision = policy.act(observation, keys)
    executed = torch.randint(1, K + 1, (size,), generator=generator)
    return MicroBatch(
        observation=observation,
        record=decision.record,
        behavior_logprobs=decision.logprobs,
        prox_logprobs=None,
        advantages=torch.randn(size, generator=generator),
        weights=torch.rand(size, generator=generator) + 0.1,
        action_mask=torch.arange(K)[None, :] < executed[:, None],
        is_current=torch.ones(size, dtype=torch.bool),
    )


def part_of(batch: MicroBatch, rows: slice) -> MicroBatch:
    """Some rows of a batch."""
    return MicroBatch(
        observation=Observation(
            batch.observation.images[rows], batch.observation.state[rows], batch.observation.task[rows]
        ),
        record={name: values[rows] for name, values in batch.record.items()},
        behavior_logprobs=batch.behavior_logprobs[rows],
        prox_logprobs=None,
        advantages=batch.advantages[rows],
        weights=batch.weights[rows],
        action_mask=batch.action_mask[rows],
        is_current=batch.is_current[rows],
        old_values=None if batch.old_values is None else batch.old_values[rows],
        returns=None if batch.returns is None else batch.returns[rows],
    )


def without_weight(batch: MicroBatch) -> MicroBatch:
    """The batch as padding."""
    padding = part_of(batch, slice(None))
    padding.weights = torch.zeros_like(batch.weights)
    return padding
