"""Bounded staleness under every interleaving of sampling, learning and weight arrival."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dvla.rl.admission import choose_group, may_start

Rule = Callable[..., int | None]


class TooStaleError(AssertionError):
    """The learner took a group beyond the bound."""


@pytest.mark.parametrize(
    ("started", "dropped", "version", "staleness", "expected"),
    [
        (0, 0, 0, 0, True),
        (3, 0, 0, 0, True),
        (4, 0, 0, 0, False),  # the first batch of four is full
        (4, 1, 0, 0, True),  # a dropped group is replaced
        (4, 0, 1, 0, True),  # the next version opens the next batch
        (11, 0, 0, 2, True),
        (12, 0, 0, 2, False),
        (12, 0, 1, 2, True),
    ],
)
def test_may_start_by_hand(started: int, dropped: int, version: int, staleness: int, expected: bool) -> None:
    assert may_start(started, dropped, version, max_staleness=staleness, groups_per_step=4) is expected


def test_first_finished_goes_first_while_there_is_room() -> None:
    # Version 5, one of two taken. Due by batch 6: group 3 (3 places); by 7: groups 3, 7, 9 (5 places).
    begun_at = {7: 5, 3: 4, 9: 5}
    assert choose_group([7, 3], begun_at, groups_taken=11, max_staleness=2, groups_per_step=2) == 7


def test_a_group_that_is_due_overtakes() -> None:
    # Version 5, one of two taken: group 3 must go into the last place of this batch.
    begun_at = {7: 5, 3: 3}
    assert choose_group([7, 3], begun_at, groups_taken=11, max_staleness=2, groups_per_step=2) == 3


def test_the_learner_waits_for_a_group_that_is_due() -> None:
    begun_at = {7: 5, 3: 3}
    assert choose_group([7], begun_at, groups_taken=11, max_staleness=2, groups_per_step=2) is None


def test_a_place_to_spare_may_go_to_a_younger_group() -> None:
    # The same with the whole batch free: group 7 may have one place, group 3 keeps the other.
    begun_at = {7: 5, 3: 3}
    assert choose_group([7], begun_at, groups_taken=10, max_staleness=2, groups_per_step=2) == 7


def test_places_of_later_batches_are_kept_as_well() -> None:
    # Version 1, batches of one: groups 1 and 2 fill batches 1 and 2, group 3 would take a place they need.
    begun_at = {1: 0, 2: 0, 3: 1}
    assert choose_group([3], begun_at, groups_taken=1, max_staleness=2, groups_per_step=1) is None
    assert choose_group([3, 2], begun_at, groups_taken=1, max_staleness=2, groups_per_step=1) == 2


def test_nothing_finished_means_waiting() -> None:
    assert choose_group([], {1: 0}, groups_taken=0, max_staleness=1, groups_per_step=2) is None
    assert choose_group([], {}, groups_taken=0, max_staleness=1, groups_per_step=2) is None


class Pipeline(RuleBasedStateMachine):
    """A learner, any number of workers of any speed, and weights that arrive late.

    Every step hypothesis takes is one event of one of the three; what it picks is the interleaving.
    """

    @initialize(max_staleness=st.integers(0, 3), groups_per_step=st.integers(1, 3), num_places=st.integers(1, 7))
    def begin(self, max_staleness: int, groups_per_step: int, num_places: int) -> None:
        self.max_staleness = max_staleness
        self.groups_per_step = groups_per_step
        self.num_places = num_places  # how many groups fit into the episode slots
        self.policy_version = 0
        self.arrived_version = 0  # of the weights the workers act with
        self.started = 0
        self.dropped = 0
        self.in_batch = 0
        self.consumed: list[int] = []
        self.running: list[int] = []
        self.finished: list[int] = []
        self.begun_at: dict[int, int] = {}

    def can_start(self) -> bool:
        return len(self.begun_at) < self.num_places and may_start(
            self.started,
            self.dropped,
            self.arrived_version,
            max_staleness=self.max_staleness,
            groups_per_step=self.groups_per_step,
        )

    def choice(self) -> int | None:
        return choose_group(
            self.finished,
            self.begun_at,
            groups_taken=len(self.consumed),
            max_staleness=self.max_staleness,
            groups_per_step=self.groups_per_step,
        )

    @precondition(lambda self: self.can_start())
    @rule()
    def start(self) -> None:
        self.running.append(self.started)
        self.begun_at[self.started] = self.arrived_version
        self.started += 1

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        self.finished.append(self.running.pop(data.draw(st.integers(0, len(self.running) - 1))))

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def lose_a_running_group(self, data: st.DataObject) -> None:
        del self.begun_at[self.running.pop(data.draw(st.integers(0, len(self.running) - 1)))]
        self.dropped += 1

    @precondition(lambda self: self.choice() is not None)
    @rule(has_signal=st.booleans())
    def learn(self, has_signal: bool) -> None:
        group = self.choice()
        assert group is not None
        self.finished.remove(group)
        begun_at = self.begun_at.pop(group)
        if not has_signal:
            self.dropped += 1
            return
        assert 0 <= self.policy_version - begun_at <= self.max_staleness
        if self.max_staleness == 0:
            assert begun_at == self.policy_version
        self.consumed.append(group)
        self.in_batch += 1
        if self.in_batch == self.groups_per_step:
            self.in_batch = 0
            self.policy_version += 1

    @precondition(lambda self: self.arrived_version < self.policy_version)
    @rule()
    def receive_weights(self) -> None:
        self.arrived_version += 1

    @invariant()
    def groups_are_conserved(self) -> None:
        if not hasattr(self, "begun_at"):
            return
        assert self.started == self.dropped + len(self.consumed) + len(self.running) + len(self.finished)
        assert len(set(self.consumed)) == len(self.consumed)
        assert set(self.begun_at) == {*self.running, *self.finished}
        limit = (self.policy_version + self.max_staleness + 1) * self.groups_per_step
        assert self.started - self.dropped <= limit

    def teardown(self) -> None:
        """From wherever the events led, fair progress of all parties must carry the learner on."""
        if not hasattr(self, "begun_at"):
            return
        target = self.policy_version + 3
        for _ in range(20 * (self.groups_per_step + self.num_places)):
            if self.policy_version >= target:
                break
            if self.arrived_version < self.policy_version:
                self.arrived_version += 1
            if self.can_start():
                self.running.append(self.started)
                self.begun_at[self.started] = self.arrived_version
                self.started += 1
            if self.running:
                self.finished.append(self.running.pop())  # the least fair order: youngest first
            if self.choice() is not None:
                Pipeline.learn(self, True)
        assert self.policy_version >= target, "the pipeline stands still"


TestPipeline = Pipeline.TestCase
TestPipeline.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)


@dataclass(frozen=True)
class State:
    """A pipeline as the learner sees it: versions count from its own, so that like situations are equal."""

    in_batch: int
    lag: int  # of the arrived weights
    running: tuple[int, ...]  # ages, sorted
    finished: tuple[int, ...]  # ages, in order of finishing

    def choice(self, version: int, rule: Rule, max_staleness: int, groups_per_step: int) -> int | None:
        """Position in `finished` of the group to take."""
        ages = (*self.finished, *self.running)
        return rule(
            range(len(self.finished)),
            {position: version - age for position, age in enumerate(ages)},
            groups_taken=version * groups_per_step + self.in_batch,
            max_staleness=max_staleness,
            groups_per_step=groups_per_step,
        )


def successors(state: State, rule: Rule, max_staleness: int, groups_per_step: int) -> Iterator[State]:
    """All that can happen next, one event each."""
    version = max(100, max_staleness)  # far from the start of the run; any number does
    started = version * groups_per_step + state.in_batch + len(state.running) + len(state.finished)
    if may_start(started, 0, version - state.lag, max_staleness=max_staleness, groups_per_step=groups_per_step):
        yield replace(state, running=tuple(sorted((*state.running, state.lag))))
    for position, age in enumerate(state.running):
        rest = state.running[:position] + state.running[position + 1 :]
        yield replace(state, running=rest, finished=(*state.finished, age))
        yield replace(state, running=rest)  # lost in a crash
    if state.lag:
        yield replace(state, lag=state.lag - 1)
    position = state.choice(version, rule, max_staleness, groups_per_step)
    if position is not None:
        rest = state.finished[:position] + state.finished[position + 1 :]
        yield replace(state, finished=rest)  # dropped for want of a signal
        age = state.finished[position]
        if age > max_staleness:
            raise TooStaleError(f"a group of age {age} is trained on: {state}")
        if state.in_batch + 1 < groups_per_step:
            yield replace(state, finished=rest, in_batch=state.in_batch + 1)
        else:
            older = tuple(age + 1 for age in state.running), tuple(age + 1 for age in rest)
            yield State(0, state.lag + 1, *older)


def explore(rule: Rule, *, max_staleness: int, groups_per_step: int) -> int:
    """Visit every state that any interleaving can lead to; their number."""
    start = State(0, 0, (), ())
    seen, frontier = {start}, [start]
    while frontier:
        state = frontier.pop()
        following = set(successors(state, rule, max_staleness, groups_per_step))
        assert following, f"the pipeline stands still: {state}"
        frontier += following - seen
        seen |= following
    return len(seen)


def first_finished(finished: Sequence[int], begun_at: Mapping[int, int], **_: int) -> int | None:
    """No rule of order at all."""
    return finished[0] if finished else None


def due_first(
    finished: Sequence[int],
    begun_at: Mapping[int, int],
    *,
    groups_taken: int,
    max_staleness: int,
    groups_per_step: int,
) -> int | None:
    """The rule that looks no further than the present batch."""
    due = groups_taken // groups_per_step - max_staleness
    if any(version <= due for version in begun_at.values()):
        return next((group for group in finished if begun_at[group] <= due), None)
    return finished[0] if finished else None


@pytest.mark.parametrize(
    ("max_staleness", "groups_per_step"), [(0, 1), (0, 3), (1, 1), (1, 2), (2, 1), (2, 2), (2, 3), (3, 1)]
)
def test_every_interleaving_keeps_the_bound(max_staleness: int, groups_per_step: int) -> None:
    assert explore(choose_group, max_staleness=max_staleness, groups_per_step=groups_per_step) > 2


@pytest.mark.parametrize(
    ("rule", "max_staleness", "groups_per_step"),
    [(first_finished, 1, 1), (first_finished, 2, 2), (due_first, 2, 1)],
)
def test_weaker_rules_break_the_bound(rule: Rule, max_staleness: int, groups_per_step: int) -> None:
    with pytest.raises(TooStaleError):
        explore(rule, max_staleness=max_staleness, groups_per_step=groups_per_step)
