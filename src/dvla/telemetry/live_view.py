"""What a run looks like in a terminal: a panel that stays at the bottom while all else scrolls above it."""

from __future__ import annotations

import sys
import threading
from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.box import ROUNDED
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from dvla.telemetry.figures import NOTHING, bar, duration, fixed, short, sparkline
from dvla.telemetry.lane_names import LANES
from dvla.telemetry.pace import Pace

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import TextIO

_HISTORY = 2000  # steps a curve remembers
_REFRESHES_PER_S = 4.0
_LABEL, _NUMBER, _GAP = 12, 8, 3  # widths within a cell, and between the two cells of a row
_NARROW = 64  # below this there is one cell in a row
_MAX_WIDTH = 120  # a panel across a very wide screen is hard to read
_LANE_STYLES = {"sampling": "green", "inference": "cyan", "grpo": "magenta", "param_dist": "yellow"}


class _Curve(NamedTuple):
    label: str
    tag: str
    style: str
    write: Callable[[float | None], str]
    low: float | None = None
    high: float | None = None


_CURVES = (
    _Curve("success", "rollout/success_rate", "green", lambda value: fixed(value, 3), low=0.0, high=1.0),
    _Curve("return", "rollout/return", "green", short),
    _Curve("env steps/s", "perf/env_steps_per_s", "cyan", short, low=0.0),
    _Curve("step time s", "time/step_s", "cyan", short, low=0.0),
    _Curve("loss", "train/loss", "magenta", short),
    _Curve("kl", "train/kl", "magenta", short, low=0.0),
)


def can_redraw(file: TextIO) -> bool:
    """Say whether a terminal can move its cursor and knows the characters that the panel is made of."""
    console = Console(file=file)
    return not console.is_dumb_terminal and not console.options.ascii_only


