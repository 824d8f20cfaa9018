"""Gathers what the lanes report and puts it where people and programs look: terminal, metrics, TensorBoard, summary."""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Self

import yaml

from dvla.config import Config, to_plain
from dvla.rl.health import HEALTH_TAGS, find_warnings, success_trend
from dvla.rl.history import History
from dvla.telemetry.console import Console
from dvla.telemetry.durations import Durations
from dvla.telemetry.film import save_film
from dvla.telemetry.lane_clock import LaneClock, LaneUse
from dvla.telemetry.lane_names import LANES
from dvla.telemetry.metrics import MetricsWriter
from dvla.telemetry.redact import redact
from dvla.telemetry.report import draw_at_end
from dvla.telemetry.summary import LANE_KEYS, write_summary
from dvla.telemetry.tensorboard_layout import RUN_LAYOUT

if TYPE_CHECKING:
    from dvla.lanes.grpo import StepReport
    from dvla.runtime.world import World

logger = logging.getLogger(__name__)

_COUNTS = (
    *("episodes", "groups", "groups_dropped", "env_steps", "decisions", "trained_decisions", "staleness_sum"),
    "worker_restarts",
)
_MAXIMA = ("staleness_max", "logprob_gap_max")
_QUIET_STEPS = 20
"""Optimiser steps without a warning after which it is said again when it is back: near its bound it comes and goes."""


