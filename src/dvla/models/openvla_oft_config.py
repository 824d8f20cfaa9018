"""Sizes and switches of OpenVLA-OFT, and the named presets. Imports neither torch nor transformers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NUM_BINS = 256
"""Action bins of one action element; their token ids are the last `NUM_BINS` of the vocabulary."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenVLAOFTConfig:
    """Every size of the architecture; what is not named here is the same in all published checkpoints."""

    image_size: int
    """Side in pixels of the square image both vision towers see; other images are resized."""
    patch_size: int
    """Side of a patch in pixels; a camera gives (image_size / patch_size)² tokens."""

    dino_hidden_size: int
    dino_layers: int
    """Blocks of the DINOv2 tower, the unused last one included."""
    dino_heads: int

    siglip_hidden_size: int
    siglip_layers: int
    """Blocks of the SigLIP tower, the unused last one included."""
    siglip_heads: int
    siglip_mlp_size: int

    llm_hidden_size: int
    llm_layers: int
    llm_heads: int
    llm_mlp_size: int
    vocab_size: int
    """Token ids of text and actions together; the action ids are the last 256 of them. The pad id and the rows that fill
    the embedding up to a multiple of 64 come on top."""

    use_proprio: bool = False
    """Give the model the proprioceptive state as one token after the vision tokens."""
    keep_stop_token: bool = True
    """End the sequence in ``</s>``, which all positions attend to. Published variants differ; a checkpoint needs the
    setting it was trained with."""

    center_crop: bool = False
    """Show the middle 90 % of each picture only, resized: what checkpoints trained with random crops expect."""
    pixel_means: Sequence[Sequence[float]] = ((0.485, 0.456, 0.406), (0.5, 0.5, 0.5))
    """Per tower (DINOv2, SigLIP) and channel, of intensities in [0, 1]; a checkpoint brings its own."""
    pixel_stds: Sequence[Sequence[float]] = ((0.229, 0.224, 0.225), (0.5, 0.5, 0.5))

    greedy_decoding: str = "argmax"
    """How a greedy decision, as in evaluation, takes its actions: "argmax", the likeliest bin, or "mean", the expectation over
    the bins, which is what sampling improves on average where labels pile up at the ends of the range."""

    smooth_action_head: bool = True
    """Random start only: the head's rows vary smoothly along the bin axis, so that neighbouring bins learn together."""
    initial_logit_std: float = 1.0
    """Random start only: spread of the action logits before temperature, > 0. Small means close to uniform."""

    def __post_init__(self) -> None:
        if self.image_size % self.patch_size:
            raise ValueError(f"image_size {self.image_size} is no multiple of patch_size {self.patch_size}")
        for tower in ("dino", "siglip", "llm"):
            width, heads = getattr(self, f"{tower}_hidden_size"), getattr(self, f"{tower}_heads")
            if width % heads:
                raise ValueError(f"{tower}_hidden_size {width} is no multiple of {tower}_heads {heads}")
        for tower in ("dino", "siglip"):
            if getattr(self, f"{tower}_layers") < 2:
                raise ValueError(f"{tower}_layers must be at least 2: the features come from the second-to-last block")
        if self.greedy_decoding not in ("argmax", "mean"):
            raise ValueError(f"greedy_decoding must be argmax or mean, not {self.greedy_decoding!r}")
        if self.initial_logit_std <= 0:
            raise ValueError(f"initial_logit_std must be positive, got {self.initial_logit_std}")

    @property
    def num_patches(self) -> int:
        """Vision tokens of one camera."""
        return (self.image_size // self.patch_size) ** 2

    @property
    def vision_size(self) -> int:
        """Channels of the fused vision features."""
        return self.dino_hidden_size + self.siglip_hidden_size

    @property
    def num_embeddings(self) -> int:
        """Rows of the token embedding: the vocabulary and the pad id, filled up to a multiple of 64."""
        return (self.vocab_size + 1 + 63) // 64 * 64

    @property
    def first_action_id(self) -> int:
        """Token id of action bin 0."""
        return self.vocab_size - NUM_BINS


PRESETS: dict[str, OpenVLAOFTConfig] = {
    "nano": OpenVLAOFTConfig(
        image_size=64,
        patch_size=16,
        dino_hidden_size=64,
        dino_layers=2,
        dino_heads=4,
        siglip_hidden_size=64,
        siglip_layers=2,
        siglip_heads=4,
        siglip_mlp_size=256,
        llm_hidden_size=128,
        llm_layers=3,
        llm_heads=4,
        llm_mlp_size=344,
        vocab_size=768,
    ),
    "tiny": OpenVLAOFTConfig(
        image_size=64,
        patch_size=8,
        dino_hidden_size=96,
        dino_layers=3,
        dino_heads=4,
        siglip_hidden_size=96,
        siglip_layers=3,
        siglip_heads=4,
        siglip_mlp_size=384,
        llm_hidden_size=192,
        llm_layers=4,
        llm_heads=6,
        llm_mlp_size=512,
        vocab_size=1024,
    ),
    "small": OpenVLAOFTConfig(
        image_size=112,
        patch_size=14,
        dino_hidden_size=192,
        dino_layers=4,
        dino_heads=6,
        siglip_hidden_size=192,
        siglip_layers=4,
        siglip_heads=6,
        siglip_mlp_size=768,
        llm_hidden_size=320,
        llm_layers=6,
        llm_heads=5,
        llm_mlp_size=864,
        vocab_size=1024,
    ),
    "full": OpenVLAOFTConfig(
        image_size=224,
        patch_size=14,
        dino_hidden_size=1024,
        dino_layers=24,
        dino_heads=16,
        siglip_hidden_size=1152,
        siglip_layers=27,
        siglip_heads=16,
        siglip_mlp_size=4304,
        llm_hidden_size=4096,
        llm_layers=32,
        llm_heads=32,
        llm_mlp_size=11008,
        vocab_size=32000,
    ),
}
"""``full`` is the published 7.5-billion-parameter model; the others have its architecture at sizes for a CPU."""
