"""Gathers what the lanes report and puts it where people and programs look: terminal, metrics, TensorBoard, summary."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Self

import yaml

from dvla.config import Schedule, to_plain
from dvla.telemetry.console import Console
from dvla.telemetry.film import save_film
from dvla.telemetry.metrics import MetricsWriter
from dvla.telemetry.summary import first_last_mean, write_summary

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from dvla.config import Config
    from dvla.lanes.grpo import StepReport
    from dvla.runtime.world import World
    from dvla.telemetry.lane_clock import LaneClock

logger = logging.getLogger(__name__)

_COUNTS = ("episodes", "groups", "groups_dropped", "env_steps", "decisions", "trained_decisions", "staleness_sum")
_MAXIMA = ("staleness_max", "logprob_gap_max")


class Reporter:
    """Rank 0 shows and writes; the other ranks keep the same counts, so that any of them could.

    Args:
        config: The run.
        world: This rank.
        logs: Folder of this attempt's logs.
    """

    def __init__(self, config: Config, world: World, logs: Path) -> None:
        self._config, self._world = config, world
        self._folder = config.run.folder
        self._console = Console(
            config.telemetry.console and world.is_main, config.algo.num_steps, title=config.run.name
        )
        self._metrics: MetricsWriter | None = None
        self._totals = dict.fromkeys(_COUNTS, 0.0) | dict.fromkeys(_MAXIMA, -1.0)
        self._history: list[tuple[float, float]] = []  # (success rate, mean return) of each batch
        self._earlier_wall_s = 0.0
        self._begin = time.monotonic()
        self._end: float | None = None
        self._last = self._begin
        self._policy_version = 0
        self._clocks: dict[str, LaneClock] = {}
        self._sync_seconds: list[float] = []
        self._weight_bytes = 0
        self._groups_lost = 0
        self._num_slots, self._num_free_slots = 0, lambda: 0

    def __enter__(self) -> Self:
        """Open the live view."""
        return self

    def __exit__(self, *_: object) -> None:
        """Give the terminal back, whatever happened."""
        self._console.close()
        if self._metrics:
            self._metrics.close()

    def phase(self, text: str) -> None:
        """Say what is being set up."""
        logger.info("%s", text, extra={"file_only": True})
        self._console.phase(text)

    def restore(self, state: dict[str, Any]) -> None:
        """Go on counting where a checkpoint left off."""
        self._totals |= state["totals"]
        self._history = [tuple(pair) for pair in state["history"]]
        self._earlier_wall_s = state["wall_s"]

    def state(self) -> dict[str, Any]:
        """What `restore` needs."""
        return {"totals": self._totals, "history": self._history, "wall_s": self._wall_s()}

    def training_starts(
        self,
        *,
        clocks: dict[str, LaneClock],
        sync_seconds: list[float],
        weight_bytes: int,
        num_slots: int,
        num_free_slots: Callable[[], int],
        policy_version: int,
    ) -> None:
        """Set-up is over; the clock of the run starts."""
        self._clocks, self._sync_seconds, self._weight_bytes = clocks, sync_seconds, weight_bytes
        self._num_slots, self._num_free_slots = num_slots, num_free_slots
        self._policy_version = policy_version
        self._begin = self._last = time.monotonic()
        for clock in clocks.values():
            clock.start(busy=self._config.runtime.schedule is Schedule.overlapped)
        if self._world.is_main:
            self._metrics = MetricsWriter(
                self._folder, tensorboard=self._config.telemetry.tensorboard, resume_at=policy_version
            )
            self._metrics.add_text("config", yaml.safe_dump(to_plain(self._config), sort_keys=False))
        self._console.training(policy_version)

    def training_ends(self, *, groups_lost: int) -> None:
        """The lanes have ended; what follows is no part of the throughput. `groups_lost` were in flight on this rank."""
        self._groups_lost = groups_lost
        self._end = time.monotonic()
        for clock in self._clocks.values():
            clock.stop()

    def step(self, report: StepReport) -> None:
        """Take in one batch; called by the grpo lane."""
        tally = report.tally
        for name in _COUNTS:
            self._totals[name] += getattr(tally, name)
        for name in _MAXIMA:
            self._totals[name] = max(self._totals[name], getattr(tally, name))
        values = tally.metrics()
        self._history.append((values["rollout/success_rate"] or 0.0, values["rollout/return"] or 0.0))
        previous, self._policy_version = self._policy_version, report.policy_version
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        values |= report.values
        values["perf/env_steps_per_s"] = tally.env_steps / seconds
        values["perf/decisions_per_s"] = tally.decisions / seconds
        values["plane/data/slots_used"] = self._num_slots - self._num_free_slots()
        values["plane/data/slots_total"] = self._num_slots
        values["plane/weights/version_syncs"] = len(self._sync_seconds)
        if self._sync_seconds:
            values["plane/weights/sync_s"] = self._sync_seconds[-1]
        for name, clock in self._clocks.items():
            delta = clock.delta()
            values[f"lane/{name}/busy_frac"] = delta.busy_frac
            values[f"lane/{name}/wait_s"] = delta.wait_s
            values[f"lane/{name}/items_per_s"] = delta.items_per_s
        if self._metrics:
            self._metrics.write(report.policy_version, int(self._totals["env_steps"]), values)
        every = self._config.run.checkpoint_every
        is_milestone = len(self._history) == 1 or report.policy_version // every > previous // every
        if report.frames is not None and is_milestone:
            save_film(self._folder / "frames" / f"step_{self._policy_version:06d}.png", report.frames)
        self._console.step({"policy_version": report.policy_version, **values})

    def _wall_s(self) -> float:
        return self._earlier_wall_s + (self._end or time.monotonic()) - self._begin

    def finish(self, outcome: str, error: str | None) -> None:
        """Write the summary and say how the run ended; rank 0."""
        logger.info("%s at version %d", outcome, self._policy_version, extra={"file_only": True})
        if not self._world.is_main:
            return
        totals, wall_s = self._totals, self._wall_s()
        success = [rates[0] for rates in self._history]
        returns = [rates[1] for rates in self._history]
        success_first, success_last = first_last_mean(success)
        return_first, return_last = first_last_mean(returns)
        trained = totals["trained_decisions"]
        summary = {
            "run": self._config.run.name,
            "exit": outcome,
            "error": error,
            "schedule": self._config.runtime.schedule.name,
            "placement": self._config.placement.name.name,
            "device": self._world.device.type,
            "world_size": self._world.world_size,
            "nodes": self._world.world_size // self._world.local_world_size,
            "model": f"{self._config.model.name}/{self._config.model.preset}",
            "env": f"{self._config.env.name}/{self._config.env.task}",
            "policy_version": self._policy_version,
            "episodes": int(totals["episodes"]),
            "groups": int(totals["groups"]),
            "groups_dropped": int(totals["groups_dropped"]),
            # Nothing steps after an episode's end, so every step is a valid one.
            "env_steps_raw": int(totals["env_steps"]),
            "env_steps_valid": int(totals["env_steps"]),
            "wall_s": wall_s,
            "env_steps_per_s_raw": totals["env_steps"] / wall_s,
            "env_steps_per_s_valid": totals["env_steps"] / wall_s,
            "decisions_per_s": totals["decisions"] / wall_s,
            "success_first": success_first,
            "success_last": success_last,
            "eval_success_before": None,
            "eval_success_after": None,
            "staleness_mean": totals["staleness_sum"] / trained if trained else None,
            "staleness_max": totals["staleness_max"] if trained else None,
            "logprob_gap_max": totals["logprob_gap_max"] if totals["logprob_gap_max"] >= 0 else None,
            "weight_syncs": len(self._sync_seconds),
            "weight_bytes": self._weight_bytes,
            "weight_sync_s_mean": sum(self._sync_seconds) / len(self._sync_seconds) if self._sync_seconds else None,
            "worker_restarts": 0,
            "cpu_efficiency": None,
            "lanes": {
                name: {"busy_frac": total.busy_frac, "wait_s": total.wait_s, "items": total.items}
                for name, total in ((name, clock.total()) for name, clock in self._clocks.items())
            },
            "groups_lost": self._groups_lost,
            "return_first": return_first,
            "return_last": return_last,
        }
        write_summary(self._folder / "summary.json", summary)
        self._console.summary(summary, self._folder)
