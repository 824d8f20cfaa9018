"""Which ranks sample, infer and train, and who works with whom."""

import math
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dvla.config import AlgoConfig, Config, ConfigError, Placement, PlacementConfig, RuntimeConfig, Schedule
from dvla.runtime.placement import ROLES, Roles, describe_placement, place


def roles_of(name, ranks, ratio="1:1", **sets):
    return place(PlacementConfig(name=Placement[name], ratio=ratio, **sets), ranks)


@pytest.mark.parametrize("ranks", range(1, 9))
def test_colocated_ranks_do_everything(ranks):
    everyone = tuple(range(ranks))
    assert roles_of("colocated", ranks) == Roles(everyone, everyone, everyone)
    assert roles_of("colocated", ranks, ratio="3:1") == Roles(everyone, everyone, everyone), "ratio is not for it"


SEPARATED = [  # ratio, ranks, ranks that train, ranks that sample and infer
    ("1:1", 2, [0], [1]),
    ("1:1", 4, [0, 1], [2, 3]),
    ("1:1", 6, [0, 1, 2], [3, 4, 5]),
    ("1:1", 8, [0, 1, 2, 3], [4, 5, 6, 7]),
    ("2:1", 3, [0], [1, 2]),
    ("2:1", 6, [0, 1], [2, 3, 4, 5]),
    ("1:2", 3, [0, 1], [2]),
    ("3:1", 4, [0], [1, 2, 3]),
    ("3:1", 8, [0, 1], [2, 3, 4, 5, 6, 7]),
    ("2:3", 5, [0, 1, 2], [3, 4]),
    ("1:6", 7, [0, 1, 2, 3, 4, 5], [6]),
]


@pytest.mark.parametrize(("ratio", "ranks", "training", "others"), SEPARATED)
def test_separated_ranks_train_first_and_sample_then(ratio, ranks, training, others):
    roles = roles_of("separated", ranks, ratio)
    assert roles == Roles(tuple(others), tuple(others), tuple(training))
    assert all(roles.inference_of(sampler) == sampler for sampler in others), "a sampler decides for itself"


HYBRID = [  # ratio, ranks, sampling, inference, training
    ("1:1", 2, [1], [0], [0, 1]),
    ("2:1", 3, [1, 2], [0], [0, 1, 2]),
    ("1:1", 4, [2, 3], [0, 1], [0, 1, 2, 3]),
    ("3:1", 8, [2, 3, 4, 5, 6, 7], [0, 1], list(range(8))),
    ("1:1:1", 3, [2], [1], [0]),
    ("2:1:1", 4, [2, 3], [1], [0]),
    ("1:1:2", 4, [3], [2], [0, 1]),
    ("2:1:2", 5, [3, 4], [2], [0, 1]),
    ("1:1:1", 6, [4, 5], [2, 3], [0, 1]),
    ("4:2:1", 7, [3, 4, 5, 6], [1, 2], [0]),
    ("2:1:1", 8, [4, 5, 6, 7], [2, 3], [0, 1]),
]


@pytest.mark.parametrize(("ratio", "ranks", "sampling", "inference", "training"), HYBRID)
def test_hybrid_ranks_sample_and_infer_apart(ratio, ranks, sampling, inference, training):
    assert roles_of("hybrid", ranks, ratio) == Roles(tuple(sampling), tuple(inference), tuple(training))


