"""How near the models come to their originals: run ``python perf/golden.py``; DVLA_GOLDEN names a folder of recordings."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from runs import store

TESTS = Path(__file__).parents[1] / "tests"
sys.path.insert(0, str(TESTS))

from golden import compare  # noqa: E402 - lies with the tests

GROUPS = {
    "pi05_tiny": ("prefix_k", "prefix_v", "velocity", "loss", "sample.n4", "sample.n10", "grad.", "grad_norm"),
    "openvla_oft_tiny": ("single", "single_stop_masked", "proprio", "two_images_proprio"),
}


def main() -> None:
    """Compare and store."""
    folder = Path(os.environ.get("DVLA_GOLDEN", TESTS / "data" / "golden"))
    rows = []
    for model, groups in GROUPS.items():
        results = list(compare(folder / model))
        for group in groups:
            end = "" if group.endswith(".") else "."
            found = [r for r in results if (r[0] + ".").startswith(group + end)]
            worst = max(found, key=lambda r: r[1])
            rows.append(
                {"name": f"{model}: {group.rstrip('.')}", "tensors": len(found), "worst": worst[1], "at": worst[0]}
            )
        exact = [r for r in results if r[2] == 0]
        rows.append(
            {
                "name": f"{model}: pictures, tokens, bins",
                "tensors": len(exact),
                "worst": max(r[1] for r in exact),
                "at": "equal to the byte",
            }
        )
        rows.append(
            {
                "name": f"{model}: all",
                "tensors": len(results),
                "worst": max(r[1] for r in results),
                "at": f"{sum(r[1] <= r[2] for r in results)} within their tolerance",
            }
        )
    store("golden", rows)


if __name__ == "__main__":
    main()
