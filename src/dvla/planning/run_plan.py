"""Foretells runs for people and programs: `dvla.plan` with `from_run` or `profile`."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from rich.console import Console
from rich.table import Table

from dvla.config import Config, ConfigError, load_as, to_plain
from dvla.planning.calibration import Calibration, calibrate
from dvla.planning.forecast import forecast
from dvla.planning.profile import Profile
from dvla.planning.search import Option, search

_SHOWN = 12
_SHOWN_LANES = ("simulators", "inference", "grpo")


@dataclass(kw_only=True, slots=True)
class RunPlanConfig:
    """A run to foretell; without `from_run` and `profile` there is none."""

    from_run: tuple[str, ...] = ()
    """Folders of finished runs with `telemetry.trace=true`, to take costs from; settings are those of the first."""
    profile: str | None = None
    """A file with the fields of `dvla.planning.profile.Profile`, YAML or JSON, instead of costs from runs."""
    change: dict[str, Any] = field(default_factory=dict)
    """Settings of `dvla.train` that are to differ: `++change.placement.ratio=3:1`."""
    nodes: int | None = None
    """Null: as in the run, else 1."""
    ranks_per_node: int | None = None
    """Null: as in the run, else 1."""
    search: bool = False
    """Look for better settings, beginning with this one."""

    def __post_init__(self) -> None:
        """Check the fields."""
        for key in ("nodes", "ranks_per_node"):
            if (value := getattr(self, key)) is not None and value < 1:
                raise ConfigError(f"{key} must be at least 1, or null")
        if self.from_run and self.profile is not None:
            raise ConfigError("profile: from_run gives one already; leave one of them out")


@dataclass(frozen=True, slots=True)
class RunPlan:
    """Settings and what they give, the best first, and what that was computed from."""

    profile: Profile
    num_nodes: int
    ranks_per_node: int
    options: list[Option]

    def to_plain(self) -> dict[str, Any]:
        """As one JSON object."""
        options = [{"name": option.name, **_keys(option.config), **asdict(option.forecast)} for option in self.options]
        sizes = {"nodes": self.num_nodes, "ranks_per_node": self.ranks_per_node}
        return sizes | {"options": options, "profile": asdict(self.profile)}


def _keys(config: Config) -> dict[str, Any]:
    plain = to_plain(config)
    keys = {"placement": ("name", "ratio", "stages"), "runtime": ("num_envs",), "algo": ("groups_per_step",)}
    return {f"{part}.{key}": plain[part][key] for part, names in keys.items() for key in names}


def read_calibration(config: RunPlanConfig) -> Calibration:
    """Costs and settings that `config` names, its changes included.

    Raises:
        ConfigError: They cannot be read, or cannot work.
    """
    if config.from_run:
        known = calibrate(config.from_run)
    else:
        path = Path(config.profile or "")
        if not path.is_file():
            raise ConfigError(f"profile={path}: there is no such file")
        known = Calibration(load_as(Profile, OmegaConf.load(path)), Config(), 1, 1)  # type: ignore[arg-type]
    changed = load_as(Config, OmegaConf.merge(to_plain(known.config), config.change))  # type: ignore[arg-type]
    return Calibration(
        known.profile, changed, config.nodes or known.num_nodes, config.ranks_per_node or known.ranks_per_node
    )


def plan_run(known: Calibration, *, with_search: bool) -> RunPlan:
    """Foretell a setting, and those around it.

    Raises:
        ConfigError: It cannot work.
    """
    config, profile, nodes, ranks = known.config, known.profile, known.num_nodes, known.ranks_per_node
    if with_search:
        options = search(config, profile, num_nodes=nodes, ranks_per_node=ranks)
    else:
        options = [Option(config, forecast(config, profile, num_nodes=nodes, ranks_per_node=ranks))]
    return RunPlan(profile, nodes, ranks, options)


def show_run(plan: RunPlan, console: Console) -> None:
    """Print `plan` as tables."""
    title = f"{plan.num_nodes} x {plan.ranks_per_node} ranks"
    table = Table("setting", title=title, title_justify="left")
    for column in ("step s", "steps/s", "stale"):
        table.add_column(column, justify="right")
    table.add_column("idle, %")
    for option in plan.options[:_SHOWN]:
        told = option.forecast
        idle = ", ".join(f"{lane} {100 * bubble:.0f}" for lane, bubble in told.bubbles.items() if lane in _SHOWN_LANES)
        table.add_row(
            option.name, f"{told.step_s:.3g}", f"{told.env_steps_per_s:,.0f}", f"{told.staleness_mean:.2f}", idle
        )
    console.print(table)
    sizes = Table("bytes", title=f"memory and links: {plan.options[0].name}", title_justify="left")
    sizes.add_column("MiB", justify="right")
    for name, value in asdict(plan.options[0].forecast.footprint).items():
        sizes.add_row(name.removesuffix("_bytes").replace("_", " "), f"{value / 2**20:,.1f}")
    console.print(sizes)