@pytest.mark.parametrize("ranks", range(1, 9))
@pytest.mark.parametrize(
    ("name", "ratio"),
    [("separated", "1:1"), ("separated", "3:1"), ("separated", "2:3"), ("hybrid", "1:1"), ("hybrid", "2:1:1")],
)
def test_a_ratio_fits_its_multiples_and_else_says_which_fit(name, ratio, ranks):
    parts = [int(part) for part in ratio.split(":")]
    if ranks % sum(parts) == 0:
        roles = roles_of(name, ranks, ratio)
        share = ranks // sum(parts)
        sizes = [len(roles.sampling), len(roles.training if name == "separated" else roles.inference)]
        assert sizes == [parts[0] * share, parts[1] * share]
        assert len(roles.training) == (parts[-1] * share if (name, len(parts)) != ("hybrid", 2) else ranks)
    else:
        with pytest.raises(ConfigError, match=f"placement.ratio={ratio} .* {ranks}: ") as refused:
            roles_of(name, ranks, ratio)
        fitting = ", ".join(str(sum(parts) * factor) for factor in (1, 2, 3))
        assert f"a multiple of {sum(parts)} ranks on a node ({fitting}, ...)" in str(refused.value)
        assert "--nproc-per-node" in str(refused.value)


def test_more_inference_ranks_than_samplers_ask_are_refused():
    with pytest.raises(
        ConfigError, match=r"placement: no sampling rank would ask the inference ranks \[2\] \(1 sampling"
    ):
        roles_of("hybrid", 4, "1:2:1")


CUSTOM = {"sampling": (1, 2), "inference": (2,), "training": (0,)}


def test_a_map_written_by_hand_is_taken_in_any_order():
    assert roles_of("custom", 3, **CUSTOM | {"sampling": (2, 1)}) == Roles((1, 2), (2,), (0,))
    assert roles_of("custom", 1, sampling=(0,), inference=(0,), training=(0,)) == roles_of("colocated", 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sampling": (1, 2, 1)}, r"placement.sampling=\[1, 1, 2\] names a rank twice"),
        ({"training": (0, 0)}, r"placement.training=\[0, 0\] names a rank twice"),
        ({"inference": (2, 3)}, r"placement.inference=\[2, 3\]: the local ranks of a node are 0 to 2"),
        ({"training": (-1, 0)}, r"placement.training=\[-1, 0\]: the local ranks of a node are 0 to 2"),
        ({"sampling": (2,)}, r"placement gives local ranks \[1\] nothing to do"),
        ({"inference": (0, 1, 2)}, r"placement: no sampling rank would ask the inference ranks \[0\]"),
        ({"sampling": (2,), "inference": (1, 2)}, r"placement: .* inference ranks \[1\] \(1 sampling ranks for 2"),
    ],
)
def test_a_map_that_cannot_work_is_refused_by_key(change, words):
    with pytest.raises(ConfigError, match=words):
        roles_of("custom", 3, **CUSTOM | change)


# -- PlacementConfig -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ROLES)
def test_each_role_of_a_custom_map_must_be_given_and_only_there(role):
    with pytest.raises(ConfigError, match=f"placement.{role} is empty: give it at least one local rank"):
        roles_of("custom", 3, **CUSTOM | {role: ()})
    for name in ("colocated", "separated", "hybrid"):
        with pytest.raises(ConfigError, match=f"placement.{role} is for placement=custom"):
            PlacementConfig(name=Placement[name], **{role: (0,)})


@pytest.mark.parametrize("ratio", ["", "1", "0:1", "1:0", "-1:2", "1:", "a:b", "1,1", "1.5:1", "1:1:1", "1:1:1:1"])
def test_a_ratio_of_nonsense_is_refused(ratio):
    with pytest.raises(ConfigError, match=f"placement.ratio={ratio}: give 2 numbers above 0, as in 1:1"):
        PlacementConfig(name=Placement.separated, ratio=ratio)
    if ratio != "1:1:1":
        with pytest.raises(ConfigError, match=f"placement.ratio={ratio}: give 2 or 3 numbers above 0, as in 1:1:1"):
            PlacementConfig(name=Placement.hybrid, ratio=ratio)


