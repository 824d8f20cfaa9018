"""Transports between real ranks: every group once, equal to the bit, bounded by slots; a death is noticed, nothing stays."""

import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks
from transfers import fill_episode, layout, make_arrays, same_episode

from dvla.planes.collective_transport import CollectiveTransport, open_groups
from dvla.planes.semaphore import Channel, StopFlag, Stopped, WaitTimeoutError
from dvla.planes.shared_transport import SharedTransport, connect_node
from dvla.planes.slots import layout_bytes, slot_arrays
from dvla.planes.transfer_plan import Pattern, make_plan
from dvla.planes.transport import Kind, Parcel, TransportError, receive_within

pytestmark = pytest.mark.alone

RATIOS = [(1, 1), (1, 3), (3, 1), (2, 3), (1, 4)]  # the last one broadcasts
GROUP_SIZE, SLOTS, LIMIT_S = 2, 6, 30.0  # slots of each sender, and of each receiver of copies


def connect(world, how, plan, stop):
    """This rank's transport, its slot arrays and the slots it may fill."""
    if how == "shared":
        fields = layout(SLOTS * len(plan.senders))
        pairs = [("groups", link.sender, link.receiver) for link in plan.links()]
        links = connect_node(world.control_pg, pairs, layout_bytes(fields), LIMIT_S)
        os.close(links.descriptor)
        ends = links.first.get("groups", []) + links.second.get("groups", [])
        own = plan.senders.index(world.rank) if world.rank in plan.senders else 0
        free = list(range(SLOTS * own, SLOTS * (own + 1)))
        return SharedTransport(world.rank, ends, stop, LIMIT_S), slot_arrays(links.memory, fields), free
    groups = open_groups(plan, "gloo", LIMIT_S)
    landing = Channel("landing", SLOTS, stop, LIMIT_S)
    for slot in range(SLOTS):
        landing.put(slot)
    arrays = make_arrays(SLOTS)
    transport = CollectiveTransport(
        world.rank, groups, arrays=arrays, landing=landing, group_size=GROUP_SIZE,
        device=torch.device("cpu"), stop=stop, timeout_s=LIMIT_S,
    )  # fmt: skip
    return transport, arrays, list(range(SLOTS))


def episode(group, member):
    """Seed and length of an episode; some are empty."""
    return group * GROUP_SIZE + member, (group + member) % 4


