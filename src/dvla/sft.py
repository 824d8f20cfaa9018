"""Supervised fine-tuning: clone the behaviour that datasets show.

``python -m dvla.sft model=openvla_oft_nano data.paths=[datasets/pushcube] run.name=sft``, or under torchrun.

The policy lies in ``runs/sft/policy`` then, in its original's layout and with the dataset's statistics:
``python -m dvla.train model=openvla_oft_nano model.checkpoint=runs/sft/policy env=maniskill`` goes on from it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dvla.config import SftConfig, load_as
from dvla.entry import start_rank

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from dvla.runtime.stop_request import StopRequest


def _clone(composed: DictConfig, stop_request: StopRequest) -> int:
    config = load_as(SftConfig, composed)
    from dvla.cloning import clone

    return clone(config, stop_request)


def main() -> None:
    """Entry of every rank."""
    start_rank("sft", "dvla:sft", _clone)


if __name__ == "__main__":
    main()
