"""Whole short runs from the command line, under torchrun, on the device."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path

from e2e.launch import QUICK, REPOSITORY, command

from gpu.check import VLA_MODULES, Findings, check

RUN_MODULES = ("hydra", "omegaconf", "yaml", "rich", "setproctitle")
"""What the entry point imports beyond the model."""
PICTURE_MODULES = ("PIL",)
"""What a run with cameras imports as well, for its film strips."""


def _train(found: Findings, label: str, *overrides: str, gap_bound: float) -> None:
    """Train three steps on one rank and look at what the run says of itself."""
    with tempfile.TemporaryDirectory(prefix="dvla-check-") as folder:
        line = command(
            Path(folder),
            *QUICK,
            *("algo.num_steps=3", "algo.micro_batch_size=16", "runtime.verify_weights=true"),
            *("telemetry.console=false", "telemetry.tensorboard=false", f"device={found.device.type}"),
            *overrides,
            ranks=1,
        )
        # No session of its own: whoever ends this check ends the run, too.
        run = subprocess.run(
            line, cwd=REPOSITORY, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
        summary_file = Path(folder) / "test" / "summary.json"
        if run.returncode != 0 or not summary_file.exists():
            found.demand(False, f"{label}: the run ends well, with 0 and a summary (it ended with {run.returncode})")
            # What the ranks said; torchrun's own report comes behind it and is longer.
            print((run.stdout + run.stderr).partition(" torch/distributed/elastic/")[0].rpartition("\n")[0])
            return
        summary = json.loads(summary_file.read_text())
    found.demand(summary["exit"] == "completed", f"{label}: exit is completed, not {summary['exit']}")
    found.demand(summary["policy_version"] == 3, f"{label}: three steps, not {summary['policy_version']}")
    device = summary["device"]
    found.demand(device.startswith(found.device.type), f"{label}: on {found.device.type}, not {device}")
    gap = summary["logprob_gap_max"]
    found.demand(gap is not None and gap < gap_bound, f"{label}: logprob_gap_max below {gap_bound}, not {gap}")
    found.figure(f"{label} logprob_gap_max", -1.0 if gap is None else gap)
    found.figure(f"{label} wall s", summary["wall_s"])
    found.figure(f"{label} decisions/s", summary["decisions_per_s"])
    found.figure(f"{label} weight sync ms", summary["weight_sync_s_mean"] * 1e3)


@check(limit_s=120, needs=RUN_MODULES)
def mlp_trains(found: Findings) -> None:
    """A run of the perceptron on the built-in reach completes."""
    _train(found, "fp32", "model=mlp", gap_bound=1e-3)


@check(limit_s=150, needs=(*RUN_MODULES, *PICTURE_MODULES, *VLA_MODULES))
def openvla_oft_trains(found: Findings) -> None:
    """Runs of OpenVLA-OFT (nano) complete, in bf16 and, on a GPU, in fp32 with CUDA graphs."""
    model = ("model=openvla_oft_nano", "env.cameras=[top]")
    _train(found, "bf16", *model, "runtime.precision=bf16", gap_bound=0.5)
    if found.on_gpu:
        _train(found, "fp32 graphs", *model, "runtime.cuda_graphs=true", gap_bound=1e-2)


@check(limit_s=150, needs=(*RUN_MODULES, *PICTURE_MODULES, *VLA_MODULES))
def pi05_trains(found: Findings) -> None:
    """Runs of pi0.5 (nano) complete, in bf16 and, on a GPU, in fp32 with CUDA graphs."""
    model = ("model=pi05_nano", "env.cameras=[top]", "algo.logprob_type=chunk")
    _train(found, "bf16", *model, "runtime.precision=bf16", gap_bound=0.5)
    if found.on_gpu:
        _train(found, "fp32 graphs", *model, "runtime.cuda_graphs=true", gap_bound=1e-2)
