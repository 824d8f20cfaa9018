import subprocess
import sys
from pathlib import Path

import pytest
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from dvla.collect import CollectConfig
from dvla.config import (
    AlgoConfig,
    Config,
    ConfigError,
    RuntimeConfig,
    SftConfig,
    config_hash,
    load,
    load_as,
    register,
    to_plain,
)

CONF = Path(__file__).parents[2] / "conf"


def composed(*overrides, command="train"):
    register()
    ConfigStore.instance().store(name="collect_config", node=CollectConfig)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose(command, list(overrides))


def test_importing_the_config_imports_no_torch():
    code = "import sys, dvla.config; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


PPO = {"name": "ppo", "group_size": 1, "filter_zero_signal": False}


OTHER_COMMANDS = {"cloning": ("sft", SftConfig), "demonstrations": ("collect", CollectConfig)}
"""Groups of files that are not for training: of which command, and what it takes."""


@pytest.mark.parametrize("path", sorted(CONF.glob("*/*.yaml")), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_config_file_composes_and_is_valid(path):
    group = path.parent.name
    if group in OTHER_COMMANDS:
        command, schema = OTHER_COMMANDS[group]
        given = ["out=x"] if command == "collect" else []
        assert load_as(schema, composed(f"{group}={path.stem}", *given, command=command))
        return
    given = [f"placement.{role}=[0]" for role in ("sampling", "inference", "training") if path.stem == "custom"]
    config = load(composed(f"{group}={path.stem}", *given))
    config.slots_per_sampler(2, 2)


@pytest.mark.parametrize("path", sorted(CONF.glob("cloning/*.yaml")), ids=lambda path: path.stem)
def test_the_parts_of_a_recipe_fit_each_other(path):
    """What launch/recipe.sh names by convention is there, and clone and training mean the same policy and task."""
    task = path.stem.partition("_")[0]
    shown = load_as(CollectConfig, composed(f"demonstrations={task}", "out=x", command="collect"))
    cloned = load_as(SftConfig, composed(f"cloning={path.stem}", command="sft"))
    trained = load(composed(f"experiment={path.stem}"))
    assert (trained.env.name, trained.env.task) == (shown.env.name, shown.env.task)
    assert trained.env.reward_mode.name == "sparse"
    assert (trained.env.image_size, trained.env.cameras) == (shown.env.image_size, shown.env.cameras)
    assert (trained.model.name, trained.model.preset) == (cloned.model.name, cloned.model.preset)
    assert trained.model.num_action_chunks == cloned.model.num_action_chunks
    assert cloned.data.paths == [f"datasets/{task}"]
    assert cloned.run.name == f"{path.stem}_sft"
    assert trained.run.name == path.stem
    assert trained.model.checkpoint == f"runs/{path.stem}_sft/policy"
    assert trained.run.eval_every == trained.algo.num_steps, "success before and after"
    assert trained.evaluation.episodes_per_task == 150
    assert trained.evaluation.videos_per_task > 0


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ({"algo": {"lrr": 1}}, "algo.lrr"),
        ({"algo": {"objective": "ppo"}}, "expected one of [decoupled, clip]"),
        ({"algo": {"group_size": 1}}, "algo.group_size must be at least 2"),
        ({"algo": {"group_size": "eight"}}, "algo.group_size"),
        ({"algo": {"objective": "clip"}}, "algo.behavior_ratio_cap"),
        ({"algo": {"num_steps": 9, "update_epochs": 2}}, "algo.num_steps=9 must be a multiple of"),
        ({"algo": {"name": "ppo"}}, "algo.filter_zero_signal=true"),
        (
            {"algo": {**PPO, "value_type": "action", "logprob_type": "chunk"}},
            "algo.logprob_type must be token or action",
        ),
        ({"algo": {**PPO, "value_clip": 0}}, "algo.value_clip must be above 0"),
        ({"algo": {**PPO, "gae_lambda": 1.5}}, "algo.gae_lambda must lie between 0 and 1"),
        ({"model": {"num_action_chunks": 33}}, "model.num_action_chunks=33 is longer than an episode"),
        ({"model": {"temperature": 0}}, "model.temperature"),
        ({"env": {"cameras": ["a"], "image_size": [0, 64]}}, "env.image_size=[0, 64]"),
        ({"env": {"cameras": ["a", "a"]}}, "env.cameras"),
        ({"runtime": {"num_envs": 5, "num_workers": 2}}, "runtime.num_envs=5 must be a multiple of"),
        ({"runtime": {"num_envs": 257}}, "raise runtime.num_workers"),
        ({"runtime": {"wait_timeout_s": 901}}, "runtime.watchdog_s=900 must be at least runtime.wait_timeout_s=901"),
        ({"runtime": {"collective_timeout_s": 900}}, "and below runtime.collective_timeout_s=900"),
        ({"runtime": {"schedule": "serial"}}, "algo.max_staleness=0"),
        ({"runtime": {"num_slots": 3}}, "runtime.num_slots=3 cannot hold one group"),
        ({"run": {"name": "../x"}}, "run.name='../x'"),
        ({"seed": -1}, "seed must lie between"),
    ],
)
def test_what_cannot_work_is_refused_by_key(override, words):
    with pytest.raises(ConfigError) as caught:
        load(OmegaConf.create(override))
    assert words in str(caught.value)


