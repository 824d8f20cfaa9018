"""Bounds, and the statistics in the files of OpenVLA, openpi and LeRobot."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from dvla.config import ConfigError
from dvla.models.normalization import read_openvla_statistics, read_pi05_statistics

GOLDEN = Path(__file__).parents[1] / "data" / "golden"
ENTRY = {"q01": [-1.0, 0.0, 0.0], "q99": [3.0, 0.5, 1.0]}
MASKED = ENTRY | {"mask": [True, True, False]}


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


def openvla(folder, config=(), own=()):
    write(folder / "config.json", {"norm_stats": {key: {"action": MASKED} for key in config}})
    if own:
        write(folder / "dataset_statistics.json", {key: {"action": MASKED, "proprio": MASKED} for key in own})
    return folder


def lerobot(folder, tensors, **config):
    name = "policy_preprocessor_step_2_normalizer_processor.safetensors"
    steps = [
        {"registry_name": "rename_observations_processor", "config": {}},
        {"registry_name": "normalizer_processor", "config": config, "state_file": name},
    ]
    write(folder / "policy_preprocessor.json", {"steps": steps})
    save_file({key: torch.tensor(x) for key, x in tensors.items()}, folder / name)
    return folder


LEROBOT = {
    "action.q01": [-1.0, 2.0],
    "action.q99": [1.5, 2.0],
    "action.mean": [0.0, 2.0],
    "observation.state.q01": [0.0],
    "observation.state.q99": [2.0],
}


def test_bounds_map_their_ends_and_leave_the_rest(tmp_path):
    bounds = read_openvla_statistics(openvla(tmp_path, ["a"]), None).action
    x = torch.tensor([[-1.0, 0.0, 0.3], [3.0, 0.5, 9.0], [5.0, 0.25, -9.0]], dtype=torch.float64)
    expected = torch.tensor([[-1.0, -1.0, 0.3], [1.0, 1.0, 9.0], [2.0, 0.0, -9.0]], dtype=torch.float64)
    torch.testing.assert_close(bounds.normalize(x), expected, rtol=0, atol=1e-7)
    torch.testing.assert_close(bounds.normalize(x, clip=True), expected.clamp(-1, 1), rtol=0, atol=1e-7)
    torch.testing.assert_close(bounds.unnormalize(bounds.normalize(x)), x, rtol=0, atol=1e-14)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_float64_stays_and_all_else_is_float32(tmp_path, dtype):
    bounds = read_openvla_statistics(openvla(tmp_path, ["a"]), None).action
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    assert bounds.normalize(torch.zeros(2, 3, dtype=dtype)).dtype == expected
    assert bounds.unnormalize(torch.zeros(2, 3, dtype=dtype)).dtype == expected


def test_bounds_move_to_a_device(tmp_path):
    moved = read_openvla_statistics(openvla(tmp_path, ["a"]), None).action.to("meta")
    assert {x.device.type for x in (moved.low, moved.high, moved.span, moved.mask)} == {"meta"}


def test_nothing_is_broadcast(tmp_path):
    bounds = read_openvla_statistics(openvla(tmp_path, ["libero"]), None).action
    bounds.require_length(3, "the environment's actions")
    with pytest.raises(
        ConfigError, match=r"^action statistics 'libero' have 3 elements, the environment's actions have 4$"
    ):
        bounds.require_length(4, "the environment's actions")
    for function in (bounds.normalize, bounds.unnormalize):
        with pytest.raises(ValueError, match="have 3 elements, the vectors have 1"):
            function(torch.zeros(5, 1))


@pytest.mark.parametrize(
    ("config", "own", "asked", "key"),
    [
        (["a", "b"], [], "b", "b"),
        (["a", "a_no_noops"], [], "a", "a"),
        (["bridge"], ["a_no_noops"], "a", "a_no_noops"),
        (["bridge"], ["a_no_noops"], "bridge", "bridge"),
        (["a"], [], None, "a"),
        ([], ["a"], None, "a"),
        (["a", "b"], ["c"], None, "c"),
        (["a", "b"], ["b"], None, "b"),
    ],
)
def test_the_key_of_openvla(tmp_path, config, own, asked, key):
    assert read_openvla_statistics(openvla(tmp_path, config, own), asked).key == key


def test_dataset_statistics_go_before_the_config(tmp_path):
    statistics = read_openvla_statistics(openvla(tmp_path, ["a"], ["a"]), "a")
    assert statistics.state is not None and statistics.state.mask.all()
    assert statistics.action.mask.tolist() == [True, True, False]
    assert statistics.raw["proprio"] == MASKED


def test_without_a_mask_all_elements_are_normalised(tmp_path):
    write(tmp_path / "dataset_statistics.json", {"a": {"action": ENTRY}})
    statistics = read_openvla_statistics(tmp_path, None)
    assert statistics.action.mask.all() and statistics.state is None


@pytest.mark.parametrize(
    ("config", "own", "asked", "message"),
    [
        (["a"], ["b"], "x", "model.unnorm_key='x': .* has no such statistics; it has: a, b$"),
        (["a", "b"], [], None, "model.unnorm_key: .*: a, b$"),
        (["a"], ["b", "c"], None, "model.unnorm_key: .*: a, b, c$"),
        ([], [], None, "dataset_statistics.json.*config.json"),
        ([], [], "a", "dataset_statistics.json.*config.json"),
    ],
)
def test_openvla_says_what_is_missing(tmp_path, config, own, asked, message):
    with pytest.raises(ConfigError, match=message):
        read_openvla_statistics(openvla(tmp_path, config, own), asked)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"mean": [0.0], "std": [1.0]}, "have mean/std only.*quantiles"),
        ({"q01": [0.0], "q99": [1.0, 2.0]}, "one length"),
        ({"q01": [0.0, 0.0], "q99": [1.0, 2.0], "mask": [True]}, "one length"),
        ({"q01": [0.0], "q99": [float("nan")]}, "finite"),
        ({"q01": [None], "q99": [1.0]}, "cannot be read"),
        ({"q01": 0.0, "q99": 1.0}, "cannot be read"),
        ({}, "nothing only"),
    ],
)
def test_unusable_entries_are_refused(tmp_path, entry, message):
    write(tmp_path / "dataset_statistics.json", {"a": {"action": entry}})
    with pytest.raises(ConfigError, match=message):
        read_openvla_statistics(tmp_path, None)
    write(tmp_path / "assets" / "a" / "norm_stats.json", {"norm_stats": {"actions": entry}})
    with pytest.raises(ConfigError, match=message):
        read_pi05_statistics(tmp_path, None)


@pytest.mark.parametrize("content", ["{", "[]"])
def test_broken_files_are_named(tmp_path, content):
    (tmp_path / "dataset_statistics.json").write_text(content)
    with pytest.raises(ConfigError, match=r"dataset_statistics\.json"):
        read_openvla_statistics(tmp_path, None)


@pytest.mark.parametrize("place", ["assets/pi/libero", "pi/libero"])
@pytest.mark.parametrize("asked", ["pi/libero", "libero", None])
@pytest.mark.parametrize("wrapped", [True, False])
def test_the_asset_of_openpi(tmp_path, place, asked, wrapped):
    content = {"state": ENTRY, "actions": ENTRY}
    write(tmp_path / place / "norm_stats.json", {"norm_stats": content} if wrapped else content)
    statistics = read_pi05_statistics(tmp_path, asked)
    assert statistics.key == "pi/libero" and statistics.raw == content and statistics.state is not None
    assert statistics.action.span.tolist() == [4.0 + 1e-6, 0.5 + 1e-6, 1.0 + 1e-6]


def test_pi05_says_what_is_missing(tmp_path):
    with pytest.raises(ConfigError, match=r"assets/\*\*/norm_stats.json.*policy_preprocessor.json"):
        read_pi05_statistics(tmp_path, None)
    for asset in ("a/libero", "b/libero", "b/droid"):
        write(tmp_path / "assets" / asset / "norm_stats.json", {"actions": ENTRY})
    for asked, message in (
        (None, "several statistics, name one of: a/libero, b/droid, b/libero$"),
        ("libero", "several such statistics; it has: a/libero, b/droid, b/libero$"),
        ("x", "model.unnorm_key='x': .* has no such statistics; it has: a/libero, b/droid, b/libero$"),
    ):
        with pytest.raises(ConfigError, match=message):
            read_pi05_statistics(tmp_path, asked)
    assert read_pi05_statistics(tmp_path, "droid").state is None


@pytest.mark.parametrize("asked", [None, "lerobot"])
def test_lerobot_replaces_a_span_of_zero_only(tmp_path, asked):
    statistics = read_pi05_statistics(lerobot(tmp_path, LEROBOT, norm_map={"ACTION": "QUANTILES"}), asked)
    assert statistics.key == "lerobot" and statistics.state is not None
    assert statistics.action.span.tolist() == [2.5, 1e-8] and statistics.state.span.tolist() == [2.0]
    constant = statistics.action.unnormalize(torch.tensor([1.0, 0.5], dtype=torch.float64))
    torch.testing.assert_close(constant, torch.tensor([1.5, 2.0], dtype=torch.float64), rtol=0, atol=1e-7)
    json.dumps(statistics.raw)


def test_what_lerobot_normalises_otherwise_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="actions normalised by MEAN_STD"):
        read_pi05_statistics(lerobot(tmp_path, LEROBOT, norm_map={"ACTION": "MEAN_STD"}), None)
    with pytest.raises(ConfigError, match=r"mean only.*quantiles"):
        read_pi05_statistics(lerobot(tmp_path, {"action.mean": [0.0]}), None)
    next(tmp_path.glob("*.safetensors")).unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        read_pi05_statistics(tmp_path, None)


def test_recordings_of_pi05():
    statistics = read_pi05_statistics(GOLDEN / "pi05_tiny", "libero")
    assert statistics.key == "tiny/libero" and statistics.state is not None
    recorded = {k: torch.from_numpy(x) for k, x in np.load(GOLDEN / "pi05_tiny" / "preprocess.npz").items()}
    outputs = load_file(GOLDEN / "pi05_tiny" / "outputs.safetensors")

    def close(x, name):
        torch.testing.assert_close(x, recorded[name], rtol=0, atol=1e-12)

    close(statistics.state.normalize(recorded["raw.state"].double()), "norm.state")
    close(statistics.action.normalize(recorded["raw.actions"].double()), "norm.actions")
    for n in ("n4", "n10"):
        # The recorded transform adds its 1 in float32, before it multiplies in float64.
        sample = (outputs[f"out.sample.{n}.actions"][..., :7] + 1).double() - 1
        close(statistics.action.unnormalize(sample), f"unnorm.{n}.actions")


def test_recordings_of_openvla_oft():
    folder = GOLDEN / "openvla_oft_tiny"
    libero, bridge = (read_openvla_statistics(folder, key) for key in ("libero_spatial", "bridge_orig"))
    assert read_openvla_statistics(folder, None).key == libero.key == "libero_spatial_no_noops"
    assert libero.state is not None
    recorded = load_file(folder / "inputs.safetensors") | {
        f"out.{k}": x for k, x in load_file(folder / "outputs.safetensors").items()
    }
    for i in range(3):
        state = libero.state.normalize(recorded[f"proprio.{i}.raw"], clip=True)
        torch.testing.assert_close(state, recorded[f"proprio.{i}.normalized"], rtol=0, atol=1e-12)
        for scenario in ("single", "single_stop_masked", "proprio", "two_images_proprio"):
            x = recorded[f"out.{scenario}.{i}.normalized_actions"]
            expected = recorded[f"out.{scenario}.{i}.unnormalized_actions"]
            torch.testing.assert_close(libero.action.unnormalize(x), expected, rtol=0, atol=1e-12)
        expected = recorded[f"out.single.{i}.unnormalized_actions_bridge_orig"]
        x = recorded[f"out.single.{i}.normalized_actions"]
        torch.testing.assert_close(bridge.action.unnormalize(x), expected, rtol=0, atol=1e-12)
