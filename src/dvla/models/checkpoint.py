"""A pre-trained checkpoint of one of the models, opened and understood before anything is built."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from dvla.config import ConfigError, ModelConfig
from dvla.envs.protocol import EnvSpec
from dvla.models.checkpoint_files import CheckpointFiles
from dvla.models.lora import canonical_name, initialise_new, is_new
from dvla.models.normalization import Statistics, read_openvla_statistics, read_pi05_statistics
from dvla.models.openvla_oft_config import OpenVLAOFTConfig
from dvla.models.openvla_oft_weights import oft_weight_map, read_oft_config
from dvla.models.pi05_config import Pi05Config
from dvla.models.pi05_weights import pi05_weight_map, read_pi05_sizes
from dvla.models.registry import check_options, known_model
from dvla.models.tokenizer import TextTokenizer, load_tokenizer
from dvla.models.weight_map import WeightMap, check, fill_parameter, load_parameters

NOISE_HEAD = "noise_head.safetensors"
"""Where the noise head of Flow-Noise lies, which the originals do not have."""

logger = logging.getLogger(__name__)

_Config = OpenVLAOFTConfig | Pi05Config


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a folder of weights says about its model."""

    files: CheckpointFiles
    config: _Config
    weight_map: WeightMap
    statistics: Statistics | None
    tokenizer: TextTokenizer | None
    """None where the caller did not want one."""
    noise_head: dict[str, Tensor]
    """Weights of Flow-Noise's head, which only our own exports have; empty where there are none."""

    @property
    def state_dim(self) -> int | None:
        """Elements of the proprioceptive state it was trained with; None if nothing tells."""
        projector = self.files.tensors.get("proprio_projector.fc1.weight")
        if projector is not None:
            return projector.shape[1]
        return None if self.statistics is None or self.statistics.state is None else len(self.statistics.state.low)

    def check(self, policy: Any) -> None:
        """Compare every tensor of the folder with the parameters of `policy`, which may be on ``meta``.

        Raises:
            ConfigError: Tensors are missing, unexpected or of another shape; lists them.
        """
        check(self.weight_map, original_shapes(policy), self.files)
        head = {n: tuple(p.shape) for n, p in policy.named_parameters() if n.startswith("noise_head.")}
        if head and not self.noise_head:
            logger.warning("%s has no %s: the noise head starts at random", self.files.folder, NOISE_HEAD)
        elif head and head != {name: tuple(tensor.shape) for name, tensor in self.noise_head.items()}:
            raise self.files.error(f"{NOISE_HEAD} does not fit the model")
        limit = getattr(self.config, "first_action_id", self.config.vocab_size)
        if self.tokenizer is not None and max(map(max, policy.prompts)) >= limit:
            raise ConfigError(f"model.tokenizer does not fit the checkpoint: it has token ids of {limit} and more")

    def load(self, policy: nn.Module, seed: int) -> None:
        """Fill the parameters of `policy`, plain or sharded, on its device; new ones are drawn from `seed`."""
        # A value head is the learner's own, and drawn by it.
        parameters = {name: p for name, p in policy.named_parameters() if not name.startswith("value_head.")}
        old = {canonical_name(name): parameter for name, parameter in parameters.items() if not is_new(name)}
        load_parameters(old, self.weight_map, self.files)
        initialise_new(parameters, seed)
        for name in [name for name in parameters if name in self.noise_head]:
            fill_parameter(parameters[name], self.noise_head[name])


def open_checkpoint(
    model: ModelConfig, *, with_tokenizer: bool = True, statistics: Statistics | None = None
) -> Checkpoint:
    """Open ``model.checkpoint``; reads headers and small files, no weights.

    Args:
        model: Says which, and how to read it.
        with_tokenizer: Read its tokenizer.
        statistics: Normalisation instead of its own, which is not looked at then.

    Raises:
        ConfigError: It cannot be used as ``model.name``; the message says why.
    """
    assert model.checkpoint is not None
    folder = Path(model.checkpoint).expanduser()
    openers = {"openvla_oft": _open_openvla_oft, "pi05": _open_pi05}
    if model.name not in openers:
        raise ConfigError(f"model.checkpoint: {model.name} cannot be loaded from one; {' and '.join(openers)} can")
    check_options(model.name, known_model(model.name, "nano", {})[1], model.options)
    files = CheckpointFiles(folder)
    if statistics is not None and (folder / "policy_preprocessor.json").is_file():
        raise files.error("lerobot's layout cannot take new statistics: keep its own with model.unnorm_key=lerobot")
    try:
        config, statistics = openers[model.name](folder, files, dict(model.options), model.unnorm_key, statistics)
    except ConfigError:
        raise
    except Exception as error:  # they may hold anything
        raise files.error(f"its JSON files are not as expected ({type(error).__name__}: {error})") from error
    tokenizer = None
    if with_tokenizer:
        own = Path(model.tokenizer).expanduser() if model.tokenizer else folder
        tokenizer = load_tokenizer("model.tokenizer" if model.tokenizer else "model.checkpoint", own)
    try:
        noise_head = load_file(folder / NOISE_HEAD) if (folder / NOISE_HEAD).is_file() else {}
    except (OSError, SafetensorError) as error:
        raise files.error(f"{NOISE_HEAD} cannot be read ({error})") from error
    weight_map = weight_map_of(config, files.tensors)
    return Checkpoint(files, config, weight_map, statistics, tokenizer, noise_head)


