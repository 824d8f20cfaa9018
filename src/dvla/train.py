"""Train a policy: ``python -m dvla.train``, or ``torchrun --standalone --nproc-per-node 2 -m dvla.train experiment=...``."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import hydra

from dvla.config import ConfigError, load, register
from dvla.runtime.failure import describe, tell_torchrun
from dvla.runtime.processes import die_with_parent, set_title
from dvla.runtime.stop_request import StopRequest

if TYPE_CHECKING:
    from omegaconf import DictConfig

CONFIG_FOLDER = Path(__file__).resolve().parents[2] / "conf"


def main() -> None:
    """Entry of every rank; ends the process with its exit code."""
    stop_request = StopRequest()
    stop_request.install()  # before the heavy imports: a signal during start-up must not kill one rank alone
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()
    set_title(f"dvla:r{os.environ.get('RANK', '0')}")
    register()

    @hydra.main(version_base="1.3", config_path=str(CONFIG_FOLDER), config_name="train")
    def start(composed: DictConfig) -> None:
        _leave(_run(composed, stop_request))

    start()


def _run(composed: DictConfig, stop_request: StopRequest) -> int:
    rank = int(os.environ.get("RANK", "0"))
    try:
        config = load(composed)
        from dvla.runner import run

        return run(config, stop_request)
    except BaseException as error:
        message = str(error) if isinstance(error, ConfigError) else describe(error)
        tell_torchrun(message)
        if rank == 0 or not isinstance(error, ConfigError):  # a wrong setting is found by all ranks: one says it
            sys.stderr.write(f"dvla: rank {rank}: error: {message}\n")
        return 2 if isinstance(error, ConfigError) else 1


def _leave(code: int) -> None:
    """End the process at once: threads still in a broken collective would turn the exit code into a crash."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    main()
