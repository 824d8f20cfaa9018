"""Both models in the main job, under real torchrun: from random weights, from a checkpoint, and out again."""

import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import safe_open

from dvla.export import export
from dvla.models.openvla_oft import prompt_text
from dvla.models.tokenizer import build_tokenizer
from e2e.launch import QUICK, REPOSITORY, train

pytestmark = pytest.mark.e2e

DATA = Path(__file__).parents[1] / "data" / "golden"
PICTURES = (*QUICK, "env.cameras=[top]", "algo.num_steps=2", "algo.micro_batch_size=16", "runtime.verify_weights=true")
CASES = {
    "openvla_oft": ["model=openvla_oft_nano", "++model.options.use_proprio=true", "algo.max_staleness=2"],
    "openvla_oft-lora": ["model=openvla_oft_nano", "model.lora_rank=4", "runtime.activation_checkpointing=true"],
    "pi05": ["model=pi05_nano", "algo.logprob_type=chunk", "runtime.precision=bf16"],
    "pi05-expert-noise": [
        *("model=pi05_nano", "model.freeze=[vlm]", "++model.options.sampler=flow_noise", "algo.logprob_type=chunk"),
        *("++model.options.discrete_state_input=true", "runtime.replicate_size=2"),
    ],
}


def command_line_export(folder, out):
    return subprocess.run(
        [sys.executable, "-m", "dvla.export", f"checkpoint={folder}/checkpoints/latest", f"out={out}"],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("case", CASES)
def test_a_nano_model_trains_and_its_export_trains_on(case, tmp_path):
    run = train(tmp_path, *PICTURES, *CASES[case])
    assert run.code == 0, run.output
    assert (run.summary["exit"], run.summary["policy_version"]) == ("completed", 2)
    assert all(line["train/grad_norm"] > 0 for line in run.metrics)
    # bfloat16 rounds alike for alike batches only
    assert run.summary["logprob_gap_max"] < (0.5 if "runtime.precision=bf16" in CASES[case] else 1e-4)

    if case == "openvla_oft":
        done = command_line_export(run.folder, tmp_path / "exported")
        assert done.returncode == 0, done.stderr
        assert command_line_export(run.folder, tmp_path / "exported").returncode != 0  # never over an older one
    else:
        export(run.folder / "checkpoints" / "latest", tmp_path / "exported")
    assert (tmp_path / "exported" / "config.json").is_file()
    assert f"| environment | {run.summary['env'].split('/')[0]} |" in (tmp_path / "exported" / "README.md").read_text()
    of_the_run = ("lora", "use_proprio", "replicate_size")  # on two ranks; the export trains on on one
    settings = [item for item in CASES[case] if not any(word in item for word in of_the_run)]
    again = train(
        *(tmp_path, *PICTURES, *settings, "run.name=again", "algo.num_steps=1"),
        f"model.checkpoint={tmp_path}/exported",
        ranks=0,
    )
    assert again.code == 0, again.output


@pytest.mark.parametrize("name", ["openvla_oft", "pi05"])
def test_a_checkpoint_of_the_original_trains_in_maniskill_and_comes_back_in_its_layout(name, tmp_path):
    instructions = [prompt_text("push the cube to the goal")]
    build_tokenizer(instructions, 384).save_pretrained(tmp_path / "tokenizer")
    source = DATA / f"{name}_tiny"
    heads = {"openvla_oft": ["dino_heads", "siglip_heads"], "pi05": ["vision_heads"]}[name]
    run = train(
        tmp_path,
        *("env=maniskill", "env.options.control_mode=pd_ee_delta_pose", "env.max_episode_steps=8", "run.name=test"),
        *(f"model={name}_nano", f"model.checkpoint={source}", f"model.tokenizer={tmp_path}/tokenizer"),
        *(f"++model.options.{key}=4" for key in heads),
        *("++model.options.use_proprio=false",) * (name == "openvla_oft"),
        *("env.reward_mode=dense", "env.terminate_on_success=false", "algo.group_size=2", "algo.groups_per_step=2"),
        *("algo.num_steps=1", "runtime.num_envs=2", "runtime.max_batch=2", "runtime.verify_weights=true"),
    )
    assert run.code == 0, run.output
    export(run.folder / "checkpoints" / "latest", tmp_path / "exported")
    changed = set()
    for file in source.glob("model*.safetensors"):
        with safe_open(file, "pt") as before, safe_open(tmp_path / "exported" / file.name, "pt") as after:
            assert set(before.keys()) == set(after.keys())
            for key in before.keys():  # noqa: SIM118 - this is no dict
                old, new = before.get_tensor(key), after.get_tensor(key)
                assert (old.dtype, old.shape) == (new.dtype, new.shape)
                if not old.equal(new):
                    changed.add(key)
    assert changed
    dead = ("attn_pool", "gemma_expert.lm_head")
    assert not [key for key in changed if any(part in key for part in dead)]


def test_compiled_layers_run_in_both_lanes(tmp_path):
    compiled = ("runtime.compile_inference=true", "runtime.compile_learner=true")
    run = train(tmp_path, *PICTURES, "model=openvla_oft_nano", *compiled, "algo.num_steps=1", ranks=1)
    assert run.code == 0, run.output
    assert run.summary["logprob_gap_max"] < 1e-4
