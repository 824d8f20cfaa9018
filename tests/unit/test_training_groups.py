"""Groups of several training ranks on one sampling rank: none waits for slots that another keeps while it waits for it."""

from collections import deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dvla.lanes.episode_source import BeginningVersions
from dvla.lanes.evaluation_episodes import EvaluationEpisodes
from dvla.lanes.training_groups import TrainingGroups
from dvla.planes.tickets import Ticket
from dvla.planes.transport import Kind, Parcel

G = 2


class Learners:
    """Takes what the sampling rank sends."""

    def __init__(self):
        self.sent = []

    def send(self, parcel):
        self.sent.append(parcel)


def make_groups(num_slots, sharing, versions=None):
    learners = Learners()
    groups = TrainingGroups(
        slots={"initial_state": np.zeros((num_slots, 4))},
        free=range(num_slots),
        seed=0,
        group_size=G,
        learners=learners,
        sharing=sharing,
        versions=versions or BeginningVersions(),
        note_free=lambda _count: None,
        note_pace=lambda _count, _seconds: None,
        note_end=lambda _group: None,
    )
    return groups, learners


def order(groups, learner, group, version=0):
    groups.take(Parcel(Kind.order, learner, id=group, version=version))


def play(groups):
    """Play all that can be played."""
    while (given := groups.next()) is not None:
        groups.finished(*given)


def test_a_group_begins_with_all_its_slots_or_not_at_all():
    groups, learners = make_groups(3, [0])
    for number in range(3):
        order(groups, 0, number)
    play(groups)
    assert [group.id for group in learners.sent] == [0]
    groups.take(learners.sent[0].answer(Kind.freed))
    play(groups)
    assert [group.id for group in learners.sent] == [0, 1]


def test_slots_are_kept_for_a_training_rank_that_has_none():
    groups, learners = make_groups(2 * G, [0, 1])
    order(groups, 0, 0)
    order(groups, 0, 2)
    play(groups)
    assert [group.id for group in learners.sent] == [0], "the other slots are for rank 1"
    order(groups, 1, 1)
    play(groups)
    assert [group.id for group in learners.sent] == [0, 1], "it passes the one that was ordered before"
    groups.take(learners.sent[0].answer(Kind.freed))
    play(groups)
    assert [group.id for group in learners.sent] == [0, 1, 2]


@pytest.mark.parametrize("spare", [0, 1, 3])
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_training_ranks_that_wait_for_each_other_all_go_on(spare, data):
    """Each step takes a group of every rank, and gives none back before all have one."""
    count, steps = data.draw(st.integers(1, 4)), 6
    groups, learners = make_groups((count + spare) * G, range(count))
    # Each rank has its orders at once or as late as for its step.
    orders = deque(data.draw(st.permutations([(rank, step) for rank in range(count) for step in range(steps)])))
    finished = {rank: [] for rank in range(count)}

    def play_on():
        play(groups)
        for group in learners.sent:
            finished[group.peer].append(group)
        learners.sent.clear()

    for _ in range(steps):
        while not all(finished.values()):
            if orders and data.draw(st.booleans()):
                rank, step = orders.popleft()
                order(groups, rank, step * count + rank)
            elif orders:
                play_on()
                if not all(finished.values()):
                    rank, step = orders.popleft()
                    order(groups, rank, step * count + rank)
            else:
                play_on()
                assert all(finished.values()), "a rank waits for a group that can never begin"
        for mine in finished.values():
            groups.take(mine.pop(0).answer(Kind.freed))


def test_between_groups_what_waits_for_newer_weights_begins_when_no_group_is_under_way():
    """It would hold an environment, or its stage, that the groups of older weights need to come to their end."""
    versions = BeginningVersions(keeps_groups=True)
    groups, learners = make_groups(3 * G, [0, 1], versions)
    ticket = Ticket(1 << 48, -1, 0, task=0, seed=0, greedy=True)
    evaluation = EvaluationEpisodes([ticket], free=[0], learners=learners, home=0, versions=versions)
    order(groups, 0, 0, version=1)
    order(groups, 0, 2, version=2)
    evaluation.take(Parcel(Kind.round, 0, version=2))
    assert evaluation.next() is not None, "nothing is under way"
    first, second = groups.next(), groups.next()
    assert first[0].version == second[0].version == 2, "an order for older weights waits for the newer ones, too"
    evaluation.take(Parcel(Kind.freed, 0, (0,)))
    evaluation.take(Parcel(Kind.round, 0, version=3))
    order(groups, 1, 1, version=3)
    assert evaluation.next() is None
    third, fourth = groups.next(), groups.next()
    assert {third[0].group, fourth[0].group} == {2}
    assert groups.next() is None
    for played in (first, second, third, fourth):
        assert evaluation.next() is None
        groups.finished(*played)
    assert evaluation.next()[0].version == 3
    ticket, _ = groups.next()
    assert (ticket.group, ticket.version) == (1, 3)
