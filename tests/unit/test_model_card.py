"""The model card of an exported policy: results of this very policy, nothing that is not known."""

import json

import pytest
import yaml

from dvla.config import Config, EnvConfig, ModelConfig, RunConfig
from dvla.envs.protocol import EnvSpec
from dvla.telemetry.model_card import model_card

SPEC = EnvSpec(
    name="maniskill/PushCube-v1",
    cameras=("base_camera",),
    image_size=(64, 48),
    state_dim=4,
    action_dim=7,
    max_episode_steps=10,
    instructions=("push the cube", "a | b"),
)


@pytest.fixture
def folder(tmp_path):
    """A run whose checkpoint is of step 20."""
    evaluations = [{"policy_version": step, "eval/success_rate": step / 100 + 0.5} for step in (0, 10, 20)]
    (tmp_path / "evaluations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in evaluations))
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    command = ["/a/dvla/train.py", "run.name=x", "note=hunter22hunter22", "model.options={a: 1}"]
    (tmp_path / "env.json").write_text(json.dumps({"command": command, "versions": {"dvla": "9.8"}}))
    for version, rate in ((10, 0.111), (20, 0.222)):
        result = {
            "policy_version": version,
            "env": "libero/x",
            "episodes": 50,
            "success_rate": rate,
            "interval": [0.1, 0.3],
        }
        (tmp_path / "evaluations" / f"of_{version}").mkdir(parents=True)
        (tmp_path / "evaluations" / f"of_{version}" / "evaluation.json").write_text(json.dumps(result))
    return tmp_path


def card(folder, **model):
    config = Config(
        run=RunConfig(name="pushcube"),
        env=EnvConfig(name="maniskill", task="PushCube-v1", options={"control_freq": 10, "robot": "panda"}),
        model=ModelConfig(name="openvla_oft", preset="nano", **model),
    )
    return model_card(config, SPEC, folder / "checkpoints" / "step_000020", 20)


def test_it_tells_results_of_this_policy_command_and_use(folder, monkeypatch):
    monkeypatch.setenv("MY_PASSWORD", "hunter22hunter22")
    text = card(folder, checkpoint="/models/oft", lora_rank=4)
    _, head, body = text.split("---\n", 2)
    assert yaml.safe_load(head)["pipeline_tag"] == "robotics"
    assert "license" not in yaml.safe_load(head), "left for the user"
    assert "| base model | /models/oft |" in body
    assert "| adapters | LoRA of rank 4, merged |" in body
    assert "| during training, before |  | 0.500 |  |" in body
    assert "| during training, this step |  | 0.700 |  |" in body
    assert "0.600" not in body
    assert "| libero/x | 50 | 0.222 | 0.100 to 0.300 |" in body
    assert "0.111" not in body
    assert "python -m dvla.train run.name=x note=<MY_PASSWORD> 'model.options={a: 1}'" in body
    assert "hunter22" not in text
    assert "a \\| b" in body
    assert (
        "python -m dvla.evaluate model=openvla_oft_nano model.checkpoint=FOLDER model.num_action_chunks=8 env.name="
        in body
    )
    assert "env.max_episode_steps=32 ++env.options.control_freq=10 ++env.options.robot=panda\n" in body


def test_without_the_runs_folder_it_says_what_is_left(tmp_path):
    text = card(tmp_path / "elsewhere")
    assert "| base model | none: random weights, preset nano |" in text
    assert "This policy was not evaluated." in text
    assert "## Training" not in text
