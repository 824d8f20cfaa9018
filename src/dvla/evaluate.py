"""Evaluate a policy: every (task, initial state) exactly once.

``python -m dvla.evaluate checkpoint=runs/x/checkpoints/latest [env=libero_spatial] [evaluation.videos_per_task=1]``
evaluates what a run has trained, with the run's own settings but for what the command line says.
``python -m dvla.evaluate model=openvla_oft_full model.checkpoint=DIR env=libero_spatial`` evaluates the weights a model
begins with. Under torchrun the episodes are shared out to the ranks.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from dvla.config import Config, ConfigError, load
from dvla.entry import start_rank

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from dvla.runtime.stop_request import StopRequest

_SETTINGS = ("env", "render", "evaluation", "runtime", "telemetry", "seed", "device")
"""What the command line may change about a trained policy's run."""


def settings(composed: DictConfig, overrides: list[str]) -> tuple[Config, Path | None, Path | None]:
    """What to evaluate, with which weights, and where to write (None: the usual place).

    Args:
        composed: What Hydra made of ``conf/evaluate.yaml`` and the command line.
        overrides: The command line.

    Raises:
        ConfigError: It cannot work.
    """
    from omegaconf import OmegaConf

    plain: Any = OmegaConf.to_container(composed)
    checkpoint, out = plain.pop("checkpoint"), plain.pop("out")
    keys = [override.partition("=")[0].lstrip("+~").split("@")[0] for override in overrides]
    if checkpoint is None:
        if "model" not in keys:
            raise ConfigError(
                "say what to evaluate: checkpoint=runs/…/checkpoints/latest, or model=… for its own weights"
            )
        return load(OmegaConf.create(plain)), None, Path(out) if out else None

    from dvla.models.trained import run_config

    of_run = OmegaConf.create(run_config(Path(checkpoint)))
    for key in sorted(keys, key=lambda key: "." in key):  # a group first, then what is changed of it
        if key.split(".")[0] in _SETTINGS:
            OmegaConf.update(of_run, key, OmegaConf.select(composed, key), merge=False, force_add=True)
        elif key not in ("checkpoint", "out"):
            raise ConfigError(f"{key}: with a checkpoint, this is as in its run and cannot be changed")
    return load(of_run), Path(checkpoint), Path(out) if out else None


def _evaluate(composed: DictConfig, stop_request: StopRequest) -> int:
    from hydra.core.hydra_config import HydraConfig

    config, checkpoint, out = settings(composed, list(HydraConfig.get().overrides.task))
    from dvla.evaluator import evaluate

    return evaluate(config, checkpoint, out, stop_request)


def main() -> None:
    """Entry of every rank."""
    start_rank("evaluate", "dvla:eval", _evaluate)


if __name__ == "__main__":
    main()
