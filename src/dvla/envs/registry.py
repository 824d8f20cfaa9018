"""Names of environments to classes, and the check of their options before any simulator starts."""

from __future__ import annotations

import difflib
import importlib
import inspect
from typing import TYPE_CHECKING, Any

from dvla.config import ConfigError, Meshes

if TYPE_CHECKING:
    from dvla.config import EnvConfig, RenderConfig
    from dvla.envs.protocol import Environment

BUILT_IN = {
    "reach": "dvla.envs.reach:ReachEnv",
    "maniskill": "dvla.envs.maniskill:ManiSkillEnv",
    "libero": "dvla.envs.libero:LiberoEnv",
}
EXPERTS = {"maniskill": "dvla.envs.maniskill_experts", "libero": "dvla.envs.libero_experts"}
"""Environments to modules with demonstrators: functions `expert_arguments`, `robot` and `play`."""


def environment_class(name: str) -> type[Environment]:
    """The class behind `env.name`: a built-in one, or ``package.module:Class``.

    Raises:
        ConfigError: There is no such environment.
    """
    target = BUILT_IN.get(name, name)
    module_name, _, class_name = target.partition(":")
    if not class_name:
        close = difflib.get_close_matches(name, BUILT_IN, n=1)
        hint = f", did you mean {close[0]}?" if close else ""
        raise ConfigError(
            f"env.name={name!r} is no environment{hint} (built in: {', '.join(BUILT_IN)}; an own one is given as "
            "package.module:Class)"
        )
    try:
        return getattr(importlib.import_module(module_name), class_name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"env.name={name!r} cannot be loaded: {error}") from error


def environment_arguments(config: EnvConfig, render: RenderConfig) -> dict[str, Any]:
    """Keyword arguments for the environment's constructor, checked against its signature.

    Raises:
        ConfigError: An option is unknown to this environment, or it has no light meshes.
    """
    parameters = inspect.signature(environment_class(config.name)).parameters
    arguments = {
        "task": config.task,
        "cameras": tuple(config.cameras),
        "image_size": tuple(config.image_size),
        "max_episode_steps": config.max_episode_steps,
        "reward_mode": config.reward_mode.name,
    }
    if "meshes" in parameters:
        arguments["meshes"] = render.meshes.name
    elif render.meshes is Meshes.light and config.cameras:
        raise ConfigError(f"render.meshes=light: {config.name} has no light meshes, set render.meshes=full")
    for key in config.options:
        if key not in parameters or key in arguments:
            own = sorted(set(parameters) - set(arguments))
            raise ConfigError(f"env.options.{key} is no option of {config.name} (it has: {', '.join(own) or 'none'})")
    try:
        inspect.signature(environment_class(config.name)).bind(**arguments, **config.options)
    except TypeError as error:
        raise ConfigError(
            f"env.name={config.name!r}: its constructor must take {', '.join(arguments)} and env.options ({error})"
        ) from error
    return arguments | config.options


def expected_action_dim(config: EnvConfig, render: RenderConfig) -> int | None:
    """Length of the environment's actions, if it can tell without starting; raises as `environment_arguments`."""
    arguments = environment_arguments(config, render)
    foresee = getattr(environment_class(config.name), "expected_action_dim", None)
    return foresee(**arguments) if foresee else None
