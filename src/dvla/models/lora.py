"""Low-rank adapters (LoRA, arXiv 2106.09685) through peft, and new weights that no checkpoint holds."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import Linear
from torch import Tensor, nn

from dvla.config import ConfigError
from dvla.models.weight_map import fill_parameter


def add_lora(policy: nn.Module, *, rank: int, alpha: float, targets: Sequence[str]) -> None:
    """Put adapters beside linear layers, in place, and freeze all else.

    Args:
        policy: A plain policy; layers that are frozen already get no adapter.
        rank: Inner width of an adapter.
        alpha: An adapter's output is multiplied by alpha / rank.
        targets: Last parts of the names of the layers to adapt, e.g. ``q_proj``.

    Raises:
        ConfigError: A target matches no layer.
    """
    linear = {
        name: module
        for name, module in policy.named_modules()
        if isinstance(module, nn.Linear) and module.weight.requires_grad
    }
    there = sorted({name.rsplit(".", 1)[-1] for name in linear})
    for target in targets:
        if target not in there:
            raise ConfigError(
                f"model.lora_targets: {target!r} matches no trainable linear layer; there are {', '.join(there)}"
            )
    chosen = [name for name in linear if name.rsplit(".", 1)[-1] in targets]
    device = next(policy.parameters()).device
    with device:
        config = LoraConfig(r=rank, lora_alpha=alpha, target_modules=chosen)  # type: ignore[arg-type]  # any number does
        inject_adapter_in_model(config, policy)
    for name, parameter in policy.named_parameters():
        parameter.requires_grad_(is_new(name))  # a noise head is new too: no checkpoint has it


def canonical_name(name: str) -> str:
    """Name of a parameter as it is without adapters."""
    return name.replace(".base_layer.", ".")


def is_new(name: str) -> bool:
    """Whether a parameter is ours and in no checkpoint of the original."""
    return ".lora_" in name or name.startswith("noise_head.")


def initialise_new(parameters: Mapping[str, Tensor], seed: int) -> None:
    """Draw the weights that no checkpoint holds, each from a generator of its own name, plain or sharded.

    The outer matrix of an adapter and all biases are zero, so that an adapted layer starts as it was.
    """
    for name, parameter in parameters.items():
        if not is_new(name):
            continue
        full = torch.zeros(parameter.shape)
        if not name.endswith("bias") and ".lora_B." not in name:
            digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "big"))
            gain = 0.1 if name.startswith("noise_head.") else 1.0
            full.normal_(std=gain / math.sqrt(parameter.shape[-1]), generator=generator)
        fill_parameter(parameter, full)


def merged_reader(policy: nn.Module) -> Callable[[str], Tensor]:
    """A function from a canonical name to the parameter, with the adapter that stands beside it added.

    Merging happens when a tensor is asked for: all at once would be a second copy of most of the model.
    """
    weights = {
        canonical_name(name): parameter.detach()
        for name, parameter in policy.named_parameters()
        if ".lora_" not in name
    }
    adapted = {f"{name}.weight": layer for name, layer in policy.named_modules() if isinstance(layer, Linear)}

    def read(name: str) -> Tensor:
        if name not in adapted:
            return weights[name]
        return weights[name] + adapted[name].get_delta_weight("default").detach()

    return read
