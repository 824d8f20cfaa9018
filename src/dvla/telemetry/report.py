"""``report.html``: a run on one page that needs nothing but itself, made of the files in the run's folder.

Nothing on it comes from a network, and a content policy in its head forbids it to. Pictures that are small are in it;
videos stay where they are, next to it. It can be made at any time, also of a run that goes on or was killed.
"""

from __future__ import annotations

import base64
import hashlib
import shlex
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml

from dvla.telemetry.atomic_file import write_atomically
from dvla.telemetry.charts import Point, Series, line_chart, stacked_chart
from dvla.telemetry.critical_lane import analyse, describe, last_steps
from dvla.telemetry.figures import duration, fixed, short
from dvla.telemetry.lane_names import LANES
from dvla.telemetry.markup import Html, element, join
from dvla.telemetry.redact import redact
from dvla.telemetry.run_files import RunFiles, number
from dvla.telemetry.spans import read_spans
from dvla.telemetry.swimlanes import swimlanes

FILE_NAME = "report.html"

_MAX_SPANS = 12_000  # analysed: seconds of a busy run, and a fraction of one to work through
_QUICK_TRACE_BYTES = 24 * 2**20  # read in a second
_EMBEDDED_BYTES = 256 * 2**10
_COLOURS = ("sampling", "inference", "grpo", "weights", "simulators", "between")  # of curves that are no lane's


def write_report(folder: Path, *, quick: bool = False) -> Path:
    """Write the report of the run in `folder`, without secrets of the environment; returns its path.

    Args:
        folder: The run's.
        quick: Leave large traces out, which take longer than all else.

    Raises:
        NoRunError: There is no run.
        OSError: The report cannot be written.
    """
    run = RunFiles.read(folder)
    write_atomically(folder / FILE_NAME, [page(run, quick=quick), "\n"])
    return folder / FILE_NAME


def draw_at_end(folder: Path, warn: Callable[[str], None]) -> None:
    """Write the report of a run that ends. Whatever goes wrong is told to `warn`: what shows a run must not make it fail."""
    try:
        write_report(folder, quick=True)
    except Exception as error:
        warn(f"there is no {FILE_NAME}: {type(error).__name__}: {error}")


