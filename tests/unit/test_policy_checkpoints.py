"""Checkpoints as people meet them: load, train a little, export, load again; and every wrong input, before a simulator."""

import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from dvla.config import ConfigError, ModelConfig
from dvla.envs.protocol import EnvSpec
from dvla.models.export import write_policy
from dvla.models.lora import merged_reader
from dvla.models.openvla_oft import prompt_text
from dvla.models.policy import Observation
from dvla.models.policy_source import check_policy, prepare_policy
from dvla.models.tokenizer import build_tokenizer
from dvla.rl.noise import decision_keys

DATA = Path(__file__).parents[1] / "data" / "golden"
OFT, PI05 = DATA / "openvla_oft_tiny", DATA / "pi05_tiny"
K, B = 4, 3
SPEC = EnvSpec(
    name="test",
    cameras=("top",),
    image_size=(56, 56),
    state_dim=8,
    action_dim=7,
    max_episode_steps=16,
    instructions=("push the cube", "lift the peg upright"),
    gripper_open=-1.0,
)
HEADS = {"openvla_oft": {"dino_heads": 4, "siglip_heads": 4}, "pi05": {"vision_heads": 4}}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    build_tokenizer([prompt_text(text) for text in SPEC.instructions], 384).save_pretrained(folder)
    return str(folder)


def model_config(name, tokenizer, folder=None, **changes):
    folder = folder or {"openvla_oft": OFT, "pi05": PI05}[name]
    options = HEADS[name] | changes.pop("options", {})
    return ModelConfig(
        name=name, checkpoint=str(folder), tokenizer=tokenizer, num_action_chunks=K, options=options, **changes
    )


def materialise(source):
    if source.load is not None:
        source.policy.to_empty(device="cpu")
        source.load(source.policy)
    return source.policy


def observation(seed=0):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (B, 1, 56, 56, 3), generator=generator, dtype=torch.uint8)
    return Observation(images=images, state=torch.randn(B, 8, generator=generator) / 5, task=torch.tensor([0, 1, 0]))


def keys():
    return decision_keys(0, torch.arange(B), torch.zeros(B, dtype=torch.int64))


