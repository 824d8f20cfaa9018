"""A profile from finished runs: costs from their traces, the rest from their metrics and summaries.

One run of a minute is enough. A cost that depends on how much there is at once (an inference batch, a micro-batch, a batch
simulator) is split into a fixed part and one for each item where the runs have several sizes; else it is taken to be in
proportion, but for a batch simulator, which is taken not to depend on their number.
"""

from __future__ import annotations

import itertools
import json
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from dvla.config import Config, ConfigError, Precision, Schedule, load_as
from dvla.planning.profile import Cost, Profile
from dvla.runtime.placement import place
from dvla.telemetry.metrics import FILE_NAME, read_metrics

_WARM_UP = 0.2
"""Share of a run's spans, in the order of time, that are not looked at."""
_MAX_LENGTHS = 2000
_NUM_FACTORS = 20


@dataclass(frozen=True, slots=True)
class Calibration:
    """What runs tell."""

    profile: Profile
    config: Config
    """Of the first run."""
    num_nodes: int
    ranks_per_node: int


@dataclass(frozen=True, slots=True)
class _Run:
    config: Config
    summary: Mapping[str, Any]
    last_metrics: Mapping[str, Any]
    spans: Mapping[str, Sequence[tuple[float, Mapping[str, Any]]]]
    """By name, in order: seconds, and what is said of it."""

    def seconds(self, name: str) -> list[float]:
        return [seconds for seconds, _ in self.spans.get(name, ())]

    def sized(self, name: str) -> list[tuple[int, float]]:
        return [(said["size"], seconds) for seconds, said in self.spans.get(name, ())]


