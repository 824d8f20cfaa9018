"""How every rank of a program starts and ends: signals, Hydra, one line for an error, an exit code."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from dvla.config import ConfigError, register
from dvla.runtime.failure import EXIT_FAILED, EXIT_SETTING, Failure, RunFailedError, announce
from dvla.runtime.processes import die_with_parent, set_title
from dvla.runtime.stop_request import StopRequest

if TYPE_CHECKING:
    from omegaconf import DictConfig

CONFIG_FOLDER = Path(__file__).resolve().with_name("conf")  # in the repository a link to conf/


def start_rank(config_name: str, title: str, work: Callable[[DictConfig, StopRequest], int]) -> None:
    """Do `work` with the composed config; ends the process with the exit code it returns.

    Args:
        config_name: The file in ``conf/``.
        title: Name of the process, which the rank's number is added to.
        work: Imports what is heavy itself, so that a signal finds its handler from the beginning.
    """
    stop_request = StopRequest()
    stop_request.install()  # before the heavy imports: a signal during start-up must not kill one rank alone
    if "TORCHELASTIC_RUN_ID" in os.environ:
        die_with_parent()
        # A library that asks something (may it download, may it run code) reads the end of the input, and fails, instead
        # of waiting for an answer with all ranks.
        nothing = os.open(os.devnull, os.O_RDONLY)
        if nothing != 0:  # else the input was closed, and this has taken its place
            os.dup2(nothing, 0)
            os.close(nothing)
    rank = int(os.environ.get("RANK", "0"))
    set_title(f"{title}:r{rank}")
    register()

    @hydra.main(version_base="1.3", config_path=str(CONFIG_FOLDER), config_name=config_name)
    def start(composed: DictConfig) -> None:
        try:
            if HydraConfig.get().mode is RunMode.MULTIRUN:
                raise ConfigError(
                    "-m (multirun): a run ends its process, so there would be no second one: start one command for each, "
                    "as in for seed in 1 2; do python -m dvla.train seed=$seed run.name=seed$seed …; done"
                )
            code = work(composed, stop_request)
        except ConfigError as error:  # found by all ranks: one says it
            code = EXIT_SETTING
            announce(replace(Failure.of(rank, error), message=str(error), traceback=""), rank, aloud=rank == 0)
        except BaseException as error:
            code = EXIT_FAILED
            announce(error.first if isinstance(error, RunFailedError) else Failure.of(rank, error), rank)
        _leave(code)

    start()


def _leave(code: int) -> None:
    """End the process at once: threads still in a broken collective would turn the exit code into a crash."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
