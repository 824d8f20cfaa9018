"""Hands more than 100,000 damaged inputs to the readers of settings, checkpoints and datasets, and counts how they took them.

Usage: python perf/fuzz.py [SEED]
Each reader has a process of its own. The first that crashes, hangs or raises anything but its own error ends the script,
which then shows the input.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from runs import store

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from fuzz_readers import TARGETS, fuzz_apart


def main() -> None:
    """Feed and store."""
    start, rows = int(sys.argv[1]) if len(sys.argv) > 1 else 0, []
    for name, (inputs, _) in TARGETS.items():
        begin = time.monotonic()
        rows.append(fuzz_apart(name, inputs, start, timeout_s=3600) | {"seed": start})
        sys.stderr.write(f"{name}: {inputs} inputs in {time.monotonic() - begin:.0f} s\n")
    store("fuzz", rows)


if __name__ == "__main__":
    main()