def send_groups(transport, arrays, free, plan, rank, num_groups, stop):
    """Send this rank's groups as fast as slots allow, until all slots are back; orders of the receivers."""
    slots, orders = set(free), []

    def take():
        parcel = receive_within(transport, stop, LIMIT_S, "slots")
        if parcel.kind is Kind.freed:
            free.extend(parcel.slots)
        else:
            assert (parcel.kind, parcel.slots, parcel.task) == (Kind.order, (), parcel.id % 5)
            orders.append(parcel.id)

    mine = [group for group in range(num_groups) if plan.sender_of(group) == rank]
    for group in mine:
        while len(free) < GROUP_SIZE:
            take()
        members = tuple(free.pop() for _ in range(GROUP_SIZE))
        for member, slot in enumerate(members):
            seed, length = episode(group, member)
            fill_episode(arrays, slot, seed=seed, length=length)
        transport.send(
            Parcel(Kind.group, plan.receiver_of(group), members, id=group, task=group % 5, version=group // 3)
        )
    while len(free) < SLOTS or len(orders) < sum(group % 3 == 0 for group in mine):
        take()
    assert set(free) == slots
    assert sorted(orders) == [group for group in mine if group % 3 == 0]
    return orders


def receive_groups(transport, arrays, plan, rank, num_groups, stop):
    """Receive this rank's groups, holding as many as slots allow; (sender, group) in order of arrival."""
    expected, held, seen = make_arrays(1), [], []
    # All landing slots; of shared slots, which are the senders', no more than leaves some to the other receivers.
    limit = SLOTS // GROUP_SIZE
    if isinstance(transport, SharedTransport):
        limit = max(1, limit // len(plan.receivers))
    for _ in range(sum(plan.receiver_of(group) == rank for group in range(num_groups))):
        group = receive_within(transport, stop, LIMIT_S, "a group")
        assert (group.kind, group.task, group.version) == (Kind.group, group.id % 5, group.id // 3)
        held.append(group)
        seen.append((group.peer, group.id))
        if len(held) == limit:
            check_and_free(transport, arrays, held.pop(0), expected)
    for group in held:
        check_and_free(transport, arrays, group, expected)
    return seen


def check_and_free(transport, arrays, group, expected):
    for member, slot in enumerate(group.slots):
        seed, length = episode(group.id, member)
        fill_episode(expected, 0, seed=seed, length=length)
        assert same_episode(expected, 0, arrays, slot), (group, member)
    if group.id % 3 == 0:
        transport.send(Parcel(Kind.order, group.peer, id=group.id, task=group.task, version=group.version))
    transport.free(group)


def pass_groups(world, how, num_groups):
    """All ratios in turn; of each (senders, receivers) what this rank saw."""
    results = []
    for num_senders, num_receivers in RATIOS:
        plan = make_plan(
            range(num_senders), range(num_senders, num_senders + num_receivers), dict.fromkeys(range(5), 0)
        )
        assert (plan.pattern is Pattern.master_broadcast) == ((num_senders, num_receivers) == (1, 4))
        stop = StopFlag()
        transport, arrays, free = connect(world, how, plan, stop)
        seen = []
        if world.rank in plan.senders:
            send_groups(transport, arrays, free, plan, world.rank, num_groups, stop)
        elif world.rank in plan.receivers:
            seen = receive_groups(transport, arrays, plan, world.rank, num_groups, stop)
        dist.barrier(world.control_pg)
        transport.close()
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("dvla-route")]
        results.append(seen)
    return results


@pytest.mark.distributed
@pytest.mark.parametrize("how", ["shared", "gloo"])
def test_every_group_arrives_once_bit_exact_in_the_order_of_its_sender_and_all_slots_come_back(how):
    num_groups = 40
    ranks = run_ranks(pass_groups, 5, how, num_groups)
    for number, (num_senders, num_receivers) in enumerate(RATIOS):
        seen = [rank[number] for rank in ranks]
        assert sorted(group for rank in seen for _, group in rank) == list(range(num_groups))
        for rank, arrived in enumerate(seen):
            for sender in range(num_senders):
                order = [group for peer, group in arrived if peer == sender]
                assert order == [
                    g
                    for g in range(num_groups)
                    if g % num_senders == sender and num_senders + g % num_receivers == rank
                ]


def decide(arrays, slot, decision):
    """What the inference rank of these tests answers: a function of the observation."""
    total = int(arrays["images"][slot, decision].sum()) + int(arrays["ticket"][slot])
    arrays["actions"][slot, decision] = total % 1000
    arrays["logprobs"][slot, decision] = -total % 997
    arrays["record.tokens"][slot, decision] = total % 251
    arrays["behavior_version"][slot, decision] = total


def exchange_decisions(world, how):
    """Rank 0 and 1 sample, rank 2 decides; each waits for the other, stage by stage."""
    plan = make_plan([0, 1], [2], dict.fromkeys(range(3), 0))
    stop = StopFlag()
    transport, arrays, free = connect(world, how, plan, stop)
    if world.rank == 2:
        for _ in range(2 * len(free) * 3):
            request = receive_within(transport, stop, LIMIT_S, "an observation")
            assert request.kind is Kind.request
            decide(arrays, request.slots[0], request.decision)
            transport.send(request.answer(Kind.reply))
    else:
        for slot in free:
            fill_episode(arrays, slot, seed=100 * world.rank + slot, length=3)
        expected = {name: array.copy() for name, array in arrays.items()}
        for decision in range(3):
            for env, slot in enumerate(free):
                decide(expected, slot, decision)
                transport.send(
                    Parcel(Kind.request, 2, (slot,), id=env, decision=decision, generation=env + 3, stage=env % 2)
                )
            for _ in free:
                reply = receive_within(transport, stop, LIMIT_S, "actions")
                assert (reply.kind, reply.decision) == (Kind.reply, decision)
                assert reply.slots == (free[reply.id],)
                assert (reply.generation, reply.stage) == (reply.id + 3, reply.id % 2)
        for name in arrays:
            assert np.array_equal(arrays[name][free], expected[name][free]), name
    dist.barrier(world.control_pg)
    transport.close()
    return True


@pytest.mark.distributed
@pytest.mark.parametrize("how", ["shared", "gloo"])
def test_observations_travel_to_inference_and_actions_back_into_the_same_slot(how):
    assert run_ranks(exchange_decisions, 3, how) == [True] * 3


def lose_a_peer(world, how, victim, folder):
    """Rank `victim` (0 sends, 1 receives) is killed in mid-flow; the other writes down what it noticed, and when."""
    plan = make_plan([0], [1], {0: 0, 1: 0})
    stop = StopFlag()
    transport, arrays, free = connect(world, how, plan, stop)
    if world.rank == 0:
        for slot in free[:GROUP_SIZE]:
            fill_episode(arrays, slot, seed=slot, length=3)
        transport.send(Parcel(Kind.group, 1, tuple(free[:GROUP_SIZE])))
        receive_within(transport, stop, LIMIT_S, "slots")
    else:
        transport.free(receive_within(transport, stop, LIMIT_S, "a group"))
    dist.barrier(world.control_pg)
    if world.rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    with pytest.raises(TransportError) as caught:
        receive_within(transport, stop, LIMIT_S, "the other")
    transport.close()
    Path(folder, "noticed").write_text(f"{time.monotonic() - begin:.3f} {caught.value}")
    os._exit(0)


@pytest.mark.distributed
@pytest.mark.chaos
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("how", ["shared", "gloo"])
def test_the_death_of_a_peer_is_noticed_at_once_and_named(how, victim, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path / "runtime"))
    (tmp_path / "runtime").mkdir()
    with pytest.raises(AssertionError, match="died"):
        run_ranks(lose_a_peer, 2, how, victim, str(tmp_path))
    seconds, text = (tmp_path / "noticed").read_text().split(" ", 1)
    assert float(seconds) < 5.0, "the time limit of waits is 30 s: it must not be what ended this one"
    named = rf"rank {victim} (pid " if how == "shared" else f"ranks [{victim}]: one of them died"
    assert named in text
    assert "died" in text
    assert list((tmp_path / "runtime").rglob("*dvla*")) == []


def stop_one(world, how):
    """Rank 1 stops while rank 0 waits for it."""
    plan = make_plan([0], [1], {0: 0, 1: 0})
    stop = StopFlag()
    transport, _, _ = connect(world, how, plan, stop)
    if world.rank == 1:
        stop.set()
        with pytest.raises(Stopped):
            receive_within(transport, stop, LIMIT_S, "a group")
    else:
        assert receive_within(transport, stop, LIMIT_S, "rank 1") == Parcel(Kind.left, peer=1)
    begin = time.monotonic()
    transport.close()
    assert time.monotonic() - begin < 4.0
    dist.barrier(world.control_pg)
    return True


@pytest.mark.distributed
@pytest.mark.parametrize("how", ["shared", "gloo"])
def test_a_rank_that_stops_takes_its_leave(how):
    assert run_ranks(stop_one, 2, how) == [True, True]


def never_come(world):
    """Rank 1 joins the group but does not fetch its slots."""
    if world.rank == 1:
        dist.broadcast_object_list([None], group_src=0, group=world.control_pg)
        dist.barrier(world.control_pg)
        return ""
    with pytest.raises(TransportError) as caught:
        connect_node(world.control_pg, [("groups", 0, 1)], 4096, timeout_s=0.2)
    dist.barrier(world.control_pg)
    return str(caught.value)


@pytest.mark.distributed
def test_a_rank_that_does_not_come_for_its_slots_is_named():
    assert "ranks [1] did not come" in run_ranks(never_come, 2)[0]


def be_quiet(world):
    """Nothing to send for several time limits of the process groups is no fault."""
    plan = make_plan([0], [1], {0: 0, 1: 0})
    stop = StopFlag()
    transport = CollectiveTransport(
        world.rank, open_groups(plan, "gloo", 1.0), arrays=make_arrays(2), landing=Channel("landing", 2, stop, 1.0),
        group_size=1, device=torch.device("cpu"), stop=stop, timeout_s=1.0,
    )  # fmt: skip
    with pytest.raises(WaitTimeoutError):
        receive_within(transport, stop, 2.5, "nothing")
    dist.barrier(world.control_pg)
    transport.close()
    return True


@pytest.mark.distributed
def test_a_quiet_route_outlasts_the_time_limit_of_its_group():
    assert run_ranks(be_quiet, 2) == [True, True]
