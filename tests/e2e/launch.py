"""Start real training runs the way people do, and read what they leave."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

REPOSITORY = Path(__file__).parents[2]

# Small and quick: the built-in reach, an MLP, one worker.
QUICK = (
    "env=reach",
    "algo.group_size=4",
    "algo.groups_per_step=4",
    "algo.num_steps=4",
    "runtime.num_envs=4",
    "run.name=test",
)


@dataclass(frozen=True)
class Run:
    """A finished run."""

    code: int
    output: str
    folder: Path

    @property
    def summary(self) -> dict:
        """summary.json."""
        return json.loads((self.folder / "summary.json").read_text())

    @property
    def metrics(self) -> list[dict]:
        """Lines of metrics.jsonl."""
        return [json.loads(line) for line in (self.folder / "metrics.jsonl").read_text().splitlines()]

    @property
    def last_words(self) -> dict[int, str]:
        """What ranks said in the end, by their number."""
        lines = [line for line in self.output.splitlines() if line.startswith("dvla: rank ")]
        return {int(line.split()[2].rstrip(":")): line for line in lines}


def command(root: Path, *overrides: str, ranks: int = 2, module: str = "dvla.train") -> list[str]:
    """Command line of a training run; without ranks it is started without torchrun."""
    start = [sys.executable, "-m"]
    if ranks:
        start += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    return [*start, module, f"run.root={root}", *overrides]


def start(
    root: Path,
    *overrides: str,
    ranks: int = 2,
    module: str = "dvla.train",
    within: Sequence[str] = (),
    variables: Mapping[str, str] | None = None,
) -> subprocess.Popen:
    """Start a run in the background, its output in one pipe.

    Args:
        root: Folder of runs.
        overrides: Of the config.
        ranks: How many; 0 starts it without torchrun.
        module: The program.
        within: Put before its command line.
        variables: Added to the environment.
    """
    return subprocess.Popen(
        [*within, *command(root, *overrides, ranks=ranks, module=module)],
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1", **(variables or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def finish(process: subprocess.Popen, root: Path, name: str = "test", timeout_s: float = 200.0) -> Run:
    """Wait for a run to end."""
    try:
        output, _ = process.communicate(timeout=timeout_s)
    finally:
        process.kill()
    return Run(process.returncode, output, root / name)


def train(root: Path, *overrides: str, ranks: int = 2, timeout_s: float = 200.0) -> Run:
    """Run to the end."""
    name = next((o.removeprefix("run.name=") for o in reversed(overrides) if o.startswith("run.name=")), "default")
    return finish(start(root, *overrides, ranks=ranks), root, name, timeout_s)


def wait_for_file(process: subprocess.Popen, path: Path, lines: int = 0, timeout_s: float = 120) -> None:
    """Wait until a file is there and has at least so many lines."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline and process.poll() is None:
        if path.exists() and len(path.read_text().splitlines()) >= lines:
            return
        time.sleep(0.05)
    raise AssertionError(process.communicate(timeout=5)[0])


def wait_for_step(process: subprocess.Popen, folder: Path, version: int) -> None:
    """Wait until metrics.jsonl holds `version`."""
    wait_for_file(process, folder / "metrics.jsonl", version)


def ranks_of(process: subprocess.Popen) -> list[psutil.Process]:
    """The rank processes of a torchrun."""
    return [p for p in psutil.Process(process.pid).children() if "dvla" in " ".join(p.cmdline())]
