"""A trained policy in the layout of the original tools, written tensor by tensor."""

from __future__ import annotations

import dataclasses
import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dvla.config import ConfigError, ModelConfig
from dvla.models.checkpoint import NOISE_HEAD, open_checkpoint, original_shapes, weight_map_of
from dvla.models.checkpoint_files import INDEX_FILE, SINGLE_FILE, CheckpointFiles, TensorPlan, write_safetensors
from dvla.models.lora import merged_reader
from dvla.models.normalization import Statistics
from dvla.models.openvla_oft_config import OpenVLAOFTConfig
from dvla.models.pi05_config import Pi05Config
from dvla.models.weight_map import WeightMap, export_tensor, source_shapes

PROPRIO = "proprio_projector."
_Read = Callable[[str], Tensor]


def write_policy(policy: Any, model: ModelConfig, out: Path, statistics: Statistics | None = None) -> None:
    """Write a plain policy with its weights on the CPU.

    Args:
        policy: The policy, with or without adapters.
        model: The config it was built from: with a checkpoint, its layout is the checkpoint's.
        out: A new folder.
        statistics: Normalisation that took the place of the checkpoint's.

    Raises:
        ConfigError: The model has no layout of another tool.
    """
    if model.name not in ("openvla_oft", "pi05"):
        raise ConfigError(f"model.name={model.name} has no layout of another tool to be written in")
    read_parameter = merged_reader(policy)
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    temporary.chmod(0o755)
    try:
        if model.checkpoint is not None:
            opened = open_checkpoint(model, with_tokenizer=False, statistics=statistics)
            _write_like(opened.files, opened.weight_map, read_parameter, temporary)
            if statistics is not None:
                _replace_statistics(model.name, statistics, temporary)
        else:
            _write_new(policy, read_parameter, temporary)
        head = {name: p for name, p in policy.named_parameters() if name.startswith("noise_head.")}
        if head:
            _write_small(temporary / NOISE_HEAD, head)
        temporary.rename(out)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _write_like(files: CheckpointFiles, weight_map: WeightMap, read_parameter: _Read, out: Path) -> None:
    """Write every tensor of `files` under its name, in its dtype, to a file of its name; copy what is no weights."""
    read = _reader(weight_map, read_parameter, files)
    by_file: dict[Path, list[TensorPlan]] = {}
    for name, info in files.tensors.items():
        by_file.setdefault(info.file, []).append((name, info.dtype, info.shape))
    for path, tensors in by_file.items():
        if path.name.startswith("proprio_projector"):
            _write_projector(path, out / path.name, {name.removeprefix(PROPRIO): read(name) for name, *_ in tensors})
        else:
            write_safetensors(out / path.name, tensors, read, files.metadata)
    written = {path.name for path in by_file}
    for path in files.folder.iterdir():
        # Weights that were not read (shards beside a whole file) would stay untrained.
        is_weights = path.match("model*.safetensors*") and not (path.name == INDEX_FILE and SINGLE_FILE not in written)
        if path.name not in written and path.name != NOISE_HEAD and not is_weights:
            (shutil.copytree if path.is_dir() else shutil.copyfile)(path, out / path.name)


def _write_statistics(model: str, statistics: Statistics, out: Path) -> None:
    """Write them where the original's tools look for them."""
    if model == "pi05":
        file, content = out / "assets" / statistics.key / "norm_stats.json", {"norm_stats": statistics.raw}
    else:
        file, content = out / "dataset_statistics.json", {statistics.key: statistics.raw}
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(content, indent=2) + "\n")


