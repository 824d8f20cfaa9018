"""Run the checks, each in a process of its own with a time limit: ``python -m gpu.run [--list | NAME …]``, see check.sh.

Prints a line for each check with what it measured, and a summary; ends with 1 if one failed, with 2 if nothing could be
checked. With OUT set, ``$OUT/gpu_check.jsonl`` gets the same as JSON lines.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from gpu.environment import BASE_MODULES, REPOSITORY, describe, how_to_get, missing, other_versions

if TYPE_CHECKING:
    from gpu.check import Check

DEVICE_VARIABLE = "DVLA_GPU_CHECK_DEVICE"
"""``cuda`` (default), or ``cpu`` for a dry run."""
_MODULES = ("pinned_memory", "slots", "weights", "lanes_together", "memory_pools", "numerics", "training")
_TOTAL_S = 570.0
_LAST_LINES = 40


@dataclass
class Outcome:
    """How a check went."""

    check: str
    result: str
    """``pass``, ``fail`` or ``skip``."""
    device: str
    seconds: float = 0.0
    figures: dict[str, float] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    """Demands that were not met, or the reason of a skip."""
    output: str = ""
    """The end of what a failed check printed."""

    def __str__(self) -> str:
        figures = ", ".join(f"{name} {value:g}" for name, value in self.figures.items())
        said = "; ".join(self.faults) if self.result == "skip" else figures
        lines = [f"{self.result.upper()} {self.check} ({self.seconds:.1f} s): {said or 'no figures'}"]
        if self.result == "fail":
            lines += [f"     not met: {fault}" for fault in self.faults]
            lines += [f"     | {line}" for line in self.output.splitlines()]
        return "\n".join(lines)


def load_checks() -> dict[str, Check]:
    """All checks by name, in the order to run them; needs `BASE_MODULES`."""
    for module in _MODULES:
        importlib.import_module(f"gpu.{module}")
    from gpu.check import CHECKS

    return CHECKS


def why_not(check: Check, device: str) -> str | None:
    """Why `check` cannot run here, if so."""
    if device == "cpu" and check.gpu_only is not None:
        return f"needs a GPU: {check.gpu_only}"
    if absent := missing(check.needs):
        return f"needs {', '.join(absent)}: {how_to_get(absent)}"
    return None


def run_check(check: Check, device: str, limit_s: float) -> Outcome:
    """Run one check in a process of its own."""
    begin = time.monotonic()
    paths = [str(REPOSITORY / "src"), str(REPOSITORY / "tests"), *filter(None, [os.environ.get("PYTHONPATH")])]
    with tempfile.TemporaryDirectory(prefix="dvla-check-") as folder:
        result, log = Path(folder) / "result", Path(folder) / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "gpu.run",
                    "--in-this-process",
                    str(result),
                    "--limit",
                    f"{limit_s}",
                    check.name,
                ],
                env=os.environ | {DEVICE_VARIABLE: device, "PYTHONPATH": os.pathsep.join(paths)},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            is_late = False
            try:
                process.wait(limit_s + 10)  # its own stacks come first
            except subprocess.TimeoutExpired:
                is_late = True
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # with what it started
                process.wait()
        seconds = time.monotonic() - begin
        lines = "\n".join(log.read_text(errors="replace").splitlines()[-_LAST_LINES:])
        if is_late or not result.exists():
            reason = f"no end within {limit_s:.0f} s" if seconds >= limit_s else f"it died ({process.returncode})"
            return Outcome(check.name, "fail", device, seconds, faults=[reason], output=lines)
        said = json.loads(result.read_text())
    if process.returncode != 0:
        said["faults"].append(f"its process ended with {process.returncode}")
    is_good = not said["faults"]
    return Outcome(check.name, "pass" if is_good else "fail", device, seconds, **said, output="" if is_good else lines)


def _run_in_this_process(check: Check, device: str, result: Path, limit_s: float) -> None:
    """What `run_check` starts: run the check and write down what it found."""
    faulthandler.enable()
    faulthandler.dump_traceback_later(limit_s, exit=True)
    import torch

    from gpu.check import Findings

    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(0)
    findings = Findings(torch.device("cpu") if device == "cpu" else torch.device("cuda", 0))
    try:
        check.function(findings)
    except BaseException as error:
        traceback.print_exc()
        findings.faults.append(f"{type(error).__name__}: {error}")
    result.write_text(json.dumps({"figures": findings.figures, "faults": findings.faults}))


def wanted_device() -> str:
    """What to check, by the environment."""
    device = os.environ.get(DEVICE_VARIABLE, "cuda")
    if device not in {"cuda", "cpu"}:
        raise SystemExit(f"gpu check: {DEVICE_VARIABLE}={device!r}: set it to cuda or cpu")
    return device


def _prepare(device: str) -> dict[str, str]:
    """Say what is here and what is not; ends the program where nothing can be checked."""
    if absent := missing(BASE_MODULES):
        print(f"gpu check: {', '.join(absent)} cannot be imported, nothing can be checked: {how_to_get(absent)}")
        raise SystemExit(2)
    here = describe()
    print("gpu check: " + ", ".join(f"{name} {value}" for name, value in here.items()))
    for other in other_versions():
        print(f"gpu check: note: {other}")
    if device == "cpu":
        print("gpu check: DRY RUN on the CPU: the code runs, but speeds mean nothing and no GPU is checked")
    elif "GPU" not in here:
        print(f"gpu check: torch finds no GPU, nothing can be checked ({DEVICE_VARIABLE}=cpu makes a dry run)")
        raise SystemExit(2)
    return here


def main() -> int:
    """Entry."""
    parser = argparse.ArgumentParser(prog="check.sh", description="Check D-VLA on one GPU.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="run these checks only")
    parser.add_argument("--list", action="store_true", help="say what each check shows, and run none")
    parser.add_argument("--in-this-process", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--limit", type=float, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    device = wanted_device()
    if arguments.in_this_process:
        _run_in_this_process(load_checks()[arguments.names[0]], device, arguments.in_this_process, arguments.limit)
        return 0
    here = _prepare(device)
    checks = load_checks()
    if unknown := set(arguments.names) - set(checks):
        parser.error(f"no check is called {', '.join(sorted(unknown))}; there are: {', '.join(checks)}")
    chosen = [checks[name] for name in arguments.names] or list(checks.values())
    if arguments.list:
        for check in chosen:
            print(f"{check.name}: {check.title}")
        return 0
    return _run_all(chosen, device, here)


def _run_all(checks: list[Check], device: str, here: dict[str, str]) -> int:
    out = os.environ.get("OUT")
    record = Path(out) / "gpu_check.jsonl" if out else Path(os.devnull)
    begin = time.monotonic()
    outcomes = []
    with record.open("w") as lines:

        def note(entry: dict) -> None:
            lines.write(json.dumps(entry) + "\n")
            lines.flush()  # whatever comes next, this much is known

        note({"environment": here, "device": device})
        for check in checks:
            left = _TOTAL_S - (time.monotonic() - begin)
            if reason := why_not(check, device):
                outcome = Outcome(check.name, "skip", device, faults=[reason])
            elif left < 20:
                outcome = Outcome(check.name, "fail", device, faults=[f"not run: {_TOTAL_S:.0f} s are over"])
            else:
                outcome = run_check(check, device, min(check.limit_s, left - 10))
            outcomes.append(outcome)
            print(outcome, flush=True)
            note(asdict(outcome))
        by_result = {r: [o.check for o in outcomes if o.result == r] for r in ("pass", "fail", "skip")}
        seconds = time.monotonic() - begin
        note({"summary": by_result, "seconds": round(seconds, 1), "device": device})
    said = f"{len(by_result['pass'])} passed, {len(by_result['fail'])} failed, {len(by_result['skip'])} skipped"
    print(f"gpu check on {device}: {said}, in {seconds:.0f} s")
    for result in ("fail", "skip"):
        if by_result[result]:
            print(f"  {result}: {', '.join(by_result[result])}")
    if not by_result["pass"] and not by_result["fail"]:
        return 2
    return 1 if by_result["fail"] else 0


if __name__ == "__main__":
    sys.exit(main())
