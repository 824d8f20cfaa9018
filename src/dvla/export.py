"""Write a trained policy as the original tools read it.

``python -m dvla.export checkpoint=runs/x/checkpoints/latest out=DIR``

A policy that began as a checkpoint goes back to that checkpoint's layout: the same files, names and dtypes. One that began
with random weights is written in the layout of its model's original (OpenVLA-OFT: Hugging Face; pi0.5: openpi). Adapters
are merged into the weights they stand beside.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hydra
import yaml

from dvla.config import ConfigError, load, register
from dvla.train import CONFIG_FOLDER

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
    from omegaconf import OmegaConf

    from dvla.envs.protocol import EnvSpec
    from dvla.models.export import write_policy
    from dvla.models.policy_source import prepare_policy
    from dvla.runtime.checkpoint import fault_of, load_plain, read_train_state

    checkpoint = checkpoint.resolve()
    fault = fault_of(checkpoint)
    if fault:
        raise ConfigError(f"checkpoint={checkpoint}: no complete checkpoint ({fault})")
    if out.exists():
        raise ConfigError(f"out={out} exists: give a new folder")
    settings = checkpoint.parents[1] / "config.yaml"
    if not settings.is_file():
        raise ConfigError(f"checkpoint={checkpoint}: {settings} is missing: the folder must lie in its run")
    config = load(OmegaConf.create(yaml.safe_load(settings.read_text())))
    saved: dict[str, Any] = read_train_state(checkpoint)["env_spec"]
    fields: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in saved.items()}
    spec = EnvSpec(**fields)
    source = prepare_policy(config.model, spec=spec, seed=config.seed)
    if source.load is not None:
        source.policy.to_empty(device="cpu")
        source.load(source.policy)
    load_plain(checkpoint, source.policy)
    write_policy(source.policy, config.model, out)


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
