"""The learning rate: warm-up, and what follows, against values worked out by hand."""

import pytest

from dvla.rl.learning_rate import lr_factor


def factors(schedule, steps, warmup_steps=4, num_steps=12):
    return [lr_factor(step, warmup_steps=warmup_steps, num_steps=num_steps, schedule=schedule) for step in steps]


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_it_rises_linearly_to_the_full_rate(schedule):
    assert factors(schedule, range(5)) == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert factors(schedule, [0], warmup_steps=0) == [1.0]


def test_what_follows_the_warm_up():
    assert factors("constant", [8, 11, 50]) == [1.0, 1.0, 1.0]
    assert factors("linear", [6, 8, 11, 12, 50]) == [0.75, 0.5, 0.125, 0.0, 0.0]
    assert factors("cosine", [6, 8, 10, 12, 50]) == pytest.approx([(1 + 0.5**0.5) / 2, 0.5, (1 - 0.5**0.5) / 2, 0, 0])


def test_a_warm_up_longer_than_the_run_never_falls():
    assert factors("linear", range(3), warmup_steps=6, num_steps=3) == pytest.approx([1 / 6, 2 / 6, 3 / 6])
