"""The examples of docs/add_an_environment.md and docs/add_a_policy.md, run as they are printed."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.e2e

DOCS = Path(__file__).parents[2] / "docs"
LARGEST = 60  # lines


def block(text, language):
    (found,) = re.findall(rf"```{language}\n(.*?)```", text, re.DOTALL)
    return found


@pytest.mark.parametrize(
    ("page", "file", "name"),
    [("add_an_environment.md", "my_env.py", "car"), ("add_a_policy.md", "my_policy.py", "conv")],
)
def test_an_example_trains(page, file, name, tmp_path):
    text = (DOCS / page).read_text()
    assert f"Save it\nas `{file}`" in text or f"Save it as `{file}`" in text
    code, command = block(text, "python"), block(text, "bash")
    assert code.count("\n") < LARGEST
    (tmp_path / file).write_text(code)
    words = command.replace("\\\n", " ").split()
    assert words[:3] == ["PYTHONPATH=.", "python", "-m"]
    path = os.pathsep.join([".", *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [sys.executable, *words[2:]],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": path},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    summary = json.loads((tmp_path / "runs" / name / "summary.json").read_text())
    assert summary["exit"] == "completed"
    assert summary["policy_version"] == 3
    assert summary["logprob_gap_max"] < 1e-4
    lines = (tmp_path / "runs" / name / "metrics.jsonl").read_text().splitlines()
    norms = [json.loads(line)["train/grad_norm"] for line in lines]
    assert len(norms) == 3
    assert min(norms) > 0
