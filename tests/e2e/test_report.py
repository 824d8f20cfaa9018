"""The report of a run that was killed, from the command line."""

import os
import signal
import subprocess
import sys

import pytest
from pages import Page

from e2e.launch import QUICK, REPOSITORY, finish, start, wait_for_step

pytestmark = pytest.mark.e2e


def test_a_killed_run_is_drawn_as_far_as_it_got(tmp_path):
    process = start(tmp_path, *QUICK, "algo.num_steps=10000", "telemetry.trace=true", ranks=0)
    wait_for_step(process, tmp_path / "test", 3)
    os.kill(process.pid, signal.SIGKILL)
    run = finish(process, tmp_path)
    assert not (run.folder / "report.html").exists()
    command = [sys.executable, "-m", "dvla.report", str(run.folder)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    page = Page((run.folder / "report.html").read_text())
    assert [point[0] for point in page.charts()["Return"][0]["points"]][:3] == [1, 2, 3]
    assert "There is no summary.json" in page.text
    assert "telemetry.trace=true" in page.text
