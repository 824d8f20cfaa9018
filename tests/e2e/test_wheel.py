"""A wheel, installed elsewhere: it brings its configuration, and trains."""

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

import dvla

pytestmark = pytest.mark.e2e

REPOSITORY = Path(__file__).parents[2]
PARTS = ("pyproject.toml", "setup.cfg", "README.md", "LICENSE", "conf", "src")


def run(*command, **options):
    done = subprocess.run(
        [str(word) for word in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        **options,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_a_wheel_trains_in_another_folder(tmp_path):
    source, wheels, target = tmp_path / "source", tmp_path / "wheels", tmp_path / "installed"
    source.mkdir()
    for part in PARTS:  # building leaves files in the tree
        path = REPOSITORY / part
        ignore = shutil.ignore_patterns("*.egg-info", "__pycache__")
        if path.is_dir():
            shutil.copytree(path, source / part, symlinks=True, ignore=ignore)
        else:
            shutil.copy(path, source)
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check")
    run(*pip, "wheel", "--no-deps", "--wheel-dir", wheels, source)
    venv.create(target, with_pip=False)
    (wheel,) = wheels.iterdir()
    run(*pip, "--python", target / "bin" / "python", "install", "--no-deps", wheel)
    # All else it needs is where this interpreter finds it; a plain line brings no editable install along.
    packages = next(target.glob("lib/*/site-packages"))
    (packages / "others.pth").write_text(f"{Path(pytest.__file__).parents[1]}\n")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    variables = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    places = run(target / "bin" / "python", "-c", "import dvla; print(dvla.__file__)", cwd=elsewhere, env=variables)
    assert str(target) in places
    assert str(target) not in dvla.__file__
    settings = ("experiment=reach", "algo.num_steps=1", "algo.groups_per_step=2", "algo.filter_zero_signal=false")
    shown = run(target / "bin" / "dvla", "train", *settings, cwd=elsewhere, env=variables)
    assert (elsewhere / "runs" / "reach" / "summary.json").exists(), shown
    assert (elsewhere / "runs" / "reach" / "report.html").exists(), shown
