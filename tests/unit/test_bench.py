"""When a benchmark counts as worse than its baseline."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "perf"))

from bench import SCRIPTS, TOLERANCES, regressions

HIGH, LOW, WITH_UNIT = "cpu_efficiency", "overlap.vs_slowest_lane", "startup_s"


@pytest.mark.parametrize(
    ("name", "baseline", "now", "is_worse"),
    [
        (HIGH, 0.95, 0.91, False),
        (HIGH, 0.95, 0.90, True),
        (HIGH, 0.95, 2.0, False),
        (LOW, 1.0, 1.04, False),
        (LOW, 1.0, 1.06, True),
        (LOW, 1.0, 0.1, False),
        (WITH_UNIT, 6.0, 7.7, False),
        (WITH_UNIT, 6.0, 7.9, True),
    ],
)
def test_worse_is_what_is_beyond_the_tolerance_on_the_bad_side(name, baseline, now, is_worse):
    found = regressions({name: baseline}, {name: now}, same_machine=True)
    assert [text.split(":")[0] for text in found] == [name] * is_worse


def test_seconds_of_another_machine_are_no_measure_but_ratios_are():
    baseline, now = {HIGH: 0.95, WITH_UNIT: 6.0}, {HIGH: 0.5, WITH_UNIT: 60.0}
    assert len(regressions(baseline, now, same_machine=True)) == 2
    assert regressions(baseline, now, same_machine=False) == [f"{HIGH}: 0.5, the baseline is 0.95, the limit 0.902"]


def test_a_figure_that_is_gone_is_worse_and_a_new_one_is_not():
    assert regressions({HIGH: 1.0}, {}, same_machine=True) == [f"{HIGH}: not measured, the baseline is 1"]
    assert regressions({}, {HIGH: 0.0}, same_machine=True) == []


def test_every_figure_with_a_tolerance_is_measured_by_a_script_of_the_set():
    folder = Path(__file__).parents[2] / "perf"
    texts = "".join((folder / f"{script}.py").read_text() for script in SCRIPTS)
    assert [name for name in TOLERANCES if name.partition(".")[2] not in texts and name not in texts] == []