def weight_map_of(config: _Config, names: Collection[str] = ()) -> WeightMap:
    """How a checkpoint's tensors correspond to a model of these sizes; `names`, those that are there, tell the layout."""
    if isinstance(config, OpenVLAOFTConfig):
        return oft_weight_map(config)
    return pi05_weight_map(
        vision_layers=config.vision_layers,
        layers=config.layers,
        names=names,
        vocab_size=config.vocab_size,
        expert_width=config.expert_hidden_size,
    )


def original_shapes(policy: nn.Module) -> dict[str, tuple[int, ...]]:
    """Shapes of the parameters that the original has too, by canonical name."""
    return {canonical_name(n): tuple(p.shape) for n, p in policy.named_parameters() if not is_new(n)}


def build_from_checkpoint(build: Any, checkpoint: Checkpoint, spec: EnvSpec, model: ModelConfig) -> nn.Module:
    """The policy of an opened checkpoint, without weights (on ``meta``).

    Raises:
        ConfigError: It does not fit the environment, or a tensor does not fit the model.
    """
    try:
        with torch.device("meta"):
            policy = build(
                checkpoint.config,
                spec=spec,
                num_action_chunks=model.num_action_chunks,
                temperature=model.temperature,
                tokenizer=checkpoint.tokenizer,
                statistics=checkpoint.statistics,
            )
    except ValueError as error:
        raise ConfigError(str(error)) from error
    checkpoint.check(policy)
    return policy


def _is_ours_and_unnormalised(config: dict[str, Any]) -> bool:
    """Whether the weights were trained here from scratch, on actions and states as they are."""
    return config.get("dvla", {}).get("normalized") is False


def _open_openvla_oft(
    folder: Path, files: CheckpointFiles, options: dict[str, Any], unnorm_key: str | None, other: Statistics | None
) -> tuple[_Config, Statistics | None]:
    foreign = [path.name for kind in ("action_head", "vision_backbone") for path in folder.glob(f"{kind}--*")]
    if foreign:
        raise files.error(f"{foreign[0]} belongs to a variant (L1 or diffusion head, FiLM) that is not supported")
    # The newest by its number of steps, if it was saved several times.
    projectors = sorted(folder.glob("proprio_projector*"), key=lambda path: (_number(path.name), path.name))
    if projectors and options.setdefault("use_proprio", True):
        files.add(projectors[-1], prefix="proprio_projector.")
    config = read_oft_config(folder, files, options)
    if config.use_proprio and not projectors:
        raise ConfigError(f"model.options.use_proprio: {folder} has no proprio_projector file")
    if other is not None or _is_ours_and_unnormalised(files.read_json("config.json")):
        return config, other
    return config, read_openvla_statistics(folder, unnorm_key)


def _number(name: str) -> int:
    """The number in a file's name, 0 without one."""
    return int("".join(filter(str.isdigit, name)) or 0)


def _open_pi05(
    folder: Path, files: CheckpointFiles, options: dict[str, Any], unnorm_key: str | None, other: Statistics | None
) -> tuple[_Config, Statistics | None]:
    sizes: dict[str, Any] = read_pi05_sizes(files)
    raw = files.read_json("config.json")
    switches: dict[str, Any] = {}
    if horizon := raw.get("chunk_size", raw.get("action_horizon")):
        switches["action_horizon"] = horizon
    if sizes["vision_hidden_size"] == 1152:
        switches["vision_heads"] = 16
    if "chunk_size" in raw:  # lerobot's pi0.5 always writes the state into the prompt
        switches |= {"discrete_state_input": True, "max_token_len": raw.get("tokenizer_max_length", 200)}
    switches |= raw.get("dvla", {}).get("options", {}) | options
    if "action_horizon" not in switches:
        raise files.error("config.json has neither action_horizon nor chunk_size")
    if "discrete_state_input" not in switches:
        logger.warning(
            "openpi's folders do not say whether the state is part of the prompt: taken to be not, as for LIBERO "
            "(model.options.discrete_state_input)"
        )
    if "vision_heads" not in switches:
        raise ConfigError(
            f"model.options.vision_heads: weights of {folder} do not tell the number of heads of this vision tower: give it"
        )
    for name, size in sizes.items():
        if switches.get(name, size) != size:
            raise ConfigError(
                f"model.options.{name}={switches[name]} contradicts the weights of {folder}, which have {size}"
            )
    try:
        config = Pi05Config(**sizes | switches)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"model.options: {error}") from error
    if other is not None or _is_ours_and_unnormalised(raw):
        return config, other
    return config, read_pi05_statistics(folder, unnorm_key)
