"""Forecasts against times worked out by hand, an independent simulation, and what must hold whatever the costs."""

import dataclasses
import statistics
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dvla.config import (
    AlgoConfig,
    Algorithm,
    Config,
    ConfigError,
    EnvConfig,
    ModelConfig,
    Placement,
    PlacementConfig,
    RuntimeConfig,
    Schedule,
)
from dvla.planning.forecast import forecast
from dvla.planning.node_model import Node
from dvla.planning.profile import Cost, Profile
from dvla.planning.search import placements, search
from dvla.planning.simulated_time import Bell, Kernel, NothingHappensError, Resource, Wait, Work
from dvla.runtime.placement import place

SERIAL = {"schedule": Schedule.serial}
EQUAL = {"chunk": Cost(fixed_s=0.02), "decide": Cost(each_s=0.02), "gradient": Cost(each_s=0.02)}
SEPARATED = {"name": Placement.separated}
HYBRID = {"name": Placement.hybrid, "ratio": "1:1:1"}


def config_of(placement=None, runtime=None, **algo):
    return Config(
        env=EnvConfig(max_episode_steps=32),
        model=ModelConfig(num_action_chunks=8),
        placement=PlacementConfig(**(placement or {})),
        runtime=RuntimeConfig(**{"balance": False, "max_wait_s": 0.0, **(runtime or {})}),
        algo=AlgoConfig(**{"groups_per_step": 4, **algo}),
    )


def told(profile, ranks=1, nodes=1, **config):
    profile = Profile(**{"episode_decisions": (4,), **profile})
    return forecast(config_of(**config), profile, num_nodes=nodes, ranks_per_node=ranks)


# 4 groups of 8 episodes of 4 decisions: 128 decisions a batch. 8 environments in one worker.


def test_serial_is_the_sum():
    plan = told(EQUAL, runtime=SERIAL, max_staleness=0)
    assert plan.step_s == pytest.approx(128 * 0.06)
    assert plan.decisions_per_s == pytest.approx(1 / 0.06)
    assert plan.bubbles == pytest.approx(
        {"simulators": 2 / 3, "sampling": 1, "inference": 2 / 3, "grpo": 2 / 3, "param_dist": 1}
    )
    assert plan.staleness_max == 0


def test_serial_counts_every_part():
    parts = {
        "reset_s": 0.1,  # 32 of one worker
        "handle_s": 0.001,  # 32 first observations, 128 answers
        "agree_s": 0.002,  # 4 groups
        "optimise_s": 0.3,
        "report_s": 0.05,
        "publish_s": 0.01,
        "transfer_s": 0.02,
        "apply_s": 0.03,
    }
    plan = told(EQUAL | parts, runtime=SERIAL, max_staleness=0)
    assert plan.step_s == pytest.approx(128 * 0.06 + 3.2 + 0.16 + 0.008 + 0.3 + 0.05 + 0.06)


def test_workers_are_parallel_also_in_serial():
    plan = told(EQUAL, runtime=SERIAL | {"num_workers": 4}, max_staleness=0)
    assert plan.step_s == pytest.approx(128 * (0.02 / 4 + 0.04))


@pytest.mark.parametrize(
    ("slowest", "costs"),
    [
        ("simulators", {"chunk": Cost(fixed_s=0.05)}),
        ("inference", {"decide": Cost(each_s=0.05)}),
        ("grpo", {"gradient": Cost(each_s=0.05)}),
    ],
)
def test_overlapped_is_the_slowest_lane(slowest, costs):
    cheap = {"chunk": Cost(fixed_s=0.01), "decide": Cost(each_s=0.01), "gradient": Cost(each_s=0.01)}
    plan = told(cheap | costs, max_staleness=1)
    assert plan.step_s == pytest.approx(128 * 0.05, rel=0.05)
    assert plan.bubbles[slowest] < 0.05
    assert all(bubble > 0.7 for lane, bubble in plan.bubbles.items() if lane != slowest)


