"""Random weights from which OpenVLA-OFT can learn without pre-training.

The composed classes come with initial values that are meant to be overwritten by a checkpoint. Learning from those fails
for two reasons, and both are mended here:

* They are so small that the action slots, which differ in nothing but their position, get nearly the same output. Here
  every layer keeps the scale of its input, so that attention depends on position and content from the start.
* The 256 bins of an action element are unrelated classes, and what is learnt about one says nothing about the next. Here
  the head's rows vary smoothly along the action axis, so that a change of the hidden state that favours a bin favours its
  neighbours too. They are ordinary weights afterwards.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dvla.models.openvla_oft_config import NUM_BINS

if TYPE_CHECKING:
    from dvla.models.openvla_oft import OpenVLAOFT

_NUM_WAVES = 6
_QUERY_GAIN = 2.5
"""Sharpness of the language model's attention. Position alone tells the action slots apart: at 1, neighbouring slots are
99.5 % alike (cosine of their last hidden states), and all elements of an action are learnt as one."""
_RESIDUAL_OUTPUTS = ("o_proj", "out_proj", "down_proj", "fc2")
"""Names of the layers whose output is added to the residual stream."""


def initialise_from_scratch(model: OpenVLAOFT) -> None:
    """Draw all live weights anew from the global generator."""
    vision, llm = model.vision_backbone, model.language_model.model
    with torch.no_grad():
        for blocks in (vision.dino.encoder.layer, vision.siglip.encoder.layers, llm.layers):
            _initialise_blocks(blocks)
        for layer in llm.layers:
            layer.self_attn.q_proj.weight *= _QUERY_GAIN
        for module in (model.projector, model.proprio_projector):
            for layer in module.children() if module is not None else ():
                _keep_scale(layer)
        dino, siglip = vision.dino.embeddings, vision.siglip.embeddings
        for patches in (dino.patch_embeddings.projection, siglip.patch_embedding):
            _keep_scale(patches)
        # Drawn like everything else, the registers too: equal ones would stay equal.
        for tokens in (dino.position_embeddings, dino.cls_token, dino.register_tokens):
            tokens.normal_(std=0.5)
        siglip.position_embedding.weight.normal_(std=0.5)
        llm.embed_tokens.weight.normal_()

        # The norm before the head makes a hidden state of length sqrt(width).
        width, std = model.config.llm_hidden_size, model.config.initial_logit_std
        first = model.config.first_action_id
        rows = smooth_rows(width) if model.config.smooth_action_head else torch.randn(NUM_BINS, width)
        model.language_model.lm_head.weight[first : first + NUM_BINS] = rows * (std / math.sqrt(width))


def smooth_rows(width: int) -> Tensor:
    """Rows (256, width) of unit variance, whose columns are random low-frequency functions of the place in the table.

    A column is a sum of cosines of 1 to 6 half-waves over the table, with amplitudes falling as 1/n. There is no constant:
    it would move all logits alike, which the softmax ignores.
    """
    wave = torch.arange(1, _NUM_WAVES + 1)
    place = (torch.arange(NUM_BINS) + 0.5) / NUM_BINS
    waves = torch.cos(math.pi * wave * place[:, None]) / wave  # (256, waves)
    waves /= waves.square().sum(1).mean().sqrt()
    return waves @ torch.randn(_NUM_WAVES, width)


def _initialise_blocks(blocks: Sequence[nn.Module]) -> None:
    """Initialise the transformer blocks of one tower; the sum of all residual branches keeps the scale of one."""
    for block in blocks:
        for name, layer in block.named_modules():
            if isinstance(layer, nn.Linear):
                _keep_scale(layer, 1 / math.sqrt(2 * len(blocks)) if name.endswith(_RESIDUAL_OUTPUTS) else 1.0)


def _keep_scale(layer: Any, gain: float = 1.0) -> None:
    """Draw a linear or convolution layer: output of `gain` times the scale of the input, no bias."""
    layer.weight.normal_(std=gain / math.sqrt(layer.weight[0].numel()))
    if layer.bias is not None:
        layer.bias.zero_()