def page(run: RunFiles, *, quick: bool = False) -> Html:
    """The whole page."""
    here = Path(__file__)
    style = Html(here.with_name("report.css").read_text(encoding="utf-8"))
    script = Html(here.with_name("report.js").read_text(encoding="utf-8"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; img-src 'self' file: data:; "
        "media-src 'self' file:"
    )
    # The swimlanes' own problems must be known before they are told.
    sections = [
        _section("Learning", _grid(_learning(run))),
        _section("Throughput", _grid(_throughput(run))),
        _section("Swimlanes", _swimlanes(run, quick=quick)),
        _section("Lanes and planes", _grid(_lanes(run))),
        _section("Staleness", _grid(_staleness(run))),
        _section("Loss and optimiser", _grid(_optimiser(run))),
        _section("Memory", _grid(_memory(run))),
        _section("What it looked like", _pictures(run)),
        _section("Settings", _settings(run)),
    ]
    head = join(
        element("meta", charset="utf-8"),
        element("meta", http_equiv="Content-Security-Policy", content=policy),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("title", f"{_name(run)} · D-VLA"),
        element("style", style),
    )
    body = element("body", _header(run), _warnings(run), *sections, element("script", script))
    return join(Html("<!doctype html>\n"), element("html", element("head", head), body, lang="en"))


def _section(title: str, content: Html | None) -> Html | None:
    return element("section", element("h2", title), content) if content else None


def _grid(charts: Iterable[Html | None]) -> Html | None:
    drawn = [chart for chart in charts if chart]
    return element("div", *drawn, class_="charts") if drawn else None


# -- header ----------------------------------------------------------------------------------------------------------


def _name(run: RunFiles) -> str:
    return str((run.summary or {}).get("run") or redact(run.folder.resolve().name))


def _header(run: RunFiles) -> Html:
    summary = run.summary or {}
    outcome = str(summary.get("exit") or "no end")
    known = outcome if outcome in ("completed", "stopped", "failed") else "unknown"
    what = [
        *(
            summary.get(key) or _setting(run, *path)
            for key, path in (("model", ("model", "name")), ("env", ("env", "name")))
        ),
        *(summary.get(key) for key in ("dataset", "placement", "schedule", "device")),
        None if summary.get("world_size") is None else f"ranks {summary['world_size']}, nodes {summary.get('nodes')}",
    ]
    versions = run.environment.get("versions")
    of_packages = versions if isinstance(versions, dict) else {}
    named = [f"{package} {version}" for package, version in of_packages.items() if version]
    machine = [str(run.environment[key]) for key in ("platform",) if key in run.environment]
    if "cores" in run.environment:
        machine.append(f"{run.environment['cores']} cores")
    if "python" in run.environment:
        named.insert(0, f"python {run.environment['python']}")
    written = time.strftime("%Y-%m-%d %H:%M", time.localtime())
    tiles = [
        element("div", element("dt", name), element("dd", value), class_="tile")
        for name, value in _tiles(run)
        if value is not None
    ]
    command = run.command
    return element(
        "header",
        element("h1", _name(run), " ", element("span", outcome, class_=f"outcome {known}")),
        element("p", " · ".join(str(part) for part in what if part)),
        element("p", str(summary["error"]), class_="error") if summary.get("error") else None,
        None if run.summary else element("p", "There is no summary.json, which a run writes when it ends: this one goes on, "
                                         "or was killed.", class_="note"),
        element("pre", command) if command else None,
        element("dl", *tiles, class_="tiles") if tiles else None,
        element("p", " · ".join([*named, *machine]), class_="note") if named or machine else None,
        element("p", f"Drawn {written} from {redact(str(run.folder.resolve()))}", class_="note"),
    )  # fmt: skip


def _tiles(run: RunFiles) -> list[tuple[str, str | None]]:
    """Name and figure; None where it was not measured."""
    summary = run.summary or {}
    last = run.metrics[-1] if run.metrics else {}

    def figure(key: str) -> float | None:
        return number(summary.get(key))

    def change(name: str) -> str | None:
        ends = [
            figure(f"{name}_{end}") for end in (("before", "after") if name == "eval_success" else ("first", "last"))
        ]
        return None if ends == [None, None] else " → ".join(fixed(end, 3) for end in ends)

    def of(value: float | None, unit: str = "") -> str | None:
        return None if value is None else f"{short(value)}{unit}"

    mean, most = figure("staleness_mean"), figure("staleness_max")
    sync, size = figure("weight_sync_s_mean"), figure("weight_bytes")
    rate = figure("env_steps_per_s_raw")
    return [
        ("optimiser steps", of(number(last.get("policy_version")) or figure("policy_version"))),
        ("success, training", change("success")),
        ("success, evaluation", change("eval_success")),
        ("return", change("return")),
        ("loss", of(figure("loss"))),
        ("held-out loss", of(figure("held_out_loss"))),
        ("episodes", of(figure("episodes"))),
        ("env steps", of(number(last.get("env_steps")))),
        ("env steps/s", of(number(last.get("perf/env_steps_per_s")) if run.summary is None else rate)),
        ("samples/s", of(figure("samples_per_s"))),
        ("time", None if (wall_s := figure("wall_s")) is None else duration(wall_s)),
        ("staleness", None if mean is None else f"{short(mean)}, at most {short(most)}"),
        ("weight sync", None if sync is None else f"{short(1000 * sync)} ms of {short((size or 0) / 2**20)} MiB"),
        ("log-prob gap", of(figure("logprob_gap_max"))),
        ("workers replaced", of(figure("worker_restarts"))),
    ]


def _warnings(run: RunFiles) -> Html | None:
    warnings = (run.summary or {}).get("warnings")
    lines = [
        f"steps {warning.get('first_step')} to {warning.get('last_step')}: {warning.get('text')}"
        for warning in (warnings if isinstance(warnings, list) else [])
        if isinstance(warning, dict)
    ]
    lines += map(redact, run.problems)  # they name files with their folders
    if not run.metrics:
        lines.append("No optimiser step was finished: metrics.jsonl has no line.")
    return (
        element("section", element("ul", *(element("li", line) for line in lines)), class_="warnings")
        if lines
        else None
    )


# -- curves ----------------------------------------------------------------------------------------------------------


def _curve(
    run: RunFiles, tag: str, name: str | None = None, style: str = "sampling", scale: float = 1.0, **more: Any
) -> Series:
    """A tag over optimiser steps, under its last part or another name."""
    return Series(name or tag.rpartition("/")[2], _points(run.metrics, tag, scale), style, **more)


def _points(lines: Sequence[dict[str, Any]], tag: str, scale: float = 1.0) -> list[Point]:
    values = ((float(line["policy_version"]), number(line[tag])) for line in lines if tag in line)
    return [(x, y * scale) for x, y in values if y is not None]


def _curves(run: RunFiles, *tags: str) -> list[Series]:
    return [_curve(run, tag, style=style) for tag, style in zip(tags, _COLOURS, strict=False)]


def _learning(run: RunFiles) -> list[Html | None]:
    def evaluated(name: str) -> Series:
        return Series("evaluation", _points(run.evaluations, f"eval/{name}"), "weights", is_dotted=True)

    tasks = sorted({tag for line in run.metrics for tag in line if tag.startswith("rollout/task_")}, key=_task_number)
    few = tasks if len(tasks) <= len(_COLOURS) else []
    by_task = [_curve(run, tag, tag.split("/")[1], style) for tag, style in zip(few, _COLOURS, strict=False)]
    success = [_curve(run, "rollout/success_rate", "training"), evaluated("success_rate")]
    returns = [_curve(run, "rollout/return", "training"), evaluated("return")]
    signal = _curves(run, "rollout/zero_signal_frac", "rollout/all_failed_frac", "rollout/all_succeeded_frac")
    return [
        line_chart("Success", success, unit="share of episodes", low=0, high=1),
        line_chart("Return", returns, unit="reward"),
        line_chart("Episode length", _curves(run, "rollout/episode_len"), unit="control steps", low=0),
        line_chart("Success by task", by_task, unit="share of episodes", low=0, high=1),
        line_chart("Groups without signal", signal, unit="share of groups", low=0, high=1),
        line_chart("Cloning loss", _curves(run, "sft/loss", "sft/held_out_loss")),
        line_chart("Action error", _curves(run, "sft/action_error", "sft/held_out_action_error"), low=0),
        line_chart("Accuracy", _curves(run, "sft/accuracy", "sft/held_out_accuracy"), low=0, high=1),
    ]


def _task_number(tag: str) -> tuple[int, str]:
    digits = tag.split("/")[1].removeprefix("task_")
    return (int(digits) if digits.isdecimal() else 0, tag)


def _throughput(run: RunFiles) -> list[Html | None]:
    parts = [
        _curve(run, "time/step_s", "whole step", "grpo"),
        _curve(run, "time/wait_groups_s", "waiting for groups", "sampling"),
        _curve(run, "time/publish_s", "publishing", "weights"),
    ]
    return [
        line_chart("Environment steps", _curves(run, "perf/env_steps_per_s"), unit="control steps/s", low=0),
        line_chart("Decisions", [_curve(run, "perf/decisions_per_s", style="inference")], unit="1/s", low=0),
        line_chart("Time of a step", parts, unit="s", low=0),
        line_chart("Samples", _curves(run, "sft/samples_per_s"), unit="1/s", low=0),
    ]


def _lanes(run: RunFiles) -> list[Html | None]:
    styles = dict(zip(LANES, ("sampling", "inference", "grpo", "weights"), strict=True))
    busy = [_curve(run, f"lane/{lane}/busy_frac", lane, style) for lane, style in styles.items()]
    slots = [_curve(run, "plane/data/slots_used", "used"), _curve(run, "plane/data/slots_total", "all", "between")]
    checkpoints = [
        _curve(run, "checkpoint/write_s", "written in", "inference"),
        _curve(run, "checkpoint/block_s", "training stood still", "grpo"),
    ]
    return [
        line_chart("Busy lanes", busy, unit="share of time, rank 0", low=0, high=1),
        line_chart("Weight sync", [_curve(run, "plane/weights/sync_s", "ms", "weights", 1000)], unit="ms", low=0),
        line_chart("Episode slots", slots, low=0),
        line_chart("Checkpoints", checkpoints, unit="s", low=0),
    ]


def _staleness(run: RunFiles) -> list[Html | None]:
    columns = []
    for line in run.metrics:
        counts = line.get("staleness/hist")
        if isinstance(counts, list):
            columns.append((float(line["policy_version"]), [number(count) or 0.0 for count in counts]))
    most = max((n + 1 for _, counts in columns for n, count in enumerate(counts) if count), default=0)
    cut = [(x, [*counts, *[0.0] * most][:most]) for x, counts in columns]
    names = [f"{n} or more" if n == 16 else str(n) for n in range(most)]
    ends = [_curve(run, "staleness/mean", "mean"), _curve(run, "staleness/max", "largest", "weights")]
    return [
        stacked_chart("Trained decisions by staleness", cut, names),
        line_chart("Staleness", ends, unit="optimiser steps", low=0),
    ]


def _optimiser(run: RunFiles) -> list[Html | None]:
    clipped = _curves(run, "train/clip_frac", "train/clip_frac_low", "train/clip_frac_high")
    return [
        line_chart(
            "Gradient norm", _curves(run, "train/grad_norm") + _curves(run, "sft/grad_norm"), unit="before clipping"
        ),
        line_chart("Clipped ratios", clipped, unit="share of terms", low=0),
        line_chart("KL", _curves(run, "train/kl", "train/reference_kl"), unit="nats per term"),
        line_chart("Entropy", _curves(run, "train/entropy"), unit="nats per element"),
        line_chart("Loss", _curves(run, "train/loss", "train/value_loss")),
        line_chart("Largest ratio", _curves(run, "train/ratio_max", "train/behavior_ratio_max")),
        line_chart("Log-probability gap", _curves(run, "train/logprob_gap"), unit="nats", low=0),
        line_chart("Explained variance", _curves(run, "train/explained_variance")),
        line_chart("Learning rate", _curves(run, "train/lr") + _curves(run, "sft/lr"), low=0),
    ]


def _memory(run: RunFiles) -> list[Html | None]:
    charts = []
    for pool in ("model", "environment"):
        used, reserved = (f"memory/{pool}/{kind}_bytes" for kind in ("used", "reserved"))
        most = max((y for _, y in _points(run.metrics, reserved)), default=0.0)
        unit, size = ("GiB", 2.0**30) if most >= 2**30 else ("MiB", 2.0**20)
        series = [
            _curve(run, used, "used", "sampling", 1 / size),
            _curve(run, reserved, "reserved", "inference", 1 / size),
        ]
        budget = _points(run.metrics[-1:], f"memory/{pool}/budget_bytes", 1 / size)
        told = f"{unit}, budget {short(budget[-1][1])}" if budget else unit
        charts.append(line_chart(f"Pool: {pool}", series, unit=told, low=0))
    return charts


# -- swimlanes, pictures, settings -----------------------------------------------------------------------------------


def _swimlanes(run: RunFiles, *, quick: bool) -> Html | None:
    if not run.traces:
        if not any("train/loss" in line for line in run.metrics[:1]):
            return None  # cloning has no lanes
        text = "No trace was recorded: telemetry.trace=true records one. It is written when a run ends, not when it is killed."
        return element("p", text, class_="note")
    size = sum(path.stat().st_size for path in run.traces)
    if quick and size > _QUICK_TRACE_BYTES:
        draws = f"python -m dvla.report {shlex.quote(redact(str(run.folder)))}"
        text = f"The traces are large ({size / 2**20:.0f} MiB): {draws} draws them."
        return element("p", text, class_="note")
    spans = []
    for path in run.traces:
        try:
            spans += read_spans(path)
        except (OSError, ValueError) as error:
            run.problems.append(f"traces/{path.name} cannot be read: {error}")
    spans.sort(key=lambda span: span.start_s)
    steps = last_steps(spans, _MAX_SPANS)
    analysis = analyse(spans, steps)
    if analysis is None:
        return element("p", "The traces hold fewer than two optimiser steps, nothing can be drawn.", class_="note")
    lines = [element("li", line) for line in describe(analysis)]
    return join(element("ul", *lines, class_="findings"), swimlanes(spans, steps, analysis))


def _pictures(run: RunFiles) -> Html | None:
    def relative(path: Path) -> str:
        return quote(path.relative_to(run.folder).as_posix())

    def source(path: Path) -> str:
        if path.stat().st_size > _EMBEDDED_BYTES:
            return relative(path)
        return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"

    films = run.films if len(run.films) <= 2 else [run.films[0], run.films[-1]]
    by_step: dict[Path, list[Path]] = {}
    for video in run.videos:
        by_step.setdefault(video.parent, []).append(video)
    folders = list(by_step) if len(by_step) <= 2 else [next(iter(by_step)), list(by_step)[-1]]
    shown = [video for folder in folders for video in by_step[folder][:3]]
    strips = [
        element(
            "div", element("p", f"What the policy saw: {path.stem}"), element("img", src=source(path), alt=path.stem)
        )
        for path in films
    ]
    players = [
        element(
            "figure",
            element("video", src=relative(path), controls="", preload="metadata"),
            element("figcaption", f"{path.parent.name}, {path.stem}"),
        )
        for path in shown
    ]
    rest = len(run.videos) - len(shown)
    more = element("p", f"{rest} more in videos/.", class_="note") if rest else None
    if not strips and not players:
        return None
    return join(
        *(element("div", strip, class_="strip") for strip in strips),
        element("div", *players, class_="charts") if players else None,
        more,
    )


def _settings(run: RunFiles) -> Html | None:
    if not run.config:
        return None
    text = yaml.safe_dump(run.config, sort_keys=False, allow_unicode=True)
    return element("details", element("summary", "config.yaml"), element("pre", text))


def _setting(run: RunFiles, *path: str) -> Any:
    value: Any = run.config
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value