def _replace_statistics(model: str, statistics: Statistics, out: Path) -> None:
    """Take away the statistics of what the weights were trained on before, and write those of what they are trained on now."""
    for old in [*out.glob("**/norm_stats.json"), out / "dataset_statistics.json"]:
        old.unlink(missing_ok=True)
    _write_statistics(model, statistics, out)
    config = json.loads((out / "config.json").read_text(encoding="utf-8"))
    if config.get("dvla", {}).get("normalized") is False:
        config["dvla"]["normalized"] = True
        (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _write_small(path: Path, tensors: dict[str, Tensor]) -> None:
    write_safetensors(path, [(n, t.dtype, tuple(t.shape)) for n, t in tensors.items()], tensors.__getitem__)


def _write_projector(source: Path, target: Path, tensors: dict[str, Tensor]) -> None:
    """Write the proprio projector, a small file of its own, in the format and with the names of `source`."""
    if target.suffix == ".safetensors":
        _write_small(target, tensors)
    else:
        names = torch.load(source, weights_only=True, map_location="meta")
        torch.save({name: tensors[name.removeprefix("module.")] for name in names}, target)


def _write_new(policy: Any, read_parameter: _Read, out: Path) -> None:
    """Write a policy that began with random weights; the names and the order are those of the original's own files."""
    weight_map = weight_map_of(policy.config)
    read = _reader(weight_map, read_parameter, None)
    shapes = source_shapes(weight_map, original_shapes(policy)) | dict(weight_map.dead)
    names = [rule.sources[0] for rule in weight_map.rules] + list(weight_map.dead)
    projector = {name.removeprefix(PROPRIO): read(name) for name in names if name.startswith(PROPRIO)}
    if projector:
        _write_small(out / "proprio_projector.safetensors", projector)
    tensors = [(name, torch.float32, tuple(shapes[name])) for name in names if not name.startswith(PROPRIO)]
    write_safetensors(out / SINGLE_FILE, tensors, read, {"format": "pt"})
    described = _describe(policy.config, normalized=policy.statistics is not None)
    (out / "config.json").write_text(json.dumps(described, indent=2) + "\n")
    if policy.statistics is not None:
        _write_statistics("pi05" if isinstance(policy.config, Pi05Config) else "openvla_oft", policy.statistics, out)
    policy.tokenizer.save(out)


def _describe(config: OpenVLAOFTConfig | Pi05Config, *, normalized: bool) -> dict[str, Any]:
    """What the original keeps in ``config.json``, and under ``dvla`` what it has no place for."""
    options = dataclasses.asdict(config)
    if isinstance(config, Pi05Config):
        switches = [
            *("action_horizon", "vision_heads", "max_token_len", "discrete_state_input"),
            *("sampler", "num_denoise_steps", "noise_level"),
        ]
        return {
            "action_dim": config.action_dim,
            "action_horizon": config.action_horizon,
            "paligemma_variant": "gemma_2b" if config.hidden_size == 2048 else "dvla",
            "action_expert_variant": "gemma_300m" if config.expert_hidden_size == 1024 else "dvla",
            "precision": "float32",
            "dvla": {"normalized": normalized, "options": {key: options[key] for key in switches}},
        }
    switches = ["keep_stop_token", "center_crop", "pixel_means", "pixel_stds"]
    return {
        "model_type": "openvla",
        "architectures": ["OpenVLAForActionPrediction"],
        "arch_specifier": "no-align+fused-gelu-mlp",
        "image_resize_strategy": "resize-naive",
        "image_sizes": [config.image_size, config.image_size],
        "llm_backbone_id": "llama2-7b-pure",
        "n_action_bins": 256,
        "pad_token_id": config.vocab_size,
        "pad_to_multiple_of": config.num_embeddings - config.vocab_size,
        "text_config": {
            "model_type": "llama",
            "hidden_size": config.llm_hidden_size,
            "intermediate_size": config.llm_mlp_size,
            "num_hidden_layers": config.llm_layers,
            "num_attention_heads": config.llm_heads,
            "num_key_value_heads": config.llm_heads,
            "pad_token_id": config.vocab_size,
            "vocab_size": config.num_embeddings,
            "rms_norm_eps": 1e-6,
        },
        "use_fused_vision_backbone": True,
        "vision_backbone_id": "dinosiglip-vit-so-224px",
        "timm_model_ids": ["dvla_dino", "dvla_siglip"],
        "dvla": {
            "normalized": normalized,
            "dino_heads": config.dino_heads,
            "siglip_heads": config.siglip_heads,
            "options": {key: options[key] for key in switches},
        },
    }


def _reader(weight_map: WeightMap, read_parameter: _Read, files: CheckpointFiles | None) -> _Read:
    """A function from a checkpoint's tensor name to the tensor, in the dtype it has there."""

    def read(name: str) -> Tensor:
        if name in weight_map.rule_of:
            tensor = export_tensor(weight_map, name, read_parameter)
            return tensor if files is None else tensor.to(files.tensors[name].dtype)
        # A tensor that no computation reads: as it was, or zero where there was none.
        return torch.zeros(weight_map.dead[name]) if files is None else files.read(name)

    return read