def raw_bytes(folder):
    """Bytes and dtype of every tensor, by an independent reader."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - this is no dict
                tensor = tensors.get_tensor(name)
                found[file.name, name] = (tensor.dtype, tensor.shape, tensor.reshape(-1).view(torch.uint8))
    return found


def assert_same_bytes(got, want):
    assert got.keys() == want.keys()
    for key, (dtype, shape, data) in want.items():
        assert got[key][:2] == (dtype, shape), key
        assert torch.equal(got[key][2], data), key


@pytest.mark.parametrize("name", ["openvla_oft", "pi05"])
@pytest.mark.parametrize("lora_rank", [0, 4])
def test_import_then_export_gives_the_same_bytes(name, lora_rank, tokenizer, tmp_path):
    model = model_config(name, tokenizer, lora_rank=lora_rank)
    write_policy(materialise(prepare_policy(model, spec=SPEC, seed=0)), model, tmp_path / "out")
    folder = Path(model.checkpoint)
    assert_same_bytes(raw_bytes(tmp_path / "out"), raw_bytes(folder))
    assert {p.name for p in (tmp_path / "out").iterdir()} == {p.name for p in folder.iterdir()}
    model = dataclasses.replace(model, checkpoint=str(tmp_path / "out"))
    check_policy(model, SPEC.cameras)


@pytest.mark.parametrize("name", ["openvla_oft", "pi05"])
def test_shards_of_torch_files_and_prefixed_names_load_too(name, tokenizer, tmp_path):
    """The projector as `torch.save` writes it under DDP; pi0.5 as lerobot names it."""
    folder = tmp_path / "checkpoint"
    shutil.copytree({"openvla_oft": OFT, "pi05": PI05}[name], folder)
    if name == "openvla_oft":
        weights = load_file(folder / "proprio_projector.safetensors")
        torch.save({f"module.{k}": v for k, v in weights.items()}, folder / "proprio_projector--100_checkpoint.pt")
        (folder / "proprio_projector.safetensors").unlink()
    else:
        weights = load_file(folder / "model.safetensors")
        save_file({f"model.{k}": v for k, v in weights.items()}, folder / "model.safetensors")
    policy = materialise(prepare_policy(model_config(name, tokenizer, folder), spec=SPEC, seed=0))
    original = materialise(prepare_policy(model_config(name, tokenizer), spec=SPEC, seed=0))
    a, b = policy.act(observation(), keys()), original.act(observation(), keys())
    assert torch.equal(a.actions, b.actions)
    model = model_config(name, tokenizer, folder)
    write_policy(policy, model, tmp_path / "out")
    assert_same_bytes(raw_bytes(tmp_path / "out"), raw_bytes(folder))
    if name == "openvla_oft":
        saved = torch.load(tmp_path / "out" / "proprio_projector--100_checkpoint.pt", weights_only=True)
        assert {k: v.dtype for k, v in saved.items()} == {f"module.{k}": v.dtype for k, v in weights.items()}
        assert all(torch.equal(saved[f"module.{k}"], v) for k, v in weights.items())


@pytest.mark.parametrize("name", ["openvla_oft", "pi05"])
def test_merged_adapters_act_as_they_did_beside_the_weights(name, tokenizer, tmp_path):
    model = model_config(name, tokenizer, lora_rank=4)
    policy = materialise(prepare_policy(model, spec=SPEC, seed=0))
    plain = materialise(prepare_policy(model_config(name, tokenizer), spec=SPEC, seed=0))
    untouched, at_first = plain.act(observation(), keys()), policy.act(observation(), keys())
    torch.testing.assert_close(at_first.actions, untouched.actions, atol=1e-6, rtol=0)
    with torch.no_grad():
        for parameter_name, parameter in policy.named_parameters():
            if ".lora_B." in parameter_name:
                parameter.normal_(std=0.05)
    trained = policy.act(observation(), keys())
    with torch.no_grad():
        assert (plain(observation(), trained.record)[0] - trained.logprobs).abs().max() > 1e-3
    write_policy(policy, model, tmp_path / "out")
    merged = materialise(prepare_policy(model_config(name, tokenizer, tmp_path / "out"), spec=SPEC, seed=0))
    with torch.no_grad():
        logprobs, _ = merged(observation(), trained.record)
    # what is merged is rounded to the dtype of the checkpoint, bfloat16 for OpenVLA-OFT
    read, dtype = merged_reader(policy), torch.bfloat16 if name == "openvla_oft" else torch.float32
    plain.load_state_dict({key: read(key).to(dtype).float() for key, _ in plain.named_parameters()})
    with torch.no_grad():
        expected, _ = plain(observation(), trained.record)
    torch.testing.assert_close(logprobs, expected, atol=1e-5, rtol=0)
    if name == "pi05":
        torch.testing.assert_close(logprobs, trained.logprobs, atol=1e-5, rtol=0)


@pytest.mark.parametrize("sampler", ["flow_sde", "flow_noise"])
def test_a_policy_from_random_weights_is_exported_whole_and_loads_again_pi05(sampler, tmp_path):
    roundtrip_of_random_weights("pi05", {"sampler": sampler}, tmp_path)


@pytest.mark.parametrize("use_proprio", [False, True])
def test_a_policy_from_random_weights_is_exported_whole_and_loads_again_oft(use_proprio, tmp_path):
    roundtrip_of_random_weights("openvla_oft", {"use_proprio": use_proprio}, tmp_path)


def roundtrip_of_random_weights(name, options, tmp_path):
    model = ModelConfig(name=name, preset="nano", num_action_chunks=K, options=options)
    policy = prepare_policy(model, spec=SPEC, seed=0).policy
    write_policy(policy, model, tmp_path / "out")
    again = dataclasses.replace(model, checkpoint=str(tmp_path / "out"))
    check_policy(again, SPEC.cameras)
    loaded = materialise(prepare_policy(again, spec=SPEC, seed=1))
    assert loaded.config == policy.config or name == "openvla_oft"
    a, b = policy.act(observation(), keys()), loaded.act(observation(), keys())
    assert torch.equal(a.actions, b.actions)
    assert torch.equal(a.logprobs, b.logprobs)


GOLDEN_SIZES = {
    "openvla_oft": {
        **{"image_size": 56, "patch_size": 14, "dino_hidden_size": 48, "dino_layers": 3, "dino_heads": 4},
        **{"siglip_hidden_size": 64, "siglip_layers": 4, "siglip_heads": 4, "siglip_mlp_size": 240},
        **{"llm_hidden_size": 128, "llm_layers": 3, "llm_heads": 4, "llm_mlp_size": 344, "vocab_size": 640},
        "use_proprio": True,
    },
    "pi05": {
        **{"image_size": 56, "patch_size": 14, "vision_hidden_size": 64, "vision_layers": 3, "vision_heads": 4},
        **{"vision_mlp_size": 172, "hidden_size": 128, "mlp_size": 256, "layers": 3, "heads": 8, "head_dim": 16},
        **{"expert_hidden_size": 64, "expert_mlp_size": 128, "vocab_size": 512},
    },
}


@pytest.mark.parametrize("name", ["openvla_oft", "pi05"])
def test_an_export_from_random_weights_has_every_tensor_the_original_writes(name, tmp_path):
    model = ModelConfig(name=name, preset="nano", num_action_chunks=K, options=GOLDEN_SIZES[name])
    write_policy(prepare_policy(model, spec=SPEC, seed=0).policy, model, tmp_path / "out")

    def shapes(folder):
        found = raw_bytes(folder).items()
        return {name: shape for (file, name), (_, shape, _) in found if file.startswith(("model", "proprio"))}

    assert shapes(tmp_path / "out") == shapes({"openvla_oft": OFT, "pi05": PI05}[name])


def test_replicas_take_frozen_and_adapted_weights_from_the_checkpoint(tokenizer):
    source = prepare_policy(model_config("openvla_oft", tokenizer, lora_rank=4), spec=SPEC, seed=0)
    assert all(parameter.is_meta for parameter in source.policy.parameters())
    replica = source.replica(torch.device("cpu"), torch.float32)
    policy = materialise(source)
    for (name, a), (other, b) in zip(policy.named_parameters(), replica.named_parameters(), strict=True):
        assert name == other
        assert torch.equal(a, b), name


# -- bad input -------------------------------------------------------------------------------------------------------


def copy_of(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "checkpoint")
    return tmp_path / "checkpoint"


def refuse(model, match):
    with pytest.raises(ConfigError, match=match):
        check_policy(model, SPEC.cameras)


@pytest.mark.parametrize("name", ["openvla_oft", "pi05"])
def test_wrong_folders_are_refused(name, tokenizer, tmp_path):
    refuse(model_config(name, tokenizer, tmp_path / "nowhere"), "no such folder")
    (tmp_path / "empty").mkdir()
    refuse(model_config(name, tokenizer, tmp_path / "empty"), "no model.safetensors")
    other = {"openvla_oft": PI05, "pi05": OFT}[name]
    refuse(model_config(name, tokenizer, other), "openvla|pi0|missing")
    refuse(ModelConfig(name="mlp", checkpoint=str(OFT)), "mlp cannot be loaded")


@pytest.mark.parametrize("name", ["openvla_oft", "pi05"])
def test_a_truncated_shard_is_refused(name, tokenizer, tmp_path):
    folder = copy_of({"openvla_oft": OFT, "pi05": PI05}[name], tmp_path)
    shard = sorted(folder.glob("model*.safetensors"))[-1]
    shard.write_bytes(shard.read_bytes()[:-100])
    refuse(model_config(name, tokenizer, folder), f"{shard.name} is damaged")


@pytest.mark.parametrize("name", ["openvla_oft", "pi05"])
@pytest.mark.parametrize("how", ["missing", "unexpected", "of another shape"])
def test_no_weight_stays_random_because_a_tensor_does_not_fit(name, how, tokenizer, tmp_path):
    folder = copy_of({"openvla_oft": OFT, "pi05": PI05}[name], tmp_path)
    (folder / "model.safetensors.index.json").unlink(missing_ok=True)
    shards = sorted(folder.glob("model*.safetensors"))
    weights = {key: tensor for shard in shards for key, tensor in load_file(shard).items()}
    for shard in shards:
        shard.unlink()
    victim = next(key for key in weights if key.endswith("layers.1.mlp.down_proj.weight"))
    match how:
        case "missing":
            del weights[victim]
        case "unexpected":
            victim = victim.replace("down_proj", "side_proj")
            weights[victim] = torch.zeros(2, 2)
        case _:
            weights[victim] = weights[victim][:-1].clone()
    save_file(weights, folder / "model.safetensors")
    refuse(model_config(name, tokenizer, folder), f"1 {how}: {re.escape(victim)}")


def test_missing_statistics_and_unknown_keys_are_refused(tokenizer, tmp_path):
    refuse(model_config("openvla_oft", tokenizer, unnorm_key="fractal"), "libero_spatial_no_noops")
    refuse(model_config("pi05", tokenizer, unnorm_key="droid"), "libero")
    pi05 = copy_of(PI05, tmp_path)
    shutil.rmtree(pi05 / "assets")
    refuse(model_config("pi05", tokenizer, pi05), "norm_stats")
    oft = copy_of(OFT, tmp_path / "oft")
    (oft / "dataset_statistics.json").unlink()
    config = json.loads((oft / "config.json").read_text())
    del config["norm_stats"]
    (oft / "config.json").write_text(json.dumps(config))
    refuse(model_config("openvla_oft", tokenizer, oft), "dataset_statistics.json")


@pytest.mark.parametrize("name", ["openvla_oft", "pi05"])
def test_an_absent_tokenizer_is_refused(name):
    refuse(model_config(name, None), "no tokenizer there.*model.tokenizer")
    refuse(model_config(name, "/nonexistent/tokenizer.model"), "model.tokenizer=/nonexistent")


@pytest.mark.parametrize("name", ["openvla_oft", "pi05"])
def test_actions_that_do_not_match_the_environment_are_refused(name, tokenizer):
    spec = dataclasses.replace(SPEC, action_dim=4)
    with pytest.raises(ConfigError, match=r"have 7 elements, the environment's actions have 4"):
        prepare_policy(model_config(name, tokenizer), spec=spec, seed=0)


def test_a_gripper_without_a_convention_is_refused(tokenizer):
    spec = dataclasses.replace(SPEC, gripper_open=None)
    with pytest.raises(ConfigError, match="gripper"):
        prepare_policy(model_config("openvla_oft", tokenizer), spec=spec, seed=0)


@pytest.mark.parametrize("name", ["openvla_oft", "pi05"])
def test_adapters_and_frozen_parts_that_match_nothing_are_refused(name, tokenizer):
    refuse(model_config(name, tokenizer, lora_rank=4, lora_targets=("q_proj", "qkv")), "'qkv' matches no trainable")
    refuse(model_config(name, tokenizer, freeze=("tail",)), "no part 'tail'; it has: vision")


def test_unknown_and_contradicting_options_are_refused(tokenizer):
    refuse(model_config("pi05", tokenizer, options={"layers": 5}), "layers=5 contradicts")
    refuse(model_config("openvla_oft", tokenizer, options={"llm_layers": 5}), "llm_layers=5 contradicts")
    refuse(model_config("pi05", tokenizer, options={"depth": 5}), "model.options.depth")
    model = model_config("pi05", tokenizer)
    model.options = {}
    refuse(model, "model.options.vision_heads")


# -- conventions -----------------------------------------------------------------------------------------------------


def test_openvla_oft_acts_in_the_units_and_the_gripper_convention_of_the_environment(tokenizer):
    for gripper_open in (1.0, -1.0):
        spec = dataclasses.replace(SPEC, gripper_open=gripper_open)
        policy = materialise(prepare_policy(model_config("openvla_oft", tokenizer), spec=spec, seed=0))
        low, high = policy.statistics.action.low, policy.statistics.action.high
        top = policy.to_environment(torch.ones(1, 1, 7))[0, 0]
        bottom = policy.to_environment(-torch.ones(1, 1, 7))[0, 0]
        torch.testing.assert_close(top[:6].double(), high[:6].clamp(-1, 1), atol=1e-6, rtol=0)
        torch.testing.assert_close(bottom[:6].double(), low[:6].clamp(-1, 1), atol=1e-6, rtol=0)
        assert (top[6], bottom[6]) == (gripper_open, -gripper_open)


def test_the_unnorm_key_of_a_suite_finds_its_data_without_no_ops(tokenizer):
    policy = prepare_policy(
        model_config("openvla_oft", tokenizer, unnorm_key="libero_spatial"), spec=SPEC, seed=0
    ).policy
    assert policy.statistics.key == "libero_spatial_no_noops"


def test_a_centre_crop_changes_what_the_model_sees(tokenizer):
    model = model_config("openvla_oft", tokenizer, options={"center_crop": True})
    cropped = materialise(prepare_policy(model, spec=SPEC, seed=0))
    plain = materialise(prepare_policy(model_config("openvla_oft", tokenizer), spec=SPEC, seed=0))
    images = observation().images[:, 0]
    assert not torch.equal(cropped.vision_backbone.preprocess(images), plain.vision_backbone.preprocess(images))


# -- found by trying to break it -------------------------------------------------------------------------------------


def test_mistakes_with_random_weights_are_found_before_a_simulator_starts_too():
    nano = ModelConfig(name="pi05", preset="nano", num_action_chunks=K)
    check_policy(nano, ("top",))
    refuse(dataclasses.replace(nano, lora_rank=4, lora_targets=("nope",)), "'nope' matches no trainable")
    refuse(dataclasses.replace(nano, freeze=("nope",)), "no part 'nope'")
    refuse(dataclasses.replace(nano, num_action_chunks=9), "num_action_chunks=9 is more than the 8")


def test_foreseen_actions_that_do_not_match_are_refused_before_a_simulator_starts(tokenizer):
    with pytest.raises(ConfigError, match=r"have 7 elements, the environment's actions have 2"):
        check_policy(model_config("pi05", tokenizer), ("top",), action_dim=2)


@pytest.mark.parametrize("name", ["action_head--1000_checkpoint.pt", "vision_backbone--1000_checkpoint.pt"])
def test_variants_that_are_not_supported_are_refused(name, tokenizer, tmp_path):
    folder = copy_of(OFT, tmp_path)
    (folder / name).write_bytes(b"x")
    refuse(model_config("openvla_oft", tokenizer, folder), name)


def test_the_newest_of_several_projectors_is_taken(tokenizer, tmp_path):
    folder = copy_of(OFT, tmp_path)
    weights = load_file(folder / "proprio_projector.safetensors")
    (folder / "proprio_projector.safetensors").unlink()
    for steps in (5000, 10000):
        changed = {key: value + steps for key, value in weights.items()}
        torch.save(changed, folder / f"proprio_projector--{steps}_checkpoint.pt")
    policy = materialise(prepare_policy(model_config("openvla_oft", tokenizer, folder), spec=SPEC, seed=0))
    want = (weights["fc1.bias"] + 10000).float()
    assert torch.equal(policy.proprio_projector.fc1.bias, want)


def test_two_names_of_one_tensor_must_hold_the_same(tokenizer, tmp_path):
    folder = copy_of(PI05, tmp_path)
    weights = load_file(folder / "model.safetensors")
    embedding = weights["paligemma_with_expert.paligemma.lm_head.weight"]
    alias = "paligemma_with_expert.paligemma.model.language_model.embed_tokens.weight"
    save_file(weights | {alias: embedding.clone()}, folder / "model.safetensors")
    materialise(prepare_policy(model_config("pi05", tokenizer, folder), spec=SPEC, seed=0))
    save_file(weights | {alias: embedding + 1}, folder / "model.safetensors")
    with pytest.raises(ConfigError, match="should be the same tensor"):
        materialise(prepare_policy(model_config("pi05", tokenizer, folder), spec=SPEC, seed=0))


def test_a_tensor_the_index_does_not_name_is_refused(tokenizer, tmp_path):
    folder = copy_of(OFT, tmp_path)
    shard = folder / "model-00001-of-00002.safetensors"
    save_file(load_file(shard) | {"stray": torch.zeros(1)}, shard)
    refuse(model_config("openvla_oft", tokenizer, folder), "holds stray, which .* does not name")


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("openvla_oft", {"keep_stop_token": "no"}),
        ("openvla_oft", {"use_proprio": 1}),
        ("pi05", {"num_denoise_steps": 2.5}),
        ("pi05", {"discrete_state_input": "no"}),
    ],
)
def test_options_of_another_kind_are_refused(name, options, tokenizer):
    refuse(model_config(name, tokenizer, options=options), f"model.options.{next(iter(options))}: got")


@pytest.mark.parametrize(
    "content", ["[]", "null", '{"model_type": "openvla", "timm_model_ids": 3, "norm_stats": null}']
)
def test_files_of_another_kind_are_refused(content, tokenizer, tmp_path):
    folder = copy_of(OFT, tmp_path)
    (folder / "config.json").write_text(content)
    refuse(model_config("openvla_oft", tokenizer, folder), "model.checkpoint=.*(not as expected|holds)")


def test_a_tokenizer_of_another_vocabulary_is_refused(tmp_path):
    build_tokenizer([prompt_text(text) for text in SPEC.instructions] + ["x" * 300], 384).save_pretrained(tmp_path)
    file = tmp_path / "tokenizer.json"
    changed = json.loads(file.read_text())
    vocabulary = changed["model"]["vocab"]
    vocabulary["▁"] = 900
    file.write_text(json.dumps(changed))
    refuse(model_config("openvla_oft", str(tmp_path)), "token ids of 384 and more")


def test_adapters_leave_a_new_noise_head_trainable():
    model = ModelConfig(name="pi05", preset="nano", num_action_chunks=K, lora_rank=2, options={"sampler": "flow_noise"})
    policy = prepare_policy(model, spec=SPEC, seed=0).policy
    trained = {name for name, parameter in policy.named_parameters() if parameter.requires_grad}
    assert {name for name in trained if "lora_" not in name} == {
        name for name, _ in policy.named_parameters() if name.startswith("noise_head.")
    }


def test_a_damaged_noise_head_is_refused(tokenizer, tmp_path):
    folder = copy_of(PI05, tmp_path)
    (folder / "noise_head.safetensors").write_bytes(b"damaged")
    model = model_config("pi05", tokenizer, folder, options={"sampler": "flow_noise"})
    refuse(model, "noise_head.safetensors cannot be read")
    save_file({"noise_head.0.weight": torch.zeros(2, 2)}, folder / "noise_head.safetensors")
    refuse(model, "noise_head.safetensors does not fit")


def test_a_state_in_the_prompt_needs_its_statistics(tokenizer, tmp_path):
    folder = copy_of(PI05, tmp_path)
    file = next(folder.glob("assets/**/norm_stats.json"))
    stats = json.loads(file.read_text())
    del stats["norm_stats"]["state"]
    file.write_text(json.dumps(stats))
    refuse(model_config("pi05", tokenizer, folder, options={"discrete_state_input": True}), "none of the state")


def test_export_leaves_shards_out_that_were_not_read(tokenizer, tmp_path):
    folder = copy_of(PI05, tmp_path)
    save_file({"x": torch.zeros(1)}, folder / "model-00001-of-00001.safetensors")
    model = model_config("pi05", tokenizer, folder)
    (tmp_path / "out.tmp").mkdir()
    write_policy(materialise(prepare_policy(model, spec=SPEC, seed=0)), model, tmp_path / "out")
    assert not (tmp_path / "out" / "model-00001-of-00001.safetensors").exists()
    assert (tmp_path / "out.tmp").is_dir()  # what lies beside it is not ours
