"""What a run looks like in a terminal: a panel that stays at the bottom while all else scrolls above it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TextIO

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from dvla.telemetry.figures import NOTHING, bar, duration, fixed, short, sparkline
from dvla.telemetry.lane_names import LANES
from dvla.telemetry.pace import Pace

_HISTORY = 2000  # steps a curve remembers
_LABEL, _NUMBER, _GAP = 12, 8, 3  # widths within a cell, and between the two cells of a row
_HEAD = _LABEL + _NUMBER + 2  # what is left of a cell is for the picture
_NARROW = 64  # below this there is one cell in a row
_MAX_WIDTH = 120  # a panel across a very wide screen is hard to read
_LANE_STYLES = {"sampling": "green", "inference": "cyan", "grpo": "magenta", "param_dist": "yellow"}


class _Curve(NamedTuple):
    label: str
    tag: str
    style: str
    low: float | None = None
    high: float | None = None
    write: Callable[[float | None], str] = short


_CURVES = (
    _Curve("success", "rollout/success_rate", "green", 0.0, 1.0, lambda value: fixed(value, 3)),
    _Curve("return", "rollout/return", "green"),
    _Curve("env steps/s", "perf/env_steps_per_s", "cyan", 0.0),
    _Curve("step time s", "time/step_s", "cyan", 0.0),
    _Curve("loss", "train/loss", "magenta"),
    _Curve("kl", "train/kl", "magenta", 0.0),
)


def can_redraw(file: TextIO) -> bool:
    """Say whether this is a terminal that can move its cursor and knows the characters the panel is made of."""
    console = Console(file=file)
    return file.isatty() and not console.is_dumb_terminal and not console.options.ascii_only


class LiveView:
    """Draws the panel, several times a second, on a thread of its own.

    What the run reports and the panel shows is replaced as a whole, never changed: no lock is needed.
    """

    def __init__(self, file: TextIO, title: str, clock: Callable[[], float]) -> None:
        self._title, self._clock, self._begin = title, clock, clock()
        self._phase: tuple[str, float] | None = None  # and since when
        self._pace: Pace | None = None
        self._steps: tuple[Mapping[str, Any], ...] = ()  # values by tag, the newest last
        self.console = Console(file=file, highlight=False)
        redirect_stderr = sys.stderr.isatty()  # if it goes elsewhere, leave it alone
        self._live = Live(self, console=self.console, redirect_stderr=redirect_stderr, vertical_overflow="crop")
        self._live.start()

    def phase(self, text: str | None) -> None:
        """Show what begins now, and leave a line about what has ended."""
        now = self._clock()
        ended, self._phase = self._phase, (text, now) if text else None
        if ended:
            self.console.print(Text.assemble(("· ", "dim"), ended[0], (f"  {now - ended[1]:.1f} s", "dim")))

    def training(self, pace: Pace) -> None:
        """Show the panel: optimiser steps begin."""
        self._pace = pace
        self.phase(None)

    def step(self, pace: Pace, values: Mapping[str, Any]) -> None:
        """Show a step."""
        self._pace, self._phase = pace, None
        self._steps = (*self._steps, dict(values))[-_HISTORY:]

    def message(self, text: str) -> None:
        """Write any text above the panel."""
        self.console.print(Text(text), soft_wrap=True)

    def close(self) -> None:
        """Draw the panel a last time and give the terminal back."""
        self.phase(None)
        self._live.stop()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the present state; called by rich."""
        phase, pace, steps, now = self._phase, self._pace, self._steps, self._clock()
        doing = [Text.assemble(("· ", "yellow"), phase[0], (f" … {now - phase[1]:.0f} s", "dim"))] if phase else []
        if pace is None:
            yield from doing
            return
        width = min(options.max_width, _MAX_WIDTH)
        inner = width - 4
        in_row = 1 if inner < _NARROW else 2
        cell = (inner - _GAP * (in_row - 1)) // in_row
        values = steps[-1] if steps else {}
        lines = [_progress(pace, now, inner), Text()]
        lines += _rows([_curve(curve, steps, cell) for curve in _CURVES], in_row)
        lines += [Text(), *_facts(values, inner), Text()]
        lines += _rows([_lane(lane, values, cell) for lane in LANES], in_row)
        lines += [Text(), *doing] if doing else []
        for line in lines:
            line.truncate(inner, overflow="ellipsis")
        yield Panel(
            Group(*lines),
            width=width,
            border_style="dim",
            title=Text.assemble(" ", (self._title, "bold"), " "),
            title_align="left",
            subtitle=Text(f" {duration(now - self._begin)} "),
            subtitle_align="right",
        )


