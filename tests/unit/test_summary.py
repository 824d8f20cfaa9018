"""A summary has every key it promises, and is valid JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from dvla.telemetry.summary import LANE_KEYS, SUMMARY_KEYS, write_summary

LANES = ("sampling", "inference", "grpo", "param_dist")


def summary(**values: Any) -> dict[str, Any]:
    return {**dict.fromkeys(SUMMARY_KEYS), "exit": "completed", **values}


def written(path: Path, values: dict[str, Any]) -> dict[str, Any]:
    write_summary(path, values)

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(path.read_text(), parse_constant=refuse)


def test_keys_and_their_order(tmp_path: Path) -> None:
    shuffled = dict(sorted(summary(wall_s=1.5).items()))
    result = written(tmp_path / "run" / "summary.json", shuffled)
    assert tuple(result) == SUMMARY_KEYS
    assert result["wall_s"] == 1.5
    assert result["lanes"] == {lane: dict.fromkeys(LANE_KEYS) for lane in LANES}


def test_keys_that_other_programs_rely_on() -> None:
    promised = """
        run exit error schedule placement device world_size nodes model env policy_version episodes groups
        groups_dropped env_steps_raw env_steps_valid wall_s env_steps_per_s_raw env_steps_per_s_valid
        decisions_per_s success_first success_last eval_success_before eval_success_after staleness_mean
        staleness_max logprob_gap_max weight_syncs weight_bytes weight_sync_s_mean worker_restarts
        cpu_efficiency lanes
    """
    assert set(promised.split()) | {"return_first", "return_last"} == set(SUMMARY_KEYS)
    assert LANE_KEYS == ("busy_frac", "wait_s", "items")


@pytest.mark.parametrize("key", ["run", "lanes", "return_last"])
def test_a_missing_key_is_named(key: str, tmp_path: Path) -> None:
    values = summary()
    del values[key]
    with pytest.raises(ValueError, match=key):
        write_summary(tmp_path / "summary.json", values)
    assert not list(tmp_path.iterdir())


def test_more_keys_are_welcome_and_come_last(tmp_path: Path) -> None:
    result = written(tmp_path / "summary.json", {"note": "x", **summary()})
    assert list(result)[-1] == "note"


def test_lanes_that_never_began_are_null(tmp_path: Path) -> None:
    busy = {"busy_frac": 0.5, "wait_s": 1.0, "items": 3}
    result = written(tmp_path / "summary.json", summary(lanes={"grpo": busy}))
    assert result["lanes"]["grpo"] == busy
    assert result["lanes"]["sampling"] == dict.fromkeys(LANE_KEYS)


def test_mistakes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="exit"):
        write_summary(tmp_path / "summary.json", summary(exit="done"))
    with pytest.raises(ValueError, match="training"):
        write_summary(tmp_path / "summary.json", summary(lanes={"training": {}}))


def test_numbers_without_a_word_in_json_are_null(tmp_path: Path) -> None:
    lanes = {"grpo": {"busy_frac": math.nan, "wait_s": 0.0, "items": 0}}
    result = written(tmp_path / "summary.json", summary(wall_s=math.inf, lanes=lanes))
    assert result["wall_s"] is None
    assert result["lanes"]["grpo"]["busy_frac"] is None


def test_a_failed_write_leaves_the_old_one(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    write_summary(path, summary(run="old"))
    with pytest.raises(TypeError):
        write_summary(path, summary(run=object()))
    assert json.loads(path.read_text())["run"] == "old"
