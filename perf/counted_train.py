"""`dvla.train` that also counts where the CPU time goes, for `bench_efficiency.py`: rank R leaves COUNTS/R.json.

At the end of every batch: the seconds since 1970, the CPU seconds of the rank's process, of its workers, and of its lanes in
what counts as work (`WORK`).
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil

from dvla.telemetry.trace import Tracer
from dvla.train import main

WORK = ("decide", "gradient", "optimise")


def count() -> None:
    """Have the spans of this process count."""
    span, seconds, batches, me = Tracer.span, dict.fromkeys(WORK, 0.0), [], psutil.Process()

    @contextmanager
    def counted(self: Tracer, name: str, /, **args: Any) -> Iterator[None]:
        before = time.thread_time()
        with span(self, name, **args):
            yield
        if name in WORK:
            seconds[name] += time.thread_time() - before
        elif name == "report":
            workers = [child.cpu_times() for child in me.children()]
            spent = {
                "now": time.time(),
                "rank": time.process_time(),
                "workers": sum(t.user + t.system for t in workers),
            }
            batches.append(spent | seconds)
            (Path(os.environ["COUNTS"]) / f"{os.environ['RANK']}.json").write_text(json.dumps(batches))

    Tracer.span = counted


if __name__ == "__main__":
    count()
    main()
