"""Both models against numbers recorded from their originals, through the product's loaders and preprocessing.

A copy of the recordings lies in tests/data. More of them may lie elsewhere: ``$DVLA_GOLDEN``, or beside the repository in
``shared/golden``.
"""

import json
import os
import shutil
from pathlib import Path

import pytest
from golden import compare, main
from safetensors.torch import load_file, save_file

OWN = Path(__file__).parents[1] / "data" / "golden"
ELSEWHERE = Path(os.environ.get("DVLA_GOLDEN", Path(__file__).parents[3] / "shared" / "golden"))
NAMES = ("openvla_oft_tiny", "pi05_tiny")


@pytest.mark.parametrize("name", NAMES)
def test_the_copy_here(name):
    check(OWN / name, at_least=80)


@pytest.mark.parametrize("name", NAMES)
def test_the_whole_recording(name):
    if not (ELSEWHERE / name).is_dir():
        pytest.skip(f"no recordings in {ELSEWHERE}")
    check(ELSEWHERE / name, at_least=140)


def check(folder, at_least):
    results = list(compare(folder))
    assert [result for result in results if not result[1] <= result[2]] == []
    assert len(results) >= at_least
    assert len({name for name, _, _ in results}) == len(results)


@pytest.mark.parametrize("name", NAMES)
def test_a_wrong_weight_is_noticed(name, tmp_path, capsys):
    folder = tmp_path / name
    shutil.copytree(OWN / name, folder)
    file = next(folder.glob("model*.safetensors"))
    weights = load_file(file)
    changed = next(key for key in weights if "layers.0.mlp.fc1.weight" in key or "blocks.0.mlp.fc1.weight" in key)
    weights[changed] = weights[changed] * 1.05
    save_file(weights, file, metadata={"format": "pt"})
    assert main([str(folder)]) == 1
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert {"name", "max_abs_diff", "tolerance"} == set(lines[0])
    assert any(line["max_abs_diff"] > line["tolerance"] for line in lines)


def test_it_wants_one_folder(capsys):
    assert main([]) == 2
    assert "usage" in capsys.readouterr().err
