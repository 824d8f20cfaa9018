"""pi0.5 checkpoints in the layouts of openpi and lerobot: names, and sizes."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from dvla.models.checkpoint_files import CheckpointFiles
from dvla.models.weight_map import Part, Rule, WeightMap, layer

_PROJECTIONS = (*(f"self_attn.{x}_proj" for x in "qkvo"), *(f"mlp.{x}_proj" for x in ("gate", "up", "down")))
_NORMS = ("input_layernorm", "post_attention_layernorm")
_VISION_LAYER = (
    *("layer_norm1", "layer_norm2", "mlp.fc1", "mlp.fc2"),
    *(f"self_attn.{x}_proj" for x in ("q", "k", "v", "out")),
)


@dataclass(frozen=True, slots=True)
class _Layout:
    """Where a checkpoint keeps the parts of the model: beginnings of names."""

    heads: str
    vision: str
    projector: str
    language: str
    expert: str
    time: str
    embeddings: tuple[str, ...]
    """Full names of the token embedding; it may be there under any of them."""


def pi05_weight_map(
    vision_layers: int, layers: int, names: Collection[str], vocab_size: int, expert_width: int
) -> WeightMap:
    """Names of a checkpoint for a model of these sizes.

    Args:
        vision_layers: Layers of the vision tower.
        layers: Layers of the prefix and of the action expert.
        names: The tensors of the checkpoint, which tell its layout; none for the layout openpi writes.
        vocab_size: Rows of the token embedding.
        expert_width: Width of the action expert.
    """
    layout = _find_layout(names)
    embeddings = tuple(name for name in layout.embeddings if name in names)
    if not embeddings:
        embeddings = layout.embeddings if names else layout.embeddings[:1]
    unused = [f"{layout.heads}state_proj.weight", f"{layout.heads}state_proj.bias"]
    unused += [f"{layout.expert}model.layers.{i}.{norm}.weight" for i in range(layers) for norm in _NORMS]
    return WeightMap(
        rules=(Rule(embeddings, (Part("embed_tokens.weight"),)), *_rules(layout, vision_layers, layers)),
        dead={f"{layout.expert}lm_head.weight": (vocab_size, expert_width)},
        leftovers=frozenset(
            (*unused, f"{layout.expert}model.norm.weight", f"{layout.expert}model.embed_tokens.weight")
        ),
    )


def read_pi05_sizes(files: CheckpointFiles) -> dict[str, int]:
    """The fields of `Pi05Config` that the shapes of the weights tell.

    Raises:
        ConfigError: It is another model.
    """
    _require_pi05(files)
    layout = _find_layout(files.tensors)
    embedding = next((name for name in layout.embeddings if name in files.tensors), layout.embeddings[0])
    vocab_size, hidden_size = files.shape(embedding)
    expert_mlp_size, expert_hidden_size = files.shape(f"{layout.expert}model.layers.0.mlp.gate_proj.weight")
    vision_mlp_size, vision_hidden_size = files.shape(f"{layout.vision}encoder.layers.0.mlp.fc1.weight")
    patch = files.shape(f"{layout.vision}embeddings.patch_embedding.weight")[-1]
    head_dim = files.shape(f"{layout.language}layers.0.self_attn.k_proj.weight")[0]  # of the one key-value head
    return {
        "image_size": patch * math.isqrt(files.shape(f"{layout.vision}embeddings.position_embedding.weight")[0]),
        "patch_size": patch,
        "vision_hidden_size": vision_hidden_size,
        "vision_layers": files.count(f"{layout.vision}encoder.layers."),
        "vision_mlp_size": vision_mlp_size,
        "hidden_size": hidden_size,
        "mlp_size": files.shape(f"{layout.language}layers.0.mlp.gate_proj.weight")[0],
        "layers": files.count(f"{layout.language}layers."),
        "heads": files.shape(f"{layout.language}layers.0.self_attn.q_proj.weight")[0] // head_dim,
        "head_dim": head_dim,
        "expert_hidden_size": expert_hidden_size,
        "expert_mlp_size": expert_mlp_size,
        "vocab_size": vocab_size,
        "action_dim": files.shape(f"{layout.heads}action_in_proj.weight")[1],
    }


def _require_pi05(files: CheckpointFiles) -> None:
    names = files.tensors
    if not any("paligemma_with_expert." in name for name in names):
        kind = "openvla" if any(name.startswith("vision_backbone.") for name in names) else "some other model"
        raise files.error(f"holds {kind}, not pi05")
    if not any(".input_layernorm.dense." in name for name in names):
        raise files.error("holds pi0, not pi05: the norms of its action expert are not adaptive")


def _find_layout(names: Collection[str]) -> _Layout:
    """The layout of these names; that of openpi when there are none."""

    def has(beginning: str) -> bool:
        return any(name.startswith(beginning) for name in names)

    heads = "model." if has("model.") else ""
    pali = f"{heads}paligemma_with_expert.paligemma."
    inner = f"{pali}model." if not names or has(f"{pali}model.") else pali
    language = f"{inner}language_model."
    embeddings: tuple[str, ...]
    if has(f"{language}model."):
        embeddings = (f"{pali}lm_head.weight", f"{language}lm_head.weight", f"{language}model.embed_tokens.weight")
        language += "model."
    else:
        embeddings = (f"{pali}lm_head.weight", f"{language}embed_tokens.weight")
    vision = f"{inner}vision_tower."
    if not names or has(f"{vision}vision_model."):
        vision += "vision_model."
    return _Layout(
        heads=heads,
        vision=vision,
        projector=f"{inner}multi_modal_projector.linear",
        language=language,
        expert=f"{heads}paligemma_with_expert.gemma_expert.",
        time=f"{heads}action_time_mlp_" if has(f"{heads}action_time_mlp_") else f"{heads}time_mlp_",
        embeddings=embeddings,
    )


def _rules(layout: _Layout, vision_layers: int, layers: int) -> Iterator[Rule]:
    """All rules but that of the embedding."""
    yield from layer(f"{layout.vision}embeddings.patch_embedding", "vision.embeddings.patch_embedding")
    yield _weight(f"{layout.vision}embeddings.position_embedding", "vision.embeddings.position_embedding")
    for i in range(vision_layers):
        for name in _VISION_LAYER:
            yield from layer(f"{layout.vision}encoder.layers.{i}.{name}", f"vision.encoder.layers.{i}.{name}")
    yield from layer(f"{layout.vision}post_layernorm", "vision.post_layernorm")
    yield from layer(layout.projector, "projector")
    for i in range(layers):
        for name in (*_PROJECTIONS, *_NORMS):
            yield _weight(f"{layout.language}layers.{i}.{name}", f"prefix_layers.{i}.{name}")
    yield _weight(f"{layout.language}norm", "prefix_norm")
    for i in range(layers):
        for name in _PROJECTIONS:
            yield _weight(f"{layout.expert}model.layers.{i}.{name}", f"expert_layers.{i}.{name}")
        for name in _NORMS:
            yield from layer(f"{layout.expert}model.layers.{i}.{name}.dense", f"expert_layers.{i}.{name}.dense")
    yield from layer(f"{layout.expert}model.norm.dense", "expert_norm.dense")
    for name in ("action_in_proj", "action_out_proj"):
        yield from layer(layout.heads + name, name)
    for name in ("in", "out"):
        yield from layer(layout.time + name, f"time_mlp_{name}")


def _weight(source: str, target: str) -> Rule:
    return Rule((f"{source}.weight",), (Part(f"{target}.weight"),))
