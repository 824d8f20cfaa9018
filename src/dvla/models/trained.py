"""From a training checkpoint back to the run's settings and to a plain policy with its trained weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dvla.config import Config, ConfigError, ModelConfig, load
from dvla.envs.protocol import EnvSpec
from dvla.models.policy_source import prepare_policy
from dvla.runtime.checkpoint import fault_of, load_plain, read_train_state


def run_config(checkpoint: Path) -> dict[str, Any]:
    """The settings of the run that a checkpoint is of, as plain values; every file of it is checked.

    Args:
        checkpoint: A ``step_NNNNNN`` folder of a run, or the link ``latest``.

    Raises:
        ConfigError: The checkpoint is torn or not of a run that can be gone on from.
    """
    folder = checkpoint.resolve()
    if fault := fault_of(folder, hashes=True):
        raise ConfigError(f"checkpoint={checkpoint}: no complete checkpoint ({fault})")
    plain = read_train_state(folder).get("config")
    if not isinstance(plain, dict):
        raise ConfigError(f"checkpoint={checkpoint} is of an older version of this program")
    if "sft" in plain:
        raise ConfigError(
            f"checkpoint={checkpoint} is of an SFT run, whose policy is ready to be used: give "
            f"model.checkpoint={folder.parents[1] / 'policy'} instead"
        )
    return plain


def env_spec_of(checkpoint: Path) -> EnvSpec:
    """The environment that the run of a checkpoint was in."""
    saved: dict[str, Any] = read_train_state(checkpoint.resolve())["env_spec"]
    fields: dict[str, Any] = {name: tuple(x) if isinstance(x, list) else x for name, x in saved.items()}
    return EnvSpec(**fields)


def as_config(plain: dict[str, Any]) -> Config:
    """Plain values as a checked config."""
    from omegaconf import OmegaConf

    return load(OmegaConf.create(plain))


def trained_policy(model: ModelConfig, *, spec: EnvSpec, seed: int, checkpoint: Path | None) -> Any:
    """A plain policy on the CPU.

    Args:
        model: The policy.
        spec: The environment it is for.
        seed: Of random weights.
        checkpoint: Whose weights to take; None for those the model begins with.
    """
    source = prepare_policy(model, spec=spec, seed=seed)
    if source.load is not None:
        source.policy.to_empty(device="cpu")
        source.load(source.policy)
    if checkpoint is not None:
        load_plain(checkpoint.resolve(), source.policy)
    return source.policy
