"""OpenVLA-OFT checkpoints in the Hugging Face layout of the original: names, and sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from torch import Tensor

from dvla.config import ConfigError
from dvla.models.checkpoint_files import CheckpointFiles
from dvla.models.openvla_oft_config import OpenVLAOFTConfig
from dvla.models.weight_map import Part, Rule, WeightMap, identity, layer, rows

_DINO, _SIGLIP = "vision_backbone.featurizer.", "vision_backbone.fused_featurizer."
_LLM = "language_model.model."
_LLM_LAYER = (
    *(f"self_attn.{x}_proj" for x in "qkvo"),
    *(f"mlp.{x}_proj" for x in ("gate", "up", "down")),
    "input_layernorm",
    "post_attention_layernorm",
)
_SAME_MLP = (("mlp.fc1", "mlp.fc1"), ("mlp.fc2", "mlp.fc2"))
_KNOWN_HEADS = {"vit_large_patch14_reg4_dinov2.lvd142m": 16, "vit_so400m_patch14_siglip_224": 16}
_FIXED = {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "hidden_act": "silu"}


def oft_weight_map(config: OpenVLAOFTConfig) -> WeightMap:
    """Names of the original for a model of these sizes; the proprio projector's begin with ``proprio_projector.``."""
    projectors = ["projector.fc1", "projector.fc2", "projector.fc3"]
    if config.use_proprio:
        projectors += ["proprio_projector.fc1", "proprio_projector.fc2"]
    rules = [*_dino(config.dino_layers), *_siglip(config.siglip_layers, config.siglip_hidden_size)]
    for name in projectors:
        rules += layer(name, name)
    rules += [_one(name, name) for name in _language(config.llm_layers)]
    attentions = [f"{_LLM}layers.{i}.self_attn." for i in range(config.llm_layers)]
    return WeightMap(
        rules=tuple(rules),
        zeros=(Part("vision_backbone.dino.embeddings.mask_token"),),
        leftovers=frozenset(f"{place}rotary_emb.inv_freq" for place in (_LLM, *attentions)),
    )


def read_oft_config(folder: Path, files: CheckpointFiles, overrides: Mapping[str, Any]) -> OpenVLAOFTConfig:
    """Sizes and switches of a checkpoint.

    Args:
        folder: The checkpoint's folder, with its ``config.json``.
        files: Its weights.
        overrides: Fields of the config that were set by hand.

    Raises:
        ConfigError: The folder holds another model, or the settings contradict it.
    """
    raw = files.read_json("config.json")
    kind = raw.get("model_type") or raw.get("type")
    if kind != "openvla":
        raise files.error(f"holds {kind or 'a model without model_type in its config.json'}, not openvla")
    if unknown := sorted(set(overrides) - {field.name for field in fields(OpenVLAOFTConfig)}):
        raise ConfigError(f"model.options.{unknown[0]}: openvla_oft has no such option")
    sizes = _sizes(files)
    for name, size in sizes.items():
        if overrides.get(name, size) != size:
            raise ConfigError(
                f"model.options.{name}={overrides[name]} contradicts the weights of {folder}, which have {size}"
            )
    text = raw.get("text_config", {})
    for name, value in _FIXED.items():
        if text.get(name, value) != value:
            raise files.error(f"text_config.{name} of its config.json is {text[name]}; only {value} is supported")
    size = sizes["image_size"]
    if list(raw.get("image_sizes", [size, size])) != [size, size]:
        raise files.error(
            f"image_sizes {raw['image_sizes']} of its config.json contradict its weights, which have {size}"
        )
    num_embeddings = files.shape(f"{_LLM}embed_tokens.weight")[0]
    own = raw.get("dvla", {})
    settings: dict[str, Any] = {
        "llm_heads": text.get("num_attention_heads", 32),
        "vocab_size": text.get("vocab_size", num_embeddings) - raw.get("pad_to_multiple_of", 64),
        **_pixel_constants(folder, files),
        **_vision_heads(raw.get("timm_model_ids", ()), own),
        **own.get("options", {}),
        **overrides,
        **sizes,
    }
    for name in ("dino_heads", "siglip_heads"):
        if name not in settings:
            raise ConfigError(
                f"model.options.{name}: {folder} does not tell the number of heads of this tower: give it"
            )
    try:
        config = OpenVLAOFTConfig(**settings)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"model.options: {error}") from error
    if config.num_embeddings != num_embeddings:
        raise files.error(
            f"vocab_size {config.vocab_size} makes {config.num_embeddings} embeddings, its weights have {num_embeddings}"
        )
    return config


def _one(source: str, parameter: str, view: Callable[[Tensor], Tensor] = identity) -> Rule:
    return Rule((source,), (Part(parameter, view),))


