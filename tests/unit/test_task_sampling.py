import numpy as np
import pytest

from dvla.planes.tickets import TicketBook
from dvla.rl.task_sampling import choose_task, running_success


def shares(rule, success, count=4000):
    draws = np.random.default_rng(0).random(count)
    tasks = [choose_task(rule, group, draw, success) for group, draw in enumerate(draws)]
    return [tasks.count(task) / count for task in range(len(success))]


def test_uniform_and_in_order():
    assert shares("uniform", [0.0, 1.0, 0.5, 0.9]) == pytest.approx([0.25] * 4, abs=0.03)
    assert [choose_task("in_order", group, 0.7, [0.0] * 3) for group in range(7)] == [0, 1, 2, 0, 1, 2, 0]


def test_what_fails_is_played_more_and_what_succeeds_is_not_forgotten():
    # weights 1, 0.5 and the floor 0.1
    assert shares("failure_rate", [0.0, 0.5, 1.0]) == pytest.approx([10 / 16, 5 / 16, 1 / 16], abs=0.03)
    assert shares("failure_rate", [1.0, 1.0]) == pytest.approx([0.5, 0.5], abs=0.03)


@pytest.mark.parametrize("rule", ["uniform", "failure_rate"])
def test_the_ends_of_the_draw_belong_to_the_first_and_last_task(rule):
    assert choose_task(rule, 0, 0.0, [0.2, 0.4, 0.6]) == 0
    assert choose_task(rule, 0, np.nextafter(1.0, 0.0), [0.2, 0.4, 0.6]) == 2


def test_the_running_rate_forgets():
    rate = 0.0
    for _ in range(20):
        rate = running_success(rate, 1.0)
    assert rate == pytest.approx(1 - 0.8**20)
    assert running_success(0.5, 0.0) == pytest.approx(0.4)


def test_the_book_remembers_how_tasks_went_and_takes_it_along():
    def book():
        return TicketBook(
            seed=1,
            learner=0,
            num_learners=1,
            groups_per_batch=500,
            max_staleness=0,
            num_tasks=2,
            num_batches=10,
            task_sampling="failure_rate",
        )

    first = book()
    for _ in range(30):
        first.note(1, 1.0)
    second = book()
    second.restore(**first.cursor(), batches_done=0)
    for one in (first, second):
        tasks = [one.start_group(0)[1] for _ in range(400)]
        assert tasks.count(0) > 320  # 10 of 11


def test_another_number_of_tasks_forgets_how_the_old_ones_went():
    book = TicketBook(
        seed=1, learner=0, num_learners=1, groups_per_batch=9, max_staleness=0, num_tasks=2, num_batches=9
    )
    book.restore(next_group=4, success=[0.5] * 9, batches_done=0)
    assert {book.start_group(0)[1] for _ in range(9)} == {0, 1}
    assert book.cursor()["success"] == [0.0, 0.0]