def test_serial_lanes_need_a_rank_that_does_everything():
    serial = RuntimeConfig(schedule=Schedule.serial)
    Config(runtime=serial, algo=on_policy())
    for placement in (
        PlacementConfig(name=Placement.separated),
        PlacementConfig(name=Placement.hybrid),
        PlacementConfig(name=Placement.custom, **CUSTOM),
    ):
        with pytest.raises(ConfigError, match=f"serial .*needs placement=colocated, not {placement.name.name}"):
            Config(runtime=serial, algo=on_policy(), placement=placement)


def on_policy():
    return AlgoConfig(max_staleness=0)


def test_stages_are_at_least_one_and_at_most_the_environments():
    for stages in (None, 1, 4):
        Config(placement=PlacementConfig(stages=stages), runtime=RuntimeConfig(num_envs=4))
    with pytest.raises(ConfigError, match=r"placement\.stages must be at least 1, or null"):
        PlacementConfig(stages=0)
    with pytest.raises(ConfigError, match=r"placement\.stages=5 are more than runtime.num_envs=4"):
        Config(placement=PlacementConfig(stages=5), runtime=RuntimeConfig(num_envs=4))


def slots(num_learners, num_samplers, *, epochs=1, max_staleness=1, num_slots=None, balance=False):
    """Groups that a sampling rank has slots for."""
    config = Config(
        algo=AlgoConfig(
            group_size=4, groups_per_step=12, update_epochs=epochs, num_steps=12, max_staleness=max_staleness
        ),
        runtime=RuntimeConfig(num_slots=num_slots and 4 * num_slots, balance=balance),
    )
    return config.slots_per_sampler(num_learners, num_samplers) / 4


def test_a_sampling_rank_has_slots_for_all_who_have_turns_at_it():
    assert [slots(1, 1), slots(2, 2), slots(2, 1), slots(1, 3), slots(2, 4)] == [24, 12, 24, 8, 6]
    assert slots(2, 3) == 2 * 12 / 3
    assert slots(3, 2) == 3 * 8 / 2
    assert slots(4, 3) == 4 * 6 / 3
    assert slots(4, 3, max_staleness=0) == 4 * 3 / 3
    assert slots(2, 4, max_staleness=0) == 6 / 2
    assert slots(4, 6, max_staleness=0) == 2 * 3 / 3
    assert slots(6, 4, max_staleness=0) == 3 * 2 / 2, "each of three learners one of its two groups"
    assert slots(2, 2, balance=True) == 18, "a rank may take groups of another"
    assert slots(2, 2, balance=True, epochs=2) == 12, "but not where a batch keeps its slots"


def test_fewer_slots_than_training_ranks_need_to_go_on_are_refused():
    assert slots(2, 2, num_slots=1) == slots(1, 3, num_slots=1) == 1, "a sampling rank of one's own"
    assert slots(2, 1, num_slots=2) == slots(2, 3, num_slots=2) == 2
    for learners, samplers in ((2, 1), (2, 3)):
        with pytest.raises(ConfigError, match=r"runtime.num_slots=4 must be at least 8: 2 training ranks share"):
            slots(learners, samplers, num_slots=1)
    # Of a batch that keeps its slots: all groups of the others, and one's own.
    assert slots(2, 1, epochs=2, num_slots=12 + 6) == 18
    with pytest.raises(ConfigError, match=r"update_epochs=2 .* runtime.num_slots must be at least 72"):
        slots(2, 1, epochs=2, num_slots=17)
    assert slots(1, 2, epochs=2, num_slots=12) == 12
    with pytest.raises(ConfigError, match=r"update_epochs=2 .* runtime.num_slots must be at least 48"):
        slots(1, 2, epochs=2, num_slots=11)


# -- who works with whom -------------------------------------------------------------------------------------------------


