"""What a run of behaviour cloning decides before it starts: normalisation, split, length, and whether all goes together."""

import dataclasses

import pytest
from batches import K
from recordings import episode, write_v2

from dvla.cloning import _Task
from dvla.config import CloningConfig, ConfigError, DataConfig, ModelConfig, SftConfig
from dvla.datasets.reading import read_dataset
from dvla.models import trained
from dvla.models.export import write_policy


def make(folder, name="openvla_oft", *, model=None, sft=None, actions=4, scale=1.0):
    """The config and the dataset of a run."""
    if not folder.exists():
        episodes = [episode(seed, 10, actions=actions) for seed in range(10)]
        write_v2(folder, [dataclasses.replace(one, actions=one.actions * scale) for one in episodes])
    config = SftConfig(
        data=DataConfig(paths=(str(folder),)),
        model=ModelConfig(name=name, preset="nano", num_action_chunks=K, **(model or {})),
        sft=CloningConfig(**(sft or {})),
    )
    return config, read_dataset(config.data)


def test_length_and_split(tmp_path):
    task = _Task.of(*make(tmp_path / "a", sft={"epochs": 3, "global_batch_size": 32, "held_out_fraction": 0.2}))
    assert (len(task.train_rows), len(task.held_out_rows)) == (80, 20)
    assert task.num_steps == 8  # 240 samples in batches of 32
    assert _Task.of(*make(tmp_path / "a", sft={"num_steps": 5})).num_steps == 5


@pytest.mark.parametrize("name", ["openvla_oft", "pi05"])
def test_statistics_are_computed_or_kept_and_must_fit(tmp_path, name):
    config, dataset = make(tmp_path / "first", name)
    task = _Task.of(config, dataset)
    assert task.computed.key == "first"
    write_policy(task.source(0).policy, config.model, tmp_path / "policy")
    tuned = {"checkpoint": str(tmp_path / "policy")}

    config, dataset = make(tmp_path / "second", name, model=tuned)
    task = _Task.of(config, dataset)
    assert task.computed.key == "second"
    kept = _Task.of(*make(tmp_path / "second", name, model=tuned | {"unnorm_key": "first"}))
    assert kept.computed is None
    assert kept.source(0).policy.statistics.key == "first"

    with pytest.raises(ConfigError, match=r"'bridge'.* has no such statistics; it has: first"):
        _Task.of(*make(tmp_path / "second", name, model=tuned | {"unnorm_key": "bridge"}))
    with pytest.raises(
        ConfigError, match=r"action statistics 'first' have 4 elements, the environment's actions have 7"
    ):
        _Task.of(*make(tmp_path / "seven", name, model=tuned | {"unnorm_key": "first"}, actions=7))
    _Task.of(*make(tmp_path / "small", name, model=tuned, scale=0.01))
    write_policy(
        _Task.of(*make(tmp_path / "small", name)).source(0).policy,
        ModelConfig(name=name, preset="nano"),
        tmp_path / "of_small",
    )
    with pytest.raises(ConfigError, match=r"the action statistics 'small' are of other data than second: .* computed"):
        _Task.of(
            *make(tmp_path / "second", name, model={"checkpoint": str(tmp_path / "of_small"), "unnorm_key": "small"})
        )


def test_a_checkpoint_of_a_cloning_run_is_not_taken_for_one_of_reinforcement_learning(tmp_path, monkeypatch):
    checkpoint = tmp_path / "run/checkpoints/step_000001"
    checkpoint.mkdir(parents=True)
    (checkpoint / "train_state.json").write_text('{"policy_version": 1, "config": {"sft": {}}}')
    monkeypatch.setattr(trained, "fault_of", lambda folder, hashes: None)
    with pytest.raises(ConfigError, match=rf"give model.checkpoint={tmp_path}/run/policy instead"):
        trained.run_config(checkpoint)
