"""Serve a trained policy to robots and evaluations on other machines, in the protocol of openpi's client.

``python -m dvla.serve checkpoint=runs/x/checkpoints/latest [host=0.0.0.0] [port=8000] [device=cpu]``

There is no password: whoever reaches the port can ask. Ctrl-C ends it.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from dvla.config import ConfigError, ServeConfig, load_as
from dvla.entry import start_rank
from dvla.planes.semaphore import wait_any

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from dvla.runtime.stop_request import StopRequest


def _serve(composed: DictConfig, stop_request: StopRequest) -> int:
    config = load_as(ServeConfig, composed)
    from dvla.robot_policy import RobotPolicy

    try:
        from dvla.serving.policy_server import served
    except ModuleNotFoundError as error:
        raise ConfigError(f"dvla.serve needs {error.name}: pip install 'dvla[serve]'") from error

    policy = RobotPolicy.load(config.checkpoint, config.device.name)
    # Who comes, and what goes wrong.
    logging.basicConfig(format="%(asctime)s %(message)s", level=logging.INFO, force=True)
    with served(policy, config.host, config.port) as port:
        print(f"serving {config.checkpoint} at ws://{config.host}:{port}, Ctrl-C ends it", flush=True)
        while not stop_request.is_set():
            wait_any([stop_request], 3600.0)
    return 0


def main() -> None:
    """Entry."""
    start_rank("serve", "dvla:serve", _serve)


if __name__ == "__main__":
    main()
