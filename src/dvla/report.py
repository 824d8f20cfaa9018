"""Draw what a run did as one page: ``python -m dvla.report runs/x`` writes ``runs/x/report.html``.

Runs do so themselves when they end (``telemetry.report``). By hand it also works for one that goes on, or that was killed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from dvla.telemetry.report import write_report
from dvla.telemetry.run_files import NoRunError


def main() -> None:
    """Entry."""
    parser = argparse.ArgumentParser(prog="python -m dvla.report", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path, help="the folder of a run, runs/<run.name>")
    folder = parser.parse_args().run
    try:
        path = write_report(folder)
    except NoRunError as error:
        sys.stderr.write(f"dvla: error: {error}\n")
        sys.exit(2)
    except OSError as error:
        sys.stderr.write(f"dvla: error: the report of {folder} cannot be written ({error}): it goes into that folder\n")
        sys.exit(1)
    sys.stdout.write(f"written to {path}\n")


if __name__ == "__main__":
    main()