def _dino(num_layers: int) -> Iterator[Rule]:
    ours = "vision_backbone.dino."
    positions = f"{ours}embeddings.position_embeddings"
    # The original has no position for the class token.
    own_position = Part(positions, lambda parameter: parameter[:, :1])
    yield Rule((f"{_DINO}cls_token",), (Part(f"{ours}embeddings.cls_token"),), addends=(own_position,))
    yield _one(f"{_DINO}pos_embed", positions, lambda parameter: parameter[:, 1:])
    yield _one(f"{_DINO}reg_token", f"{ours}embeddings.register_tokens")
    yield from layer(f"{_DINO}patch_embed.proj", f"{ours}embeddings.patch_embeddings.projection")
    for i in range(num_layers):
        source, target = f"{_DINO}blocks.{i}.", f"{ours}encoder.layer.{i}."
        for name in ("norm1", "norm2", "mlp.fc1", "mlp.fc2"):
            yield from layer(source + name, target + name)
        yield from layer(f"{source}attn.qkv", *(f"{target}attention.{x}_proj" for x in "qkv"))
        yield from layer(f"{source}attn.proj", f"{target}attention.o_proj")
        for n in "12":
            yield _one(f"{source}ls{n}.scale_factor", f"{target}layer_scale{n}.lambda1")
    yield from layer(f"{_DINO}norm", f"{ours}layernorm")


def _siglip(num_layers: int, width: int) -> Iterator[Rule]:
    ours = "vision_backbone.siglip."
    positions = f"{ours}embeddings.position_embedding.weight"
    yield _one(f"{_SIGLIP}pos_embed", positions, lambda parameter: parameter.unsqueeze(0))
    yield from layer(f"{_SIGLIP}patch_embed.proj", f"{ours}embeddings.patch_embedding")
    for i in range(num_layers):
        source, target = f"{_SIGLIP}blocks.{i}.", f"{ours}encoder.layers.{i}."
        for theirs, name in (("norm1", "layer_norm1"), ("norm2", "layer_norm2"), *_SAME_MLP):
            yield from layer(source + theirs, target + name)
        yield from layer(f"{source}attn.qkv", *(f"{target}self_attn.{x}_proj" for x in "qkv"))
        yield from layer(f"{source}attn.proj", f"{target}self_attn.out_proj")
    yield from layer(f"{_SIGLIP}norm", f"{ours}post_layernorm")
    pool, head = f"{_SIGLIP}attn_pool.", f"{ours}head."
    yield _one(f"{pool}latent", f"{head}probe")
    for kind in ("weight", "bias"):
        yield _one(f"{pool}q.{kind}", f"{head}attention.in_proj_{kind}", rows(None, width))
        yield _one(f"{pool}kv.{kind}", f"{head}attention.in_proj_{kind}", rows(width, None))
    for theirs, name in (("proj", "attention.out_proj"), ("norm", "layernorm"), *_SAME_MLP):
        yield from layer(pool + theirs, head + name)


def _language(num_layers: int) -> Iterator[str]:
    """Tensors of the language model, which are named alike on both sides."""
    yield f"{_LLM}embed_tokens.weight"
    for i in range(num_layers):
        yield from (f"{_LLM}layers.{i}.{name}.weight" for name in _LLM_LAYER)
    yield f"{_LLM}norm.weight"
    yield "language_model.lm_head.weight"


def _sizes(files: CheckpointFiles) -> dict[str, int]:
    """The sizes that can be read from the shapes of the weights."""
    patch = files.shape(f"{_DINO}patch_embed.proj.weight")[-1]
    llm_mlp_size, llm_hidden_size = files.shape(f"{_LLM}layers.0.mlp.gate_proj.weight")
    siglip_mlp_size, siglip_hidden_size = files.shape(f"{_SIGLIP}blocks.0.mlp.fc1.weight")
    return {
        "image_size": patch * math.isqrt(files.shape(f"{_DINO}pos_embed")[1]),
        "patch_size": patch,
        "dino_hidden_size": files.shape(f"{_DINO}blocks.0.norm1.weight")[0],
        "dino_layers": files.count(f"{_DINO}blocks."),
        "siglip_hidden_size": siglip_hidden_size,
        "siglip_layers": files.count(f"{_SIGLIP}blocks."),
        "siglip_mlp_size": siglip_mlp_size,
        "llm_hidden_size": llm_hidden_size,
        "llm_layers": files.count(f"{_LLM}layers."),
        "llm_mlp_size": llm_mlp_size,
    }


def _vision_heads(timm_ids: list[str], own: Mapping[str, Any]) -> dict[str, int]:
    """Heads of the two towers, as far as known: the weights do not tell them."""
    names = ("dino_heads", "siglip_heads")
    known = {name: _KNOWN_HEADS[timm] for name, timm in zip(names, timm_ids, strict=False) if timm in _KNOWN_HEADS}
    return known | {name: own[name] for name in names if name in own}


def _pixel_constants(folder: Path, files: CheckpointFiles) -> dict[str, Any]:
    """How pixels are normalised, where the checkpoint says so."""
    if not (folder / "preprocessor_config.json").exists():
        return {}
    raw = files.read_json("preprocessor_config.json")
    # What the original computes with comes first; its rounding differs from the other two.
    tower = raw.get("tvf_normalize_params")
    means, stds = ([t[key] for t in tower] for key in ("mean", "std")) if tower else (raw.get("means"), raw.get("stds"))
    named = {"pixel_means": means, "pixel_stds": stds}
    return {name: tuple(map(tuple, values)) for name, values in named.items() if values is not None}