def _progress(pace: Pace, now: float, width: int) -> Text:
    left = Text.assemble(("step ", "dim"), (f"{pace.policy_version}/{pace.total_steps}", "bold"), "  ")
    share = pace.policy_version / max(1, pace.total_steps)
    right = Text.assemble(f"  {100 * share:3.0f} %", ("  eta ", "dim"), duration(pace.seconds_left(now)).rjust(5))
    return Text.assemble(left, _bar(share, width - len(left) - len(right), "green"), right)


def _bar(share: float | None, width: int, style: str) -> Text:
    full, empty = bar(share, max(0, width))
    return Text.assemble((full, style), (empty, "bright_black"))


def _rows(cells: list[Text], in_row: int) -> list[Text]:
    return [Text(" " * _GAP).join(cells[i : i + in_row]) for i in range(0, len(cells), in_row)]


def _cell(label: str, number: str, picture: Text, width: int) -> Text:
    cell = Text.assemble((label.ljust(_LABEL), "dim"), (number.rjust(_NUMBER), "bold"), "  ", picture)
    cell.truncate(width, overflow="ellipsis", pad=True)
    return cell


def _curve(curve: _Curve, steps: Sequence[Mapping[str, Any]], width: int) -> Text:
    past = [values.get(curve.tag) for values in steps]
    line = sparkline(past, width - _HEAD, low=curve.low, high=curve.high)
    return _cell(curve.label, curve.write(past[-1] if past else None), Text(line, curve.style), width)


def _lane(lane: str, values: Mapping[str, Any], width: int) -> Text:
    share = values.get(f"lane/{lane}/busy_frac")
    number = NOTHING if share is None else f"{100 * share:.0f} %"
    return _cell(lane, number, _bar(share, width - _HEAD, _LANE_STYLES[lane]), width)


def _facts(values: Mapping[str, Any], width: int) -> list[Text]:
    """Numbers that need no curve, in as many lines as it takes; what the run does not report is left out."""
    largest, slots = values.get("staleness/max"), values.get("plane/data/slots_total")
    no_signal = values.get("rollout/zero_signal_frac")
    facts = (
        ("staleness", fixed(values.get("staleness/mean"), 2), "" if largest is None else f" (max {largest:.0f})"),
        ("logprob gap", short(values.get("train/logprob_gap")), ""),
        ("dropped", short(values.get("rollout/groups_dropped")), ""),
        ("no signal", NOTHING if no_signal is None else f"{100 * no_signal:.0f} %", ""),
        ("warnings", short(values.get("health/warnings") or None), ""),
        ("weight syncs", short(values.get("plane/weights/version_syncs")), ""),
        ("slots", short(values.get("plane/data/slots_used")), "" if slots is None else f"/{slots:.0f}"),
    )
    lines: list[Text] = []
    for label, number, more in facts:
        if number + more == NOTHING:
            continue
        fact = Text.assemble((f"{label} ", "dim"), number + more)
        if lines and len(lines[-1]) + _GAP + len(fact) <= width:
            lines[-1].append(" " * _GAP).append_text(fact)
        else:
            lines.append(fact)
    return lines
