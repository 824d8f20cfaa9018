"""Building policies by name."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from dvla.envs.protocol import EnvSpec
from dvla.models.registry import build_policy

SPEC = EnvSpec(
    name="test",
    cameras=("front",),
    image_size=(64, 64),
    state_dim=6,
    action_dim=4,
    max_episode_steps=10,
    instructions=("push the cube",),
)


def build(name: str = "mlp", preset: str = "nano", options: dict | None = None, seed: int = 0) -> nn.Module:
    return build_policy(name, preset, options or {}, spec=SPEC, num_action_chunks=2, temperature=1.0, seed=seed)


@pytest.mark.parametrize("name", ["mlp", "openvla_oft"])
def test_initial_weights_depend_on_the_seed_alone(name: str) -> None:
    torch.manual_seed(1)
    first = build(name, seed=5).state_dict()
    torch.manual_seed(2)
    second = build(name, seed=5).state_dict()
    other = build(name, seed=6).state_dict()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("name", ["mlp", "openvla_oft"])
def test_global_random_state_is_left_alone(name: str) -> None:
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    build(name)
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("name", ["mlp", "openvla_oft"])
def test_weights_are_float32_and_untied(name: str) -> None:
    policy = build(name)
    parameters = [p for _, p in policy.named_parameters(remove_duplicate=False)]
    assert all(p.dtype == torch.float32 and p.device.type == "cpu" for p in parameters)
    assert len({p.data_ptr() for p in parameters}) == len(parameters)


def test_options_change_the_preset() -> None:
    assert build("mlp", options={"hidden_sizes": [8], "initial_std": 1}).net[0].out_features == 8
    assert build("openvla_oft", options={"use_proprio": True}).proprio_projector is not None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"name": "gpt"},
            r"model\.name: unknown model 'gpt'; allowed: mlp, openvla_oft, pi05, or package\.module:Class",
        ),
        ({"preset": "huge"}, r"model\.preset: mlp has no preset 'huge'; allowed: nano, default"),
        ({"options": {"depth": 3}}, r"model\.options\.depth: mlp has no such option; allowed: hidden_sizes, activ"),
        ({"options": {"hidden_sizes": 3}}, r"model\.options\.hidden_sizes: got 3, needs a value like \(64, 64\)"),
        ({"options": {"initial_std": -1.0}}, r"model\.options: initial_std must be positive"),
        ({"name": "openvla_oft", "options": {"use_proprio": 1}}, r"model\.options\.use_proprio: got 1, needs .* False"),
        ({"name": "openvla_oft", "options": {"llm_heads": 5}}, r"model\.options: llm_hidden_size 128 is no multiple"),
        ({"name": "nowhere.at_all:Policy"}, r"model\.name: cannot import 'nowhere.at_all:Policy'"),
        ({"name": "dvla.models.mlp:Missing"}, r"model\.name: cannot import"),
        ({"name": "torch.nn:Identity"}, r"model\.name: torch.nn:Identity is no Policy"),
    ],
)
def test_mistakes_name_the_config_key(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message) as error:
        build(**arguments)
    assert "\n" not in str(error.value)


USER_POLICY = """
import torch
class Mine(torch.nn.Module):
    record_spec = {}
    def __init__(self, preset, spec, num_action_chunks, temperature, width=1):
        super().__init__()
        self.preset = preset
        self.layer = torch.nn.Linear(spec.state_dim, width, dtype=torch.float64)
    def act(self, obs, keys): ...
    def fsdp_units(self): return []
"""


def test_a_class_of_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "user_policy.py").write_text(USER_POLICY)
    monkeypatch.syspath_prepend(tmp_path)
    policy = build("user_policy:Mine", "any", {"width": 3})
    assert policy.layer.weight.shape == (3, 6)
    assert policy.layer.weight.dtype == torch.float32
    assert policy.preset == "any"
    with pytest.raises(ValueError, match=r"model\.name: user_policy:Mine must take preset, spec.*'depth'"):
        build("user_policy:Mine", options={"depth": 3})


def test_the_perceptron_does_not_import_transformers() -> None:
    code = (
        "import sys; from dvla.envs.protocol import EnvSpec; from dvla.models.registry import build_policy; "
        "spec = EnvSpec(name='t', cameras=(), image_size=(0, 0), state_dim=2, action_dim=1, max_episode_steps=1, "
        "instructions=('a',)); "
        "build_policy('mlp', 'nano', {}, spec=spec, num_action_chunks=1, temperature=1.0, seed=0); "
        "sys.exit('transformers' in sys.modules or 'tokenizers' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