@st.composite
def placements(draw):
    """Any map that `place` takes, and the number of ranks."""
    ranks = draw(st.integers(1, 8))
    name = draw(st.sampled_from(list(Placement)))
    if name is Placement.custom:
        sets = {role: tuple(draw(st.sets(st.integers(0, ranks - 1), min_size=1))) for role in ROLES}
        config = PlacementConfig(name=name, **sets)
    else:
        num_parts = draw(st.integers(2, 3)) if name is Placement.hybrid else 2
        parts = [draw(st.integers(1, 4)) for _ in range(num_parts)]
        config = PlacementConfig(name=name, ratio=":".join(map(str, parts)))
        ranks = sum(parts) * draw(st.integers(1, 2))
    try:
        return place(config, ranks), ranks
    except ConfigError:  # what is refused is tested above
        everyone = tuple(range(ranks))
        return Roles(everyone, everyone, everyone), ranks


@settings(max_examples=60, deadline=None)
@given(placements())
def test_every_rank_has_work_and_no_set_is_empty(placed):
    roles, ranks = placed
    assert all(getattr(roles, role) == tuple(sorted(set(getattr(roles, role)))) != () for role in ROLES)
    assert all(roles.of(rank) for rank in range(ranks))
    assert {rank for role in ROLES for rank in getattr(roles, role)} == set(range(ranks))
    assert set(roles.with_weights) == set(roles.training) | set(roles.inference)


@settings(max_examples=60, deadline=None)
@given(placements())
def test_every_sampler_has_exactly_one_inference_rank_and_each_of_these_is_asked_about_equally(placed):
    roles, _ = placed
    asked = {rank: roles.samplers_of(rank) for rank in roles.inference}
    assert sorted(sampler for samplers in asked.values() for sampler in samplers) == list(roles.sampling)
    assert all(asked.values()), "an inference rank without work was to be refused"
    for inferrer, samplers in asked.items():
        assert all(roles.inference_of(sampler) == inferrer for sampler in samplers)
    from_others = [len(set(samplers) - {inferrer}) for inferrer, samplers in asked.items()]
    assert max(from_others) - min(from_others) <= 1


def test_a_rank_that_only_infers_comes_before_those_with_environments_of_their_own():
    roles = roles_of("custom", 3, sampling=(0, 1), inference=(0, 2), training=(0, 1, 2))
    assert [roles.inference_of(sampler) for sampler in roles.sampling] == [0, 2]
    roles = roles_of("custom", 4, sampling=(0, 1, 2), inference=(0, 3), training=(0,))
    assert [roles.inference_of(sampler) for sampler in roles.sampling] == [0, 3, 0]


@settings(max_examples=60, deadline=None)
@given(placements())
def test_every_rank_that_only_infers_hears_of_weights_from_one_training_rank(placed):
    roles, _ = placed
    heard = Counter(follower for learner in roles.training for follower in roles.followers_of(learner))
    assert heard == Counter(rank for rank in roles.inference if rank not in roles.training)
    for learner in roles.training:
        assert all(roles.herald_of(follower) == learner for follower in roles.followers_of(learner))
    loads = [len(roles.followers_of(learner)) for learner in roles.training]
    assert max(loads) - min(loads) <= 1


@settings(max_examples=60, deadline=None)
@given(placements())
def test_every_sampler_reports_evaluations_to_one_training_rank(placed):
    roles, _ = placed
    for sampler in roles.sampling:
        assert roles.home_of(sampler) in roles.training
        assert sampler not in roles.training or roles.home_of(sampler) == sampler


@settings(max_examples=60, deadline=None)
@given(placements(), st.integers(0, 50), st.integers(1, 12))
def test_the_groups_of_all_learners_take_each_sampler_equally_often(placed, first, count):
    roles, _ = placed
    taken = Counter(dict.fromkeys(roles.sampling, 0))
    for learner in roles.training:
        taken.update(roles.sampler_of(learner, number) for number in range(first, first + count))
    assert set(taken) == set(roles.sampling)
    assert max(taken.values()) - min(taken.values()) <= 1


