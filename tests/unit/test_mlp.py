"""The Gaussian perceptron policy."""

from __future__ import annotations

import math

import pytest
import torch

from dvla.envs.protocol import EnvSpec
from dvla.models.mlp import MLPConfig, MLPPolicy
from dvla.models.policy import Observation
from dvla.rl.noise import decision_keys

K, A, STATE = 3, 2, 5


def make_spec(num_tasks: int = 1, state_dim: int = STATE) -> EnvSpec:
    return EnvSpec(
        name="test",
        cameras=(),
        image_size=(0, 0),
        state_dim=state_dim,
        action_dim=A,
        max_episode_steps=10,
        instructions=tuple(f"task {i}" for i in range(num_tasks)),
    )


def make_policy(num_tasks: int = 1, temperature: float = 1.0, **options: object) -> MLPPolicy:
    torch.manual_seed(0)
    policy = MLPPolicy(MLPConfig(**options), spec=make_spec(num_tasks), num_action_chunks=K, temperature=temperature)
    # Undo the small last layer: a policy that ignores its input would pass most of these tests.
    torch.nn.init.normal_(policy.net[-1].weight, std=0.1)
    return policy


def make_obs(batch: int, num_tasks: int = 1) -> Observation:
    generator = torch.Generator().manual_seed(1)
    return Observation(
        images=torch.zeros(batch, 0, 0, 0, 3, dtype=torch.uint8),
        state=torch.randn(batch, STATE, generator=generator),
        task=torch.arange(batch) % num_tasks,
    )


def keys_of(batch: int) -> torch.Tensor:
    return decision_keys(3, torch.arange(batch), torch.zeros(batch, dtype=torch.int64))


def test_shapes_dtypes_and_range() -> None:
    policy = make_policy()
    decision = policy.act(make_obs(7), keys_of(7))
    assert decision.actions.shape == decision.logprobs.shape == (7, K, A)
    assert decision.actions.dtype == decision.logprobs.dtype == torch.float32
    assert decision.actions.abs().max() <= 1
    for name, field in policy.record_spec.items():
        assert decision.record[name].shape[1:] == field.shape
        assert decision.record[name].dtype == field.dtype
    assert not decision.logprobs.requires_grad


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_forward_finds_the_logprobs_of_act_exactly(temperature: float) -> None:
    policy = make_policy(temperature=temperature)
    obs = make_obs(6)
    decision = policy.act(obs, keys_of(6))
    logprobs, _ = policy(obs, decision.record)
    assert torch.equal(logprobs, decision.logprobs)


def test_a_decision_does_not_depend_on_its_batch() -> None:
    policy = make_policy(num_tasks=3)
    obs, keys = make_obs(8, 3), keys_of(8)
    together = policy.act(obs, keys)
    for i in range(8):
        alone = policy.act(
            Observation(obs.images[i : i + 1], obs.state[i : i + 1], obs.task[i : i + 1]), keys[i : i + 1]
        )
        torch.testing.assert_close(alone.actions[0], together.actions[i], atol=1e-6, rtol=0)
        torch.testing.assert_close(alone.logprobs[0], together.logprobs[i], atol=1e-5, rtol=0)


def test_logprobs_and_entropy_are_those_of_the_normal_distribution() -> None:
    temperature, std = 0.64, 0.5
    policy = make_policy(temperature=temperature, initial_std=std)
    obs = make_obs(4)
    sample = torch.randn(4, K, A)
    logprobs, entropy = policy(obs, {"sample": sample})
    mean = policy.net(obs.state).view(4, K, A)
    reference = torch.distributions.Normal(mean, math.sqrt(temperature) * std)
    torch.testing.assert_close(logprobs, reference.log_prob(sample))
    torch.testing.assert_close(entropy, reference.entropy())
    assert not logprobs._is_view() and not entropy._is_view()  # FSDP2 warns of modules that return views


def test_samples_have_the_stated_moments() -> None:
    policy = make_policy(initial_std=0.6)
    obs = make_obs(1)
    many = Observation(obs.images.expand(20000, -1, -1, -1, -1), obs.state.expand(20000, -1), obs.task.expand(20000))
    sample = policy.act(many, keys_of(20000)).record["sample"]
    mean = policy.net(obs.state).view(K, A)
    assert (sample.mean(0) - mean).abs().max() < 5 * 0.6 / math.sqrt(20000)
    assert (sample.std(0) - 0.6).abs().max() < 5 * 0.6 / math.sqrt(40000)


def test_the_task_is_seen() -> None:
    policy = make_policy(num_tasks=2)
    obs = make_obs(2, 2)
    same_state = Observation(obs.images, obs.state[:1].expand(2, -1), obs.task)
    logprobs, _ = policy(same_state, {"sample": torch.zeros(2, K, A)})
    assert not torch.allclose(logprobs[0], logprobs[1])


def test_initial_actions_hardly_depend_on_the_state() -> None:
    torch.manual_seed(0)
    policy = MLPPolicy(MLPConfig(), spec=make_spec(), num_action_chunks=K, temperature=1.0)
    assert policy.net(make_obs(64).state).abs().max() < 0.02


def test_gradient_reaches_every_parameter() -> None:
    policy = make_policy(num_tasks=2)
    obs = make_obs(4, 2)
    logprobs, entropy = policy(obs, policy.act(obs, keys_of(4)).record)
    (logprobs.sum() + entropy.sum()).backward()
    for name, parameter in policy.named_parameters():
        assert parameter.grad is not None and parameter.grad.abs().max() > 0, name


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"model\.name"):
        MLPPolicy(MLPConfig(), spec=make_spec(state_dim=0), num_action_chunks=K, temperature=1.0)
    with pytest.raises(ValueError, match="activation"):
        MLPConfig(activation="relu6")
    with pytest.raises(ValueError, match="initial_std"):
        MLPConfig(initial_std=0)
    with pytest.raises(ValueError, match="temperature"):
        make_policy(temperature=0.0)
