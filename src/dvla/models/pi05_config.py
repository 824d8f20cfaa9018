"""Sizes and switches of pi0.5, and the named presets. Imports neither torch nor transformers."""

from __future__ import annotations

from dataclasses import dataclass

SAMPLERS = ("flow_sde", "flow_noise")
CAMERA_SLOTS = 3
"""Pictures the model was trained with: base, left wrist, right wrist."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pi05Config:
    """Every size of the architecture; what is not named here is the same in all published checkpoints."""

    image_size: int
    """Side in pixels of the square pictures; others are resized, their aspect kept by black bars."""
    patch_size: int

    vision_hidden_size: int
    vision_layers: int
    vision_heads: int
    vision_mlp_size: int

    hidden_size: int
    """Width of the prefix: pictures and prompt."""
    mlp_size: int
    layers: int
    """Layers of the prefix and of the action expert."""
    heads: int
    """Query heads of both; they share one key-value head."""
    head_dim: int
    expert_hidden_size: int
    expert_mlp_size: int
    vocab_size: int

    action_horizon: int
    """Actions of one chunk (H); the first ``model.num_action_chunks`` of them are executed."""
    action_dim: int = 32
    """Width of an action in the network; an environment's actions are the first elements."""
    max_token_len: int = 200
    """Prompts are cut to this many tokens."""
    discrete_state_input: bool = False
    """Write the state into the prompt, in 256 bins. A checkpoint needs the setting it was trained with."""

    sampler: str = "flow_sde"
    """``flow_sde``: one denoising step of each decision, drawn anew, is noisy. ``flow_noise``: all are, with a learned
    standard deviation; log-probabilities are true sums over the whole chain (not means over it, as elsewhere)."""
    num_denoise_steps: int = 4
    noise_level: float = 0.5
    """Noise of ``flow_sde`` (a)."""

    def __post_init__(self) -> None:
        if self.image_size % self.patch_size:
            raise ValueError(f"image_size {self.image_size} is no multiple of patch_size {self.patch_size}")
        if self.vision_hidden_size % self.vision_heads:
            raise ValueError(
                f"vision_hidden_size {self.vision_hidden_size} is no multiple of vision_heads {self.vision_heads}"
            )
        if self.sampler not in SAMPLERS:
            raise ValueError(f"sampler must be one of {', '.join(SAMPLERS)}, got {self.sampler!r}")
        if self.num_denoise_steps < 1:
            raise ValueError(f"num_denoise_steps must be at least 1, got {self.num_denoise_steps}")
        if self.noise_level <= 0:
            raise ValueError(f"noise_level must be positive, got {self.noise_level}")

    @property
    def num_patches(self) -> int:
        """Vision tokens of one camera."""
        return (self.image_size // self.patch_size) ** 2


PRESETS: dict[str, Pi05Config] = {
    "nano": Pi05Config(
        image_size=64,
        patch_size=16,
        vision_hidden_size=64,
        vision_layers=2,
        vision_heads=4,
        vision_mlp_size=256,
        hidden_size=128,
        mlp_size=384,
        layers=3,
        heads=4,
        head_dim=32,
        expert_hidden_size=64,
        expert_mlp_size=192,
        vocab_size=512,
        action_horizon=8,
        max_token_len=128,
    ),
    "tiny": Pi05Config(
        image_size=64,
        patch_size=8,
        vision_hidden_size=96,
        vision_layers=3,
        vision_heads=4,
        vision_mlp_size=384,
        hidden_size=192,
        mlp_size=768,
        layers=4,
        heads=6,
        head_dim=32,
        expert_hidden_size=96,
        expert_mlp_size=384,
        vocab_size=768,
        action_horizon=8,
    ),
    "small": Pi05Config(
        image_size=112,
        patch_size=14,
        vision_hidden_size=192,
        vision_layers=4,
        vision_heads=6,
        vision_mlp_size=768,
        hidden_size=320,
        mlp_size=1280,
        layers=6,
        heads=8,
        head_dim=40,
        expert_hidden_size=160,
        expert_mlp_size=640,
        vocab_size=1024,
        action_horizon=10,
    ),
    "full": Pi05Config(
        image_size=224,
        patch_size=14,
        vision_hidden_size=1152,
        vision_layers=27,
        vision_heads=16,
        vision_mlp_size=4304,
        hidden_size=2048,
        mlp_size=16384,
        layers=18,
        heads=8,
        head_dim=256,
        expert_hidden_size=1024,
        expert_mlp_size=4096,
        vocab_size=257152,
        action_horizon=10,
    ),
}
"""``full`` is the published 3.35-billion-parameter model; the others have its architecture at sizes for a CPU."""
