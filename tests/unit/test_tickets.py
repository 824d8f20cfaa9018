import pytest

from dvla.planes.tickets import TicketBook, cursor_after_reshard, make_tickets


def make_book(learner=0, num_learners=1, **changes):
    settings = {
        "seed": 3,
        "learner": learner,
        "num_learners": num_learners,
        "groups_per_batch": 2,
        "max_staleness": 1,
        "num_tasks": 5,
        "num_batches": 10,
    } | changes
    return TicketBook(**settings)


def start_all(book, version):
    groups = []
    while (group := book.start_group(version)) is not None:
        groups.append(group)
    return groups


def test_members_share_task_and_initial_state_and_nothing_else():
    tickets = make_tickets(3, 17, 4, 2, 6)
    assert {(t.group, t.task, t.version) for t in tickets} == {(17, 2, 6)}
    assert len({t.seed for t in tickets}) == 1
    assert [t.id for t in tickets] == [68, 69, 70, 71]
    assert [t.member for t in tickets] == [0, 1, 2, 3]


def test_tasks_and_states_depend_on_seed_and_group_alone():
    assert make_tickets(3, 17, 4, 1, 0)[0].seed == make_tickets(3, 17, 8, 2, 5)[0].seed
    seeds = {make_tickets(seed, group, 4, 0, 0)[0].seed for seed in range(5) for group in range(50)}
    assert len(seeds) == 250
    groups = start_all(make_book(groups_per_batch=100), 0)
    assert [group for group, _ in groups] == list(range(200))
    tasks = [task for _, task in groups]
    assert all(20 <= tasks.count(task) <= 60 for task in range(5))
    of_one = start_all(make_book(1, 3, groups_per_batch=10), 4)
    assert of_one == groups[1::3][:60]
    assert [task for _, task in start_all(make_book(seed=4, groups_per_batch=100), 0)] != tasks


def test_learners_take_different_groups():
    numbers = [group for learner in range(3) for group, _ in start_all(make_book(learner, 3), 0)]
    assert sorted(numbers) == list(range(12))


def test_admission_opens_with_the_version_and_with_drops():
    book = make_book()
    assert len(start_all(book, 0)) == 4  # (0 + 1 + 1) batches of 2
    assert len(start_all(book, 1)) == 2
    book.drop(0)
    assert len(start_all(book, 1)) == 1
    assert book.num_open() == 6


def test_nothing_starts_that_no_batch_will_take():
    book = make_book(num_batches=3)
    assert len(start_all(book, 100)) == 6
    book.drop(1)
    assert len(start_all(book, 100)) == 1


def test_groups_that_may_not_grow_older_come_first():
    book = make_book()
    start_all(book, 0)  # groups 0..3: they fill the batches of versions 0 and 1
    book.take(0)
    book.take(1)
    start_all(book, 1)  # groups 4, 5
    assert book.choose([4, 3]) == 3
    assert book.choose([4, 5]) is None  # 2 and 3 began at version 0 and fill the present batch
    book.take(2)
    book.take(3)
    assert book.choose([5, 4]) == 5


def test_a_resumed_book_admits_no_burst():
    book = make_book()
    start_all(book, 0)
    cursor = book.cursor()
    again = make_book()
    again.restore(**cursor, batches_done=6)
    groups = start_all(again, 6)
    assert len(groups) == 4
    assert groups[0][0] == cursor["next_group"]


def test_taking_twice_is_an_error():
    book = make_book()
    start_all(book, 0)
    book.take(0)
    with pytest.raises(KeyError):
        book.take(0)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3), (3, 2), (4, 4)])
def test_other_learners_go_on_with_the_next_groups(before, after):
    """As in the serial schedule: two batches have been played, and nothing beyond."""
    played, cursors = [], []
    for learner in range(before):
        book = make_book(learner, before, groups_per_batch=12 // before, max_staleness=0)
        played += start_all(book, 1)
        cursors.append(book.cursor())
    for learner in range(after):
        book = make_book(learner, after, groups_per_batch=12 // after, max_staleness=0)
        book.restore(**cursor_after_reshard(cursors, learner, after), batches_done=2)
        played += start_all(book, 2)
    whole = start_all(make_book(groups_per_batch=12, max_staleness=0), 2)
    assert sorted(played) == whole == sorted(whole)
    assert len(whole) == 36


def test_other_learners_play_no_group_twice_where_drops_have_made_one_run_ahead():
    cursors = [{"next_group": 8, "success": [0.5, 0.0]}, {"next_group": 5, "success": [1.0, 0.5]}]
    assert cursor_after_reshard(cursors, 1, 2) == cursors[1]
    assert cursor_after_reshard(cursors, 0, 1) == {"next_group": 7, "success": [0.75, 0.25]}
    assert [cursor_after_reshard(cursors, learner, 3)["next_group"] for learner in range(3)] == [7, 8, 9]
