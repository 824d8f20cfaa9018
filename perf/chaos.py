"""What becomes of a run when something is killed: run ``python perf/chaos.py``, or as part of ``make chaos``.

All combinations of tests/chaos/test_matrix.py: an environment's worker, a lane, either rank or torchrun's agent dies in the
middle of a reset, a decision, a gradient, a publication, a checkpoint or an evaluation. Seconds are from the kill to the end
of all processes; of a run that goes on, to its regular end.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from runs import REPOSITORY, store


def main() -> None:
    """Measure and store, if all tests pass."""
    with tempfile.TemporaryDirectory() as folder:
        test = ["tests/chaos/test_matrix.py", "-m", "chaos", "--outcomes", folder, *sys.argv[1:]]
        subprocess.run([sys.executable, "-m", "pytest", *test], cwd=REPOSITORY, check=True, stdout=sys.stderr)
        outcomes = [json.loads(path.read_text()) for path in Path(folder).iterdir()]
    store("chaos", sorted(outcomes, key=lambda row: (row["victim"], row["moment"])))


if __name__ == "__main__":
    main()
