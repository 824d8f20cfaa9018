"""The benchmarks of this machine, one after another: run ``python perf/bench.py [--check] [SCRIPT …]``, or ``make bench``.

Without `--check` their figures become the new baselines (results/*.json, RESULTS.md). With it they are compared with these
instead, by `TOLERANCES`, and the exit code is 1 if one is worse than that. Ratios are compared everywhere, figures with a unit
only on the processor and number of cores that the baseline was measured on. All of it takes some twenty minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from runs import RESULTS, machine

HERE = Path(__file__).parent
SCRIPTS = ("bench_mlp", "bench_stages", "bench_efficiency", "bench_libero", "bench_weights")


@dataclass(frozen=True)
class Tolerance:
    """How much worse a figure may be, as a share of the baseline."""

    worse: float
    is_better_high: bool = True
    is_ratio: bool = True


TOLERANCES = {
    "grpo_mlp.env_steps_per_s_raw": Tolerance(0.25, is_ratio=False),
    "grpo_mlp_image.env_steps_per_s_raw": Tolerance(0.25, is_ratio=False),
    "startup_s": Tolerance(0.3, is_better_high=False, is_ratio=False),
    "overlap.vs_slowest_lane": Tolerance(0.05, is_better_high=False),
    "overlap.vs_serial": Tolerance(0.1),
    "cpu_efficiency": Tolerance(0.05),
    "cpu_overhead": Tolerance(0.5, is_better_high=False),
    "libero.vs_ceiling": Tolerance(0.1),
    "weights.vs_memcpy": Tolerance(0.4),
    "weights.vs_gloo_broadcast": Tolerance(0.4),
    "weights.learner_blocked_frac": Tolerance(0.3, is_better_high=False),
}


def regressions(baseline: dict[str, float], now: dict[str, float], *, same_machine: bool) -> list[str]:
    """What is worse than its tolerance, or was measured once and is not now, in words."""
    found = []
    for name, tolerance in TOLERANCES.items():
        if name not in baseline or not (tolerance.is_ratio or same_machine):
            continue
        if name not in now:
            found.append(f"{name}: not measured, the baseline is {baseline[name]:.3g}")
            continue
        limit = baseline[name] * (1 - tolerance.worse if tolerance.is_better_high else 1 + tolerance.worse)
        if now[name] < limit if tolerance.is_better_high else now[name] > limit:
            found.append(f"{name}: {now[name]:.3g}, the baseline is {baseline[name]:.3g}, the limit {limit:.3g}")
    return found


def read(folder: Path, script: str) -> tuple[dict[str, float], dict]:
    """Figures of a script by name, and the machine they are of; nothing if it has not been measured."""
    path = folder / f"{script}.json"
    if not path.exists():
        return {}, {}
    content = json.loads(path.read_text())
    return {row["name"]: row["value"] for row in content["rows"] if "value" in row}, content["machine"]


def main() -> None:
    """Measure; then compare, or keep."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare with the baselines instead of making them")
    parser.add_argument("scripts", nargs="*", default=SCRIPTS, help=f"of {', '.join(SCRIPTS)}; all")
    arguments = parser.parse_args()
    worse = []
    if arguments.check and (unmeasured := [script for script in arguments.scripts if not read(RESULTS, script)[0]]):
        sys.exit(f"nothing to compare {', '.join(unmeasured)} with: first make bench ARGS='{' '.join(unmeasured)}'")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) if arguments.check else RESULTS
        for number, script in enumerate(arguments.scripts, 1):
            sys.stderr.write(f"\n== {script} ({number} of {len(arguments.scripts)}) ==\n")
            environment = os.environ | {"BENCH_RESULTS": str(folder)}
            subprocess.run([sys.executable, str(HERE / f"{script}.py")], check=True, env=environment)
            if arguments.check:
                baseline, theirs = read(RESULTS, script)
                same = all(theirs.get(key) == machine()[key] for key in ("cpu", "cores"))
                worse += regressions(baseline, read(folder, script)[0], same_machine=same)
    if arguments.check:
        sys.stderr.write("\n".join(["worse than the baseline:", *worse] if worse else ["no benchmark is worse"]) + "\n")
        sys.exit(bool(worse))
    subprocess.run([sys.executable, str(HERE / "report.py")], check=True)


if __name__ == "__main__":
    main()
