import json

import pytest
import yaml

from dvla.config import Config, ConfigError, RunConfig, to_plain
from dvla.runtime.run_folder import claim, prepare


def config_in(tmp_path, **changes):
    return Config(run=RunConfig(root=str(tmp_path), name="test", **changes))


def test_a_new_run_gets_its_folder(tmp_path):
    config = config_in(tmp_path)
    with claim(config.run.folder):
        logs = prepare(config, resuming=False)
    assert logs == tmp_path / "test" / "logs" / "attempt_1"
    assert yaml.safe_load((tmp_path / "test" / "config.yaml").read_text()) == to_plain(config)
    assert "torch" in json.loads((tmp_path / "test" / "env.json").read_text())["versions"]


@pytest.mark.parametrize(
    ("entry", "is_kept"),
    [("metrics.jsonl", True), ("checkpoints/step_000001/COMPLETE.json", True), ("logs/attempt_1/rank.log", False)],
)
def test_only_a_folder_without_results_is_used_again(tmp_path, entry, is_kept):
    folder = tmp_path / "test"
    path = folder / entry
    path.parent.mkdir(parents=True)
    path.write_text("{}")
    (folder / "config.yaml").write_text("seed: 0")
    if is_kept:
        with pytest.raises(ConfigError, match="is not empty"):
            prepare(config_in(tmp_path), resuming=False)
    else:
        assert prepare(config_in(tmp_path), resuming=False).name == "attempt_2"


def test_one_folder_has_one_live_run(tmp_path):
    folder = config_in(tmp_path).run.folder
    for _ in range(2):  # it is free again afterwards
        with (
            claim(folder),
            pytest.raises(
                ConfigError, match=r"another run is writing to .*test: wait for it, or give another run\.name"
            ),
            claim(folder),
        ):
            pass
