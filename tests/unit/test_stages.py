"""Stages: environments that act together ask together, and nobody waits for one that has left."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dvla.lanes.stages import Stages
from dvla.planes.transport import Kind, Parcel


def ask(stages, env, decision=0):
    return Parcel(Kind.request, peer=0, slots=(env,), id=env, decision=decision, stage=stages.of(env))


def asks(stages, *envs):
    """What goes out as the environments ask one after the other."""
    return [[request.id for request in stages.asks(ask(stages, env))] for env in envs]


def leaves(stages, env):
    return [request.id for request in stages.leaves(env)]


@pytest.mark.parametrize(
    ("num_envs", "num_stages", "expected"),
    [
        (4, None, [0, 0, 0, 0]),
        (4, 1, [0, 0, 0, 0]),
        (4, 2, [0, 1, 0, 1]),
        (5, 2, [0, 1, 0, 1, 0]),
        (4, 4, [0, 1, 2, 3]),
        (7, 3, [0, 1, 2, 0, 1, 2, 0]),
    ],
)
def test_environments_are_dealt_to_stages_in_turn(num_envs, num_stages, expected):
    stages = Stages(num_stages)
    assert [stages.of(env) for env in range(num_envs)] == expected


@given(st.integers(1, 64), st.integers(1, 64))
def test_every_stage_has_about_equally_many(num_envs, num_stages):
    if num_stages > num_envs:
        return  # refused by the config
    stages = Stages(num_stages)
    sizes = [0] * num_stages
    for env in range(num_envs):
        sizes[stages.of(env)] += 1
    assert max(sizes) - min(sizes) <= 1


def test_without_stages_every_request_passes_at_once():
    stages = Stages(None)
    assert asks(stages, 0, 1, 2, 3, 0) == [[0], [1], [2], [3], [0]]
    assert leaves(stages, 2) == []


def test_a_stage_goes_out_together_when_none_of_it_acts():
    stages = Stages(1)
    assert asks(stages, 0) == [[0]], "nobody acts: nothing to wait for"
    assert asks(stages, 1) == [[]], "0 acts"
    assert asks(stages, 0) == [[1, 0]], "in the order of asking"
    assert asks(stages, 0, 1) == [[], [0, 1]]


def test_stages_do_not_wait_for_each_other():
    stages = Stages(2)
    assert asks(stages, 0, 1) == [[0], [1]]
    assert asks(stages, 2, 3) == [[], []]
    assert asks(stages, 1) == [[3, 1]], "while the first stage still acts"
    assert asks(stages, 0) == [[2, 0]]


def test_nobody_waits_for_an_environment_whose_episode_is_over():
    stages = Stages(1)
    asks(stages, 0)
    asks(stages, 1)
    asks(stages, 2)
    assert leaves(stages, 0) == [1, 2]
    assert asks(stages, 0) == [[]], "it comes back with its next episode, and waits for those that act"
    assert asks(stages, 2) == [[]]
    assert leaves(stages, 1) == [0, 2]


def test_the_request_of_an_environment_whose_worker_died_is_taken_back():
    stages = Stages(1)
    asks(stages, 0)
    assert asks(stages, 1, 2) == [[], []]
    assert leaves(stages, 1) == [], "0 still acts"
    assert asks(stages, 0) == [[2, 0]], "without the one that was lost"
    assert asks(stages, 1) == [[]], "its episode, begun anew, asks again"
    assert leaves(stages, 0) == []
    assert leaves(stages, 2) == [1]


def test_leaving_twice_or_without_having_asked_does_no_harm():
    stages = Stages(1)
    assert leaves(stages, 0) == leaves(stages, 0) == []
    assert asks(stages, 1) == [[1]]


class Rank(RuleBasedStateMachine):
    """Environments that ask, act, end and are replaced in any order; a model of what must go out.

    An environment is `idle` (no episode, or a new one without its first observation), `asking` (observed, held back) or
    `acting` (its request went out, whether it was answered or not).
    """

    @initialize(num_envs=st.integers(1, 6), data=st.data())
    def begin(self, num_envs, data):
        self.num_stages = data.draw(st.none() | st.integers(1, num_envs))
        self.stages = Stages(self.num_stages)
        self.state = ["idle"] * num_envs
        self.number = [0] * num_envs  # of the next request of each environment
        self.out = []  # (environment, number) of all that went out
        self.due = []  # what is asked, and was not taken back

    def members(self, stage):
        return [env for env in range(len(self.state)) if self.stages.of(env) == stage]

    def went_out(self, requests, stage):
        """Check what goes out now against what must."""
        members = self.members(stage)
        held = {env for env in members if self.state[env] == "asking"}
        if self.num_stages is not None and any(self.state[env] == "acting" for env in members):
            assert requests == []
            return
        assert {request.id for request in requests} == held
        for request in requests:
            self.state[request.id] = "acting"
            self.out.append((request.id, request.decision))
            self.due.remove((request.id, request.decision))

    @rule(data=st.data())
    def an_environment_asks(self, data):
        """Its first observation, or the one after its actions."""
        env = data.draw(st.sampled_from([e for e, state in enumerate(self.state) if state != "asking"] or [-1]))
        if env < 0:
            return
        request = ask(self.stages, env, self.number[env])
        self.due.append((env, self.number[env]))
        self.number[env] += 1
        self.state[env] = "asking"
        sent = self.stages.asks(request)
        if self.num_stages is None:
            assert sent == [request]
        self.went_out(sent, self.stages.of(env))

    @rule(data=st.data())
    def an_environment_ends_or_is_replaced(self, data):
        env = data.draw(st.integers(0, len(self.state) - 1))
        if self.state[env] == "asking":
            self.due.remove((env, self.number[env] - 1))
        self.state[env] = "idle"
        self.went_out(self.stages.leaves(env), self.stages.of(env))

    @precondition(lambda self: "asking" in self.state)
    @rule()
    def the_others_answer_until_all_who_ask_were_released(self):
        """However the waits came about, answers of those that act release everybody, after one round."""
        for env in [env for env, state in enumerate(self.state) if state == "acting"]:
            self.state[env] = "asking"
            self.due.append((env, self.number[env]))
            request = ask(self.stages, env, self.number[env])
            self.number[env] += 1
            self.went_out(self.stages.asks(request), self.stages.of(env))
        assert self.due == []

    @invariant()
    def nothing_is_doubled(self):
        if hasattr(self, "out"):
            assert len(set(self.out)) == len(self.out)

    @invariant()
    def whoever_is_held_back_waits_for_one_that_acts(self):
        if hasattr(self, "state"):
            for env, state in enumerate(self.state):
                if state == "asking":
                    assert any(self.state[other] == "acting" for other in self.members(self.stages.of(env)))


TestRank = Rank.TestCase
TestRank.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
