"""A run on a disk that holds one checkpoint and no second one: it trains on, says so, and saves when there is room."""

import shutil
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from e2e.launch import QUICK, Run, finish, start

from dvla.runtime.checkpoint import complete_checkpoints, fault_of

pytestmark = [pytest.mark.chaos, pytest.mark.e2e]

RUN = (*QUICK, "run.checkpoint_every=1", "algo.max_staleness=0")
SMALL, LARGE = "3m", "64m"  # a checkpoint has 1.8 MB


@contextmanager
def small_disk(folder):
    """A file system in memory that only the command line it gives, and what runs behind it, sees; and where we see it."""
    if missing := [tool for tool in ("unshare", "nsenter", "mount") if shutil.which(tool) is None]:
        pytest.skip(f"needs {', '.join(missing)} (util-linux)")
    folder.mkdir()
    holder = subprocess.Popen(
        ["unshare", "--mount", "sh", "-c", f"mount -t tmpfs -o size={SMALL} disk {folder} && echo ready && exec cat"],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        if holder.stdout.readline() != "ready\n":
            pytest.skip(f"mounting is not allowed here: {holder.communicate()[1].strip()}")
        yield (
            ["nsenter", "-t", str(holder.pid), "-m", "--", "env", "-C", str(Path.cwd())],
            Path(f"/proc/{holder.pid}/root{folder}"),
        )
    finally:
        holder.communicate()  # closes its input, and so ends it


def wait_until(process, is_so, timeout_s=120):
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and process.poll() is None:
        if is_so():
            return
        time.sleep(0.05)
    raise AssertionError(process.communicate(timeout=5)[0])


def test_a_full_disk_costs_checkpoints_and_not_the_run(tmp_path):
    folder = tmp_path / "runs"
    with small_disk(folder) as (within, seen):
        checkpoints = seen / "test" / "checkpoints"

        def failures():
            return Run(0, "", seen / "test").metrics[-1]["checkpoint/failures"]

        # Only the last save must succeed.
        run = finish(start(folder, *RUN, "algo.num_steps=3", ranks=2, within=within), seen)
        assert run.code == 1, run.output
        assert "No space left on device" in run.summary["error"], run.output
        assert (run.summary["exit"], run.summary["policy_version"]) == ("failed", 3)
        assert [line["policy_version"] for line in run.metrics] == [1, 2, 3]
        first = checkpoints / "step_000001"
        assert complete_checkpoints(checkpoints) == [first]
        assert sorted(path.name for path in checkpoints.iterdir()) == ["latest", "step_000001"]
        assert fault_of(first, hashes=True) is None

        process = start(folder, *RUN, "algo.num_steps=100000", "resume=auto", ranks=0, within=within)
        wait_until(process, lambda: (seen / "test/metrics.jsonl").read_text().count("\n") > 1 and failures() >= 2)
        assert complete_checkpoints(checkpoints) == [first]
        assert fault_of(first, hashes=True) is None
        assert (checkpoints / "latest").readlink().name == "step_000001"

        subprocess.run([*within, "mount", "-o", f"remount,size={LARGE}", str(folder)], check=True)
        wait_until(process, lambda: (checkpoints / "latest").readlink().name != "step_000001")
        process.terminate()
        run = finish(process, seen)
        assert run.code == 0, run.output
        version = run.summary["policy_version"]
        assert (checkpoints / "latest").readlink().name == f"step_{version:06d}"
        assert fault_of(checkpoints / f"step_{version:06d}", hashes=True) is None
        assert [line["policy_version"] for line in run.metrics] == list(range(1, version + 1))
        assert "failed on rank 0: OSError: [Errno 28] No space left" in run.output
