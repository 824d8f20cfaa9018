"""OpenVLA-OFT against numbers recorded from the public implementation.

The recordings are no part of the repository; they are looked for in ``$DVLA_GOLDEN``, else beside the repository in
``shared/golden``. Weights and names are those of a Hugging Face checkpoint of the original, at a tiny size.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from dvla.envs.protocol import EnvSpec
from dvla.models.openvla_oft import OpenVLAOFT
from dvla.models.openvla_oft_config import OpenVLAOFTConfig
from dvla.models.policy import Observation

GOLDEN = Path(os.environ.get("DVLA_GOLDEN", Path(__file__).parents[3] / "shared" / "golden")) / "openvla_oft_tiny"
SAMPLES, K, A, LONE_SPACE, STOP = 3, 8, 7, 300, 2
TOLERANCE = 1e-4

pytestmark = pytest.mark.skipif(not GOLDEN.is_dir(), reason=f"no recordings in {GOLDEN}")


class Renamer:
    """Moves the tensors of a checkpoint to the names of this implementation, and notices what is left over."""

    def __init__(self, checkpoint: dict[str, Tensor]) -> None:
        self.old, self.new = dict(checkpoint), {}

    def move(self, source: str, *targets: str) -> None:
        """Weight and bias of a layer; of several, stacked, when there are several targets."""
        for kind in ("weight", "bias"):
            for target, tensor in zip(targets, self.old.pop(f"{source}.{kind}").chunk(len(targets)), strict=True):
                self.new[f"{target}.{kind}"] = tensor

    def vision(self) -> None:
        old, new = "vision_backbone.featurizer.", "vision_backbone.dino."
        positions = self.old.pop(f"{old}pos_embed")
        self.new[f"{new}embeddings.cls_token"] = self.old.pop(f"{old}cls_token")
        self.new[f"{new}embeddings.register_tokens"] = self.old.pop(f"{old}reg_token")
        # The original has no position for the class token; here it is zero.
        self.new[f"{new}embeddings.position_embeddings"] = torch.cat((0 * positions[:, :1], positions), dim=1)
        self.new[f"{new}embeddings.mask_token"] = torch.zeros(1, positions.shape[-1])
        self.move(f"{old}patch_embed.proj", f"{new}embeddings.patch_embeddings.projection")
        self.move(f"{old}norm", f"{new}layernorm")
        for i in range(3):
            source, target = f"{old}blocks.{i}.", f"{new}encoder.layer.{i}."
            for layer in ("norm1", "norm2", "mlp.fc1", "mlp.fc2"):
                self.move(source + layer, target + layer)
            self.move(f"{source}attn.qkv", *(f"{target}attention.{x}_proj" for x in "qkv"))
            self.move(f"{source}attn.proj", f"{target}attention.o_proj")
            for n in "12":
                self.new[f"{target}layer_scale{n}.lambda1"] = self.old.pop(f"{source}ls{n}.scale_factor")

        old, new = "vision_backbone.fused_featurizer.", "vision_backbone.siglip."
        self.new[f"{new}embeddings.position_embedding.weight"] = self.old.pop(f"{old}pos_embed")[0]
        self.move(f"{old}patch_embed.proj", f"{new}embeddings.patch_embedding")
        self.move(f"{old}norm", f"{new}post_layernorm")
        for i in range(4):
            source, target = f"{old}blocks.{i}.", f"{new}encoder.layers.{i}."
            for layer in ("norm1", "norm2"):
                self.move(source + layer, target + layer.replace("norm", "layer_norm"))
            for layer in ("mlp.fc1", "mlp.fc2"):
                self.move(source + layer, target + layer)
            self.move(f"{source}attn.qkv", *(f"{target}self_attn.{x}_proj" for x in "qkv"))
            self.move(f"{source}attn.proj", f"{target}self_attn.out_proj")
        self.new[f"{new}head.probe"] = self.old.pop(f"{old}attn_pool.latent")
        for kind in ("weight", "bias"):
            stacked = [self.old.pop(f"{old}attn_pool.{x}.{kind}") for x in ("q", "kv")]
            self.new[f"{new}head.attention.in_proj_{kind}"] = torch.cat(stacked)
        for layer, target in (
            ("proj", "attention.out_proj"),
            ("norm", "layernorm"),
            ("mlp.fc1",) * 2,
            ("mlp.fc2",) * 2,
        ):
            self.move(f"{old}attn_pool.{layer}", f"{new}head.{target}")


@pytest.fixture(scope="module")
def weights() -> dict[str, Tensor]:
    checkpoint: dict[str, Tensor] = {}
    for file in sorted(GOLDEN.glob("model-*.safetensors")):
        checkpoint |= load_file(file)
    renamer = Renamer(checkpoint)
    renamer.vision()
    assert all(name.startswith(("projector.", "language_model.")) for name in renamer.old)
    return renamer.new | renamer.old


@pytest.fixture(scope="module")
def inputs() -> dict[str, Tensor]:
    return load_file(GOLDEN / "inputs.safetensors")


@pytest.fixture(scope="module")
def outputs() -> dict[str, Tensor]:
    return load_file(GOLDEN / "outputs.safetensors")


def make_policy(scenario: str, weights: dict[str, Tensor], inputs: dict[str, Tensor]) -> OpenVLAOFT:
    config = OpenVLAOFTConfig(
        image_size=56,
        patch_size=14,
        dino_hidden_size=48,
        dino_layers=3,
        dino_heads=4,
        siglip_hidden_size=64,
        siglip_layers=4,
        siglip_heads=4,
        siglip_mlp_size=240,
        llm_hidden_size=128,
        llm_layers=3,
        llm_heads=4,
        llm_mlp_size=344,
        vocab_size=640,
        use_proprio="proprio" in scenario,
        keep_stop_token="stop_masked" not in scenario,  # not attended is the same as not there
    )
    spec = EnvSpec(
        name="golden",
        cameras=("primary", "wrist")[: 2 if "two_images" in scenario else 1],
        image_size=(56, 56),
        state_dim=8,
        action_dim=A,
        max_episode_steps=1,
        instructions=("0", "1", "2"),
    )
    policy = OpenVLAOFT(config, spec=spec, num_action_chunks=K, temperature=1.6)
    if "proprio" in scenario:
        projector = load_file(GOLDEN / "proprio_projector.safetensors")
        weights = weights | {f"proprio_projector.{name}": tensor for name, tensor in projector.items()}
    policy.load_state_dict(weights)
    prompts = [inputs[f"prompt.{i}.input_ids"][0].tolist() for i in range(SAMPLES)]
    prompts = [prompt if prompt[-1] == LONE_SPACE else [*prompt, LONE_SPACE] for prompt in prompts]
    policy.set_prompts(prompts, stop_id=STOP)
    return policy


def stacked(outputs: dict[str, Tensor], name: str) -> Tensor:
    return torch.cat([outputs[name.format(i)] for i in range(SAMPLES)])


@pytest.mark.parametrize("scenario", ["single", "single_stop_masked", "proprio", "two_images_proprio"])
def test_logits_and_logprobs(
    scenario: str,
    weights: dict[str, Tensor],
    inputs: dict[str, Tensor],
    outputs: dict[str, Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    policy = make_policy(scenario, weights, inputs)
    cameras = ("primary", "wrist")[: 2 if "two_images" in scenario else 1]
    # The recorded pictures were resized by another library, which differs by a grey level: begin after that.
    pixels = torch.cat([inputs[f"image.{i}.{name}_pixel_values"] for i in range(SAMPLES) for name in cameras])
    monkeypatch.setattr(policy.vision_backbone, "preprocess", lambda _: torch.stack(pixels.chunk(2, dim=1)))
    obs = Observation(
        images=torch.zeros(SAMPLES, len(cameras), 56, 56, 3, dtype=torch.uint8),
        state=torch.stack([inputs[f"proprio.{i}.normalized"] for i in range(SAMPLES)]).float(),
        task=torch.arange(SAMPLES),
    )
    with torch.no_grad():
        logits = policy.action_logits(obs)
        tokens = stacked(outputs, scenario + ".{}.sampled_token_ids") - policy.config.first_action_id
        logprobs, entropy = policy(obs, {"tokens": tokens.view(SAMPLES, K, A).to(torch.uint8)})
    name = ".{}.logits" if scenario == "single" else ".{}.logits_action_ids"
    expected = stacked(outputs, scenario + name)[..., : policy.config.vocab_size][..., -256:]
    for got, want in (
        (logits, expected),
        (logprobs.flatten(1), stacked(outputs, scenario + ".{}.sampled_logp_T1.6")),
        (entropy.flatten(1), stacked(outputs, scenario + ".{}.entropy_T1.6")),
    ):
        torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=0)
    greedy = policy.bin_centers[logits.argmax(-1)].double()
    actions = torch.stack([outputs[f"{scenario}.{i}.normalized_actions"] for i in range(SAMPLES)])
    torch.testing.assert_close(greedy.view(SAMPLES, K, A), actions, atol=1e-6, rtol=0)


def test_preprocessing(weights: dict[str, Tensor], inputs: dict[str, Tensor]) -> None:
    vision = make_policy("single", weights, inputs).vision_backbone
    for i in range(SAMPLES):
        resized = vision.preprocess(inputs[f"image.{i}.primary_resized_uint8"][None])
        expected = inputs[f"image.{i}.primary_pixel_values"]
        torch.testing.assert_close(torch.cat((*resized,), dim=1), expected, atol=2e-6, rtol=0)
        raw = vision.preprocess(inputs[f"image.{i}.primary_uint8"][None])
        assert (raw[1] - resized[1]).abs().max() < 1.01 * 2 / 255  # one grey level
