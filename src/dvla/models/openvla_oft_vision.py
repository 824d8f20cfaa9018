"""Vision of OpenVLA-OFT: DINOv2 and SigLIP side by side, and the projector into the language model's width."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import Dinov2WithRegistersConfig, Dinov2WithRegistersModel, SiglipVisionConfig, SiglipVisionModel

from dvla.models.openvla_oft_config import OpenVLAOFTConfig
from dvla.models.resize import center_crop, resize

_NUM_REGISTERS = 4


class FusedVisionBackbone(nn.Module):
    """Patch features of two vision transformers, concatenated on channels.

    The features are what comes out of the second-to-last block, before any final norm. The last blocks, the final norms
    and SigLIP's pooling head are therefore dead weight: they stay, frozen, because checkpoints hold them, but they are
    never computed.
    """

    pixel_means: Tensor
    pixel_stds: Tensor

    def __init__(self, config: OpenVLAOFTConfig) -> None:
        super().__init__()
        self.config = config
        self.dino = Dinov2WithRegistersModel(
            Dinov2WithRegistersConfig(
                hidden_size=config.dino_hidden_size,
                num_hidden_layers=config.dino_layers,
                num_attention_heads=config.dino_heads,
                num_register_tokens=_NUM_REGISTERS,
                image_size=config.image_size,
                patch_size=config.patch_size,
                layer_norm_eps=1e-6,
                attn_implementation="sdpa",
            )
        )
        self.siglip = SiglipVisionModel(
            SiglipVisionConfig(
                hidden_size=config.siglip_hidden_size,
                intermediate_size=config.siglip_mlp_size,
                num_hidden_layers=config.siglip_layers,
                num_attention_heads=config.siglip_heads,
                image_size=config.image_size,
                patch_size=config.patch_size,
                hidden_act="gelu",  # the checkpoints were trained with the exact GELU, not SigLIP's usual approximation
                layer_norm_eps=1e-6,
                attn_implementation="sdpa",
            )
        )
        for dead in (
            self.dino.encoder.layer[-1],
            self.dino.layernorm,
            self.siglip.encoder.layers[-1],
            self.siglip.post_layernorm,
            self.siglip.head,
        ):
            dead.requires_grad_(False)
        self.dino.embeddings.mask_token.requires_grad_(False)
        self.reset_buffers()

    @property
    def live_blocks(self) -> list[nn.Module]:
        """The transformer blocks that are computed, in forward order."""
        return [*self.dino.encoder.layer[:-1], *self.siglip.encoder.layers[:-1]]

    def reset_buffers(self) -> None:
        """Compute the constants anew, on the device of the weights: they are in no checkpoint."""
        device = self.dino.embeddings.cls_token.device
        # (tower, image, channel, height, width)
        for name in ("pixel_means", "pixel_stds"):
            values = torch.tensor([list(tower) for tower in getattr(self.config, name)], device=device)
            self.register_buffer(name, values.view(2, 1, 3, 1, 1), persistent=False)
        positions = torch.arange(self.siglip.embeddings.num_positions, device=device).expand(1, -1)
        self.siglip.embeddings.register_buffer("position_ids", positions, persistent=False)

    def preprocess(self, images: Tensor) -> Tensor:
        """Resize and normalise.

        Args:
            images: (N, H, W, 3) uint8.

        Returns:
            (2, N, 3, image_size, image_size) float32: as DINOv2 expects it, as SigLIP does.
        """
        pixels = resize(images, (self.config.image_size, self.config.image_size), "bicubic")
        if self.config.center_crop:
            pixels = center_crop(pixels)
        pixels = pixels.permute(0, 3, 1, 2)
        # In the order of the original: a fused multiply-add is off by a rounding, which the towers magnify a hundredfold.
        return (pixels.to(self.pixel_means.dtype) / 255 - self.pixel_means) / self.pixel_stds

    def forward(self, images: Tensor) -> Tensor:
        """Features (N, patches, dino + siglip channels) of `images` (N, H, W, 3) uint8."""
        for_dino, for_siglip = self.preprocess(images)
        x = self.dino.embeddings(for_dino)
        for block in self.dino.encoder.layer[:-1]:
            x = block(x)
        y = self.siglip.embeddings(for_siglip)
        for block in self.siglip.encoder.layers[:-1]:
            y = block(y, None)
        return torch.cat((x[:, 1 + _NUM_REGISTERS :], y), dim=-1)


class VisionProjector(nn.Module):
    """Three-layer perceptron from the vision features to the language model's width."""

    def __init__(self, vision_size: int, llm_size: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(vision_size, 4 * vision_size)
        self.fc2 = nn.Linear(4 * vision_size, llm_size)
        self.fc3 = nn.Linear(llm_size, llm_size)

    def forward(self, features: Tensor) -> Tensor:
        """(…, vision_size) to (…, llm_size)."""
        return self.fc3(F.gelu(self.fc2(F.gelu(self.fc1(features)))))


class ProprioProjector(nn.Module):
    """Two-layer perceptron from the proprioceptive state to one token."""

    def __init__(self, state_dim: int, llm_size: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(state_dim, llm_size)
        self.fc2 = nn.Linear(llm_size, llm_size)

    def forward(self, state: Tensor) -> Tensor:
        """(B, state_dim) to (B, llm_size)."""
        return self.fc2(F.gelu(self.fc1(state)))
