"""Gradients of all models' log-probabilities against finite differences, in float64."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from dvla.envs.protocol import EnvSpec
from dvla.models import openvla_oft_config, pi05_config
from dvla.models.openvla_oft import OpenVLAOFT
from dvla.models.pi05 import Pi05
from dvla.models.policy import Observation
from dvla.rl.noise import decision_keys

B, K, A = 3, 2, 3
STEP = 1e-6  # of finite differences
SPEC = EnvSpec(
    name="test",
    cameras=("base", "wrist"),
    image_size=(32, 32),
    state_dim=4,
    action_dim=A,
    max_episode_steps=10,
    instructions=("push the cube", "pick up the black bowl and put it down", "stack"),
)


@pytest.fixture(autouse=True)
def float64_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """The norms of `transformers` compute in float32, whose rounding would hide the differences."""

    def normed(x: Tensor, eps: float) -> Tensor:
        assert x.dtype == torch.float64
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)

    monkeypatch.setattr(LlamaRMSNorm, "forward", lambda self, x: self.weight * normed(x, self.variance_epsilon))
    monkeypatch.setattr(GemmaRMSNorm, "forward", lambda self, x: (1 + self.weight) * normed(x, self.eps))


def observation() -> Observation:
    generator = torch.Generator().manual_seed(1)
    return Observation(
        images=torch.randint(0, 256, (B, 2, 32, 32, 3), generator=generator, dtype=torch.uint8),
        state=torch.randn(B, 4, generator=generator),
        task=torch.arange(B),
    )


def openvla_oft() -> OpenVLAOFT:
    config = dataclasses.replace(
        openvla_oft_config.PRESETS["nano"],
        image_size=32,
        dino_hidden_size=16,
        dino_heads=2,
        siglip_hidden_size=16,
        siglip_heads=2,
        siglip_mlp_size=32,
        llm_hidden_size=32,
        llm_layers=2,
        llm_heads=2,
        llm_mlp_size=48,
        use_proprio=True,
    )
    torch.manual_seed(0)
    return OpenVLAOFT(config, spec=SPEC, num_action_chunks=K, temperature=1.6).double()


def pi05(sampler: str, *, with_state: bool = False) -> Pi05:
    config = dataclasses.replace(
        pi05_config.PRESETS["nano"],
        image_size=32,
        vision_hidden_size=16,
        vision_heads=2,
        vision_mlp_size=32,
        hidden_size=32,
        mlp_size=48,
        layers=2,
        heads=2,
        head_dim=16,
        expert_hidden_size=16,
        expert_mlp_size=32,
        action_horizon=4,
        action_dim=6,
        sampler=sampler,
        discrete_state_input=with_state,
    )
    torch.manual_seed(0)
    policy = Pi05(config, spec=SPEC, num_action_chunks=K, temperature=1.0).double()
    with torch.no_grad():
        for parameter in policy.parameters():  # nothing stays at 0, where a factor could go unnoticed
            parameter += 0.05 * torch.randn_like(parameter)
    return policy


def check_gradients(policy: nn.Module, names: Sequence[str], *, entropy: bool) -> None:
    """Compare the gradients of log-probabilities and, if they have any, entropies with respect to some parameters."""
    obs = observation()
    record = policy.act(obs, decision_keys(0, torch.arange(B), torch.zeros(B, dtype=torch.int64))).record
    record = {name: value.double() if value.is_floating_point() else value for name, value in record.items()}
    if "denoise_step" in record:
        record["denoise_step"] = torch.tensor([0, 1, 3])
    parameters = [policy.get_parameter(name).detach().clone().requires_grad_() for name in names]

    def outputs(*values: Tensor) -> tuple[Tensor, ...]:
        found = functional_call(policy, dict(zip(names, values, strict=True)), (obs, record))
        assert all(tensor.dtype == torch.float64 for tensor in found)
        assert found[1].requires_grad == entropy
        return found if entropy else found[:1]

    # One number that no output's error leaves unchanged, and its slope along a random direction of each parameter. This is
    # what gradcheck's fast mode does, but that takes minutes to say what is wrong.
    generator = torch.Generator().manual_seed(2)
    weights = [torch.randn(B, K, A, generator=generator, dtype=torch.float64) for _ in range(1 + entropy)]

    def total(*values: Tensor) -> Tensor:
        return sum((weight * tensor).sum() for weight, tensor in zip(weights, outputs(*values), strict=True))

    gradients = torch.autograd.grad(total(*parameters), parameters)
    for i, (name, parameter, gradient) in enumerate(zip(names, parameters, gradients, strict=True)):
        assert gradient.abs().max() > 1e-6, name
        direction = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        values = [tensor.detach() for tensor in parameters]
        ends = []
        for shift in (STEP, -STEP):
            values[i] = parameters[i].detach() + shift * direction
            ends.append(total(*values).item())
        slope = (gradient * direction).sum().item()
        assert (ends[0] - ends[1]) / (2 * STEP) == pytest.approx(slope, rel=1e-5, abs=1e-6), name

    # The smallest parameter entry by entry, each output on its own.
    smallest = min(range(len(names)), key=lambda i: parameters[i].numel())
    others = [parameter.detach() for parameter in parameters]

    def of_smallest(value: Tensor) -> tuple[Tensor, ...]:
        return outputs(*others[:smallest], value, *others[smallest + 1 :])

    assert torch.autograd.gradcheck(of_smallest, parameters[smallest])


def test_openvla_oft() -> None:
    names = [
        "vision_backbone.dino.embeddings.patch_embeddings.projection.weight",
        "vision_backbone.dino.encoder.layer.0.layer_scale1.lambda1",
        "vision_backbone.siglip.encoder.layers.0.self_attn.v_proj.weight",
        "projector.fc1.bias",
        "projector.fc3.weight",
        "proprio_projector.fc1.weight",
        "language_model.model.embed_tokens.weight",
        "language_model.model.layers.0.self_attn.q_proj.weight",
        "language_model.model.layers.1.self_attn.k_proj.weight",
        "language_model.model.layers.1.mlp.gate_proj.weight",
        "language_model.model.layers.1.post_attention_layernorm.weight",
        "language_model.model.norm.weight",
        "language_model.lm_head.weight",
    ]
    check_gradients(openvla_oft(), names, entropy=True)


PI05_NAMES = [
    "vision.embeddings.patch_embedding.weight",
    "vision.encoder.layers.1.mlp.fc1.weight",
    "vision.post_layernorm.weight",
    "projector.weight",
    "embed_tokens.weight",
    "prefix_layers.0.self_attn.q_proj.weight",
    "prefix_layers.0.post_attention_layernorm.weight",
    "prefix_layers.1.input_layernorm.weight",
    "prefix_layers.1.self_attn.k_proj.weight",
    "prefix_layers.1.self_attn.v_proj.weight",
    "expert_layers.0.input_layernorm.dense.weight",
    "expert_layers.0.self_attn.k_proj.weight",
    "expert_layers.1.self_attn.q_proj.weight",
    "expert_layers.1.mlp.down_proj.weight",
    "expert_layers.1.post_attention_layernorm.dense.bias",
    "expert_norm.dense.weight",
    "action_in_proj.weight",
    "action_out_proj.bias",
    "time_mlp_in.weight",
    "time_mlp_out.bias",
]


@pytest.mark.parametrize("with_state", [False, True])
def test_flow_sde(with_state: bool) -> None:
    check_gradients(pi05("flow_sde", with_state=with_state), PI05_NAMES, entropy=False)


def test_flow_noise() -> None:
    names = [*PI05_NAMES, "noise_head.0.weight", "noise_head.2.bias", "noise_head.4.weight"]
    check_gradients(pi05("flow_noise"), names, entropy=True)