def calibrate(folders: Sequence[str]) -> Calibration:
    """Read run folders.

    Raises:
        ConfigError: One is no finished run with a trace.
    """
    runs = [_read(Path(folder)) for folder in folders]
    first = runs[0]
    summary, config = first.summary, first.config
    is_batch = config.env.options.get("sim_backend") == "gpu"
    answers = [said for run in runs for _, said in run.spans["handle"]]
    begun = [said["simulator_s"] for said in answers if said["what"] == "observed" and not said["decision"]]
    lengths = [said["decision"] + 1 for said in answers if said["what"] == "finished"]
    chunks = [
        (run.config.runtime.num_envs, said["simulator_s"])
        for run in runs
        for _, said in run.spans["handle"]
        if said["what"] == "finished" or said["decision"]
    ]
    if not lengths or not chunks:
        raise ConfigError(f"from_run={folders[0]}: no episode ended in it; calibrate with a longer run")
    if is_batch and len({size for size, _ in chunks}) > 1:
        chunk = _fit(chunks)
    else:
        chunk = _with_factors(statistics.fmean(seconds for _, seconds in chunks), 0.0, chunks)
    agree_s = _quick(s for run in runs for s in run.seconds("agree"))
    decisions = summary["decisions_per_s"] * summary["wall_s"]
    slots = config.slots_per_sampler(*_learners_and_samplers(config, summary))
    slots += config.runtime.num_envs if config.run.eval_every else 0
    itemsize = 2 if config.runtime.precision is Precision.bf16 else 4
    profile = Profile(
        chunk=chunk,
        reset_s=_mean(begun),
        handle_s=sum(s for run in runs for s in run.seconds(_handling(run.config))) / len(answers),
        decide=_fit([pair for run in runs for pair in run.sized("decide")]),
        gradient=_fit([pair for run in runs for pair in run.sized("gradient")]),
        optimise_s=_quick(s for run in runs for s in run.seconds("optimise")),
        agree_s=agree_s + _mean(s for run in runs for s in run.seconds("cut")),
        report_s=_quick(s for run in runs for s in run.seconds("add up"))
        + _mean(s for run in runs for s in run.seconds("report")),
        publish_s=_mean(s for run in runs for s in run.seconds("publish")),
        transfer_s=_quick(s for run in runs for s in run.seconds("gather")),
        apply_s=_mean(s for run in runs for s in run.seconds("apply")),
        episode_decisions=tuple(sorted(lengths)[:: -(-len(lengths) // _MAX_LENGTHS)]),
        steps_per_decision=summary["env_steps_raw"] / decisions,
        dropped_share=summary["groups_dropped"] / max(1, summary["groups"]),
        is_batch_simulator=is_batch,
        has_accelerators=summary["device"] == "cuda",
        trained_parameters=summary["weight_bytes"] // itemsize,
        weight_bytes=summary["weight_bytes"],
        slot_bytes=int(first.last_metrics.get("memory/environment/used_bytes") or 0) // slots,
    )
    return Calibration(profile, config, summary["nodes"], summary["world_size"] // summary["nodes"])


def _handling(config: Config) -> str:
    """The spans in which answers are handled; serial runs wait for simulators within `collect`."""
    return "handle" if config.runtime.schedule is Schedule.serial else "collect"


def _learners_and_samplers(config: Config, summary: Mapping[str, Any]) -> tuple[int, int]:
    nodes = summary["nodes"]
    roles = place(config.placement, summary["world_size"] // nodes)
    return nodes * len(roles.training), nodes * len(roles.sampling)


def _read(folder: Path) -> _Run:
    for name in ("config.yaml", "summary.json", FILE_NAME):
        if not (folder / name).is_file():
            raise ConfigError(f"from_run={folder}: there is no {name}; give the folder of a finished run")
    config = load_as(Config, OmegaConf.create(OmegaConf.load(folder / "config.yaml")))  # type: ignore[arg-type]
    summary = json.loads((folder / "summary.json").read_text())
    metrics = read_metrics(folder / FILE_NAME)
    spans: dict[str, list[tuple[float, float, Mapping[str, Any]]]] = defaultdict(list)
    for path in sorted((folder / "traces").glob("rank*.json")):
        for event in json.loads(path.read_text())["traceEvents"]:
            if event["ph"] == "X":
                spans[event["name"]].append((event["ts"], event["dur"] / 1e6, event["args"]))
    needed = ("handle", "decide", "gradient", "optimise")
    if missing := [name for name in needed if not spans.get(name)]:
        raise ConfigError(
            f"from_run={folder}: its traces have no {', '.join(missing)}; calibrate with telemetry.trace=true"
        )
    if summary["exit"] == "failed" or not metrics or not summary["env_steps_raw"]:
        raise ConfigError(f"from_run={folder}: this run failed, or trained no batch")
    kept = {}
    for name, events in spans.items():
        events.sort(key=lambda event: event[0])
        kept[name] = [(seconds, said) for _, seconds, said in events[int(_WARM_UP * len(events)) :]]
    return _Run(config, summary, metrics[-1], kept)


def _mean(values: Iterable[float]) -> float:
    return statistics.fmean(known) if (known := list(values)) else 0.0


def _quick(values: Iterable[float]) -> float:
    """What a collective takes when nobody has to be waited for: a low quantile."""
    known = sorted(values)
    return known[len(known) // 4] if known else 0.0


def _fit(calls: Sequence[tuple[int, float]]) -> Cost:
    """Least squares of the seconds of calls by their sizes, neither part below 0."""
    count = len(calls)
    mean_size, mean_s = sum(size for size, _ in calls) / count, sum(seconds for _, seconds in calls) / count
    spread = sum((size - mean_size) ** 2 for size, _ in calls)
    fixed, each = 0.0, mean_s / mean_size
    if spread >= 0.01 * count * mean_size**2:
        slope = sum((size - mean_size) * (seconds - mean_s) for size, seconds in calls) / spread
        if slope <= 0:
            fixed, each = mean_s, 0.0
        elif slope < each:
            fixed, each = mean_s - slope * mean_size, slope
    return _with_factors(fixed, each, calls)


def _with_factors(fixed: float, each: float, calls: Sequence[tuple[int, float]]) -> Cost:
    """The cost, and how calls differ from it: means of equal shares of them, in order."""
    ratios = sorted(seconds / (fixed + each * size) for size, seconds in calls)
    num = min(_NUM_FACTORS, len(ratios))
    cuts = [index * len(ratios) // num for index in range(num + 1)]
    shares = [statistics.fmean(ratios[start:end]) for start, end in itertools.pairwise(cuts)]
    mean = statistics.fmean(shares)
    return Cost(fixed_s=fixed, each_s=each, factors=tuple(share / mean for share in shares))
