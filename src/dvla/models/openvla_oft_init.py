"""Random weights that OpenVLA-OFT can learn from without pre-training.

The initial values of the composed classes are made to be overwritten by a checkpoint. Trained from scratch they have two
faults. They are so small that the action slots, which differ in nothing but their position, all get nearly the same
output. And the 256 bins of an action are unrelated classes: what is learnt about one bin says nothing about the next.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from dvla.models.openvla_oft_config import NUM_BINS

_NUM_WAVES = 6


def smooth_rows(width: int, std: float) -> Tensor:
    """Rows (256, width) whose every column is a random low-frequency function of the bin's place on the action axis.

    Column functions are sums of cosines of 1 to 6 half-waves over the axis, with weights falling as 1/n. There is no
    constant: it would move all logits alike, which the softmax ignores. Neighbouring rows are nearly parallel, so a
    gradient on one bin moves its neighbours too.
    """
    wave = torch.arange(1, _NUM_WAVES + 1)
    place = (torch.arange(NUM_BINS) + 0.5) / NUM_BINS
    waves = torch.cos(math.pi * wave * place[:, None]) / wave  # (256, waves)
    waves *= std / waves.square().sum(1).mean().sqrt()
    return waves @ torch.randn(_NUM_WAVES, width)