def test_on_policy_does_not_overlap_batches():
    """While a batch is trained on there is nothing to sample but what is left of it."""
    plan = told({"chunk": Cost(fixed_s=0.02), "gradient": Cost(fixed_s=0.0), "optimise_s": 1.0}, max_staleness=0)
    assert plan.step_s == pytest.approx(128 * 0.02 + 1.0)
    ahead = told({"chunk": Cost(fixed_s=0.02), "gradient": Cost(fixed_s=0.0), "optimise_s": 1.0}, max_staleness=1)
    assert ahead.step_s == pytest.approx(128 * 0.02)


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 3])
def test_staleness_is_bounded(max_staleness):
    lengths = {"episode_decisions": (1, 2, 4)}
    costs = {"chunk": Cost(fixed_s=0.001), "gradient": Cost(each_s=0.05)}  # a slow learner: sampling runs ahead
    plan = told(costs | lengths, max_staleness=max_staleness)
    assert plan.staleness_max <= max_staleness
    assert plan.staleness_mean == pytest.approx(max_staleness, abs=0.3)


def test_slots_bound_what_is_in_flight():
    """One group at a time in flight: simulators wait for the learner to free its slots."""
    costs = {"chunk": Cost(fixed_s=0.02), "gradient": Cost(each_s=0.02)}
    plan = told(costs, max_staleness=3, runtime={"num_slots": 8})
    assert plan.step_s == pytest.approx(128 * 0.04, rel=0.02)


def test_uneven_episodes_leave_environments_idle_at_the_end():
    """On-policy: of 8 environments and as many episodes, all but the longest wait."""
    costs = {"chunk": Cost(fixed_s=0.1), "episode_decisions": (1, 2, 3, 4)}
    plan = told(costs, max_staleness=0, groups_per_step=1, runtime={"num_workers": 8})
    node = Node(config_of(), Profile(episode_decisions=(1, 2, 3, 4)), place(PlacementConfig(), 1), 1)
    longest = [max(node.lengths(group)) for group in range(3, 11)]
    assert plan.step_s == pytest.approx(0.1 * statistics.fmean(longest), rel=0.1)


@pytest.mark.parametrize(
    ("num_workers", "stages", "seconds"),
    [(2, 1, 0.32), (2, 2, 0.16), (8, 1, 0.32), (8, 2, 0.24), (8, 4, 0.2)],
)
def test_stages(num_workers, stages, seconds):
    """A round of 8 environments, of whose chunks each worker does its share in 0.16 s, and the policy all in 0.16 s."""
    chunk = Cost(fixed_s=0.16 * num_workers / 8)
    runtime = {"num_workers": num_workers}
    plan = told(
        {"chunk": chunk, "decide": Cost(each_s=0.02), "episode_decisions": (100,)},
        ranks=3,
        placement=HYBRID | {"stages": stages},
        runtime=runtime,
        groups_per_step=1,
        max_staleness=0,
    )
    assert 8 / plan.decisions_per_s == pytest.approx(seconds, rel=0.02)


@pytest.mark.parametrize("stages", [1, 2])
def test_uneven_stages_as_another_simulation_has_them(stages, monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "perf")
    import bench_placements

    theory = bench_placements.simulated_round(2, stages, bench_placements.UNEVEN, 400)
    plan = told(
        {"chunk": Cost(fixed_s=0.04), "decide": Cost(each_s=0.02), "episode_decisions": tuple(range(5, 21))},
        ranks=3,
        placement=HYBRID | {"stages": stages},
        runtime={"num_workers": 2},
        groups_per_step=8,
    )
    assert 8 / plan.decisions_per_s == pytest.approx(theory, rel=0.02)


def test_ranks_share_the_work():
    one = told(EQUAL, runtime={"num_workers": 4})
    two = told(EQUAL, runtime={"num_workers": 4}, ranks=2)
    assert two.step_s == pytest.approx(one.step_s / 2, rel=0.05)


