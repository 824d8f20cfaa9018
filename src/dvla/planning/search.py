"""Looks for a better setting of a run: placement, ratio, stages, environments, groups of a batch. Pure, from forecasts."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd
from typing import TYPE_CHECKING

from dvla.config import ConfigError, Placement, PlacementConfig
from dvla.planning.forecast import Forecast, forecast

if TYPE_CHECKING:
    from collections.abc import Iterator

    from dvla.config import Config
    from dvla.planning.profile import Profile

_GAIN = 1.02
"""What another setting must bring to be taken: less is no more than the forecast's own error."""
_LARGEST = 8
"""Times as many environments, and groups of a batch, as in the setting to begin with."""


@dataclass(frozen=True, slots=True)
class Option:
    """A setting and what it gives."""

    config: Config
    forecast: Forecast

    @property
    def name(self) -> str:
        """For people: the keys that a search changes."""
        return describe(self.config)


def describe(config: Config) -> str:
    """The keys that a search changes, in words."""
    place = config.placement
    words = [place.name.name]
    if place.name in (Placement.separated, Placement.hybrid):
        words.append(place.ratio)
    if place.stages is not None:
        words.append(f"{place.stages} stages")
    return ", ".join([*words, f"{config.runtime.num_envs} envs a rank", f"{config.algo.groups_per_step} groups"])


def placements(ranks_per_node: int) -> list[PlacementConfig]:
    """Every placement that a node of so many ranks allows, without stages."""
    found = {(Placement.colocated, "1:1")}
    for first in range(1, ranks_per_node):
        for second in range(1, ranks_per_node - first + 1):
            third = ranks_per_node - first - second
            common = gcd(gcd(first, second), third)
            ratio = f"{first // common}:{second // common}"
            if not third:
                found.add((Placement.separated, ratio))
            if second <= first:  # else inference ranks would have nobody to decide for
                found.add((Placement.hybrid, f"{ratio}:{third // common}" if third else ratio))
    return [PlacementConfig(name=name, ratio=ratio) for name, ratio in sorted(found, key=lambda kind: kind[0].name)]


def search(config: Config, profile: Profile, *, num_nodes: int, ranks_per_node: int) -> list[Option]:
    """Change one key after the other for the better until none helps.

    Returns:
        All settings that were looked at and can work, the one with most control steps a second first.

    Raises:
        ConfigError: None can.
    """
    known: dict[str, Option | None] = {}

    def look(other: Config) -> Option | None:
        name = describe(other)
        if name not in known:
            try:
                told = forecast(other, profile, num_nodes=num_nodes, ranks_per_node=ranks_per_node)
                known[name] = Option(other, told)
            except ConfigError:
                known[name] = None
        return known[name]

    best = look(config)
    while True:
        before = best
        for choices in _CHOICES:
            for other in choices(best.config if best else config, config, ranks_per_node):
                option = look(other)
                if option and (best is None or _pace(option) > _GAIN * _pace(best)):
                    best = option
        if best is before:
            break
    if best is None:
        raise ConfigError("search: no placement on these ranks can work; look at one setting to see why (search=false)")
    return sorted(filter(None, known.values()), key=_pace, reverse=True)


def _pace(option: Option) -> float:
    return option.forecast.env_steps_per_s


def _other_placements(config: Config, _first: Config, ranks_per_node: int) -> Iterator[Config]:
    for placement in placements(ranks_per_node):
        yield from _valid(config, placement=replace(placement, stages=config.placement.stages))


def _other_stages(config: Config, _first: Config, _ranks: int) -> Iterator[Config]:
    for stages in (None, 1, 2, 3, 4):
        yield from _valid(config, placement=replace(config.placement, stages=stages))


def _other_envs(config: Config, first: Config, _ranks: int) -> Iterator[Config]:
    for num_envs in (config.runtime.num_envs // 2, 2 * config.runtime.num_envs):
        if num_envs and num_envs <= _LARGEST * first.runtime.num_envs:
            yield from _valid(config, num_envs=num_envs)


def _other_groups(config: Config, first: Config, _ranks: int) -> Iterator[Config]:
    for groups in (config.algo.groups_per_step // 2, 2 * config.algo.groups_per_step):
        if groups and groups <= _LARGEST * first.algo.groups_per_step:
            yield from _valid(config, groups_per_step=groups)


_CHOICES = (_other_placements, _other_stages, _other_envs, _other_groups)


def _valid(
    config: Config,
    *,
    placement: PlacementConfig | None = None,
    num_envs: int | None = None,
    groups_per_step: int | None = None,
) -> Iterator[Config]:
    """The config with these changes, unless they cannot work."""
    try:
        yield replace(
            config,
            placement=placement or config.placement,
            runtime=replace(config.runtime, num_envs=num_envs or config.runtime.num_envs),
            algo=replace(config.algo, groups_per_step=groups_per_step or config.algo.groups_per_step),
        )
    except ConfigError:
        return