@settings(max_examples=60, deadline=None)
@given(placements(), st.integers(0, 20), st.integers(1, 12))
def test_who_orders_by_turns_where_and_fewest_first_keeps_within_its_share(placed, first, window):
    """What `Config.slots_per_sampler` counts on, in whatever order groups are given back."""
    roles, _ = placed
    for learner in roles.training:
        turns = roles.samplers_in_turn(learner, first)
        assert len(set(turns)) == len(turns)
        assert turns[0] == roles.sampler_of(learner, first)
        assert set(turns) == {sampler for sampler in roles.sampling if learner in roles.learners_of(sampler)}
        assert all(roles.sampler_of(learner, number) in turns for number in range(50))
        assert len(turns) == len(roles.sampling) // math.gcd(len(roles.sampling), len(roles.training))
        ordered = Counter()
        for number in range(first, first + 3 * window):
            if ordered.total() == window:  # always the same one is done first: the one that has most
                ordered[max(ordered, key=ordered.__getitem__) if number % 2 else min(ordered)] -= 1
                ordered = +ordered
            ordered[min(roles.samplers_in_turn(learner, number), key=ordered.__getitem__)] += 1
            assert max(ordered.values()) <= -(-window // len(turns))


@given(st.integers(1, 8), st.integers(0, 100))
def test_colocated_ranks_sample_their_own_groups(ranks, number):
    roles = roles_of("colocated", ranks)
    assert all(roles.sampler_of(rank, number) == rank for rank in range(ranks))
    assert all(roles.inference_of(rank) == roles.home_of(rank) == rank for rank in range(ranks))
    assert all(roles.learners_of(rank) == [rank] for rank in range(ranks))


@settings(max_examples=60, deadline=None)
@given(placements(), st.integers(0, 3))
def test_the_sets_are_the_same_on_every_node_and_no_relation_crosses_nodes(placed, node):
    roles, ranks = placed
    here = roles.on_node(node, ranks)
    first = node * ranks
    for role in ROLES:
        assert getattr(here, role) == tuple(first + rank for rank in getattr(roles, role))
    for sampler in roles.sampling:
        assert here.inference_of(first + sampler) == first + roles.inference_of(sampler)
        assert here.home_of(first + sampler) == first + roles.home_of(sampler)
    for learner in roles.training:
        assert here.followers_of(first + learner) == tuple(first + rank for rank in roles.followers_of(learner))
        assert here.sampler_of(first + learner, 5) == first + roles.sampler_of(learner, 5)


# -- in words ------------------------------------------------------------------------------------------------------------


def describe(roles, ranks, num_nodes=1):
    mib = 2**20
    return describe_placement(
        roles,
        name="hybrid",
        num_nodes=num_nodes,
        local_world_size=ranks,
        weight_bytes=3 * mib,
        gradient_bytes=5 * mib // 2,
    )


def test_a_placement_in_words_on_one_node():
    assert describe(roles_of("hybrid", 3, "1:1:1"), 3) == [
        "placement hybrid: 1 node of 3 ranks",
        "  rank 0: training",
        "  rank 1: inference",
        "  rank 2: sampling, asks 1",
        "  one node: nothing crosses a network",
    ]


def test_a_placement_in_words_on_two_nodes_says_what_crosses():
    assert describe(roles_of("hybrid", 2, "1:1"), 2, num_nodes=2) == [
        "placement hybrid: 2 nodes of 2 ranks",
        "  ranks 0, 2: inference, training",
        "  ranks 1, 3: sampling, training, asks 0",
        "  between nodes, per step: weights 3.0 MiB out of all leaders together, gradients 2.5 MiB in and out of each node; "
        "no observations, no actions",
    ]


def test_uneven_numbers_are_said_to_feed_in_turn():
    lines = describe(roles_of("separated", 5, "3:2"), 5)
    assert "  3 sampling ranks feed 2 training ranks in turn" in lines
    assert not [line for line in describe(roles_of("separated", 6, "2:1"), 6) if "in turn" in line]
