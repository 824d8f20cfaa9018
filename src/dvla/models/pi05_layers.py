"""Transformer layers of pi0.5: the prefix's, which hand out their keys and values, and the action expert's.

They are Gemma's, but for two things that Gemma's own classes cannot do: the expert attends to the prefix layer of the same
depth beside its own tokens, and its norms are steered by the denoising time (adaRMS).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import GemmaConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.gemma.modeling_gemma import GemmaMLP, GemmaRMSNorm, apply_rotary_pos_emb

from dvla.models.precision import at_least_float32

KeyValue = tuple[Tensor, Tensor]
"""Keys, after rotary embedding, and values; each (B, 1, S, head_dim)."""


class MultiQueryAttention(nn.Module):
    """Attention of many query heads to one key-value head, bidirectional."""

    def __init__(self, config: GemmaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        width, inner = config.hidden_size, config.num_attention_heads * config.head_dim
        self.q_proj = nn.Linear(width, inner, bias=False)
        self.k_proj = nn.Linear(width, config.head_dim, bias=False)
        self.v_proj = nn.Linear(width, config.head_dim, bias=False)
        self.o_proj = nn.Linear(inner, width, bias=False)

    def key_value(self, x: Tensor, rotary: KeyValue) -> KeyValue:
        """Keys and values of (B, S, d); `rotary` are the cosines and sines (B, S, head_dim) of its positions."""
        key = self.k_proj(x).unsqueeze(1)
        # A copy, because FSDP2 warns of modules that return views.
        return apply_rotary_pos_emb(key, key, *rotary)[1], self.v_proj(x).unsqueeze(1).clone()

    def forward(self, x: Tensor, rotary: KeyValue, key_value: KeyValue, mask: Tensor | None) -> Tensor:
        """Attend from (B, S, d) to `key_value`; `mask` (B, 1, 1, keys) bool is True where there is a token."""
        batch, length, _ = x.shape
        query = self.q_proj(x).view(batch, length, -1, self.head_dim).transpose(1, 2)
        query = apply_rotary_pos_emb(query, query, *rotary)[0]
        # All heads see the same keys under the same mask: as rows of one head they need no copies of the keys.
        attended = F.scaled_dot_product_attention(
            query.reshape(batch, 1, -1, self.head_dim), *key_value, attn_mask=mask
        )
        return self.o_proj(attended.view(batch, -1, length, self.head_dim).transpose(1, 2).flatten(2))


class PrefixLayer(GradientCheckpointingLayer):
    """A layer over pictures and prompt."""

    def __init__(self, config: GemmaConfig) -> None:
        super().__init__()
        self.self_attn = MultiQueryAttention(config)
        self.mlp = GemmaMLP(config)
        self.input_layernorm = GemmaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = GemmaRMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self, x: Tensor, rotary: KeyValue, mask: Tensor | None, needs_output: bool
    ) -> tuple[Tensor | None, KeyValue]:
        """(B, S, d) to the same, and the layer's keys and values, which is all that is needed of the last layer."""
        normed = self.input_layernorm(x)
        key_value = self.self_attn.key_value(normed, rotary)
        if not needs_output:
            return None, key_value
        x = x + self.self_attn(normed, rotary, key_value, mask)
        return x + self.mlp(self.post_attention_layernorm(x)), key_value


class AdaptiveRMSNorm(nn.Module):
    """RMS norm whose scale, shift and residual gate are functions of a condition (adaRMS)."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.dense = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        """Normed (B, S, d) and the gate (B, 1, d), for `condition` (B, d)."""
        wide = at_least_float32(x)
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        scale, shift, gate = self.dense(condition).unsqueeze(1).chunk(3, dim=-1)
        return (wide * (1 + at_least_float32(scale)) + at_least_float32(shift)).to(x.dtype), gate


class ExpertLayer(GradientCheckpointingLayer):
    """A layer over the action tokens, which see the prefix and each other."""

    def __init__(self, config: GemmaConfig) -> None:
        super().__init__()
        self.self_attn = MultiQueryAttention(config)
        self.mlp = GemmaMLP(config)
        self.input_layernorm = AdaptiveRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = AdaptiveRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(self, x: Tensor, condition: Tensor, rotary: KeyValue, prefix: KeyValue, mask: Tensor | None) -> Tensor:
        """(B, H, d) to the same; `mask` (B, 1, 1, P + H) covers the prefix and the actions."""
        normed, gate = self.input_layernorm(x, condition)
        own = self.self_attn.key_value(normed, rotary)
        key, value = (torch.cat(pair, dim=2) for pair in zip(prefix, own, strict=True))
        x = x + self.self_attn(normed, rotary, (key, value), mask) * gate
        normed, gate = self.post_attention_layernorm(x, condition)
        return x + self.mlp(normed) * gate
