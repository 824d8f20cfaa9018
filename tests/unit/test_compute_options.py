"""Ways to compute a policy that must not change what it computes."""

import pytest
import torch
from batches import make_batch, make_policy

from dvla.config import ConfigError
from dvla.models.compute_options import checkpoint_activations, compile_layers
from dvla.models.cuda_graph import GraphedAct
from dvla.models.policy import Decision, Observation
from dvla.rl.noise import decision_keys


def gradients(policy, batch):
    policy.train()
    logprobs, _ = policy(batch.observation, batch.record)
    policy.zero_grad()
    (logprobs * batch.advantages[:, None, None]).sum().backward()
    return {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["openvla_oft", "pi05"])
def test_checkpointed_activations_give_the_same_gradients(name):
    batch = make_batch(make_policy(name), 3, 0)
    want = gradients(make_policy(name), batch)
    policy = make_policy(name)
    checkpoint_activations(policy)
    calls = []
    layer = [m for m in policy.modules() if getattr(m, "gradient_checkpointing", False)][-1]
    layer.self_attn.register_forward_hook(lambda *_: calls.append(1))
    got = gradients(policy, batch)
    assert len(calls) == 2  # once forward, once again for the backward pass
    assert got.keys() == want.keys()
    for key, value in want.items():
        torch.testing.assert_close(got[key], value, atol=1e-6, rtol=1e-5)


def test_a_model_without_layers_cannot_checkpoint_them():
    with pytest.raises(ConfigError, match="activation_checkpointing"):
        checkpoint_activations(make_policy("mlp"))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["openvla_oft", "pi05"])
def test_compiled_layers_compute_the_same(name):
    policy = make_policy(name)
    batch = make_batch(policy, 3, 0)
    with torch.no_grad():
        want, _ = policy(batch.observation, batch.record)
        compile_layers(policy)
        got, _ = policy(batch.observation, batch.record)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    torch._dynamo.reset()


class Recorder:
    """Plays a CUDA graph on the CPU: replaying computes again from the static inputs into the static results."""

    def __init__(self):
        self.captures = 0

    def __call__(self, call):
        self.captures += 1
        static = call()

        def replay():
            fresh = call()
            static.actions.copy_(fresh.actions)
            static.logprobs.copy_(fresh.logprobs)
            for key, value in fresh.record.items():
                static.record[key].copy_(value)

        return replay, static


def rows(batch, count):
    keys = decision_keys(1, torch.arange(count), torch.zeros(count, dtype=torch.int64))
    obs = batch.observation
    return Observation(images=obs.images[:count], state=obs.state[:count], task=obs.task[:count]), keys


@pytest.mark.parametrize("name", ["openvla_oft", "pi05"])
def test_replayed_decisions_are_those_of_the_policy_whatever_the_batch(name):
    policy, recorder = make_policy(name), Recorder()
    act, batch = GraphedAct(policy, capture=recorder), make_batch(make_policy(name), 6, 0)
    seen = []
    for count in (3, 4, 1, 6, 2, 3):
        got, want = act(*rows(batch, count)), policy.act(*rows(batch, count))
        assert isinstance(got, Decision)
        assert got.actions.shape == want.actions.shape
        torch.testing.assert_close(got.actions, want.actions, atol=1e-5, rtol=0)
        torch.testing.assert_close(got.logprobs, want.logprobs, atol=1e-5, rtol=0)
        assert got.record.keys() == want.record.keys()
        seen.append((got, want))
    assert recorder.captures == 4  # sizes 4, 1, 8, 2
    for got, want in seen:  # results are the caller's own: later replays left them alone
        torch.testing.assert_close(got.actions, want.actions, atol=1e-5, rtol=0)


def test_a_replay_reads_the_weights_of_the_moment():
    policy, batch = make_policy("openvla_oft"), make_batch(make_policy("openvla_oft"), 2, 0)
    act = GraphedAct(policy, capture=Recorder())
    before = act(*rows(batch, 2))
    with torch.no_grad():
        policy.language_model.lm_head.weight.mul_(-1)
    after = act(*rows(batch, 2))
    assert not torch.equal(before.actions, after.actions)
    assert torch.equal(after.actions, policy.act(*rows(batch, 2)).actions)