def test_a_batch_that_does_not_divide_names_key_and_ranks():
    config = Config(algo=AlgoConfig(groups_per_step=7))
    with pytest.raises(
        ConfigError, match=r"algo.groups_per_step=7 must be a multiple of the number of training ranks \(2\)"
    ):
        config.slots_per_sampler(2, 2)


def test_slots_hold_the_staleness_window():
    algo = AlgoConfig(groups_per_step=8, group_size=4, max_staleness=2)
    fixed = RuntimeConfig(balance=False)
    assert Config(algo=algo, runtime=fixed).slots_per_sampler(2, 2) == 3 * 4 * 4
    assert Config(algo=algo, runtime=fixed).slots_per_sampler(2, 1) == 2 * 3 * 4 * 4
    assert Config(algo=algo, runtime=fixed).slots_per_sampler(1, 3) == 3 * 8 // 3 * 4
    assert Config(algo=algo, runtime=RuntimeConfig(num_slots=5)).slots_per_sampler(2, 2) == 5
    assert Config(algo=algo, runtime=RuntimeConfig(num_slots=500, balance=False)).slots_per_sampler(2, 2) == 48


def test_a_rank_that_may_take_groups_of_others_has_room_for_them():
    algo = AlgoConfig(groups_per_step=8, group_size=4, max_staleness=2)
    assert Config(algo=algo).slots_per_sampler(2, 2) == 3 * 4 * 4 * 3 // 2
    assert Config(algo=algo).slots_per_sampler(2, 1) == 2 * 3 * 4 * 4
    assert Config(algo=algo, runtime=RuntimeConfig(num_slots=500)).slots_per_sampler(2, 2) == 72


def test_a_batch_with_several_epochs_fits_its_slots():
    epochs = Config(
        algo=AlgoConfig(groups_per_step=8, group_size=4, update_epochs=2, num_steps=4),
        runtime=RuntimeConfig(num_slots=5),
    )
    with pytest.raises(ConfigError, match="at least 16"):
        epochs.slots_per_sampler(2, 2)


def test_the_hash_changes_with_any_value_and_nothing_else():
    assert config_hash(Config()) == config_hash(Config())
    assert config_hash(Config()) != config_hash(Config(seed=1))
    assert to_plain(load(OmegaConf.create(to_plain(Config())))) == to_plain(Config())


@pytest.mark.parametrize("key", ["nix", "env.nix"])
def test_keys_that_were_forced_in_are_refused_like_others(key):
    with pytest.raises(ConfigError, match=rf"{key}: Key 'nix' not in"):
        load(composed(f"+{key}=3"))
