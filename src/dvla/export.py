"""Write a trained policy as the original tools read it.

``python -m dvla.export checkpoint=runs/x/checkpoints/latest out=DIR``

A policy that began as a checkpoint goes back to that checkpoint's layout: the same files, names and dtypes. One that began
with random weights is written in the layout of its model's original (OpenVLA-OFT: Hugging Face; pi0.5: openpi). Adapters
are merged into the weights they stand beside. ``README.md`` is a model card, with what the run's folder tells of results.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra

from dvla.config import ConfigError, register
from dvla.entry import CONFIG_FOLDER

if TYPE_CHECKING:
    from omegaconf import DictConfig


def export(checkpoint: Path, out: Path) -> None:
    """Write the policy of a training checkpoint to the new folder `out`.

    Args:
        checkpoint: A ``step_NNNNNN`` folder of a run, or the link ``latest``.
        out: A folder that does not exist yet.

    Raises:
        ConfigError: The checkpoint is torn or not of a run, or `out` exists.
    """
    from dvla.models.export import write_policy
    from dvla.models.trained import as_config, env_spec_of, run_config, trained_policy
    from dvla.runtime.checkpoint import read_train_state
    from dvla.telemetry.model_card import model_card

    config = as_config(run_config(checkpoint))
    if out.exists():
        raise ConfigError(f"out={out} exists: give a new folder")
    spec, version = env_spec_of(checkpoint), read_train_state(checkpoint.resolve())["policy_version"]
    card = model_card(config, spec, checkpoint.resolve(), version)
    policy = trained_policy(config.model, spec=spec, seed=config.seed, checkpoint=checkpoint)
    write_policy(policy, config.model, out)
    (out / "README.md").write_text(card, encoding="utf-8")  # in place of the base model's, if that has one


def main() -> None:
    """Entry."""
    register()

    @hydra.main(version_base="1.3", config_path=str(CONFIG_FOLDER), config_name="export")
    def start(composed: DictConfig) -> None:
        options: Any = composed
        try:
            export(Path(options.checkpoint), Path(options.out))
        except ConfigError as error:
            sys.stderr.write(f"dvla: error: {error}\n")
            sys.exit(2)
        sys.stdout.write(f"written to {options.out}\n")

    start()


if __name__ == "__main__":
    main()
