"""launch/slurm.sbatch under a real SLURM: stopped by a signal, requeued, resumed, on one node and on two."""

import json
import time

import pytest
import slurm as slurm_tests

from e2e.launch import QUICK, REPOSITORY

pytestmark = [pytest.mark.e2e, pytest.mark.slurm, pytest.mark.alone]

STEPS = 30
OVERRIDES = (*(override for override in QUICK if "run.name" not in override), f"algo.num_steps={STEPS}")


@pytest.fixture(scope="module")
def slurm():
    try:
        with slurm_tests.running_slurm() as cluster:
            yield cluster
    except slurm_tests.SlurmMissing as reason:
        pytest.skip(str(reason))


class Job:
    """A submitted training run."""

    def __init__(self, slurm, root, *options, folder=REPOSITORY, **settings):
        self.slurm, self.root = slurm, root
        self.number = slurm.submit(
            f"--output={root}/%j.log",
            *options,
            str(REPOSITORY / "launch" / "slurm.sbatch"),
            f"run.root={root}",
            *OVERRIDES,
            folder=folder,
            **settings,
        )
        self.folder = root / f"dvla-{self.number}"

    @property
    def log(self):
        path = self.root / f"{self.number}.log"
        return path.read_text() if path.exists() else ""

    @property
    def summary(self):
        return json.loads((self.folder / "summary.json").read_text())

    @property
    def versions(self):
        path = self.folder / "metrics.jsonl"
        return [json.loads(line)["policy_version"] for line in path.read_text().splitlines()] if path.exists() else []

    def wait_for_step(self, version, timeout_s=120):
        deadline = time.monotonic() + timeout_s
        while len(self.versions) < version:
            assert self.slurm.job(self.number)["JobState"] in ("PENDING", "RUNNING", "CONFIGURING"), self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.05)

    def stop(self):
        self.slurm.call("scancel", "--signal=USR1", "--batch", self.number)

    def requeue(self):
        self.slurm.call("scontrol", "requeue", self.number)

    def has_latest(self):
        latest = self.folder / "checkpoints" / "latest"
        return latest.readlink().name == f"step_{self.summary['policy_version']:06d}"


def ended(slurm, job):
    state = slurm.wait_for_state(job.number, "COMPLETED", "FAILED", "CANCELLED", "NODE_FAIL")
    assert state == "COMPLETED", job.log


def check_stopped(job, nodes):
    assert (job.summary["exit"], job.summary["nodes"], job.summary["world_size"]) == ("stopped", nodes, 2 * nodes)
    assert 2 <= job.summary["policy_version"] < STEPS
    assert job.has_latest()


def check_went_on_to_the_end(job, saved):
    assert (job.summary["exit"], job.summary["policy_version"]) == ("completed", STEPS)
    assert job.versions == list(range(1, STEPS + 1))
    assert f"resuming from {job.folder / 'checkpoints' / f'step_{saved:06d}'}" in job.log
    # The log of the first start is still there, and torchrun had nothing to say.
    assert [f"start {n}" in job.log for n in (1, 2, 3)] == [True, True, False]
    assert "Traceback" not in job.log


def test_a_signal_saves_and_requeueing_goes_on_to_the_end(slurm, tmp_path):
    job = Job(slurm, tmp_path)
    job.wait_for_step(2)
    job.stop()
    ended(slurm, job)
    check_stopped(job, nodes=1)
    saved = job.summary["policy_version"]
    job.requeue()
    slurm.wait_for_state(job.number, "RUNNING")
    ended(slurm, job)
    check_went_on_to_the_end(job, saved)


def test_a_job_on_two_nodes_requeues_itself_if_it_may(slurm, tmp_path):
    job = Job(slurm, tmp_path, "--nodes=2", REQUEUE="1", NPROC="2")
    job.wait_for_step(2)
    job.stop()
    slurm.wait_for_state(job.number, "PENDING", "FAILED")
    check_stopped(job, nodes=2)
    saved = job.summary["policy_version"]
    slurm.wait_for_state(job.number, "RUNNING", "FAILED")
    ended(slurm, job)
    check_went_on_to_the_end(job, saved)


def test_a_running_job_that_slurm_takes_away_saves_first(slurm, tmp_path):
    """As for preemption or a drained node: SIGTERM to every process, SIGKILL a few seconds later."""
    job = Job(slurm, tmp_path)
    job.wait_for_step(2)
    job.requeue()
    slurm.wait_for_state(job.number, "PENDING")
    slurm.call("scancel", job.number)
    check_stopped(job, nodes=1)


def test_a_job_submitted_elsewhere_says_what_to_do(slurm, tmp_path):
    job = Job(slurm, tmp_path, folder=tmp_path)
    assert slurm.wait_for_state(job.number, "COMPLETED", "FAILED") == "FAILED"
    assert f"error: no .venv/bin/torchrun in {tmp_path}: submit in the folder of the project" in job.log
