"""The correspondence between checkpoints and our parameters: checks, import, export, and both models' maps."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from dvla.config import ConfigError
from dvla.envs.protocol import EnvSpec
from dvla.models.checkpoint_files import CheckpointFiles
from dvla.models.openvla_oft import OpenVLAOFT
from dvla.models.openvla_oft_config import PRESETS, OpenVLAOFTConfig
from dvla.models.openvla_oft_weights import oft_weight_map, read_oft_config
from dvla.models.pi05_weights import pi05_weight_map, read_pi05_sizes
from dvla.models.weight_map import Part, Rule, WeightMap, check, export_tensor, load_parameters, rows, source_shapes

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
OFT, PI05 = GOLDEN / "openvla_oft_tiny", GOLDEN / "pi05_tiny"

MAP = WeightMap(
    rules=(
        Rule(("plain",), (Part("plain"),)),
        Rule(("stack",), (Part("first"), Part("second"))),
        Rule(("top",), (Part("split", rows(None, 1)),)),
        Rule(("rest",), (Part("split", rows(1, None)),)),
        Rule(("place",), (Part("table", lambda t: t[1:].unsqueeze(0)),)),
        Rule(("base",), (Part("base"),), addends=(Part("table", lambda t: t[:1]),)),
        Rule(("name", "alias"), (Part("shared"),)),
    ),
    zeros=(Part("mask"),),
    dead={"unread": (2,)},
    leftovers=frozenset({"old"}),
)
SHAPES = {
    "plain": (2, 3),
    "first": (2, 2),
    "second": (1, 2),
    "split": (4,),
    "table": (3, 2),
    "base": (1, 2),
    "shared": (3,),
    "mask": (1, 2),
}


def random_tensors(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}


def open_tensors(folder: Path, tensors: dict[str, Tensor]) -> CheckpointFiles:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    return CheckpointFiles(folder)


def parameters_of(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    return {name: torch.full(shape, float("nan"), dtype=dtype) for name, shape in shapes.items()}


def assert_round_trip(weight_map: WeightMap, shapes: dict[str, tuple[int, ...]], files: CheckpointFiles) -> None:
    check(weight_map, shapes, files)
    parameters = parameters_of(shapes)
    load_parameters(parameters, weight_map, files)
    assert not any(parameter.isnan().any() for parameter in parameters.values())
    for name, info in files.tensors.items():
        if name in weight_map.dead or name in weight_map.leftovers:
            continue
        exported = export_tensor(weight_map, name, parameters.__getitem__).to(info.dtype).contiguous()
        assert exported.shape == info.shape
        assert torch.equal(
            exported.view(-1).view(torch.uint8), files.read(name).contiguous().view(-1).view(torch.uint8)
        )


@pytest.fixture
def tensors() -> dict[str, Tensor]:
    shapes = source_shapes(MAP, SHAPES)
    assert shapes["stack"] == (3, 2)
    assert shapes["place"] == (1, 2, 2)
    del shapes["alias"]
    tensors = random_tensors(shapes)
    tensors["base"][0, 0] = -0.0
    return tensors


def test_round_trip(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    assert_round_trip(MAP, SHAPES, open_tensors(tmp_path, tensors))


def test_parameters_after_import(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    parameters = parameters_of(SHAPES, torch.float64)
    load_parameters(parameters, MAP, open_tensors(tmp_path, tensors))
    for name, expected in {
        "plain": tensors["plain"],
        "first": tensors["stack"][:2],
        "second": tensors["stack"][2:],
        "split": torch.cat((tensors["top"], tensors["rest"])),
        "table": torch.cat((torch.zeros(1, 2), tensors["place"][0])),
        "shared": tensors["name"],
        "mask": torch.zeros(1, 2),
    }.items():
        assert torch.equal(parameters[name], expected.double())


def test_an_addend_that_was_trained_is_exported(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    parameters = parameters_of(SHAPES)
    load_parameters(parameters, MAP, open_tensors(tmp_path, tensors))
    parameters["table"][0] = 1
    assert torch.equal(export_tensor(MAP, "base", parameters.__getitem__), tensors["base"].float() + 1)


def test_mixed_precision_is_kept(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    tensors["rest"] = torch.full((3,), 1 / 3)
    parameters = parameters_of(SHAPES)
    load_parameters(parameters, MAP, open_tensors(tmp_path, tensors))
    assert torch.equal(parameters["split"][1:], tensors["rest"])


def test_aliases(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    value = tensors.pop("name")
    assert_round_trip(MAP, SHAPES, open_tensors(tmp_path / "alias", tensors | {"alias": value}))
    both = tensors | {"alias": value, "name": value.clone()}
    assert_round_trip(MAP, SHAPES, open_tensors(tmp_path / "both", both))
    with pytest.raises(ConfigError, match=r"1 missing: name or alias$"):
        check(MAP, SHAPES, open_tensors(tmp_path / "none", tensors))


def test_dead_tensors_and_leftovers_may_be_there(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    extra = {"unread": torch.ones(2), "old": torch.ones(7)}
    assert_round_trip(MAP, SHAPES, open_tensors(tmp_path / "good", tensors | extra))
    with pytest.raises(ConfigError, match=r"1 of another shape: unread \(3,\), not \(2,\)$"):
        check(MAP, SHAPES, open_tensors(tmp_path / "bad", tensors | {"unread": torch.ones(3)}))


def test_all_differences_are_listed(tmp_path: Path, tensors: dict[str, Tensor]) -> None:
    tensors["stack"] = torch.zeros(3, 1)
    tensors |= {f"extra{i:02}": torch.zeros(1) for i in range(12)}
    del tensors["plain"], tensors["top"]
    with pytest.raises(ConfigError) as caught:
        check(MAP, SHAPES, open_tensors(tmp_path, tensors))
    message = str(caught.value)
    assert message.startswith(f"model.checkpoint={tmp_path}: ")
    assert "2 missing: plain, top;" in message
    assert "12 unexpected: extra00, " in message
    assert "extra09 and 2 more;" in message
    assert message.endswith("1 of another shape: stack (3, 1), not (3, 2)")


@pytest.mark.parametrize(
    "zeros",
    [(), (Part("mask"), Part("plain", rows(0, 1))), (Part("mask", rows(0, 0)),), (Part("mask"), Part("unknown"))],
)
def test_a_map_that_does_not_cover_the_model_is_a_bug(zeros: tuple[Part, ...]) -> None:
    with pytest.raises(ValueError, match=r"map"):
        source_shapes(WeightMap(MAP.rules, zeros), SHAPES)


def oft_policy(config: OpenVLAOFTConfig) -> OpenVLAOFT:
    spec = EnvSpec(
        name="golden",
        cameras=("primary",),
        image_size=(56, 56),
        state_dim=8,
        action_dim=7,
        max_episode_steps=1,
        instructions=("0",),
    )
    return OpenVLAOFT(config, spec=spec, num_action_chunks=8, temperature=1.0)


def shapes_of(module: torch.nn.Module) -> dict[str, tuple[int, ...]]:
    return {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}


def test_from_scratch_openvla_oft_keeps_its_function_through_a_checkpoint(tmp_path: Path) -> None:
    policy = oft_policy(PRESETS["nano"])
    weights = {name: parameter.detach() for name, parameter in policy.named_parameters()}
    weight_map = oft_weight_map(policy.config)
    exported = {name: export_tensor(weight_map, name, weights.__getitem__) for name in weight_map.rule_of}
    files = open_tensors(tmp_path, {name: tensor.contiguous() for name, tensor in exported.items()})
    check(weight_map, shapes_of(policy), files)
    images = torch.randint(256, (2, 64, 64, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        before = policy.vision_backbone(images)
        load_parameters(dict(policy.named_parameters()), weight_map, files)
        after = policy.vision_backbone(images)
    assert not policy.vision_backbone.dino.embeddings.position_embeddings[:, 0].any()
    torch.testing.assert_close(after, before, atol=1e-5, rtol=0)


@pytest.mark.parametrize("use_proprio", [False, True])
def test_golden_openvla_oft(use_proprio: bool) -> None:
    files = CheckpointFiles(OFT)
    if use_proprio:
        files.add(OFT / "proprio_projector.safetensors", prefix="proprio_projector.")
    overrides = {"dino_heads": 4, "siglip_heads": 4, "use_proprio": use_proprio}
    config = read_oft_config(OFT, files, overrides)
    assert config == OpenVLAOFTConfig(
        image_size=56,
        patch_size=14,
        dino_hidden_size=48,
        dino_layers=3,
        siglip_hidden_size=64,
        siglip_layers=4,
        siglip_mlp_size=240,
        llm_hidden_size=128,
        llm_layers=3,
        llm_heads=4,
        llm_mlp_size=344,
        vocab_size=640,
        pixel_means=((0.48500001430511475, 0.4560000002384186, 0.4059999883174896), (0.5, 0.5, 0.5)),
        pixel_stds=((0.2290000021457672, 0.2240000069141388, 0.22499999403953552), (0.5, 0.5, 0.5)),
        **overrides,
    )
    assert_round_trip(oft_weight_map(config), shapes_of(oft_policy(config)), files)


@pytest.fixture
def oft_copy(tmp_path: Path) -> Path:
    for path in OFT.glob("model*"):
        shutil.copyfile(path, tmp_path / path.name)
    return tmp_path


@pytest.mark.parametrize(
    ("change", "overrides", "match"),
    [
        ({}, {}, r"model\.options\.dino_heads: "),
        ({"dvla": {"dino_heads": 4}}, {}, r"model\.options\.siglip_heads: "),
        ({}, {"dino_layers": 2}, r"model\.options\.dino_layers=2 contradicts the weights of .* which have 3"),
        ({}, {"heads": 2}, r"model\.options\.heads: openvla_oft has no such option"),
        ({"model_type": "llama"}, {}, "holds llama, not openvla"),
        ({"text_config": {"rms_norm_eps": 1e-5}}, {}, r"text_config\.rms_norm_eps .* is 1e-05; only 1e-06"),
        ({"image_sizes": [224, 224]}, {}, r"image_sizes \[224, 224\]"),
        ({"pad_to_multiple_of": 200}, {"dino_heads": 4, "siglip_heads": 4}, "vocab_size 504 makes 512 embeddings"),
        ({"dvla": {"dino_heads": 5, "siglip_heads": 4}}, {}, "48 is no multiple of dino_heads 5"),
    ],
)
def test_openvla_oft_settings_that_cannot_work(
    oft_copy: Path, change: dict[str, object], overrides: dict[str, object], match: str
) -> None:
    raw = json.loads((OFT / "config.json").read_text()) | change
    (oft_copy / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=match):
        read_oft_config(oft_copy, CheckpointFiles(oft_copy), overrides)


def test_openvla_oft_settings_of_its_config(oft_copy: Path) -> None:
    files = CheckpointFiles(oft_copy)
    with pytest.raises(ConfigError, match=r"no config\.json"):
        read_oft_config(oft_copy, files, {})
    raw = json.loads((OFT / "config.json").read_text())
    published = ["vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224"]
    (oft_copy / "config.json").write_text(json.dumps(raw | {"timm_model_ids": published}))
    config = read_oft_config(oft_copy, files, {"siglip_heads": 8})
    assert (config.dino_heads, config.siglip_heads) == (16, 8)
    (oft_copy / "config.json").write_text(json.dumps(raw | {"dvla": {"dino_heads": 4, "siglip_heads": 2}}))
    config = read_oft_config(oft_copy, files, {})
    assert (config.dino_heads, config.siglip_heads) == (4, 2)


PI05_SIZES = {
    "image_size": 56,
    "patch_size": 14,
    "vision_hidden_size": 64,
    "vision_layers": 3,
    "vision_mlp_size": 172,
    "hidden_size": 128,
    "mlp_size": 256,
    "layers": 3,
    "heads": 8,
    "head_dim": 16,
    "expert_hidden_size": 64,
    "expert_mlp_size": 128,
    "vocab_size": 512,
    "action_dim": 32,
}
PALI = "paligemma_with_expert.paligemma."


def pi05_map(names: Collection[str]) -> WeightMap:
    return pi05_weight_map(vision_layers=3, layers=3, names=names, vocab_size=512, expert_width=64)


def pi05_shapes() -> dict[str, tuple[int, ...]]:
    d, v, e, attention, kv = 128, 64, 64, 128, 16
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (512, d), "prefix_norm.weight": (d,)}

    def add(name: str, *shape: int) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = shape, shape[:1]

    add("vision.embeddings.patch_embedding", v, 3, 14, 14)
    shapes["vision.embeddings.position_embedding.weight"] = (16, v)
    for i in range(3):
        block = f"vision.encoder.layers.{i}."
        for name in ("q", "k", "v", "out"):
            add(f"{block}self_attn.{name}_proj", v, v)
        add(f"{block}mlp.fc1", 172, v)
        add(f"{block}mlp.fc2", v, 172)
        add(f"{block}layer_norm1", v)
        add(f"{block}layer_norm2", v)
        for side, width, mlp in (("prefix", d, 256), ("expert", e, 128)):
            block = f"{side}_layers.{i}."
            for name, shape in {
                "self_attn.q": (attention, width),
                "self_attn.k": (kv, width),
                "self_attn.v": (kv, width),
                "self_attn.o": (width, attention),
                "mlp.gate": (mlp, width),
                "mlp.up": (mlp, width),
                "mlp.down": (width, mlp),
            }.items():
                shapes[f"{block}{name}_proj.weight"] = shape
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"prefix_layers.{i}.{norm}.weight"] = (d,)
            add(f"expert_layers.{i}.{norm}.dense", 3 * e, e)
    add("vision.post_layernorm", v)
    add("projector", d, v)
    add("expert_norm.dense", 3 * e, e)
    add("action_in_proj", e, 32)
    add("action_out_proj", 32, e)
    add("time_mlp_in", e, e)
    add("time_mlp_out", e, e)
    return shapes


def test_golden_pi05() -> None:
    files = CheckpointFiles(PI05)
    assert read_pi05_sizes(files) == PI05_SIZES
    weight_map = pi05_map(files.tensors)
    assert_round_trip(weight_map, pi05_shapes(), files)
    canonical = pi05_map(())
    assert set(canonical.rule_of) | set(canonical.dead) == set(files.tensors)


def replaced(*pairs: tuple[str, str]) -> Callable[[str], str]:
    def rename(name: str) -> str:
        for old, new in pairs:
            name = name.replace(old, new)
        return name

    return rename


@pytest.mark.parametrize(
    "rename",
    [
        "model.{}".format,
        replaced(("vision_tower.vision_model.", "vision_tower.")),
        replaced((f"{PALI}lm_head.", f"{PALI}model.language_model.embed_tokens.")),
        replaced(("time_mlp_", "action_time_mlp_")),
        replaced((f"{PALI}model.language_model.", f"{PALI}model.language_model.model.")),
        replaced((f"{PALI}model.language_model.", f"{PALI}language_model.model."), (f"{PALI}model.", PALI)),
        replaced(
            (f"{PALI}lm_head.", f"{PALI}language_model.lm_head."),
            (f"{PALI}model.language_model.", f"{PALI}language_model.model."),
            (f"{PALI}model.", PALI),
            ("vision_tower.vision_model.", "vision_tower."),
        ),
    ],
)
def test_pi05_layouts(tmp_path: Path, rename: Callable[[str], str]) -> None:
    tensors = random_tensors(source_shapes(pi05_map(()), pi05_shapes()))
    files = open_tensors(tmp_path, {rename(name): tensor for name, tensor in tensors.items()})
    assert read_pi05_sizes(files) == PI05_SIZES
    assert_round_trip(pi05_map(files.tensors), pi05_shapes(), files)


def test_pi05_with_both_embeddings_and_unused_tensors(tmp_path: Path) -> None:
    tensors = random_tensors(source_shapes(pi05_map(()), pi05_shapes()))
    tensors[f"{PALI}model.language_model.embed_tokens.weight"] = tensors[f"{PALI}lm_head.weight"].clone()
    expert = "paligemma_with_expert.gemma_expert."
    tensors |= random_tensors(
        {
            f"{expert}lm_head.weight": (512, 64),
            f"{expert}model.norm.weight": (64,),
            f"{expert}model.layers.2.input_layernorm.weight": (64,),
            "state_proj.weight": (64, 32),
            "state_proj.bias": (64,),
        }
    )
    files = open_tensors(tmp_path, tensors)
    assert_round_trip(pi05_map(files.tensors), pi05_shapes(), files)
    del tensors[f"{PALI}lm_head.weight"], tensors[f"{PALI}model.language_model.embed_tokens.weight"]
    files = open_tensors(tmp_path, tensors)
    with pytest.raises(ConfigError, match=r"1 missing: .*lm_head\.weight or .*embed_tokens\.weight$"):
        check(pi05_map(files.tensors), pi05_shapes(), files)


def test_pi05_is_told_from_other_models(tmp_path: Path) -> None:
    tensors = {"vision_backbone.featurizer.cls_token": torch.zeros(1)}
    with pytest.raises(ConfigError, match="holds openvla, not pi05"):
        read_pi05_sizes(open_tensors(tmp_path / "a", tensors))
    with pytest.raises(ConfigError, match="holds pi0, not pi05"):
        read_pi05_sizes(open_tensors(tmp_path / "b", {f"{PALI}lm_head.weight": torch.zeros(1, 1)}))
    with pytest.raises(ConfigError, match="holds some other model, not pi05"):
        read_pi05_sizes(open_tensors(tmp_path / "c", {"weight": torch.zeros(1)}))


def test_golden_folders_are_told_apart() -> None:
    with pytest.raises(ConfigError, match="holds openvla, not pi05"):
        read_pi05_sizes(CheckpointFiles(OFT))
    with pytest.raises(ConfigError, match="not openvla"):
        read_oft_config(PI05, CheckpointFiles(PI05), {})


def test_golden_weights_are_readable_by_name() -> None:
    files = CheckpointFiles(OFT)
    for shard in OFT.glob("model-*.safetensors"):
        for name, tensor in load_file(shard).items():
            assert torch.equal(files.read(name), tensor)
