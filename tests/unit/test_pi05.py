"""pi0.5: the policy contract for both samplers, and what padding, cameras and dead weights must not change."""

from __future__ import annotations

import copy
import dataclasses
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributions import Normal

from dvla.config import ConfigError
from dvla.envs.protocol import EnvSpec
from dvla.models.normalization import Bounds, Statistics
from dvla.models.pi05 import Pi05, Prefix, time_embedding
from dvla.models.pi05_config import PRESETS, Pi05Config
from dvla.models.pi05_prompt import prompt_text, state_bins, tokenize
from dvla.models.policy import Decision, Observation
from dvla.rl.noise import decision_keys, normal

K, A, S = 2, 3, 5  # executed steps, action elements, state elements
NANO = PRESETS["nano"]
SAMPLERS = ("flow_sde", "flow_noise")
TASKS = ("push the cube", "pick up the black bowl next to the plate and put it down", "stack the cubes")


def variant(**changes: Any) -> Pi05Config:
    return dataclasses.replace(NANO, **changes)


def make_spec(cameras: int = 1, tasks: tuple[str, ...] = TASKS, **changes: Any) -> EnvSpec:
    spec = EnvSpec(
        name="test",
        cameras=tuple(f"camera_{i}" for i in range(cameras)),
        image_size=(64, 64),
        state_dim=S,
        action_dim=A,
        max_episode_steps=10,
        instructions=tasks,
    )
    return dataclasses.replace(spec, **changes)


def make_policy(config: Pi05Config = NANO, spec: EnvSpec | None = None, **changes: Any) -> Pi05:
    torch.manual_seed(0)
    arguments = {"num_action_chunks": K, "temperature": 1.0, **changes}
    return Pi05(config, spec=spec or make_spec(), **arguments)


def make_obs(
    batch: int, cameras: int = 1, size: tuple[int, int] = (64, 64), num_tasks: int = len(TASKS)
) -> Observation:
    generator = torch.Generator().manual_seed(1)
    return Observation(
        images=torch.randint(0, 256, (batch, cameras, *size, 3), generator=generator, dtype=torch.uint8),
        # Some elements leave [-1, 1], so that states have more or fewer characters.
        state=torch.randn(batch, S, generator=generator),
        task=torch.arange(batch) % num_tasks,
    )


def part(obs: Observation, index: slice) -> Observation:
    return Observation(obs.images[index], obs.state[index], obs.task[index])


def keys_of(batch: int) -> Tensor:
    return decision_keys(3, torch.arange(batch), torch.zeros(batch, dtype=torch.int64))