class LiveView:
    """Draws the panel, several times a second, on a thread of its own.

    `_lock` guards what the run reports and the panel shows; it is never held while anything is drawn.

    Args:
        file: The terminal.
        title: Shown in the frame.
        total_steps: Optimiser steps of the whole run.
        clock: Monotonic clock, in seconds.
    """

    def __init__(self, file: TextIO, title: str, total_steps: int, clock: Callable[[], float]) -> None:
        self._title, self._total_steps, self._clock = title, total_steps, clock
        self._begin = clock()
        self._lock = threading.Lock()
        self._phase: tuple[str, float] | None = None
        self._pace: Pace | None = None
        self._values: dict[str, Any] = {}
        self._history: dict[str, deque[float | None]] = {}
        self.console = Console(file=file, highlight=False)
        self._live = Live(
            get_renderable=lambda: self,
            console=self.console,
            refresh_per_second=_REFRESHES_PER_S,
            redirect_stderr=sys.stderr.isatty(),  # if it goes elsewhere, leave it alone
            vertical_overflow="crop",
        )
        self._live.start()

    def phase(self, text: str) -> None:
        """Show what begins now, and leave a line about what has ended."""
        now = self._clock()
        with self._lock:
            ended, self._phase = self._phase, (text, now)
        self._leave(ended, now)

    def training(self, policy_version: int) -> None:
        """Show the panel: optimiser steps begin."""
        now = self._clock()
        with self._lock:
            ended, self._phase = self._phase, None
            self._pace = Pace(self._total_steps, policy_version, now)
        self._leave(ended, now)

    def step(self, policy_version: int, values: Mapping[str, Any]) -> None:
        """Show a step."""
        with self._lock:
            assert self._pace is not None
            self._phase = None
            self._pace.step(policy_version, self._clock())
            self._values = dict(values)
            for tag, value in values.items():
                self._history.setdefault(tag, deque(maxlen=_HISTORY)).append(value)

    def message(self, text: str) -> None:
        """Write any text above the panel."""
        self.console.print(Text(text), soft_wrap=True)

    def close(self) -> None:
        """Draw the panel a last time and give the terminal back."""
        with self._lock:
            ended, self._phase = self._phase, None
        self._leave(ended, self._clock())
        self._live.stop()

    def _leave(self, phase: tuple[str, float] | None, now: float) -> None:
        if phase is not None:
            text, since = phase
            self.console.print(Text.assemble(("· ", "dim"), text, (f"  {now - since:.1f} s", "dim")))

    # -- drawing ------------------------------------------------------------------------------------------

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Draw the present state; called by rich."""
        with self._lock:
            phase, pace, values = self._phase, self._pace, self._values
            history = {tag: list(past) for tag, past in self._history.items()}
        now = self._clock()
        if pace is None:
            if phase is not None:
                yield self._phase_line(phase, now)
            return
        width = min(options.max_width, _MAX_WIDTH)
        inner = width - 4
        lines = [self._progress(pace, now, inner), Text()]
        lines += _rows([_curve(curve, values, history) for curve in _CURVES], inner)
        lines += [Text(), *_facts(values, inner), Text()]
        lines += _rows([_lane(lane, values) for lane in LANES], inner)
        if phase is not None:
            lines += [Text(), self._phase_line(phase, now)]
        for line in lines:
            line.truncate(inner, overflow="ellipsis")
        yield Panel(
            Group(*lines),
            box=ROUNDED,
            width=width,
            border_style="dim",
            title=Text.assemble(" ", (self._title, "bold"), " "),
            title_align="left",
            subtitle=Text(f" {duration(now - self._begin)} "),
            subtitle_align="right",
        )

    def _phase_line(self, phase: tuple[str, float], now: float) -> Text:
        text, since = phase
        return Text.assemble(("· ", "yellow"), text, (f" … {now - since:.0f} s", "dim"))

    def _progress(self, pace: Pace, now: float, width: int) -> Text:
        left = Text.assemble(("step ", "dim"), (f"{pace.policy_version}/{pace.total_steps}", "bold"), "  ")
        share = pace.policy_version / max(1, pace.total_steps)
        right = Text.assemble(f"  {100 * share:3.0f} %", ("  eta ", "dim"), duration(pace.seconds_left(now)).rjust(5))
        full, empty = bar(share, max(0, width - len(left) - len(right)))
        return Text.assemble(left, (full, "green"), (empty, "bright_black"), right)


class _Cell:
    """Half a row: a label, a number, and a picture as wide as there is room for."""

    def __init__(self, label: str, number: str, picture: Callable[[int], list[tuple[str, str]]]) -> None:
        self.label, self.number, self.picture = label, number, picture

    def draw(self, width: int) -> Text:
        text = Text.assemble((self.label.ljust(_LABEL), "dim"), (self.number.rjust(_NUMBER), "bold"), "  ")
        for piece, style in self.picture(max(0, width - len(text))):
            text.append(piece, style)
        text.append(" " * (width - cell_len(text.plain)))
        return text


def _rows(cells: list[_Cell], width: int) -> list[Text]:
    """Lay out cells in rows of two, or of one where there is not the width."""
    in_row = 1 if width < _NARROW else 2
    each = (width - _GAP * (in_row - 1)) // in_row
    return [
        Text(" " * _GAP).join(cell.draw(each) for cell in cells[i : i + in_row]) for i in range(0, len(cells), in_row)
    ]


def _curve(curve: _Curve, values: Mapping[str, Any], history: Mapping[str, list[float | None]]) -> _Cell:
    def picture(width: int) -> list[tuple[str, str]]:
        return [(sparkline(history.get(curve.tag, []), width, low=curve.low, high=curve.high), curve.style)]

    return _Cell(curve.label, curve.write(values.get(curve.tag)), picture)


def _lane(lane: str, values: Mapping[str, Any]) -> _Cell:
    share = values.get(f"lane/{lane}/busy_frac")

    def picture(width: int) -> list[tuple[str, str]]:
        full, empty = bar(share, width)
        return [(full, _LANE_STYLES[lane]), (empty, "bright_black")]

    return _Cell(lane, NOTHING if share is None else f"{100 * share:.0f} %", picture)


def _facts(values: Mapping[str, Any], width: int) -> list[Text]:
    """Numbers that need no curve, in as many lines as it takes; what the run does not report is left out."""
    staleness = fixed(values.get("staleness/mean"), 2)
    if (largest := values.get("staleness/max")) is not None:
        staleness += f" (max {largest:.0f})"
    slots = short(values.get("plane/data/slots_used"))
    if (total := values.get("plane/data/slots_total")) is not None:
        slots += f"/{total:.0f}"
    facts = {
        "staleness": staleness,
        "logprob gap": short(values.get("train/logprob_gap")),
        "dropped": short(values.get("rollout/groups_dropped")),
        "weight syncs": short(values.get("plane/weights/version_syncs")),
        "slots": slots,
    }
    lines: list[Text] = []
    for label, text in facts.items():
        if text == NOTHING:
            continue
        fact = Text.assemble((f"{label} ", "dim"), text)
        if lines and len(lines[-1]) + _GAP + len(fact) <= width:
            lines[-1].append(" " * _GAP).append_text(fact)
        else:
            lines.append(fact)
    return lines
