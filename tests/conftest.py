"""Shared by all tests: test helpers importable, also in worker processes; one compute thread; nothing left behind."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil
import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))
os.environ["PYTHONPATH"] = os.pathsep.join([str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])])
os.environ["OMP_NUM_THREADS"] = "1"  # before torch: two cores stand still under its default


def _command(process):
    """The command line of a process; of one that has ended and waits for its parent, nothing."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []


def pytest_addoption(parser):
    parser.addoption(
        "--part",
        choices=["together", "alone"],
        help="only the tests that may run beside others (as with -n 2), or only those marked alone",
    )
    parser.addoption("--outcomes", help="a folder for what became of each combination of the chaos matrix")


def pytest_collection_modifyitems(config, items):
    part = config.getoption("part")
    if part is not None:
        others = [item for item in items if (item.get_closest_marker("alone") is not None) != (part == "alone")]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if (item.get_closest_marker("alone") is not None) == (part == "alone")]


@pytest.fixture(autouse=True)
def leaves_nothing():
    """Every test ends without child processes and without new shared memory."""
    before = set(os.listdir("/dev/shm"))
    known = {process.pid for process in psutil.Process().children(recursive=True)}
    yield
    new = [process for process in psutil.Process().children(recursive=True) if process.pid not in known]
    # Python's own helper of the spawn method lives as long as the test run.
    new = [process for process in new if not any("multiprocessing" in word for word in _command(process))]
    _, alive = psutil.wait_procs(new, timeout=5)
    assert not alive, f"left running: {alive}"
    # sem.mp-*: Python's multiprocessing, which others on this machine may use and which clears up behind itself
    assert {name for name in os.listdir("/dev/shm") if not name.startswith("sem.mp-")} <= before