def evaluate(policy: Pi05, obs: Observation, record: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    with torch.no_grad():
        return policy(obs, record)


def velocity_of(policy: Pi05, prefix: Prefix, time: float = 0.5) -> Tensor:
    batch = len(prefix.num_tokens)
    x = torch.randn(batch, NANO.action_horizon, NANO.action_dim, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        return policy.velocity(policy.denoise(prefix, x, torch.full((batch,), time)))


def sampled_tensors(decision: Decision) -> dict[str, Tensor]:
    return {"actions": decision.actions, "logprobs": decision.logprobs, **decision.record}


# -------------------------------------------------------------------------------------------------------- the contract


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("with_state", [False, True])
def test_shapes_dtypes_and_range(sampler: str, with_state: bool) -> None:
    policy = make_policy(variant(sampler=sampler, discrete_state_input=with_state))
    decision = policy.act(make_obs(4), keys_of(4))
    assert decision.actions.shape == decision.logprobs.shape == (4, K, A)
    assert decision.actions.dtype == decision.logprobs.dtype == torch.float32
    assert decision.actions.abs().max() <= 1
    assert set(decision.record) == set(policy.record_spec)
    for name, field in policy.record_spec.items():
        assert decision.record[name].shape[1:] == field.shape
        assert decision.record[name].dtype == field.dtype
    for name, tensor in sampled_tensors(decision).items():
        assert not tensor.is_inference() and not tensor.requires_grad, name


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("with_state", [False, True])
@pytest.mark.parametrize("cameras", [1, 2, 3])
def test_forward_finds_the_logprobs_of_act(sampler: str, with_state: bool, cameras: int) -> None:
    policy = make_policy(variant(sampler=sampler, discrete_state_input=with_state), make_spec(cameras))
    assert len(set(map(len, policy.prompts))) > 1
    obs = make_obs(6, cameras)
    decision = policy.act(obs, keys_of(6))
    logprobs, entropy = policy(obs, decision.record)
    assert logprobs.shape == entropy.shape == (6, K, A)
    assert logprobs.dtype == entropy.dtype == torch.float32
    assert not logprobs._is_view() and not entropy._is_view()  # FSDP2 warns of modules that return views
    torch.testing.assert_close(logprobs.detach(), decision.logprobs, atol=1e-5, rtol=0)
    # Records are found again in any order and company.
    order = torch.tensor([4, 1, 5])
    record = {name: value[order] for name, value in decision.record.items()}
    shuffled, _ = evaluate(policy, part(obs, order), record)
    torch.testing.assert_close(shuffled, decision.logprobs[order], atol=1e-5, rtol=0)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("with_state", [False, True])
def test_a_decision_does_not_depend_on_its_batch(sampler: str, with_state: bool) -> None:
    policy = make_policy(variant(sampler=sampler, discrete_state_input=with_state), make_spec(2))
    obs, keys = make_obs(6, 2), keys_of(6)
    together = sampled_tensors(policy.act(obs, keys))
    for i in range(6):
        alone = sampled_tensors(policy.act(part(obs, slice(i, i + 1)), keys[i : i + 1]))
        for name, tensor in alone.items():
            torch.testing.assert_close(
                tensor[0], together[name][i], atol=1e-5, rtol=0, msg=lambda m, n=name: f"{n}: {m}"
            )


def test_noise_depends_on_the_key_alone() -> None:
    policy, obs = make_policy(), make_obs(2)
    same = Observation(obs.images[[0, 0]], obs.state[[0, 0]], obs.task[[0, 0]])
    other_keys = policy.act(same, keys_of(2))
    assert (other_keys.actions[0] - other_keys.actions[1]).abs().max() > 0.1
    equal_keys = policy.act(same, keys_of(2)[[0, 0]])
    torch.testing.assert_close(equal_keys.actions[0], equal_keys.actions[1])


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_greedy_is_the_ode_from_noise(sampler: str) -> None:
    policy = make_policy(variant(sampler=sampler, num_denoise_steps=5), make_spec(2))
    obs, keys = make_obs(3, 2), keys_of(3)
    actions = policy.act(obs, keys, greedy=True).actions
    with torch.no_grad():
        prefix = policy.encode_observation(obs, {})
        x = normal(keys, NANO.action_horizon, NANO.action_dim)
        for time in (1.0, 0.8, 0.6, 0.4, 0.2):
            x = x - 0.2 * policy.velocity(policy.denoise(prefix, x, torch.full((3,), time)))
    torch.testing.assert_close(actions, x[:, :K, :A].clamp(-1, 1), atol=1e-5, rtol=0)
    assert torch.equal(policy.act(obs, keys, greedy=True).actions, actions)
    assert not torch.allclose(policy.act(obs, keys).actions, actions)


def test_the_noisy_step_is_drawn_per_sample() -> None:
    policy = make_policy(spec=make_spec(tasks=TASKS[:1]))
    obs = make_obs(1, num_tasks=1)
    many = Observation(obs.images.expand(64, -1, -1, -1, -1), obs.state.expand(64, -1), obs.task.expand(64))
    record = policy.act(many, keys_of(64)).record
    counts = record["denoise_step"].bincount(minlength=4)
    assert len(counts) == 4 and (counts > 5).all()
    is_first = record["denoise_step"] == 0
    start = normal(keys_of(64), NANO.action_horizon, NANO.action_dim)
    assert torch.equal(record["x_from"][is_first], start[is_first])
    assert (record["x_from"] != start)[~is_first].any(dim=(1, 2)).all()


def test_an_action_follows_from_its_noisy_step() -> None:
    policy, obs, keys = make_policy(), make_obs(12), keys_of(12)
    decision = policy.act(obs, keys)
    with torch.no_grad():
        prefix = policy.encode_observation(obs, {})
        x = decision.record["x_to"]
        for step in range(4):
            velocity = policy.velocity(policy.denoise(prefix, x, torch.full((12,), 1 - step / 4)))
            x = torch.where((decision.record["denoise_step"] < step).view(-1, 1, 1), x - velocity / 4, x)
    torch.testing.assert_close(decision.actions, x[:, :K, :A].clamp(-1, 1), atol=1e-5, rtol=0)


def test_flow_sde_logprobs_by_hand() -> None:
    policy, obs = make_policy(variant(noise_level=0.7)), make_obs(6)
    record = policy.act(obs, keys_of(6)).record
    record["denoise_step"] = torch.tensor([0, 1, 2, 3, 1, 0])
    logprobs, entropy = evaluate(policy, obs, record)
    t = 1 - record["denoise_step"].double() / 4
    with torch.no_grad():
        v = policy.velocity(policy.denoise(policy.encode_observation(obs, {}), record["x_from"], t.float())).double()
    t = t.view(-1, 1, 1)
    variance = 0.49 * t / torch.tensor([0.25, 0.25, 0.5, 0.75, 0.25, 0.25]).view(-1, 1, 1)
    x = record["x_from"].double()
    mean = (x - t * v) * (1.25 - t) + (x + (1 - t) * v) * (t - 0.25 - variance / (8 * t))
    expected = Normal(mean, (variance / 4).sqrt())
    torch.testing.assert_close(logprobs, expected.log_prob(record["x_to"])[:, :K, :A].float(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, expected.entropy()[:, :K, :A].float())


def test_flow_noise_logprobs_are_sums_over_the_chain() -> None:
    policy, obs = make_policy(variant(sampler="flow_noise", num_denoise_steps=3)), make_obs(3)
    decision = policy.act(obs, keys_of(3))
    chain = decision.record["chain"]
    assert torch.equal(chain[:, 0], normal(keys_of(3), NANO.action_horizon, NANO.action_dim))
    torch.testing.assert_close(decision.actions, chain[:, -1, :K, :A].clamp(-1, 1))
    logprobs, entropy = evaluate(policy, obs, decision.record)
    expected, entropies, noise = Normal(0, 1).log_prob(chain[:, 0]), [], [chain[:, 0]]
    with torch.no_grad():
        prefix = policy.encode_observation(obs, {})
        for step in range(3):
            hidden = policy.denoise(prefix, chain[:, step], torch.full((3,), 1 - step / 3))
            squashed = (torch.tanh(policy.noise_head(hidden)) + 1) / 2
            std = 0.08 * 2**squashed  # 0.08 to 0.16
            transition = Normal(chain[:, step] - policy.velocity(hidden) / 3, std)
            expected = expected + transition.log_prob(chain[:, step + 1])
            entropies.append(transition.entropy())
            noise.append((chain[:, step + 1] - transition.mean) / std)
    torch.testing.assert_close(logprobs, expected[:, :K, :A], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(entropy, torch.stack(entropies).mean(0)[:, :K, :A])
    # Every step has noise of its own.
    noise = torch.stack(noise).flatten(1)
    torch.testing.assert_close(noise.std(1), torch.ones(4), atol=0.15, rtol=0)
    assert (torch.corrcoef(noise) - torch.eye(4)).abs().max() < 0.2


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_only_what_is_executed_has_logprobs(sampler: str) -> None:
    policy, obs = make_policy(variant(sampler=sampler)), make_obs(3)
    record = policy.act(obs, keys_of(3)).record
    before = evaluate(policy, obs, record)
    last = record["chain"][:, -1] if sampler == "flow_noise" else record["x_to"]
    last[:, K:] += 1.0
    last[:, :, A:] -= 1.0
    assert all(map(torch.equal, evaluate(policy, obs, record), before))
    last[:, K - 1, A - 1] += 1.0
    after, _ = evaluate(policy, obs, record)
    changed = torch.zeros(K, A, dtype=torch.bool)
    changed[-1, -1] = True
    assert torch.equal((after != before[0]).all(0), changed) and torch.equal((after != before[0]).any(0), changed)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("with_state", [False, True])
def test_gradient_reaches_every_live_parameter_and_no_dead_one(sampler: str, with_state: bool) -> None:
    policy = make_policy(variant(sampler=sampler, discrete_state_input=with_state), make_spec(2))
    obs = make_obs(6, 2)
    logprobs, entropy = policy(obs, policy.act(obs, keys_of(6)).record)
    (logprobs.square().sum() + entropy.sum()).backward()
    for name, parameter in policy.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
        else:
            assert parameter.grad is None, name


def test_dead_parameters_are_kept_and_frozen() -> None:
    policy, obs = make_policy(), make_obs(2)
    frozen = {name for name, parameter in policy.named_parameters() if not parameter.requires_grad}
    last = f"prefix_layers.{NANO.layers - 1}."
    names = ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    dead = {f"{last}{name}.weight" for name in (*names, "post_attention_layernorm")} | {"prefix_norm.weight"}
    assert frozen == dead
    before = sampled_tensors(policy.act(obs, keys_of(2)))
    with torch.no_grad():
        for name in dead:
            policy.get_parameter(name).fill_(math.nan)
    called = []
    for name in dead:
        module = policy.get_submodule(name.removesuffix(".weight"))
        module.register_forward_pre_hook(lambda module, _: called.append(module))
    after = sampled_tensors(policy.act(obs, keys_of(2)))
    assert not called
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_constants_are_in_no_checkpoint_and_outlive_meta(sampler: str) -> None:
    config, spec = variant(sampler=sampler), make_spec(2)
    policy, obs = make_policy(config, spec), make_obs(3, 2)
    constants = dict(policy.named_buffers())
    assert not set(constants) & set(policy.state_dict())
    with torch.device("meta"):
        other = make_policy(config, spec)
    other.to_empty(device="cpu").load_state_dict(policy.state_dict())
    for name, buffer in other.named_buffers():
        assert torch.equal(buffer, constants[name]), name
    before, after = (sampled_tensors(p.act(obs, keys_of(3))) for p in (policy, other))
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_bfloat16_weights(sampler: str) -> None:
    policy = make_policy(variant(sampler=sampler), make_spec(2))
    obs = make_obs(6, 2)
    narrow = copy.deepcopy(policy).to(torch.bfloat16)
    constants = dict(policy.named_buffers())
    for name, buffer in narrow.named_buffers():
        assert torch.equal(buffer, constants[name]), name
    wide, decision = policy.act(obs, keys_of(6)), narrow.act(obs, keys_of(6))
    logprobs, entropy = evaluate(narrow, obs, decision.record)
    assert decision.logprobs.dtype == logprobs.dtype == entropy.dtype == torch.float32
    assert narrow.velocity(torch.zeros(1, 1, NANO.expert_hidden_size, dtype=torch.bfloat16)).dtype == torch.float32
    # Rows of other batches, as the chain is to Flow-Noise, are rounded otherwise.
    torch.testing.assert_close(logprobs, decision.logprobs, atol=1e-5 if sampler == "flow_sde" else 0.2, rtol=0)
    assert 0 < (decision.actions - wide.actions).abs().max() < 0.1
    near, _ = evaluate(narrow, obs, wide.record)
    assert 0 < (near - wide.logprobs).abs().max() < 0.5


def test_fsdp_units_are_distinct_and_in_forward_order() -> None:
    policy, obs = make_policy(), make_obs(2)
    units = policy.fsdp_units()
    record = policy.act(obs, keys_of(2)).record
    called = []
    for unit in units:
        unit.register_forward_pre_hook(lambda module, _: called.append(module))
    policy(obs, record)
    assert len(set(units)) == len(units)
    assert called == units


def test_freezable_parts() -> None:
    policy, obs = make_policy(), make_obs(3)
    parts = policy.freezable()
    assert set(parts) == {"vision", "vlm"}
    for module in parts["vlm"]:
        module.requires_grad_(False)
    logprobs, _ = policy(obs, policy.act(obs, keys_of(3)).record)
    logprobs.sum().backward()
    learns = {name.split(".")[0] for name, parameter in policy.named_parameters() if parameter.grad is not None}
    expert = {"expert_layers", "expert_norm", "action_in_proj", "action_out_proj", "time_mlp_in", "time_mlp_out"}
    assert learns == expert


# ------------------------------------------------------------------------------------------------- cameras and padding


def test_absent_cameras_can_be_left_out() -> None:
    policy, obs = make_policy(spec=make_spec(3)), make_obs(3, 3)
    ids, mask = policy.prompt_ids[obs.task], policy._token_mask(policy.prompt_lengths[obs.task], 64)
    mask = mask[:, : ids.shape[1]]
    with torch.no_grad():
        alone = policy.encode(obs.images[:, :1], None, ids, mask)
        present = torch.tensor([[True, False, False]]).expand(3, -1)
        masked = policy.encode(obs.images, present, ids, mask)
        garbage = torch.cat((obs.images[:, :1], 255 - obs.images[:, 1:]), dim=1)
        other = policy.encode(garbage, present, ids, mask)
    assert torch.equal(alone.num_tokens, NANO.num_patches + policy.prompt_lengths[obs.task])
    assert torch.equal(masked.num_tokens, alone.num_tokens)
    assert masked.layers[0][0].shape[2] == alone.layers[0][0].shape[2] + 2 * NANO.num_patches
    for time in (1.0, 0.25):
        expected = velocity_of(policy, alone, time)
        torch.testing.assert_close(velocity_of(policy, masked, time), expected, atol=1e-6, rtol=0)
        assert torch.equal(velocity_of(policy, other, time), velocity_of(policy, masked, time))


def test_cameras_may_be_absent_in_some_rows_and_in_the_middle() -> None:
    policy, obs = make_policy(spec=make_spec(3)), make_obs(3, 3, num_tasks=1)
    ids = policy.prompt_ids[obs.task][:, : policy.prompt_lengths[0]]
    present = torch.tensor([[True, True, True], [True, False, True], [False, True, False]])
    with torch.no_grad():
        together = velocity_of(policy, policy.encode(obs.images, present, ids, None))
        for i in range(3):
            x = torch.randn(3, NANO.action_horizon, NANO.action_dim, generator=torch.Generator().manual_seed(2))[
                i : i + 1
            ]
            prefix = policy.encode(obs.images[i : i + 1, present[i]], None, ids[i : i + 1], None)
            alone = policy.velocity(policy.denoise(prefix, x, torch.tensor([0.5])))
            torch.testing.assert_close(together[i], alone[0], atol=1e-6, rtol=0)


def test_every_present_camera_and_the_prompt_matter() -> None:
    policy, obs = make_policy(spec=make_spec(3)), make_obs(3, 3)
    before = velocity_of(policy, policy.encode_observation(obs, {}))
    for camera in range(3):
        images = obs.images.clone()
        images[:, camera] = 255 - images[:, camera]
        changed = velocity_of(policy, policy.encode_observation(dataclasses.replace(obs, images=images), {}))
        assert (changed - before).abs().amax((1, 2)).min() > 1e-4
    task = (obs.task + 1) % len(TASKS)
    changed = velocity_of(policy, policy.encode_observation(dataclasses.replace(obs, task=task), {}))
    assert (changed - before).abs().amax((1, 2)).min() > 1e-4
    swapped = dataclasses.replace(obs, images=obs.images[:, [1, 0, 2]])
    assert (velocity_of(policy, policy.encode_observation(swapped, {})) - before).abs().max() > 1e-4


def test_padding_of_prompts_changes_nothing() -> None:
    policy, obs = make_policy(), make_obs(3)
    lengths = policy.prompt_lengths[obs.task]
    with torch.no_grad():
        padded = velocity_of(policy, policy.encode_observation(obs, {}))
        for width in (policy.prompt_ids.shape[1], 60):
            ids = torch.full((3, width), 7)  # not only the usual zeros
            for row, prompt in enumerate(policy.prompts):
                ids[row, : len(prompt)] = torch.tensor(prompt)
            prefix = policy.encode(obs.images, None, ids, policy._token_mask(lengths, width))
            torch.testing.assert_close(velocity_of(policy, prefix), padded, atol=1e-6, rtol=0)
    for row, prompt in enumerate(policy.prompts):  # and alone, without any mask
        x = torch.randn(3, NANO.action_horizon, NANO.action_dim, generator=torch.Generator().manual_seed(2))[
            row : row + 1
        ]
        with torch.no_grad():
            prefix = policy.encode(obs.images[row : row + 1], None, torch.tensor([prompt]), None)
            assert prefix.mask is None
            alone = policy.velocity(policy.denoise(prefix, x, torch.tensor([0.5])))
        torch.testing.assert_close(alone[0], padded[row], atol=1e-6, rtol=0)


def test_prompts_of_one_length_need_no_mask() -> None:
    policy, obs = make_policy(spec=make_spec(tasks=TASKS[:1])), make_obs(2, num_tasks=1)
    with torch.no_grad():
        assert policy.encode_observation(obs, {}).mask is None
        assert make_policy().encode_observation(obs, {}).mask is not None


def test_recorded_prompts_are_trimmed_to_the_longest_of_the_batch() -> None:
    policy, obs = make_policy(variant(discrete_state_input=True)), make_obs(3)
    decision = policy.act(obs, keys_of(3))
    record, lengths = decision.record, decision.record["prompt_length"]
    assert len(lengths.unique()) == 3
    short = int(lengths.argmin())
    for index, longest in ((slice(None), lengths.max()), (slice(short, short + 1), lengths.min())):
        with torch.no_grad():
            prefix = policy.encode_observation(part(obs, index), {name: value[index] for name, value in record.items()})
        assert prefix.layers[0][0].shape[2] == NANO.num_patches + longest
        assert torch.equal(prefix.num_tokens, NANO.num_patches + lengths[index])
    for row, length in enumerate(lengths.tolist()):
        assert not record["prompt_ids"][row, length:].any()
        record["prompt_ids"][row, length:] = 5
    logprobs, _ = evaluate(policy, obs, record)
    torch.testing.assert_close(logprobs, decision.logprobs, atol=1e-5, rtol=0)


def test_long_prompts_are_cut() -> None:
    spec, obs = make_spec(tasks=("push the cube " * 20, "push the cube")), make_obs(2, num_tasks=2)
    for with_state in (False, True):
        policy = make_policy(variant(discrete_state_input=with_state, max_token_len=12), spec)
        decision = policy.act(obs, keys_of(2))
        logprobs, _ = evaluate(policy, obs, decision.record)
        torch.testing.assert_close(logprobs, decision.logprobs, atol=1e-5, rtol=0)
        if with_state:
            assert decision.record["prompt_length"].tolist() == [12, 12]
        else:
            assert policy.prompt_lengths.tolist() == [12, len(policy.prompts[1])] and len(policy.prompts[1]) < 12


def test_pictures_keep_their_aspect() -> None:
    policy = make_policy()
    white = torch.full((1, 32, 64, 3), 255, dtype=torch.uint8)
    pixels = policy.preprocess(white)
    assert pixels.shape == (1, 3, 64, 64) and pixels.dtype == torch.float32
    assert (pixels[:, :, :16] == -1).all() and (pixels[:, :, 48:] == -1).all() and (pixels[:, :, 16:48] == 1).all()
    obs = make_obs(2, size=(48, 32))
    decision = policy.act(obs, keys_of(2))
    torch.testing.assert_close(evaluate(policy, obs, decision.record)[0], decision.logprobs, atol=1e-5, rtol=0)


def test_actions_see_each_other_but_the_prefix_does_not_see_them() -> None:
    policy, obs = make_policy(), make_obs(1)
    with torch.no_grad():
        prefix = policy.encode_observation(obs, {})
        x = torch.randn(1, NANO.action_horizon, NANO.action_dim, generator=torch.Generator().manual_seed(2))
        before = policy.velocity(policy.denoise(prefix, x, torch.tensor([0.5])))
        x[:, -1] += 1.0
        after = policy.velocity(policy.denoise(prefix, x, torch.tensor([0.5])))
    assert ((after - before).abs().amax(-1) > 1e-5).all()


# --------------------------------------------------------------------------------------------- prompts, times, actions


def test_state_bins() -> None:
    below = np.nextafter(-1.0, -2.0)
    values = np.array([-1.0, below, 1.0, 0.0, -5.0, 7.0, -1 + 1 / 128, -1 + 1 / 128 - 1e-9, 1 - 1e-9])
    assert state_bins(values).tolist() == [0, -1, 255, 128, -1, 255, 1, 0, 255]


def test_prompt_texts() -> None:
    assert prompt_text(" Push_the cube\nnow ", None) == "Push the cube now"
    state = np.array([0.0, -1.0, 1.0, -2.0])
    assert prompt_text(" Push_the cube ", state) == "Task: Push the cube, State: 128 0 255 -1;\nAction: "


def test_prompt_tokens() -> None:
    tokenizer = make_policy(variant(discrete_state_input=True)).tokenizer
    state = np.array([0.0, -1.0])
    plain = tokenize(tokenizer, "push the cube", None, 100)
    assert plain == [tokenizer.bos_id, *tokenizer.encode("push the cube"), *tokenizer.encode("\n")]
    assert tokenize(tokenizer, "push the cube", None, 3) == plain[:3]
    stated = tokenize(tokenizer, "push the cube", state, 100)
    assert stated == [tokenizer.bos_id, *tokenizer.encode("Task: push the cube, State: 128 0;\nAction: ")]


def test_state_enters_the_prompt_only_if_it_should() -> None:
    obs = make_obs(3)
    other = dataclasses.replace(obs, state=-obs.state)
    policy = make_policy()
    assert torch.equal(policy.act(obs, keys_of(3)).actions, policy.act(other, keys_of(3)).actions)
    policy = make_policy(variant(discrete_state_input=True))
    assert not torch.allclose(policy.act(obs, keys_of(3)).actions, policy.act(other, keys_of(3)).actions)


def test_time_embedding() -> None:
    # Periods from 0.004 to 4 in 4 waves: 0.004, 0.04, 0.4, 4
    found = time_embedding(torch.tensor([0.5, 0.0]), 8)
    angles = [2 * math.pi * 0.5 / period for period in (0.004, 0.04, 0.4, 4.0)]
    expected = [*map(math.sin, angles), *map(math.cos, angles)]
    assert found.shape == (2, 8)
    torch.testing.assert_close(found[0], torch.tensor(expected, dtype=torch.float64), atol=1e-9, rtol=0)
    assert found[1].tolist() == [0.0] * 4 + [1.0] * 4


def make_statistics(actions: int = A, states: int = S) -> Statistics:
    def bounds(name: str, n: int, low: float, high: float) -> Bounds:
        edges = [torch.full((n,), edge, dtype=torch.float64) for edge in (low, high, high - low)]
        return Bounds(f"{name} statistics 'x'", *edges, torch.ones(n, dtype=torch.bool))

    return Statistics(bounds("action", actions, -0.2, 0.4), bounds("state", states, -4.0, 4.0), "x", {})


def test_a_checkpoints_units() -> None:
    config, obs, keys = variant(discrete_state_input=True), make_obs(3), keys_of(3)
    policy, own = make_policy(config), make_policy(config, statistics=make_statistics())
    quarter = dataclasses.replace(obs, state=obs.state / 4)  # what the statistics make of the state
    plain, scaled = policy.act(quarter, keys), own.act(obs, keys)
    assert torch.equal(plain.record["prompt_ids"], scaled.record["prompt_ids"])
    assert torch.equal(plain.record["x_to"], scaled.record["x_to"])  # samples stay in the model's units
    assert torch.equal(plain.logprobs, scaled.logprobs)
    is_inside = plain.actions.abs() < 1
    assert is_inside.any()
    expected = -0.2 + 0.3 * (plain.actions + 1)
    torch.testing.assert_close(scaled.actions[is_inside], expected[is_inside])


def test_expert_layers_are_steered_by_the_condition() -> None:
    norm = make_policy().expert_norm
    width = NANO.expert_hidden_size
    x, condition = torch.full((1, 1, width), -3.0), torch.zeros(1, width)
    with torch.no_grad():
        for part_of_bias, value in zip(norm.dense.bias.chunk(3), (0.5, 2.0, 0.25), strict=True):
            part_of_bias.fill_(value)
        normed, gate = norm(x, condition)
    torch.testing.assert_close(normed, torch.full_like(x, -1 * (1 + 0.5) + 2))
    assert (gate == 0.25).all()


def test_closed_gates_leave_the_expert_layers_without_effect() -> None:
    policy, obs = make_policy(), make_obs(1)
    with torch.no_grad():
        prefix, layer = policy.encode_observation(obs, {}), policy.expert_layers[0]
        x = torch.randn(1, NANO.action_horizon, NANO.expert_hidden_size, generator=torch.Generator().manual_seed(0))
        rotary = policy.rotary(x, position_ids=torch.arange(NANO.action_horizon).expand(1, -1))
        arguments = (torch.ones(1, NANO.expert_hidden_size), rotary, prefix.layers[0], None)
        before = layer(x, *arguments)
        for name in ("input_layernorm", "post_attention_layernorm"):
            dense = layer.get_submodule(name).dense
            dense.weight.zero_()
            dense.bias[2 * NANO.expert_hidden_size :].zero_()
            after = layer(x, *arguments)
            assert not torch.allclose(after, before)
            before = after
    assert torch.equal(after, x)


def test_flow_loss() -> None:
    policy, obs = make_policy(), make_obs(3)
    actions, noise = torch.randn(2, 3, NANO.action_horizon, NANO.action_dim, generator=torch.Generator().manual_seed(0))
    time = torch.tensor([0.1, 0.5, 1.0])
    with torch.no_grad():
        prefix = policy.encode_observation(obs, {})
        loss = policy.flow_loss(prefix, actions, noise, time)
        mixed = torch.stack([t * n + (1 - t) * a for t, n, a in zip(time, noise, actions, strict=True)])
        velocity = policy.velocity(policy.denoise(prefix, mixed, time))
    torch.testing.assert_close(loss, (velocity - (noise - actions)) ** 2)


# ------------------------------------------------------------------------------------------------- sizes and mistakes


def test_full_preset_has_the_published_size() -> None:
    with torch.device("meta"):
        policy = make_policy(PRESETS["full"])
    assert sum(p.numel() for p in policy.vision.parameters()) == 412_442_352
    assert sum(p.numel() for p in policy.projector.parameters()) == 2_361_344
    assert sum(p.numel() for p in policy.parameters()) == 3_353_433_872


@pytest.mark.parametrize(
    ("message", "config", "spec", "changes"),
    [
        ("model.num_action_chunks=9 is more than the 8", {}, {}, {"num_action_chunks": 9}),
        ("model.temperature must be 1", {}, {}, {"temperature": 1.5}),
        ("1 to 3 cameras, test has 4", {}, {"cameras": ("a", "b", "c", "d")}, {}),
        ("1 to 3 cameras, test has 0", {}, {"cameras": ()}, {}),
        ("test has 33 action elements, the model 32", {}, {"action_dim": 33}, {}),
        ("test has no proprioceptive state", {"discrete_state_input": True}, {"state_dim": 0}, {}),
        ("vocabulary of 200 is too small", {"vocab_size": 200}, {}, {}),
    ],
)
def test_what_does_not_fit_is_refused(message: str, config: dict, spec: dict, changes: dict) -> None:
    with pytest.raises(ValueError, match=message):
        make_policy(variant(**config), dataclasses.replace(make_spec(), **spec), **changes)


def test_statistics_must_fit_the_environment() -> None:
    with pytest.raises(ConfigError, match="action statistics 'x' have 4 elements, the environment's actions have 3"):
        make_policy(statistics=make_statistics(actions=4))
    make_policy(statistics=make_statistics(states=S + 1))  # the state is not used
    with pytest.raises(ConfigError, match="state statistics 'x' have 6 elements"):
        make_policy(variant(discrete_state_input=True), statistics=make_statistics(states=S + 1))


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        ("image_size 60 is no multiple of patch_size 16", {"image_size": 60}),
        ("vision_hidden_size 64 is no multiple of vision_heads 3", {"vision_heads": 3}),
        ("sampler must be one of flow_sde, flow_noise, got 'ode'", {"sampler": "ode"}),
        ("num_denoise_steps must be at least 1, got 0", {"num_denoise_steps": 0}),
        ("noise_level must be positive, got 0.0", {"noise_level": 0.0}),
    ],
)
def test_impossible_sizes_are_refused(message: str, changes: dict) -> None:
    with pytest.raises(ValueError, match=message):
        variant(**changes)


@pytest.mark.parametrize("sampler", SAMPLERS)
@pytest.mark.parametrize("num_steps", [1, 3, 10])
def test_any_number_of_steps(sampler: str, num_steps: int) -> None:
    policy, obs = make_policy(variant(sampler=sampler, num_denoise_steps=num_steps)), make_obs(6)
    decision = policy.act(obs, keys_of(6))
    logprobs, _ = evaluate(policy, obs, decision.record)
    torch.testing.assert_close(logprobs, decision.logprobs, atol=2e-5, rtol=0)


def test_largest_chunk() -> None:
    policy, obs = make_policy(num_action_chunks=8, spec=make_spec(action_dim=32)), make_obs(2)
    decision = policy.act(obs, keys_of(2))
    assert decision.actions.shape == (2, 8, 32)
    torch.testing.assert_close(evaluate(policy, obs, decision.record)[0], decision.logprobs, atol=1e-5, rtol=0)
