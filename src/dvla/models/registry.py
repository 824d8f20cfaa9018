"""From the names in a config to a policy with reproducible initial weights.

Models are imported when they are asked for: a run of the perceptron must not pay for importing transformers.
"""

from __future__ import annotations

import dataclasses
import inspect
import pkgutil
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from dvla.config import ConfigError
from dvla.envs.protocol import EnvSpec

_MODELS = {  # where the class is, and where its presets are
    "mlp": ("dvla.models.mlp:MLPPolicy", "dvla.models.mlp:PRESETS"),
    "openvla_oft": ("dvla.models.openvla_oft:OpenVLAOFT", "dvla.models.openvla_oft_config:PRESETS"),
    "pi05": ("dvla.models.pi05:Pi05", "dvla.models.pi05_config:PRESETS"),
}


def build_policy(
    name: str,
    preset: str,
    options: Mapping[str, Any],
    *,
    spec: EnvSpec,
    num_action_chunks: int,
    temperature: float,
    seed: int,
    **more: Any,
) -> nn.Module:
    """Build a policy on the CPU, in float32.

    Args:
        name: ``openvla_oft``, ``pi05``, ``mlp``, or ``package.module:Class`` for a class of the user's, which is called as
            ``Class(preset=..., spec=..., num_action_chunks=..., temperature=..., **options)``.
        preset: Name of a set of sizes; a user's class gets it as it is.
        options: Fields of the preset to change.
        spec: The environment the policy is for.
        num_action_chunks: Control steps K of one decision.
        temperature: Sampling temperature, > 0.
        seed: Determines the initial weights, whatever random numbers were drawn before; the global generators are left
            as they were.
        **more: What only some models take, such as `statistics`.

    Raises:
        ConfigError: A name, preset or option is unknown or does not fit the environment; names the config key.
    """
    build = check_model(name, preset, options)
    # devices=(): everything is drawn on the CPU, and looking at the accelerators would initialise them.
    with torch.random.fork_rng(devices=()):
        torch.manual_seed(seed)
        policy = build(spec=spec, num_action_chunks=num_action_chunks, temperature=temperature, **more)
    return policy.to(dtype=torch.float32)


def check_model(name: str, preset: str, options: Mapping[str, Any]) -> Callable[..., nn.Module]:
    """Check names and options without building anything, so that a typo costs no simulator's start.

    Returns:
        A function that builds the policy, given `spec`, `num_action_chunks` and `temperature`.

    Raises:
        ConfigError: As `build_policy`.
    """
    if ":" in name:
        return _custom(name, preset, options)
    build, config = known_model(name, preset, options)

    def build_known(**sizes: Any) -> nn.Module:
        try:
            return build(config, **sizes)
        except ValueError as error:  # the sizes do not fit the environment
            raise ConfigError(str(error)) from error

    return build_known


def known_model(name: str, preset: str, options: Mapping[str, Any]) -> tuple[Callable[..., nn.Module], Any]:
    """One of the models that come with D-VLA: its class and its sizes."""
    if name not in _MODELS:
        raise ConfigError(f"model.name: unknown model {name!r}; allowed: {', '.join(_MODELS)}, or package.module:Class")
    build, presets = map(pkgutil.resolve_name, _MODELS[name])
    if preset not in presets:
        raise ConfigError(f"model.preset: {name} has no preset {preset!r}; allowed: {', '.join(presets)}")
    config = presets[preset]
    check_options(name, config, options)
    try:
        return build, dataclasses.replace(config, **options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"model.options: {error}") from error


def check_options(name: str, config: Any, options: Mapping[str, Any]) -> None:
    """Check that `options` are fields of `config`, the sizes of some preset, and of their kinds.

    Raises:
        ConfigError: One is not.
    """
    allowed = [field.name for field in dataclasses.fields(config)]
    for option, value in options.items():
        if option not in allowed:
            raise ConfigError(f"model.options.{option}: {name} has no such option; allowed: {', '.join(allowed)}")
        default = getattr(config, option)
        if not _is_like(value, default):
            raise ConfigError(f"model.options.{option}: got {value!r}, needs a value like {default!r}")


def _is_like(value: Any, default: Any) -> bool:
    """Whether `value` can stand in for `default` without changing its kind."""
    if isinstance(value, bool) or isinstance(default, bool):
        return isinstance(value, bool) and isinstance(default, bool)
    if isinstance(default, float):
        return isinstance(value, int | float)
    if isinstance(default, list | tuple):
        return isinstance(value, list | tuple) and all(_is_like(item, default[0]) for item in value)
    return isinstance(value, type(default))


def _custom(name: str, preset: str, options: Mapping[str, Any]) -> Callable[..., nn.Module]:
    """A function that builds a policy of the user's own."""
    try:
        build = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(f"model.name: cannot import {name!r}: {error}") from error
    try:
        inspect.signature(build).bind(preset=preset, spec=None, num_action_chunks=None, temperature=None, **options)
    except TypeError as error:
        raise ConfigError(
            f"model.name: {name} must take preset, spec, num_action_chunks, temperature and model.options ({error})"
        ) from error

    def build_custom(**sizes: Any) -> nn.Module:
        policy = build(preset=preset, **sizes, **options)
        is_whole = all(hasattr(policy, part) for part in ("record_spec", "act", "fsdp_units"))
        if not isinstance(policy, nn.Module) or not is_whole:
            raise ConfigError(f"model.name: {name} is no Policy (an nn.Module with record_spec, act and fsdp_units)")
        return policy.to("cpu")

    return build_custom