class Reporter:
    """Rank 0 shows and writes; the other ranks keep the same counts, so that any of them could.

    Args:
        config: The run.
        world: This rank.
    """

    def __init__(self, config: Config, world: World) -> None:
        self._config, self._world, self._folder = config, world, config.run.folder
        is_shown = config.telemetry.console and world.is_main
        self._console = Console(is_shown, config.algo.num_steps, title=config.run.name)
        self._metrics: MetricsWriter | None = None
        self._totals = dict.fromkeys(_COUNTS, 0.0) | dict.fromkeys(_MAXIMA, -1.0)
        self._history = History()  # HEALTH_TAGS of the batches
        self._warnings: dict[str, dict[str, Any]] = {}  # by name, as in the summary
        self._evaluations: dict[int, float] = {}  # policy version -> success rate
        self._earlier_wall_s = 0.0
        self._time = LaneClock()  # of this attempt
        self._policy_version = 0
        self._lane_uses: Callable[[], dict[str, LaneUse]] = lambda: dict.fromkeys(LANES, LaneUse())
        self._last_uses = self._lane_uses()
        self._syncs = Durations()
        self._weight_bytes = self._groups_lost = 0
        self._num_slots, self._num_free_slots = 0, lambda: 0
        self._memory_usage: Callable[[], dict[str, float]] = dict

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the terminal back and close the files; closing twice does no harm."""
        self._console.close()
        if self._metrics:
            self._metrics.close()

    def phase(self, text: str) -> None:
        """Say what is being set up."""
        logger.info("%s", text, extra={"file_only": True})
        self._console.phase(text)

    def say(self, lines: list[str]) -> None:
        """Show and log lines about the run."""
        for line in lines:
            logger.info("%s", line, extra={"file_only": True})
            self._console.message(line)

    def warn(self, text: str) -> None:
        """Show and log a warning; from any thread."""
        logger.warning("step %d: %s", self._policy_version, text, extra={"file_only": True})
        self._console.message(f"warning at step {self._policy_version}: {text}")

    def restore(self, state: dict[str, Any]) -> None:
        """Go on counting where a checkpoint left off."""
        self._totals |= state["totals"]
        self._history = History.from_state(state["history"])
        self._warnings = {warning["name"]: warning for warning in state.get("warnings", ())}
        self._evaluations = {int(version): rate for version, rate in state["evaluations"].items()}
        self._earlier_wall_s = state["wall_s"]

    def state(self) -> dict[str, Any]:
        """What `restore` needs."""
        return {
            "totals": self._totals,
            "history": self._history.state(),
            "warnings": list(self._warnings.values()),
            "evaluations": self._evaluations,
            "wall_s": self._wall_s(),
        }

    def training_starts(
        self,
        *,
        lane_uses: Callable[[], dict[str, LaneUse]],
        syncs: Durations,
        weight_bytes: int,
        num_slots: int,
        num_free_slots: Callable[[], int],
        policy_version: int,
        memory_usage: Callable[[], dict[str, float]],
    ) -> None:
        """Set-up is over; the clock of the run starts."""
        self._lane_uses, self._syncs, self._weight_bytes = lane_uses, syncs, weight_bytes
        self._num_slots, self._num_free_slots = num_slots, num_free_slots
        self._policy_version, self._memory_usage = policy_version, memory_usage
        self._time.start()
        if self._world.is_main:
            tensorboard = self._config.telemetry.tensorboard
            self._metrics = MetricsWriter(
                self._folder, tensorboard=tensorboard, resume_at=policy_version, warn=self.warn
            )
            self._metrics.add_text("config", redact(yaml.safe_dump(to_plain(self._config), sort_keys=False)))
            self._metrics.add_layout(RUN_LAYOUT)
        self._console.training(policy_version)

    def training_ends(self, *, groups_lost: int) -> None:
        """The lanes have ended; what follows is no part of the throughput. `groups_lost` were in flight on this rank."""
        self._groups_lost = groups_lost
        self._time.stop()

    def step(self, report: StepReport) -> None:
        """Take in one batch; called by the grpo lane."""
        tally = report.tally
        for name in _COUNTS:
            self._totals[name] += getattr(tally, name)
        for name in _MAXIMA:
            self._totals[name] = max(self._totals[name], getattr(tally, name))
        values = tally.metrics() | report.values
        previous, self._policy_version = self._policy_version, report.policy_version
        self._history.add({tag: values[tag] for tag in HEALTH_TAGS})
        values["health/success_trend"] = success_trend(self._history)
        values["health/warnings"] = self._judge(num_tasks=len(tally.tasks))
        seconds = self._time.delta().wall_s
        values |= self._memory_usage()
        values["perf/env_steps_per_s"] = tally.env_steps / seconds
        values["perf/decisions_per_s"] = tally.decisions / seconds
        values["plane/data/slots_used"] = self._num_slots - self._num_free_slots()
        values["plane/data/slots_total"] = self._num_slots
        values["plane/weights/version_syncs"] = self._syncs.count
        if self._syncs.count:
            values["plane/weights/sync_s"] = self._syncs.last
        uses, last = self._lane_uses(), self._last_uses
        self._last_uses = uses
        for name in LANES:
            use = LaneUse(*map(operator.sub, uses[name], last[name]))
            for key in ("busy_frac", "wait_s", "items_per_s"):
                values[f"lane/{name}/{key}"] = getattr(use, key)
        if self._metrics:
            env_steps = int(self._totals["env_steps"])
            self._metrics.write(report.policy_version, env_steps, values, tally.histograms())
        every = self._config.run.checkpoint_every
        is_milestone = self._history.num_batches == 1 or report.policy_version // every > previous // every
        if report.frames is not None and is_milestone:
            if self._metrics:
                self._metrics.add_film("rollout/film", report.frames, report.policy_version)
            try:
                save_film(self._folder / "frames" / f"step_{self._policy_version:06d}.png", report.frames)
            except OSError as error:  # a full disk
                self.warn(f"there is no film of this step: {error}")
        self._console.step({"policy_version": report.policy_version, **values})

    def _judge(self, *, num_tasks: int) -> int:
        """Look for what keeps the run from learning, say what is new, and count what there is."""
        found, step = find_warnings(self._history, self._config, num_tasks=num_tasks), self._policy_version
        for warning in found:
            known = self._warnings.setdefault(
                warning.name, {"name": warning.name, "first_step": step, "last_step": None, "steps": 0, "text": ""}
            )
            if known["last_step"] is None or step - known["last_step"] > _QUIET_STEPS:
                self.warn(warning.text)
            known |= {"last_step": step, "steps": known["steps"] + 1, "text": warning.text}
        return len(found)

    def evaluation(self, values: dict[str, float]) -> None:
        """Take in the result of an evaluation round; called by the grpo lane."""
        version = int(values["eval/version"])
        self._evaluations[version] = values["eval/success_rate"]
        if self._metrics:
            self._metrics.write_evaluation(version, values)
        self._console.message(f"evaluation at step {version}: success rate {values['eval/success_rate']:.3f}")

    def is_evaluated(self, version: int) -> bool:
        """Whether there is an evaluation that began with the weights of `version`."""
        return version in self._evaluations

    def _wall_s(self) -> float:
        return self._earlier_wall_s + self._time.total().wall_s

    def finish(self, outcome: str, error: str | None, *, writer: int | None = None, draws: bool = True) -> None:
        """Write summary and report and say how the run ended; the main rank, or `writer` in its place, if this is it."""
        logger.info("%s at version %d", outcome, self._policy_version, extra={"file_only": True})
        if self._world.rank == (self._world.main_rank if writer is None else writer):
            summary = self._summary(outcome, error)
            write_summary(self._folder / "summary.json", summary)
            if draws and self._config.telemetry.report:
                draw_at_end(self._folder, self.warn)
            self._console.summary(summary, self._folder)

    def fail(self, error: str, writer: int) -> None:
        """End a run that stands still, whatever its lanes are at."""
        logger.error("%s", error, extra={"file_only": True})
        self.close()
        self.finish("failed", error, writer=writer, draws=False)  # to leave is urgent; dvla.report can do it later

    def _summary(self, outcome: str, error: str | None) -> dict[str, Any]:
        config, world, totals, syncs = self._config, self._world, self._totals, self._syncs
        wall_s, trained = self._wall_s(), totals["trained_decisions"]
        success_first, success_last = self._history.courses["rollout/success_rate"].first_last_mean()
        return_first, return_last = self._history.courses["rollout/return"].first_last_mean()
        uses = self._lane_uses()
        return {
            "run": config.run.name,
            "exit": outcome,
            "error": error,
            "schedule": config.runtime.schedule.name,
            "placement": config.placement.name.name,
            "device": world.device.type,
            "world_size": world.world_size,
            "nodes": world.world_size // world.local_world_size,
            "model": f"{config.model.name}/{config.model.preset}",
            "env": f"{config.env.name}/{config.env.task}",
            "meshes": config.render.meshes.name,
            "policy_version": self._policy_version,
            **{name: int(totals[name]) for name in ("episodes", "groups", "groups_dropped")},
            # Nothing steps after an episode's end, so every step is a valid one.
            **dict.fromkeys(("env_steps_raw", "env_steps_valid"), int(totals["env_steps"])),
            **dict.fromkeys(("env_steps_per_s_raw", "env_steps_per_s_valid"), totals["env_steps"] / wall_s),
            "wall_s": wall_s,
            "decisions_per_s": totals["decisions"] / wall_s,
            **{"success_first": success_first, "success_last": success_last},
            **{"return_first": return_first, "return_last": return_last},
            "staleness_mean": totals["staleness_sum"] / trained if trained else None,
            "staleness_max": totals["staleness_max"] if trained else None,
            "logprob_gap_max": totals["logprob_gap_max"] if totals["logprob_gap_max"] >= 0 else None,
            "weight_syncs": syncs.count,
            "weight_bytes": self._weight_bytes,
            "weight_sync_s_mean": syncs.mean(),
            "worker_restarts": int(totals["worker_restarts"]),
            "eval_success_before": self._evaluations.get(0),
            "eval_success_after": self._evaluations.get(config.algo.num_steps),
            "cpu_efficiency": None,  # not measured
            "lanes": {name: {key: getattr(use, key) for key in LANE_KEYS} for name, use in uses.items()},
            "groups_lost": self._groups_lost,
            "warnings": list(self._warnings.values()),
        }
