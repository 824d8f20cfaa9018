"""OpenVLA-OFT: the policy contract, and what makes the architecture the published one."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from dvla.envs.protocol import EnvSpec
from dvla.models import openvla_oft
from dvla.models.openvla_oft import OpenVLAOFT
from dvla.models.openvla_oft_config import PRESETS, OpenVLAOFTConfig
from dvla.models.policy import Observation
from dvla.rl.noise import decision_keys

K, A = 2, 3
NANO = PRESETS["nano"]
TASKS = ("push the cube", "pick up the black bowl next to the plate and put it down", "stack the cubes")


def make_spec(tasks: tuple[str, ...] = TASKS, cameras: int = 1, size: int = 64) -> EnvSpec:
    return EnvSpec(
        name="test",
        cameras=tuple(f"camera_{i}" for i in range(cameras)),
        image_size=(size, size),
        state_dim=5,
        action_dim=A,
        max_episode_steps=10,
        instructions=tasks,
    )


def make_policy(config: OpenVLAOFTConfig = NANO, spec: EnvSpec | None = None, temperature: float = 1.0) -> OpenVLAOFT:
    torch.manual_seed(0)
    return OpenVLAOFT(config, spec=spec or make_spec(), num_action_chunks=K, temperature=temperature)


def make_obs(batch: int, cameras: int = 1, size: int = 64, num_tasks: int = len(TASKS)) -> Observation:
    generator = torch.Generator().manual_seed(1)
    return Observation(
        images=torch.randint(0, 256, (batch, cameras, size, size, 3), generator=generator, dtype=torch.uint8),
        state=torch.randn(batch, 5, generator=generator),
        task=torch.arange(batch) % num_tasks,
    )


def part(obs: Observation, index: slice) -> Observation:
    return Observation(obs.images[index], obs.state[index], obs.task[index])


def keys_of(batch: int) -> Tensor:
    return decision_keys(3, torch.arange(batch), torch.zeros(batch, dtype=torch.int64))


def logits_of(policy: OpenVLAOFT, obs: Observation) -> Tensor:
    with torch.no_grad():
        return policy.action_logits(obs)


# -------------------------------------------------------------------------------------------------------- the contract


def test_shapes_dtypes_and_range() -> None:
    policy = make_policy()
    decision = policy.act(make_obs(4), keys_of(4))
    assert decision.actions.shape == decision.logprobs.shape == (4, K, A)
    assert decision.actions.dtype == decision.logprobs.dtype == torch.float32
    assert decision.actions.abs().max() <= 1
    assert set(decision.record) == set(policy.record_spec)
    for name, field in policy.record_spec.items():
        assert decision.record[name].shape[1:] == field.shape
        assert decision.record[name].dtype == field.dtype
    assert not decision.logprobs.is_inference() and not decision.logprobs.requires_grad


@pytest.mark.parametrize("temperature", [1.0, 1.6])
def test_forward_finds_the_logprobs_of_act(temperature: float) -> None:
    policy = make_policy(temperature=temperature)
    obs = make_obs(6)
    decision = policy.act(obs, keys_of(6))
    logprobs, entropy = policy(obs, decision.record)
    assert logprobs.dtype == entropy.dtype == torch.float32
    assert not logprobs._is_view() and not entropy._is_view()  # FSDP2 warns of modules that return views
    torch.testing.assert_close(logprobs.detach(), decision.logprobs, atol=1e-6, rtol=0)


def test_a_decision_does_not_depend_on_its_batch() -> None:
    policy = make_policy(dataclasses.replace(NANO, use_proprio=True))
    obs, keys = make_obs(8), keys_of(8)
    together = policy.act(obs, keys)
    for i in range(8):
        alone = policy.act(part(obs, slice(i, i + 1)), keys[i : i + 1])
        assert torch.equal(alone.record["tokens"][0], together.record["tokens"][i])
        torch.testing.assert_close(alone.logprobs[0], together.logprobs[i], atol=1e-5, rtol=0)


def test_a_decision_does_not_depend_on_the_other_tasks_of_the_run() -> None:
    policy, obs = make_policy(), make_obs(3)
    padded = logits_of(policy, obs)
    prompts = list(policy.prompts)
    assert len({len(prompt) for prompt in prompts}) > 1
    for task in range(3):
        policy.set_prompts([prompts[task]], stop_id=policy.stop_id)
        assert policy.key_mask is None
        alone = dataclasses.replace(part(obs, slice(task, task + 1)), task=torch.zeros(1, dtype=torch.int64))
        torch.testing.assert_close(logits_of(policy, alone)[0], padded[task], atol=1e-5, rtol=0)


def test_gradient_reaches_every_trainable_parameter() -> None:
    policy = make_policy(dataclasses.replace(NANO, use_proprio=True), make_spec(cameras=2))
    obs = make_obs(3, cameras=2)
    logprobs, entropy = policy(obs, policy.act(obs, keys_of(3)).record)
    (logprobs.square().sum() + entropy.sum()).backward()
    for name, parameter in policy.named_parameters():
        if parameter.requires_grad:
            assert parameter.grad is not None and parameter.grad.abs().max() > 0, name
        else:
            assert parameter.grad is None, name


def test_dead_parameters_are_kept_and_frozen() -> None:
    policy = make_policy()
    frozen = {name for name, parameter in policy.named_parameters() if not parameter.requires_grad}
    tower = "vision_backbone."
    dead = (
        f"{tower}dino.encoder.layer.1.",
        f"{tower}dino.layernorm.",
        f"{tower}dino.embeddings.mask_token",
        f"{tower}siglip.encoder.layers.1.",
        f"{tower}siglip.post_layernorm.",
        f"{tower}siglip.head.",
    )
    assert all(name.startswith(dead) for name in frozen)
    assert all(any(name.startswith(prefix) for name in frozen) for prefix in dead)
    before, obs = logits_of(policy, make_obs(1)), make_obs(1)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if name in frozen:
                parameter.fill_(math.nan)
    assert torch.equal(logits_of(policy, obs), before)


def test_fsdp_units_are_live_distinct_and_large(monkeypatch: pytest.MonkeyPatch) -> None:
    policy = make_policy()
    assert policy.fsdp_units() == []  # at this size, one collective for all
    monkeypatch.setattr(openvla_oft, "MIN_UNIT_PARAMETERS", 1)
    units = policy.fsdp_units()
    called = []
    for unit in units:
        unit.register_forward_pre_hook(lambda module, _: called.append(module))
    obs = make_obs(2)
    policy(obs, policy.act(obs, keys_of(2)).record)
    assert called[: len(units)] == units  # all are called, in this order


def test_constants_are_in_no_checkpoint_and_outlive_meta() -> None:
    policy, obs = make_policy(), make_obs(3)
    constants = dict(policy.named_buffers())
    assert not set(constants) & set(policy.state_dict())
    with torch.device("meta"):
        other = make_policy()
    other.to_empty(device="cpu").load_state_dict(policy.state_dict())
    for name, buffer in other.named_buffers():
        assert torch.equal(buffer, constants[name]), name
    assert torch.equal(logits_of(other, obs), logits_of(policy, obs))


def test_bfloat16_weights() -> None:
    policy = make_policy(dataclasses.replace(NANO, use_proprio=True))
    obs = make_obs(6)
    before, constants = logits_of(policy, obs), dict(policy.named_buffers())
    policy = policy.to(torch.bfloat16)
    for name, buffer in policy.named_buffers():
        assert torch.equal(buffer, constants[name]), name
    decision = policy.act(obs, keys_of(6))
    logprobs, entropy = policy(obs, decision.record)
    assert decision.logprobs.dtype == logprobs.dtype == entropy.dtype == torch.float32
    assert torch.equal(logprobs, decision.logprobs)
    assert 0 < (logits_of(policy, obs) - before).abs().max() < 0.1


# ---------------------------------------------------------------------------------------------------- the architecture


def test_full_preset_has_the_published_size() -> None:
    with torch.device("meta"):
        policy = make_policy(PRESETS["full"])
    assert sum(p.numel() for p in policy.vision_backbone.siglip.parameters()) == 427_680_704
    assert sum(p.numel() for p in policy.projector.parameters()) == 71_385_600
    assert sum(p.numel() for p in policy.language_model.parameters()) == 6_738_939_904


def test_prompts_end_in_the_lone_space_and_padding_lies_left_of_them() -> None:
    policy = make_policy()
    for prompt in policy.prompts:
        assert prompt[0] == 1 and prompt[-1] == policy.prompts[0][-1]
    mask = policy.key_mask[:, 0, 0]
    longest = max(map(len, policy.prompts))
    for task, prompt in enumerate(policy.prompts):
        pads = longest - len(prompt)
        first = 1 + NANO.num_patches
        assert not mask[task, first : first + pads].any() and mask[task].sum() == mask.shape[1] - pads
        positions = policy.position_ids[task][mask[task]]
        assert torch.equal(positions, torch.arange(len(positions)))


def test_sequence_layout() -> None:
    config = dataclasses.replace(NANO, use_proprio=True)
    policy = make_policy(config, make_spec(TASKS[:1], cameras=2))
    obs = make_obs(2, cameras=2, num_tasks=1)
    embedded = policy.embed(obs)
    prompt = policy.language_model.model.embed_tokens(torch.tensor(policy.prompts[0]))
    stop = policy.language_model.model.embed_tokens(torch.tensor([policy.stop_id]))
    vision = [policy.projector(policy.vision_backbone(obs.images[:, camera])) for camera in range(2)]
    proprio = policy.proprio_projector(obs.state)[:, None]
    expected = [prompt[:1].expand(2, -1, -1), *vision, proprio, prompt[1:].expand(2, -1, -1)]
    expected += [torch.zeros(2, K * A, config.llm_hidden_size), stop.expand(2, -1, -1)]
    torch.testing.assert_close(embedded, torch.cat(expected, dim=1), atol=1e-6, rtol=0)


@pytest.mark.parametrize("keep_stop_token", [True, False])
def test_logits_are_those_of_the_whole_language_model(keep_stop_token: bool) -> None:
    """The shortcuts (blocks called one by one, few rows, few columns) change nothing."""
    policy = make_policy(dataclasses.replace(NANO, keep_stop_token=keep_stop_token))
    whole = LlamaForCausalLM(policy.language_model.config)
    whole.load_state_dict(policy.language_model.state_dict())
    obs = make_obs(3)
    with torch.no_grad():
        logits = whole(
            inputs_embeds=policy.embed(obs),
            attention_mask=policy.key_mask[obs.task, 0, 0].long(),
            position_ids=policy.position_ids[obs.task],
        ).logits
    last_slot = logits.shape[1] - 1 - keep_stop_token
    expected = logits[:, last_slot - K * A : last_slot, NANO.vocab_size - 256 : NANO.vocab_size]
    torch.testing.assert_close(logits_of(policy, obs), expected, atol=1e-5, rtol=0)


def test_attention_is_bidirectional() -> None:
    policy = make_policy(spec=make_spec(TASKS[:1]))
    obs = make_obs(2, num_tasks=1)
    prompts, before = list(policy.prompts), logits_of(policy, obs)
    policy.set_prompts([[*prompts[0][:-1], 5]], stop_id=policy.stop_id)
    changed = (logits_of(policy, obs) - before).abs().amax(dim=(0, 2))
    assert (changed > 1e-4).all()  # the last prompt token is the row of the first action, and seen by the others
    policy.set_prompts(prompts, stop_id=5)
    changed = (logits_of(policy, obs) - before).abs().amax(dim=(0, 2))
    assert (changed > 1e-4).all()  # the very last token is seen by all rows before it


def test_only_the_tokens_of_the_prompt_matter() -> None:
    """The placeholders have no embedding: no row of the table that the prompt does not name has any effect."""
    policy = make_policy(spec=make_spec(TASKS[:1]))
    obs = make_obs(2, num_tasks=1)
    before = logits_of(policy, obs)
    unused = torch.ones(NANO.num_embeddings, dtype=torch.bool)
    unused[[*policy.prompts[0], policy.stop_id]] = False
    with torch.no_grad():
        policy.language_model.model.embed_tokens.weight[unused] = 7.0
    assert torch.equal(logits_of(policy, obs), before)


def test_stop_token_can_be_left_out() -> None:
    with_stop, without = make_policy(), make_policy(dataclasses.replace(NANO, keep_stop_token=False))
    without.load_state_dict(with_stop.state_dict())
    obs = make_obs(3)
    assert without.embed(obs).shape[1] == with_stop.embed(obs).shape[1] - 1
    assert (logits_of(without, obs) - logits_of(with_stop, obs)).abs().max() > 1e-4


def test_vision_features_come_from_the_second_to_last_blocks() -> None:
    vision = make_policy().vision_backbone
    images = make_obs(2).images[:, 0]
    with torch.no_grad():
        dino, siglip = (
            tower(pixels, output_hidden_states=True).hidden_states[-2]
            for tower, pixels in zip((vision.dino, vision.siglip), vision.preprocess(images), strict=True)
        )
        features = vision(images)
    torch.testing.assert_close(features, torch.cat((dino[:, 5:], siglip), dim=-1), atol=1e-6, rtol=0)


def test_action_slots_differ_by_position() -> None:
    """Nothing but position tells them apart, so random weights must make something of it."""
    logits = logits_of(make_policy(), make_obs(1))[0]
    assert torch.pdist(logits).median() > 0.3 * logits.norm(dim=-1).mean()


def test_images_of_another_size_are_resized() -> None:
    policy = make_policy()
    small = torch.randint(0, 256, (2, 4, 4, 3), dtype=torch.uint8)
    large = small.repeat_interleave(32, dim=1).repeat_interleave(32, dim=2)  # 128 pixels, squares of one colour
    seen = policy.vision_backbone.preprocess(large)
    assert seen.shape == (2, 2, 3, 64, 64)
    level = (seen[1] / 2 + 0.5) * 255  # SigLIP's normalisation undone
    torch.testing.assert_close(level, level.round(), atol=1e-3, rtol=0)
    assert level.min() >= -1e-3 and level.max() <= 255 + 1e-3
    centres = level[:, :, 8::16, 8::16].permute(0, 2, 3, 1)
    torch.testing.assert_close(centres, small.float(), atol=3, rtol=0)


def test_images_of_the_right_size_are_only_normalised() -> None:
    images = make_obs(2).images[:, 0]
    dino, siglip = make_policy().vision_backbone.preprocess(images)
    pixels = images.permute(0, 3, 1, 2) / 255
    mean = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
    std = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)
    torch.testing.assert_close(dino, (pixels - mean) / std, atol=1e-5, rtol=0)
    torch.testing.assert_close(siglip, pixels * 2 - 1, atol=1e-6, rtol=0)


# ----------------------------------------------------------------------------------------------------------- the tokens


def test_actions_are_the_centres_of_the_bins() -> None:
    centers = make_policy().bin_centers
    edges = torch.linspace(-1, 1, 256)
    intervals = (edges[1:] + edges[:-1]) / 2
    torch.testing.assert_close(centers, torch.cat((intervals, intervals[-1:])).flip(0), atol=1e-6, rtol=0)


def test_greedy_decisions_take_the_likeliest_bin_or_the_mean_over_all() -> None:
    obs, keys = make_obs(3), keys_of(3)
    likeliest, mean = make_policy(), make_policy(dataclasses.replace(NANO, greedy_decoding="mean"))
    mean.load_state_dict(likeliest.state_dict())
    probs, centers = torch.softmax(logits_of(likeliest, obs), dim=-1).view(3, K, A, 256), likeliest.bin_centers
    assert torch.equal(likeliest.act(obs, keys, greedy=True).actions, centers[probs.argmax(-1)])
    torch.testing.assert_close(mean.act(obs, keys, greedy=True).actions, (probs * centers).sum(-1), atol=1e-5, rtol=0)
    assert torch.equal(mean.act(obs, keys).actions, likeliest.act(obs, keys).actions)  # exploring is the same
    with pytest.raises(ValueError, match="greedy_decoding must be argmax or mean"):
        dataclasses.replace(NANO, greedy_decoding="median")


def test_temperature_and_entropy_by_definition() -> None:
    temperature = 1.6
    policy = make_policy(temperature=temperature)
    obs = make_obs(3)
    tokens = torch.randint(0, 256, (3, K, A), dtype=torch.uint8)
    logprobs, entropy = policy(obs, {"tokens": tokens})
    scaled = logits_of(policy, obs).double() / temperature
    weights = scaled.exp() / scaled.exp().sum(-1, keepdim=True)
    expected = weights.gather(-1, tokens.long().view(3, K * A, 1)).log().view(3, K, A)
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy.double(), -(weights * weights.log()).sum(-1).view(3, K, A), atol=1e-5, rtol=0)


def test_samples_follow_the_probabilities(monkeypatch: pytest.MonkeyPatch) -> None:
    policy, count = make_policy(temperature=0.3), 4000
    obs = make_obs(1)
    with torch.no_grad():
        logprobs = policy._bin_logprobs(obs)
    monkeypatch.setattr(policy, "_bin_logprobs", lambda _: logprobs.expand(count, -1, -1, -1))
    decision = policy.act(obs, keys_of(count))
    tokens = decision.record["tokens"].view(count, K * A).long()
    observed = torch.stack([tokens[:, i].bincount(minlength=256) for i in range(K * A)])
    logprobs = logprobs[0].view(K * A, 256)
    expected = count * logprobs.exp()
    assert expected.max() / expected.min() > 3  # far enough from uniform to mean something
    statistic = ((observed - expected).square() / expected).sum(-1)
    assert (statistic < 255 + 5 * math.sqrt(2 * 255)).all()
    assert torch.corrcoef(tokens.T.double()).fill_diagonal_(0).abs().max() < 5 / math.sqrt(count)
    torch.testing.assert_close(decision.logprobs.view(count, -1)[0], logprobs[range(K * A), tokens[0]])


def test_initial_policy_is_close_to_uniform() -> None:
    policy = make_policy()
    decision = policy.act(make_obs(6), keys_of(6))
    _, entropy = policy(make_obs(6), decision.record)
    assert math.log(256) - 1 < entropy.min() and entropy.max() < math.log(256) - 1e-3


def test_smooth_head_makes_neighbouring_bins_alike() -> None:
    first = NANO.first_action_id
    for smooth in (True, False):
        policy = make_policy(dataclasses.replace(NANO, smooth_action_head=smooth))
        rows = policy.language_model.lm_head.weight[first : first + 256]
        likeness = torch.cosine_similarity(rows[1:], rows[:-1], dim=-1)
        assert (likeness.min() > 0.97) == smooth
        spread = logits_of(policy, make_obs(6)).std(-1).mean()
        assert 0.5 < spread / NANO.initial_logit_std < 1.5


def test_impossible_settings_are_refused() -> None:
    with pytest.raises(ValueError, match=r"model\.name: openvla_oft needs images"):
        make_policy(spec=make_spec(cameras=0))
    with pytest.raises(ValueError, match=r"model\.options\.use_proprio"):
        make_policy(dataclasses.replace(NANO, use_proprio=True), dataclasses.replace(make_spec(), state_dim=0))
    with pytest.raises(ValueError, match="temperature"):
        make_policy(temperature=0.0)
    with pytest.raises(ValueError, match="vocabulary"):
        make_policy(dataclasses.replace(NANO, vocab_size=512))