def test_separated_ratio():
    costs = {"chunk": Cost(fixed_s=0.04), "gradient": Cost(each_s=0.01)}
    even = told(costs, ranks=4, placement=SEPARATED, groups_per_step=8)
    three = told(costs, ranks=4, placement=SEPARATED | {"ratio": "3:1"}, groups_per_step=8)
    assert even.step_s == pytest.approx(256 * 0.04 / 2, rel=0.02)
    assert three.step_s == pytest.approx(256 * 0.04 / 3, rel=0.1)


def test_accelerators_are_shared():
    """Co-located on an accelerator, lanes that overlap slow each other; apart they do not."""
    costs = {"decide": Cost(each_s=0.02), "gradient": Cost(each_s=0.02), "has_accelerators": True}
    assert told(costs).step_s == pytest.approx(128 * 0.04, rel=0.01)
    assert told(costs, ranks=2, placement=SEPARATED).step_s == pytest.approx(128 * 0.02, rel=0.02)


def test_cores_are_shared():
    costs = {"chunk": Cost(fixed_s=0.02)}
    runtime = {"num_workers": 4}
    assert told(costs, runtime=runtime).step_s == pytest.approx(128 * 0.005)
    assert told(costs | {"cores": 2}, runtime=runtime).step_s == pytest.approx(128 * 0.01, rel=0.05)


def test_batch_simulator_runs_when_all_have_their_actions():
    costs = {"chunk": Cost(fixed_s=0.1, each_s=0.01), "decide": Cost(each_s=0.01), "is_batch_simulator": True}
    plan = told(costs)
    assert plan.step_s == pytest.approx(128 / 8 * (0.18 + 0.08), rel=0.01)
    assert told(costs, runtime=SERIAL, max_staleness=0).step_s == pytest.approx(plan.step_s)


def test_dropped_groups_are_sampled_too():
    costs = {"chunk": Cost(fixed_s=0.02), "dropped_share": 0.5}
    plan = told(costs, groups_per_step=16, max_dropped_per_step=1000)
    assert plan.step_s == pytest.approx(2 * 512 * 0.02, rel=0.15)


def test_update_epochs_train_again():
    costs = {"gradient": Cost(each_s=0.01), "optimise_s": 0.1}
    assert told(costs, update_epochs=2, num_steps=100).step_s == pytest.approx(2 * (128 * 0.01 + 0.1))


def test_nodes_exchange_weights_and_gradients():
    costs = {"gradient": Cost(each_s=0.01), "trained_parameters": 10**9, "weight_bytes": 2 * 10**9}
    link = {"network_gb_per_s": 1.0}
    plan = told(costs | link, nodes=2, groups_per_step=4)
    assert plan.footprint.gradient_bytes_per_node == 4 * 10**9
    assert plan.footprint.weight_bytes_per_node == 10**9
    assert plan.step_s == pytest.approx(64 * 0.01 + 4.0)
    assert told(costs, nodes=2, groups_per_step=4).step_s == pytest.approx(64 * 0.01)


COSTS = st.floats(0.001, 0.1)


@settings(max_examples=10, deadline=None)
@given(st.fixed_dictionaries({"chunk": COSTS, "decide": COSTS, "gradient": COSTS, "optimise_s": COSTS}), st.data())
def test_bounds_and_order(costs, data):
    """Never faster than the slowest lane, never slower than serial; dearer work never helps (but for a little: anomalies of
    the order in which requests are served exist)."""

    def plan_of(costs, **config):
        profile = {
            "chunk": Cost(fixed_s=costs["chunk"]),
            "decide": Cost(each_s=costs["decide"]),
            "gradient": Cost(each_s=costs["gradient"]),
            "optimise_s": costs["optimise_s"],
        }
        return told(profile, **config)

    overlapped = plan_of(costs, max_staleness=1)
    lanes = [128 * costs["chunk"], 128 * costs["decide"], 128 * costs["gradient"] + costs["optimise_s"]]
    assert overlapped.step_s >= max(lanes) * (1 - 1e-6)
    assert overlapped.step_s <= plan_of(costs, max_staleness=0, runtime=SERIAL).step_s * (1 + 1e-6)
    assert all(0 <= bubble <= 1 for bubble in overlapped.bubbles.values())
    key, factor = data.draw(st.sampled_from(sorted(costs))), data.draw(st.floats(1.0, 3.0))
    dearer = plan_of(costs | {key: factor * costs[key]}, max_staleness=1)
    assert dearer.step_s >= overlapped.step_s * 0.95


