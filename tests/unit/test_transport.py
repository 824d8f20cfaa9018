"""Plans of transfers, parcels between threads and over sockets, and what of a slot travels."""

import os
import socket
import threading
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transfers import fill_episode, make_arrays, same_episode

from dvla.planes.collective_transport import slot_blocks
from dvla.planes.semaphore import StopFlag, Stopped, WaitTimeoutError, wait_any
from dvla.planes.shared_transport import Link, SharedTransport, local_links
from dvla.planes.transfer_plan import BROADCAST_RATIO, Pattern, make_plan
from dvla.planes.transport import Kind, Parcel, TransportError, receive_within

GROUP = Parcel(Kind.group, peer=1, slots=(4, 2, 9), id=7, task=3, version=5)


@st.composite
def plans(draw):
    num_senders, num_receivers = draw(st.integers(1, 12)), draw(st.integers(1, 12))
    ranks = draw(st.permutations(range(num_senders + num_receivers)))
    per_node = draw(st.integers(1, 24))
    return make_plan(ranks[:num_senders], ranks[num_senders:], {rank: rank // per_node for rank in ranks})


@given(plans(), st.integers(0, 10_000), st.integers(0, 300))
def test_every_group_has_one_sender_and_one_receiver_and_both_are_balanced(plan, first, count):
    groups = range(first, first + count)
    carried = Counter(
        (group, link.sender, link.receiver)
        for link in plan.links()
        for group in groups
        if group >= link.first_group and (group - link.first_group) % link.stride == 0
    )
    assert carried == Counter((group, plan.sender_of(group), plan.receiver_of(group)) for group in groups)
    for ranks, of in ((plan.senders, plan.sender_of), (plan.receivers, plan.receiver_of)):
        counts = Counter(map(of, groups))
        assert set(counts) <= set(ranks)
        assert max(counts[rank] for rank in ranks) - min(counts[rank] for rank in ranks) <= 1


@given(plans())
def test_routes_carry_each_link_once_in_each_direction(plan):
    pairs = Counter((link.sender, link.receiver) for link in plan.links())
    assert set(pairs.values()) == {1}
    assert Counter((r.source, target) for r in plan.routes() for target in r.targets) == pairs
    assert Counter((target, r.source) for r in plan.back_routes() for target in r.targets) == pairs


@given(plans(), st.integers(0, 200))
def test_ranks_of_a_route_make_the_same_number_of_calls(plan, num_groups):
    route_of = {(route.source, target): route for route in plan.routes() for target in route.targets}
    calls = Counter()
    for group in range(num_groups):
        route = route_of[plan.sender_of(group), plan.receiver_of(group)]
        calls.update((route, rank) for rank in (route.source, *route.targets))
    for route in plan.routes():
        assert len({calls[route, rank] for rank in (route.source, *route.targets)}) == 1
    if plan.pattern is Pattern.master_broadcast:  # a receiver obeys one master
        assert Counter(target for route in plan.routes() for target in route.targets) == Counter(plan.receivers)


@pytest.mark.parametrize(("num_senders", "num_receivers", "ranks_per_node", "pattern"), [
    (1, 1, 8, Pattern.point_to_point),
    (3, 1, 8, Pattern.point_to_point),
    (1, BROADCAST_RATIO - 1, 8, Pattern.point_to_point),
    (1, BROADCAST_RATIO, 8, Pattern.master_broadcast),
    (2, 2 * BROADCAST_RATIO, 16, Pattern.master_broadcast),
    (2, 2 * BROADCAST_RATIO + 1, 16, Pattern.point_to_point),  # blocks would differ
    (1, 7, 4, Pattern.point_to_point),  # the block would span nodes
])  # fmt: skip
def test_the_ratio_of_the_sets_chooses_the_pattern(num_senders, num_receivers, ranks_per_node, pattern):
    ranks = range(num_senders + num_receivers)
    nodes = {rank: rank // ranks_per_node for rank in ranks}
    plan = make_plan(ranks[:num_senders], ranks[num_senders:], nodes)
    assert plan.pattern is pattern
    assert f"{num_senders}:{num_receivers}, {pattern.value}" in plan.describe()


@pytest.mark.parametrize("sets", [([], [1]), ([0], []), ([0, 0], [1])])
def test_a_set_without_ranks_or_with_one_twice_is_refused(sets):
    with pytest.raises(ValueError, match="ranks must be at least one"):
        make_plan(*sets, {0: 0, 1: 0})


def socket_ends(stop, timeout_s=10.0):
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return [
        SharedTransport(rank, [Link(1 - rank, 4711, end)], stop, timeout_s)
        for rank, end in zip((0, 1), ends, strict=True)
    ]


def ends_in_one_rank(stop, timeout_s=10.0):
    return [SharedTransport(1, [link], stop, timeout_s) for link in local_links(1, stop)]


@pytest.fixture(params=[socket_ends, ends_in_one_rank])
def ends(request):
    stop = StopFlag()
    return *request.param(stop), stop


def test_parcels_arrive_once_in_order_and_make_the_end_readable(ends):
    one, other, stop = ends
    assert other.receive() is None
    assert not wait_any([other], 0)
    sent = [
        GROUP,
        Parcel(Kind.request, 1, (6,), id=2, version=2**40, decision=11, greedy=True, generation=3, stage=1),
        Parcel(Kind.group, 1, (), id=8),
        Parcel(Kind.published, 1, id=1, task=2**60 - 1, version=9),
    ]
    for parcel in sent:
        one.send(parcel)
    received = [receive_within(other, stop, 10, "parcels") for _ in sent]
    assert [replace(parcel, peer=1, remote=()) for parcel in received] == sent
    assert not wait_any([other], 0)


def test_freeing_a_group_gives_its_slots_back_to_the_sender(ends):
    one, other, stop = ends
    one.send(GROUP)
    other.free(other.receive())
    back = receive_within(one, stop, 10, "slots")
    assert (back.kind, back.slots, back.id) == (Kind.freed, GROUP.slots, GROUP.id)


def test_a_wait_ends_with_a_stop_or_says_who_waited_for_what(ends):
    one, _, stop = ends
    with pytest.raises(WaitTimeoutError, match="MainThread waited 0 s for a group"):
        receive_within(one, stop, 0.0, "a group")
    ended = []

    def wait():
        with pytest.raises(Stopped):
            receive_within(one, stop, 3600, "a group")
        ended.append(True)

    thread = threading.Thread(target=wait)
    thread.start()
    stop.set()
    thread.join(10)
    assert ended


def test_a_peer_that_closes_is_heard_after_all_it_sent(ends):
    one, other, stop = ends
    one.send(GROUP)
    one.close()
    assert [receive_within(other, stop, 10, "it").kind for _ in range(2)] == [Kind.group, Kind.left]
    other.send(replace(GROUP, peer=other.peers[0]))  # without effect
    assert other.receive() is None


def test_a_peer_that_closes_with_parcels_unread_is_heard_as_well(ends):
    """The kernel reports such a socket as reset before it hands out what lies in it."""
    one, other, stop = ends
    other.send(GROUP if other.peers == [1] else replace(GROUP, peer=0))
    one.send(GROUP)
    one.close()
    assert [receive_within(other, stop, 10, "it").kind for _ in range(2)] == [Kind.group, Kind.left]
    assert other.receive() is None


def test_a_link_that_breaks_names_the_peer_once():
    stop = StopFlag()
    mine, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    transport = SharedTransport(0, [Link(3, 4711, mine)], stop, 10)
    transport.send(Parcel(Kind.group, 3, (1,)))  # dies unread
    theirs.close()
    with pytest.raises(TransportError, match=r"rank 3 \(pid 4711\) died: its link to rank 0 broke"):
        receive_within(transport, stop, 10, "a group")
    assert transport.receive() is None


def test_a_peer_that_does_not_read_is_waited_for_in_bounds():
    one, _other = socket_ends(StopFlag(), timeout_s=0.0)

    def send_for_ever():
        while True:
            one.send(GROUP)

    with pytest.raises(WaitTimeoutError, match=r"rank 0 waited 0 s for rank 1 \(pid 4711\) to read"):
        send_for_ever()


def test_closing_returns_every_descriptor():
    stop = StopFlag()
    before = os.listdir("/proc/self/fd")
    for end in socket_ends(stop) + ends_in_one_rank(stop):
        end.close()
    del end
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("has_cameras", [True, False])
def test_a_group_travels_whole_and_no_further_than_its_episodes(has_cameras):
    here, there = make_arrays(3, has_cameras=has_cameras), make_arrays(5, has_cameras=has_cameras)
    lengths = [0, 3, 1]
    for slot, length in enumerate(lengths):
        fill_episode(here, slot, seed=slot, length=length)
    spans = [range(length) for length in lengths]
    untouched = {name: array.copy() for name, array in there.items()}
    pairs = zip(
        slot_blocks(here, Kind.group, (0, 1, 2), spans), slot_blocks(there, Kind.group, (4, 0, 2), spans), strict=True
    )
    for source, target in pairs:
        target[:] = source
    for slot, (landed, length) in enumerate(zip((4, 0, 2), lengths, strict=True)):
        assert same_episode(here, slot, there, landed)
        assert (there["state"][landed, length:] == untouched["state"][landed, length:]).all()
    for name, array in there.items():
        assert np.array_equal(array[[1, 3]], untouched[name][[1, 3]]), name


def test_a_request_and_its_reply_carry_one_decision():
    arrays = make_arrays(2)
    frame = arrays["images"][0, 0].nbytes + arrays["state"][0, 0].nbytes + 8 + 8
    answer = sum(arrays[name][0, 0].nbytes for name in ("actions", "logprobs", "behavior_version", "record.tokens"))
    assert sum(b.size for b in slot_blocks(arrays, Kind.request, (1,), [range(2, 3)])) == frame
    assert sum(b.size for b in slot_blocks(arrays, Kind.reply, (1,), [range(2, 3)])) == answer
    assert slot_blocks(arrays, Kind.order, (1,), [range(2, 3)]) == []


def test_an_outcome_carries_what_is_counted_and_no_picture():
    arrays = make_arrays(2)
    per_decision = ("executed_steps", "rewards", "behavior_version")
    size = sum(arrays[name][0, :2].nbytes for name in per_decision)
    size += sum(arrays[name][0].nbytes for name in ("num_decisions", "success"))
    assert sum(block.size for block in slot_blocks(arrays, Kind.outcome, (1,), [range(2)])) == size


def test_two_ends_that_send_more_than_sockets_hold_do_not_wait_for_each_other_for_ever():
    stop, count = StopFlag(), 3000
    ends = socket_ends(stop)
    seen = {}

    def work(end, peer):
        first = end.receive()  # from here on this thread is the one that receives
        seen[peer] = [] if first is None else [first.id]
        for number in range(count):
            end.send(Parcel(Kind.request, peer, (number,), id=number))
        while len(seen[peer]) < count:
            if (parcel := end.receive()) is not None:
                seen[peer].append(parcel.id)

    threads = [threading.Thread(target=work, args=(end, peer)) for end, peer in zip(ends, (1, 0), strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert seen == {1: list(range(count)), 0: list(range(count))}
