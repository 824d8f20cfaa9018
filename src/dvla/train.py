"""Train a policy: ``python -m dvla.train``, or ``torchrun --standalone --nproc-per-node 2 -m dvla.train experiment=...``."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dvla.config import load
from dvla.entry import start_rank

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from dvla.runtime.stop_request import StopRequest


def _train(composed: DictConfig, stop_request: StopRequest) -> int:
    config = load(composed)
    from dvla.runner import run

    return run(config, stop_request)


def main() -> None:
    """Entry of every rank."""
    start_rank("train", "dvla", _train)


if __name__ == "__main__":
    main()
