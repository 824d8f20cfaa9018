"""The console shows a run in a terminal and elsewhere, and never stands in its way."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest

from dvla.telemetry.console import Console, summary_text

SHOW_CURSOR, HIDE_CURSOR = "\x1b[?25h", "\x1b[?25l"


class Terminal(io.StringIO):
    encoding = "utf-8"

    def isatty(self) -> bool:
        return True


def last_panel(terminal: Terminal) -> list[str]:
    """Lines of the panel as it was drawn last, without colours."""
    text = terminal.getvalue()
    panel = text[text.rindex("╭") : text.rindex("╯") + 1]
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r", "", panel).splitlines()


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def values(version: int, **more: Any) -> dict[str, Any]:
    return {
        "policy_version": version,
        "rollout/success_rate": 0.5,
        "rollout/return": -0.25,
        "perf/env_steps_per_s": 1234.5,
        "train/loss": -1.5e-5,
        "train/logprob_gap": None,
        "staleness/mean": 0.75,
        "staleness/max": 2,
        "lane/sampling/busy_frac": 0.8,
        "time/step_s": 2.0,
        **more,
    }


SUMMARY = {
    "exit": "completed",
    "policy_version": 40,
    "episodes": 1280,
    "wall_s": 192.4,
    "env_steps_per_s_raw": 167.25,
    "error": None,
    "success_first": 0.125,
    "success_last": 0.875,
    "return_first": None,
    "return_last": None,
}


@pytest.fixture(autouse=True)
def terminal_of_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("LINES", "40")


def test_plain_lines_share_their_columns() -> None:
    file, clock = io.StringIO(), Clock()
    console = Console(True, 100, file=file, clock=clock)
    console.phase("starting 8 simulators")
    clock.now = 4.0
    console.phase("building the policy")
    console.training(9)
    for version in (10, 11):
        clock.now += 2.0
        console.step(values(version))
    console.step({"policy_version": 12})
    console.close()
    setup_1, setup_2, header, *lines = file.getvalue().splitlines()
    assert (setup_1, setup_2) == ("[  0.0 s] starting 8 simulators", "[  4.0 s] building the policy")
    assert {len(line) for line in lines} == {len(header)}
    assert len(header) < 130
    for title, text in (("success", "0.500"), ("return", "-0.25"), ("steps/s", "1234"), ("loss", "-1.5e-05")):
        end = header.index(title) + len(title)
        assert lines[0][:end].endswith(text)
    assert lines[0].startswith(" 10/100")
    assert lines[0].endswith(" 3:00")  # 90 steps of 2 s
    assert " 80   -   -   - " in lines[0]


def test_the_first_step_brings_the_header_if_nothing_else_did() -> None:
    file = io.StringIO()
    console = Console(True, 100, file=file)
    console.step(values(1))
    header, line = file.getvalue().splitlines()
    assert header.split()[:2] == ["step", "success"]
    assert line.startswith("  1/100")


def test_disabled_shows_nothing() -> None:
    file = Terminal()
    with Console(False, 100, file=file) as console:
        console.phase("x")
        console.training(0)
        console.step(values(1))
        console.summary(SUMMARY, Path("runs/x"))
    assert file.getvalue() == ""


def test_live_panel_shows_the_run() -> None:
    file, clock = Terminal(), Clock()
    with Console(True, 100, title="D-VLA nano", file=file, clock=clock) as console:
        console.phase("building [the] policy")
        clock.now = 2.5
        console.training(0)
        for version in range(1, 26):
            clock.now += 2.0
            more = {"plane/data/slots_used": 24, "plane/data/slots_total": 32}
            console.step(values(version, **more, **{"rollout/zero_signal_frac": 0.25, "health/warnings": version % 2}))
        console.summary(SUMMARY, Path("runs/[x]"))
    text = file.getvalue()
    assert "building [the] policy" in text
    assert "results: runs/[x]" in text
    panel = "\n".join(last_panel(file))
    for piece in ("D-VLA nano", "step 25/100", "25 %", "eta  2:30", "0.500  ▅▅▅", "─  0:52  ─"):
        assert piece in panel, piece
    for piece in (
        "staleness 0.75 (max 2)",
        "slots 24/32",
        "no signal 25 %",
        "warnings 1",
        "sampling        80 %  ━━━━━",
        "grpo               -  ────",
    ):
        assert piece in panel, piece
    assert "logprob gap" not in panel  # not measured


@pytest.mark.parametrize("columns", [20, 50, 80, 120, 300])
def test_no_line_is_wider_than_the_terminal(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    file = Terminal()
    with Console(True, 1000, file=file) as console:
        for version in range(1, 400):
            console.step(values(version))
    assert {len(line) for line in last_panel(file)} == {min(columns, 120)}


def test_the_terminal_is_given_back_after_an_error() -> None:
    file, stdout = Terminal(), sys.stdout
    console = Console(True, 100, file=file)

    def train() -> None:
        with console:
            console.training(0)
            assert HIDE_CURSOR in file.getvalue()
            console.step(values(1))
            raise RuntimeError("boom")

    with pytest.raises(RuntimeError, match="boom"):
        train()
    assert file.getvalue().rindex(SHOW_CURSOR) > file.getvalue().rindex(HIDE_CURSOR)
    assert sys.stdout is stdout
    console.close()  # once more does no harm


@pytest.mark.parametrize("environment", [{"TERM": "dumb"}, {}])
def test_terminals_that_cannot_draw_get_plain_lines(environment: dict[str, str], monkeypatch: Any) -> None:
    file = Terminal()
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if not environment:
        file.encoding = "ascii"
    with Console(True, 100, file=file) as console:
        console.phase("starting…")
        console.step(values(1))
    assert "\x1b" not in file.getvalue()
    assert "0.500" in file.getvalue()


@pytest.mark.parametrize("error", [BrokenPipeError(), ValueError("I/O operation on closed file")])
def test_a_stream_that_goes_away_does_not_stop_the_run(error: Exception) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise error

    with Console(True, 100, file=Gone()) as console:
        console.phase("x")
        console.training(0)
        console.step(values(1))
        console.summary(SUMMARY, Path("x"))


def test_summary_after_the_close() -> None:
    for file in (io.StringIO(), Terminal()):
        console = Console(True, 40, file=file)
        console.close()
        console.summary(SUMMARY, Path("runs/nano"))
        assert file.getvalue().rstrip().endswith("results: runs/nano")


def test_summary_text() -> None:
    lines = summary_text(SUMMARY, Path("runs/nano")).splitlines()
    assert lines[0] == "completed: 40 optimiser steps, 1280 episodes in 3:12, 167 env steps/s"
    assert lines[1:] == ["success 0.125 -> 0.875", "results: runs/nano"]
    sick = {"first_step": 3, "last_step": 9, "text": "all fail: train it first"}
    warned = summary_text({**SUMMARY, "warnings": [sick]}, Path("runs/nano"))
    assert warned.splitlines()[2] == "warning at steps 3 to 9: all fail: train it first"
    failed = summary_text({**SUMMARY, "exit": "failed", "error": "rank 1: no"}, Path("runs/nano"))
    assert failed.splitlines()[1] == "error: rank 1: no"
