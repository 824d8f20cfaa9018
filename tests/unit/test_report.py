"""The report of any run folder: what a run wrote, what a kill left of it, what somebody else put there."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pages import Page

from dvla.telemetry.report import FILE_NAME, draw_at_end, write_report
from dvla.telemetry.run_files import NoRunError, RunFiles, number
from dvla.telemetry.summary import SUMMARY_KEYS, write_summary
from dvla.telemetry.trace import Tracer

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\"'&"


def read(folder: Path) -> Page:
    write_report(folder)
    return Page((folder / FILE_NAME).read_text())


def test_a_secret_does_not_get_onto_the_page(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_HF_TOKEN", "hf_0123456789")
    folder = make_run(tmp_path / "of_hf_0123456789", [])
    (folder / "summary.json").mkdir()  # cannot be read: the page says so, with its path
    text = write_report(folder).read_text()
    assert text.count("of_&lt;MY_HF_TOKEN&gt;") >= 3 and "hf_0123456789" not in text


def line(step: int, **more) -> dict:
    values = {"policy_version": step, "env_steps": 10 * step, "rollout/success_rate": step / 10, "train/loss": 0.5}
    return values | {"staleness/hist": [3, 1] + [0] * 15, "lane/grpo/busy_frac": 0.5} | more


def make_run(folder: Path, lines: list[dict]) -> Path:
    folder.mkdir()
    (folder / "config.yaml").write_text("model: {name: mlp}\n")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    return folder


def add_trace(folder: Path, num_steps: int = 4) -> None:
    clock = iter(range(10**18, 10**19, 10**6))  # a millisecond a look
    tracer = Tracer(0, True, clock_ns=lambda: next(clock), epoch_ns=lambda: 10**18)
    sampling, grpo = tracer.for_lane("sampling"), tracer.for_lane("grpo")
    for step in range(1, num_steps + 1):
        with sampling.span("collect", workers=1, running=2):
            pass
        with grpo.span("optimise", version=step):
            pass
    tracer.write(folder / "traces" / "rank00000.json")


def test_curves_are_the_metrics(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [line(step) for step in range(1, 6)])
    (folder / "evaluations.jsonl").write_text('{"policy_version": 0, "eval/success_rate": 0.25}\n')
    charts = read(folder).charts()
    training, evaluation = charts["Success"]
    assert training["points"] == [[step, step / 10] for step in range(1, 6)]
    assert evaluation["points"] == [[0, 0.25]]
    assert [series["points"][0][1] for series in charts["Trained decisions by staleness"]] == [0.75, 0.25]
    assert charts["Busy lanes"][0]["name"] == "grpo"


def test_a_summary_is_shown_with_its_warnings_and_its_error(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [line(1)])
    warning = {"first_step": 3, "last_step": 9, "text": "steps too large"}
    values = dict.fromkeys(SUMMARY_KEYS) | {"run": "mine", "exit": "failed", "error": "rank 1: gone", "wall_s": 75}
    write_summary(folder / "summary.json", values | {"warnings": [warning], "success_first": 0.1, "success_last": 0.9})
    text = read(folder).text
    assert all(
        words in text
        for words in ("mine failed", "rank 1: gone", "steps 3 to 9: steps too large", "1:15", "0.100 → 0.900")
    )


def test_a_killed_run_is_drawn_as_far_as_it_got(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [line(1), line(2)])
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"policy_version": 3, "rollout/succ')
    (folder / "env.json").write_text('{"comm')
    page = read(folder)
    assert [point[0] for point in page.charts()["Success"][0]["points"]] == [1, 2]
    assert "There is no summary.json" in page.text
    assert "env.json cannot be read" in page.text
    assert "telemetry.trace=true" in page.text


def test_a_run_without_a_step_says_so(tmp_path: Path) -> None:
    assert "No optimiser step was finished" in read(make_run(tmp_path / "run", [])).text


def test_swimlanes_of_a_trace(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [line(1)])
    add_trace(folder)
    page = read(folder)
    assert "Optimiser steps 2 to 4" in page.text
    assert "grpo is busy" in page.text
    titles = re.findall(r"<title>([^<]*)</title>", (folder / FILE_NAME).read_text())
    assert any(title.startswith("collect (workers 1, running 2)") for title in titles)


@pytest.mark.parametrize("content", ["{", '{"traceEvents": [{"ph": "X", "name": 1, "pid": "a"}]}'])
def test_a_trace_that_cannot_be_read_is_told(tmp_path: Path, content: str) -> None:
    folder = make_run(tmp_path / "run", [line(1)])
    (folder / "traces").mkdir()
    (folder / "traces" / "rank00000.json").write_text(content)
    text = read(folder).text
    assert "traces/rank00000.json cannot be read" in text
    assert "fewer than two optimiser steps" in text


def test_cloning_has_its_own_curves(tmp_path: Path) -> None:
    lines = [{"policy_version": 1, "sft/loss": 2.0, "sft/held_out_loss": None, "sft/samples_per_s": 8.0}]
    page = read(make_run(tmp_path / "run", lines))
    assert page.charts().keys() == {"Cloning loss", "Samples"}
    assert "Swimlanes" not in page.text


def test_ten_thousand_steps_make_a_small_page(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", [line(step) for step in range(1, 10_001)])
    page = read(folder)
    assert (folder / FILE_NAME).stat().st_size < 500_000
    assert len(page.charts()["Success"][0]["points"]) == 300


def test_hostile_strings_stay_text(tmp_path: Path) -> None:
    folder = make_run(
        tmp_path / HOSTILE.replace("/", "∕"), [line(1, **{HOSTILE: 1.0, f"rollout/task_{HOSTILE}/x": 0.5})]
    )
    (folder / "config.yaml").write_text(json.dumps({"model": {"name": HOSTILE}, HOSTILE: "http://example.org/"}))
    values = dict.fromkeys(SUMMARY_KEYS, HOSTILE) | {"exit": "failed", "lanes": {}}
    write_summary(folder / "summary.json", values | {"warnings": [{"text": HOSTILE}, HOSTILE]})
    (folder / "env.json").write_text(
        json.dumps({"command": [HOSTILE], "versions": {HOSTILE: HOSTILE}, "platform": HOSTILE})
    )
    tracer = Tracer(0, True)
    for step in range(3):
        with tracer.for_lane("grpo").span(HOSTILE, about=HOSTILE), tracer.for_lane("grpo").wait(HOSTILE, HOSTILE):
            pass
        with tracer.for_lane("grpo").span("optimise", version=step):
            pass
    tracer.write(folder / "traces" / "rank00000.json")
    video = folder / "videos" / "step_000001" / "a'\" onload=alert(3) .mp4"
    video.parent.mkdir(parents=True)
    video.touch()
    page = read(folder)
    assert HOSTILE in page.text
    assert [tag for tag, _ in page.tags].count("script") == 1
    assert not any(tag == "img" for tag, _ in page.tags)
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    links = [value for _, attributes in page.tags for name, value in attributes.items() if name in ("src", "href")]
    assert links == ["videos/step_000001/a%27%22%20onload%3Dalert%283%29%20.mp4"]


def test_its_own_script_is_the_only_one_that_may_run(tmp_path: Path) -> None:
    page = read(make_run(tmp_path / "run", [line(1)]))
    (policy,) = (a["content"] for tag, a in page.tags if a.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-")
    assert "http" not in policy


def test_values_that_are_no_numbers_are_left_out(tmp_path: Path) -> None:
    lines = [line(1, **{"rollout/success_rate": value}) for value in ("x", [1], None, True, float("nan"), 1e308, {})]
    lines += [{"policy_version": "one"}, line(2)]
    lines += [line(3, **{"staleness/hist": ["a", None, -1, float("inf")]}), line(4, **{"staleness/hist": "x"})]
    charts = read(make_run(tmp_path / "run", lines)).charts()
    assert [point[0] for point in charts["Success"][0]["points"]] == [2, 3, 4]
    assert number(3) == 3.0


@pytest.mark.parametrize("content", ["[1, 2]", "\x00", "a: [", "null", "!!python/object:os.system {}"])
def test_settings_that_cannot_be_read(tmp_path: Path, content: str) -> None:
    folder = make_run(tmp_path / "run", [line(1)])
    (folder / "config.yaml").write_text(content)
    assert "config.yaml cannot be read" in read(folder).text


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(NoRunError, match="there is no folder"):
        RunFiles.read(tmp_path / "nothing")
    with pytest.raises(
        NoRunError, match=r"neither config\.yaml, which a run writes when it starts, nor metrics\.jsonl"
    ):
        RunFiles.read(tmp_path)


def test_the_end_of_a_run_is_not_made_to_fail(tmp_path: Path) -> None:
    told: list[str] = []
    draw_at_end(tmp_path, told.append)
    assert len(told) == 1
    assert told[0].startswith("there is no report.html: NoRunError: ")
    folder = make_run(tmp_path / "run", [line(1)])
    (folder / FILE_NAME).mkdir()  # cannot be replaced
    draw_at_end(folder, told.append)
    assert "IsADirectoryError" in told[1]
    shutil.rmtree(folder / FILE_NAME)
    draw_at_end(folder, told.append)
    assert len(told) == 2


def test_from_the_command_line(tmp_path: Path) -> None:
    def call(folder: Path) -> subprocess.CompletedProcess:
        return subprocess.run(
            [sys.executable, "-m", "dvla.report", str(folder)], capture_output=True, text=True, check=False
        )

    folder = make_run(tmp_path / "run", [line(1)])
    done = call(folder)
    assert (done.returncode, done.stdout) == (0, f"written to {folder / FILE_NAME}\n")
    missing = call(tmp_path / "nothing")
    assert missing.returncode == 2
    assert (
        missing.stderr
        == f"dvla: error: there is no folder {tmp_path / 'nothing'}: give the folder of a run, runs/<run.name>\n"
    )