def test_what_differs_from_call_to_call_costs_who_waits_for_the_slowest():
    """A chunk takes 0.1 or 0.3 s: of 8 workers, one almost always takes 0.3."""
    costs = {"chunk": Cost(fixed_s=0.2, factors=(0.5, 1.5))}
    runtime = SERIAL | {"num_workers": 8}
    assert told(costs, runtime=runtime, max_staleness=0).step_s == pytest.approx(128 / 8 * 0.3, rel=0.03)
    assert told(costs, max_staleness=1).step_s == pytest.approx(128 * 0.2, rel=0.03)


def test_forecasts_are_reproducible():
    assert told(EQUAL) == told(EQUAL)


# -- memory, search, errors


def test_memory():
    costs = EQUAL | {"trained_parameters": 1000, "weight_bytes": 2000, "frozen_bytes": 30, "slot_bytes": 7}
    plan = told(costs | {"has_accelerators": True}, ranks=4, placement=SEPARATED).footprint
    assert plan.learner_bytes == 16 * 1000 // 2 + 30
    assert plan.replica_bytes == 2000 + 30
    assert plan.model_bytes == plan.learner_bytes
    assert plan.host_buffer_bytes == 2 * 2000
    assert plan.environment_bytes == 7 * config_of(placement=SEPARATED).slots_per_sampler(2, 2)
    both = told(costs | {"has_accelerators": True}, ranks=4).footprint
    assert both.model_bytes == 16 * 1000 // 4 + 30 + 2000 + 30


def test_what_does_not_fit_is_refused():
    costs = EQUAL | {"trained_parameters": 10**10, "has_accelerators": True, "accelerator_gib": 80.0}
    with pytest.raises(ConfigError, match="accelerator_gib"):
        told(costs)
    assert told(costs, ranks=4).footprint.model_bytes < 80 * 2**30


def test_all_placements_of_a_node():
    names = [(placement.name.name, placement.ratio) for placement in placements(4)]
    assert set(names) == {
        ("colocated", "1:1"),
        *(("separated", ratio) for ratio in ("1:1", "1:3", "3:1")),
        *(("hybrid", ratio) for ratio in ("1:1", "3:1", "1:1:2", "2:1:1")),
    }
    assert len(placements(1)) == 1


def test_search():
    """Simulators that only more environments keep busy, on cores of their own: more of them, and co-located."""
    profile = Profile(
        chunk=Cost(fixed_s=0.05), decide=Cost(fixed_s=0.02), gradient=Cost(each_s=0.002), episode_decisions=(4,)
    )
    begin = config_of(SEPARATED, runtime={"num_envs": 4, "num_workers": 4}, groups_per_step=4, group_size=4)
    found = search(begin, profile, num_nodes=1, ranks_per_node=2)
    assert found == sorted(found, key=lambda option: -option.forecast.env_steps_per_s)
    assert {option.config.placement.name.name for option in found} == {"colocated", "separated", "hybrid"}
    best = found[0]
    assert best.config.placement.name is Placement.colocated
    assert best.config.runtime.num_envs > 4
    assert (
        best.name == f"colocated, {best.config.runtime.num_envs} envs a rank, {best.config.algo.groups_per_step} groups"
    )
    first = forecast(begin, profile, num_nodes=1, ranks_per_node=2)
    assert best.forecast.env_steps_per_s > 2 * first.env_steps_per_s


