"""What behaviour cloning minimises, of both models, and that it sees and labels as reinforcement learning does."""

import dataclasses
import json
from pathlib import Path

import golden
import numpy as np
import pytest
import torch
from batches import SPEC, A, K, make_policy
from recordings import episode, write_v2
from safetensors.torch import load_file
from torch.nn import functional as F

from dvla.config import ConfigError, DataConfig, ModelConfig
from dvla.datasets.reading import read_dataset
from dvla.datasets.samples import Samples
from dvla.datasets.statistics import compute_statistics
from dvla.models.export import write_policy
from dvla.models.policy import Observation
from dvla.models.policy_source import prepare_policy
from dvla.rl.noise import decision_keys, normal, uniform

B = 5


def observe(batch=B, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return Observation(
        images=torch.randint(0, 256, (batch, 1, 64, 64, 3), generator=generator, dtype=torch.uint8),
        state=torch.randn(batch, 5, generator=generator),
        task=torch.arange(batch) % 2,
    )


def demonstrated(steps=K, seed=1):
    return torch.rand(B, steps, A, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def keys(batch=B):
    return decision_keys(0, torch.arange(batch), torch.zeros(batch, dtype=torch.int64))


def recorded(tmp_path, **sizes):
    return read_dataset(
        DataConfig(paths=(str(write_v2(tmp_path / "set", [episode(0, 9, **sizes), episode(1, 7, **sizes)])),))
    )


# -- OpenVLA-OFT -------------------------------------------------------------------------------------------------------


def test_the_cross_entropy_is_minus_the_log_probability_that_reinforcement_learning_uses():
    policy, obs, actions = make_policy("openvla_oft"), observe(), demonstrated()
    loss, error, correct = policy.imitation_loss(obs, actions, keys())
    tokens = policy.tokenize_actions(actions)
    logprobs, _ = policy(obs, {"tokens": tokens.to(torch.uint8)})
    torch.testing.assert_close(loss, -logprobs, rtol=0, atol=0)
    greedy = policy.act(obs, keys(), greedy=True)
    torch.testing.assert_close(error, (greedy.actions - actions).abs())
    assert torch.equal(correct, greedy.actions == policy.bin_centers[tokens])
    # Its own likeliest actions cost it nothing but what it doubts.
    _, error, correct = policy.imitation_loss(obs, greedy.actions, keys())
    assert correct.all() and error.max() == 0


def test_smoothing_mixes_in_the_mean_over_all_bins():
    policy, obs, actions = make_policy("openvla_oft"), observe(), demonstrated()
    logits = policy.action_logits(obs).flatten(0, 1)
    labels = policy.tokenize_actions(actions).flatten()
    want = F.cross_entropy(logits, labels, label_smoothing=0.3, reduction="none").view(B, K, A)
    got, *_ = policy.imitation_loss(obs, actions, keys(), label_smoothing=0.3)
    torch.testing.assert_close(got, want)


def test_it_is_minus_the_originals_log_probability():
    folder = Path(__file__).parents[1] / "data/golden/openvla_oft_tiny"
    meta = json.loads((folder / "meta.json").read_text())
    given, want = load_file(folder / "inputs.safetensors"), load_file(folder / "outputs.safetensors")
    policy = golden._oft_policy(folder, meta, "single", 3, given)
    policy.statistics = None  # actions in the model's own units
    policy.reset_buffers()
    size = policy.config.image_size
    pictures = [golden.resize(given[f"image.{i}.primary_uint8"][None], (size, size), "bicubic") for i in range(3)]
    obs = Observation(torch.stack(pictures), torch.zeros(3, 8), torch.arange(3))
    ids, logprobs = (
        torch.cat([want[f"single.{i}.{part}"].view(1, -1, 7) for i in range(3)])
        for part in ("sampled_token_ids", f"sampled_logp_T{policy.temperature}")
    )
    labels = ids - policy.config.first_action_id if ids.max() > 255 else ids
    actions = torch.where(labels == 0, 1.0, policy.bin_centers[labels])  # bins 0 and 1 share their centre
    loss, *_ = policy.imitation_loss(obs, actions, keys(3))
    torch.testing.assert_close(loss.detach(), -logprobs.float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("opens", [1.0, -1.0])
def test_labels_are_what_the_environment_gets_back(tmp_path, opens):
    dataset = recorded(tmp_path)
    statistics = compute_statistics(dataset, "openvla_oft")
    spec = dataclasses.replace(
        SPEC, cameras=("front", "hand"), image_size=(16, 24), state_dim=2, action_dim=4, gripper_open=opens
    )
    for commands_gripper in (False, True):
        if commands_gripper:  # as published checkpoints have it
            statistics.action.mask[-1] = False
        model = ModelConfig(name="openvla_oft", preset="nano", num_action_chunks=K)
        policy = prepare_policy(model, spec=spec, seed=0, statistics=statistics).policy
        actions = torch.from_numpy(dataset.episodes[0].actions[None, :K]).clone()
        if commands_gripper:
            actions[..., -1] = torch.tensor([1.0, -1.0]).repeat(K // 2)
        labelled = policy.from_environment(actions)
        back = policy.to_environment(policy.bin_centers[policy.tokenize_actions(labelled)])
        inside = (labelled.abs() <= 1)[..., :-1]
        assert inside.float().mean() > 0.5
        width = statistics.action.span[:-1] / 255
        assert ((back - actions).abs()[..., :-1] <= width * 0.51)[inside].all()
        if commands_gripper:
            assert torch.equal(back[..., -1], actions[..., -1])


# -- pi0.5 -------------------------------------------------------------------------------------------------------------


def test_flow_matching_by_hand():
    policy, obs = make_policy("pi05"), observe()
    steps, width = policy.config.action_horizon, policy.config.action_dim
    actions = demonstrated(steps)
    loss, error, correct = policy.imitation_loss(obs, actions, keys())
    assert correct is None
    time = 0.999 * uniform(keys(), stream=4) ** (2 / 3) + 0.001
    noise = normal(keys(), steps, width, stream=0)
    padded = torch.cat((actions, torch.zeros(B, steps, width - A)), -1)
    t = time.view(-1, 1, 1)
    x = t * noise + (1 - t) * padded
    velocity = policy.velocity(policy.denoise(policy.encode_observation(obs, {}), x, time))
    torch.testing.assert_close(loss, ((velocity - (noise - padded)) ** 2)[..., :A])
    torch.testing.assert_close(error, (x - t * velocity - padded).abs()[..., :A], rtol=1e-4, atol=1e-5)


def test_times_are_of_openpis_distribution():
    many = decision_keys(1, torch.arange(200_000), torch.zeros(200_000, dtype=torch.int64))
    times = 0.999 * uniform(many, stream=4) ** (2 / 3) + 0.001
    want = torch.distributions.Beta(1.5, 1.0).sample((200_000,)) * 0.999 + 0.001
    for q in (0.05, 0.25, 0.5, 0.75, 0.95):
        assert times.quantile(q) == pytest.approx(float(want.quantile(q)), abs=0.01)


def test_the_loss_of_a_sample_does_not_depend_on_its_batch():
    policy, obs = make_policy("pi05"), observe()
    actions = demonstrated(policy.num_imitated_steps)
    whole, *_ = policy.imitation_loss(obs, actions, keys())
    alone, *_ = policy.imitation_loss(
        Observation(obs.images[2:3], obs.state[2:3], obs.task[2:3]), actions[2:3], keys()[2:3]
    )
    torch.testing.assert_close(whole[2:3], alone)


def test_a_normalised_policy_that_knows_the_state(tmp_path):
    dataset = recorded(tmp_path)
    statistics = compute_statistics(dataset, "pi05")
    spec = dataclasses.replace(SPEC, cameras=("front", "hand"), image_size=(16, 24), state_dim=2, action_dim=4)
    model = ModelConfig(
        name="pi05", preset="nano", num_action_chunks=K, options={"discrete_state_input": True, "max_token_len": 64}
    )
    policy = prepare_policy(model, spec=spec, seed=0, statistics=statistics).policy
    frames = np.concatenate([np.stack(list(one.read_pictures())) for one in dataset.episodes])
    samples = Samples(dataset, frames, horizon=policy.num_imitated_steps, device=torch.device("cpu"))
    batch = samples.batch(np.arange(4))
    batch.observation.task[:] = 0
    loss, error, _ = policy.imitation_loss(batch.observation, batch.actions, keys(4))
    assert loss.shape == error.shape == (4, policy.config.action_horizon, 4)
    loss.mean().backward()
    assert policy.action_in_proj.weight.grad.abs().max() > 0


# -- both --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["openvla_oft", "pi05"])
def test_a_recorded_frame_gives_the_logits_of_the_simulators_frame(tmp_path, name):
    """A picture that went through a dataset decides like the one that a simulator wrote into an episode slot."""
    original = episode(0, 9)
    dataset = recorded(tmp_path)
    spec = dataclasses.replace(SPEC, cameras=("front", "hand"), image_size=(16, 24), state_dim=2, action_dim=4)
    model = ModelConfig(name=name, preset="nano", num_action_chunks=K)
    policy = prepare_policy(model, spec=spec, seed=0, statistics=compute_statistics(dataset, name)).policy
    frames = np.concatenate([np.stack(list(one.read_pictures())) for one in dataset.episodes])
    samples = Samples(dataset, frames, horizon=policy.num_imitated_steps, device=torch.device("cpu"))
    seen = samples.batch(np.array([3, 8])).observation
    slot = Observation(
        torch.from_numpy(original.images[[3, 8]]),
        torch.from_numpy(original.states[[3, 8]]),
        torch.zeros(2, dtype=torch.int64),
    )
    for recorded_part, simulated_part in ((seen.images, slot.images), (seen.state, slot.state), (seen.task, slot.task)):
        assert torch.equal(recorded_part, simulated_part)
    one, two = (policy.act(obs, keys(2)) for obs in (seen, slot))
    assert torch.equal(one.logprobs, two.logprobs) and torch.equal(one.actions, two.actions)


@pytest.mark.parametrize("name", ["openvla_oft", "pi05"])
def test_a_policy_is_written_with_its_statistics_and_read_again(tmp_path, name):
    dataset = recorded(tmp_path)
    statistics = compute_statistics(dataset, name)
    spec = dataclasses.replace(SPEC, cameras=("front", "hand"), image_size=(16, 24), state_dim=2, action_dim=4)
    model = ModelConfig(name=name, preset="nano", num_action_chunks=K)
    policy = prepare_policy(model, spec=spec, seed=0, statistics=statistics).policy
    write_policy(policy, model, tmp_path / "policy")
    obs = Observation(
        torch.from_numpy(episode(0, 9).images[:2]),
        torch.from_numpy(episode(0, 9).states[:2]),
        torch.zeros(2, dtype=torch.int64),
    )

    def load(**changes):
        source = prepare_policy(
            dataclasses.replace(model, checkpoint=str(tmp_path / "policy"), **changes),
            spec=dataclasses.replace(spec, action_dim=changes.pop("action_dim", 4)),
            seed=1,
        )
        source.policy.to_empty(device="cpu")
        source.load(source.policy)
        return source.policy

    for key in (None, "set"):
        again = load(unnorm_key=key)
        assert again.statistics.raw == statistics.raw
        assert torch.equal(again.act(obs, keys(2)).actions, policy.act(obs, keys(2)).actions)
    with pytest.raises(ConfigError, match=r"model.unnorm_key='bridge': .* has no such statistics; it has: set"):
        load(unnorm_key="bridge")
    with pytest.raises(ConfigError, match=r"action statistics 'set' have 4 elements, the environment's actions have 7"):
        prepare_policy(
            dataclasses.replace(model, checkpoint=str(tmp_path / "policy")),
            spec=dataclasses.replace(spec, action_dim=7),
            seed=0,
        )


@pytest.mark.parametrize("name", ["openvla_oft", "pi05"])
def test_new_statistics_take_the_place_of_a_checkpoints(tmp_path, name):
    first = compute_statistics(recorded(tmp_path / "a"), name)
    spec = dataclasses.replace(SPEC, cameras=("front", "hand"), image_size=(16, 24), state_dim=2, action_dim=4)
    model = ModelConfig(name=name, preset="nano", num_action_chunks=K)
    write_policy(prepare_policy(model, spec=spec, seed=0).policy, model, tmp_path / "plain")
    write_policy(prepare_policy(model, spec=spec, seed=0, statistics=first).policy, model, tmp_path / "first")
    second = dataclasses.replace(first, key="second", raw=dict(first.raw))
    for old in ("plain", "first"):
        tuned = dataclasses.replace(model, checkpoint=str(tmp_path / old))
        source = prepare_policy(tuned, spec=spec, seed=0, statistics=second)
        assert source.policy.statistics is second or source.policy.statistics.key == "second"
        source.policy.to_empty(device="cpu")
        source.load(source.policy)
        write_policy(source.policy, tuned, tmp_path / f"{old}_tuned", second)
        found = prepare_policy(dataclasses.replace(tuned, checkpoint=str(tmp_path / f"{old}_tuned")), spec=spec, seed=0)
        assert found.policy.statistics.key == "second"
