"""Log lines say when, where and in which lane; rank 0 alone talks to the terminal."""

from __future__ import annotations

import io
import logging
import re
import sys
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest

from dvla.telemetry.logs import set_up_logging


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    root, ours = logging.getLogger(), logging.getLogger("dvla")
    handlers, levels = list(root.handlers), (root.level, ours.level)
    yield
    for handler in [handler for handler in root.handlers if handler not in handlers]:
        root.removeHandler(handler)
        handler.close()
    root.setLevel(levels[0])
    ours.setLevel(levels[1])
    logging.captureWarnings(False)


def test_a_line_names_time_rank_lane_and_level(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging(3, tmp_path / "attempt_1")
    logger = logging.getLogger("dvla.lanes.grpo")
    thread = threading.Thread(target=lambda: logger.info("step %d", 7), name="dvla-grpo")
    thread.start()
    thread.join()
    logger.warning("slow")
    first, second = (tmp_path / "attempt_1" / "rank00003.log").read_text().splitlines()
    assert re.fullmatch(r"\d\d:\d\d:\d\d r03 grpo I step 7", first)
    assert second.endswith(" r03 main W slow")
    assert capsys.readouterr().err == ""


def test_rank_0_is_heard_in_the_terminal_as_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging(0, tmp_path)
    logging.getLogger("dvla").info("hello")
    shown = capsys.readouterr().err
    assert shown.endswith("r00 main I hello\n")
    assert (tmp_path / "rank00000.log").read_text() == shown


def test_the_terminal_is_the_one_of_the_moment(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_up_logging(0, tmp_path)
    panel = io.StringIO()
    monkeypatch.setattr(sys, "stderr", panel)
    logging.getLogger("dvla").info("above the panel")
    assert "above the panel" in panel.getvalue()
    assert capsys.readouterr().err == ""


def test_libraries_speak_only_of_trouble(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging(0, tmp_path)
    logging.getLogger("library").info("chatter")
    logging.getLogger("library").warning("trouble")
    logging.getLogger("dvla").debug("detail")
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("old call", DeprecationWarning, stacklevel=1)
    text = capsys.readouterr().err
    assert "trouble" in text
    assert "old call" in text
    assert "chatter" not in text
    assert "detail" not in text


def test_tracebacks_follow_their_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging(1, tmp_path)
    try:
        raise KeyError("slot")
    except KeyError:
        logging.getLogger("dvla").exception("lane failed")
    text = (tmp_path / "rank00001.log").read_text()
    assert re.search(r"r01 main E lane failed\nTraceback .*\n(.*\n)+KeyError: 'slot'\n", text)


def test_setting_up_again_replaces(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging(0, tmp_path / "attempt_1")
    set_up_logging(0, tmp_path / "attempt_2")
    logging.getLogger("dvla").info("once")
    assert capsys.readouterr().err.count("once") == 1
    assert (tmp_path / "attempt_1" / "rank00000.log").read_text() == ""