@pytest.mark.parametrize("balance", [False, True])
@pytest.mark.parametrize("ranks", [2, 4])
def test_no_placement_comes_to_a_standstill(ranks, balance):
    """Also where slots are scarce and episodes differ."""
    costs = EQUAL | {"episode_decisions": (1, 3), "dropped_share": 0.3}
    for placement in placements(ranks):
        for stages in (None, 2):
            plan = told(
                costs,
                ranks=ranks,
                placement={"name": placement.name, "ratio": placement.ratio, "stages": stages},
                runtime={"balance": balance, "num_envs": 4},
                groups_per_step=12,
                group_size=2,
                max_dropped_per_step=4,
            )
            assert plan.staleness_max <= 1


def test_search_without_any_setting_that_can_work():
    costs = EQUAL | {"trained_parameters": 10**12, "has_accelerators": True, "accelerator_gib": 80.0}
    with pytest.raises(ConfigError, match="no placement"):
        search(config_of(), Profile(**costs), num_nodes=1, ranks_per_node=2)


@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("profile.reset_s", {"reset_s": -1.0}),
        ("profile.decide.each_s", {"decide": Cost(each_s=float("nan"))}),
        ("profile.episode_decisions", {"episode_decisions": ()}),
        ("profile.dropped_share", {"dropped_share": 1.0}),
        ("profile.cores", {"cores": 0}),
    ],
)
def test_profiles_that_cannot_be_are_refused(key, values):
    with pytest.raises(ConfigError, match=key):
        Profile(**values)


def test_what_is_not_modelled_is_refused():
    with pytest.raises(ConfigError, match=r"algo\.name"):
        told(EQUAL, name=Algorithm.ppo, filter_zero_signal=False)
    with pytest.raises(ConfigError, match="all costs are 0"):
        told({})
    with pytest.raises(ConfigError, match=r"algo\.groups_per_step"):
        told(EQUAL, ranks=3)


# -- simulated time


def played(resources, *processes):
    kernel, ends = Kernel(resources), {}

    def noted(name, process):
        yield from process
        ends[name] = kernel.now

    for name, process in enumerate(processes):
        kernel.start(noted(name, process(kernel)))
    kernel.run(lambda: len(ends) == len(processes))
    return ends


def test_a_resource_is_shared_evenly():
    shared = Resource(1.0)

    def work(seconds, after=0.0):
        def process(kernel):
            if after:
                yield Wait(Bell(), after)
            yield Work(shared, seconds)

        return process

    assert played([shared], work(1.0), work(1.0)) == pytest.approx({0: 2.0, 1: 2.0})
    assert played([shared], work(1.0), work(3.0)) == pytest.approx({0: 2.0, 1: 4.0})
    shared = Resource(2.0)
    assert played([shared], work(1.0), work(3.0), work(1.0, after=3.0)) == pytest.approx({0: 1.0, 1: 3.0, 2: 4.0})


def test_bells_wake_whoever_waits_now():
    bell = Bell()

    def ringer(kernel):
        yield Wait(Bell(), 1.0)
        kernel.ring(bell)
        yield Wait(Bell(), 5.0)

    def patient(kernel):
        yield Wait(bell, 3.0)  # rung at 1; the time-out at 3 is void
        yield Wait(bell, 3.0)

    assert played([Resource()], ringer, patient) == pytest.approx({0: 6.0, 1: 4.0})


def test_waiting_for_nothing_is_an_error():
    def process(kernel):
        yield Wait(Bell())

    with pytest.raises(NothingHappensError):
        played([Resource()], process)


def test_profiles_are_plain():
    assert dataclasses.asdict(Profile())["chunk"] == {"fixed_s": 0.0, "each_s": 0.0, "factors": (1.0,)}
