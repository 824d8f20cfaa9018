"""Random weights from which pi0.5 can learn without pre-training."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import nn

from dvla.models.pi05_layers import AdaptiveRMSNorm

if TYPE_CHECKING:
    from dvla.models.pi05 import Pi05


def initialise_from_scratch(model: Pi05) -> None:
    """Draw all weights from the global generator, so that every layer keeps the scale of its input.

    The gates of adaRMS start at 1: at the 0 that training from a vision-language model begins with, no gradient would
    reach the expert's layers.
    """
    branches = 2 * model.config.layers
    with torch.no_grad():
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear | nn.Conv2d):
                ends_branch = name.endswith(("o_proj", "down_proj", "out_proj", "fc2"))
                gain = branches**-0.5 if ends_branch else 1.0
                if name.endswith("action_out_proj") or name.startswith("noise_head"):
                    gain = 0.1
                module.weight.normal_(std=gain / math.sqrt(module.weight[0].numel()))
                if module.bias is not None:
                    module.bias.zero_()
        for module in model.modules():
            if isinstance(module, AdaptiveRMSNorm):
                module.dense.weight *= 0.1
                module.dense.bias[2 * module.dense.in_features :] = 1.0
        model.embed_tokens.weight.normal_(std=model.config.hidden_size**-0.5)
        model.vision.embeddings.position_embedding.weight.normal_(std=0.5)
