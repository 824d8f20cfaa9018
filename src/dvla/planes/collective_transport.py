"""Transport between ranks that share no memory: what the slots hold travels through process groups of torch.distributed.

Every `Route` of a plan is one process group with one source, and one thread per rank makes all its calls: a header of fixed
size, then the bytes: large blocks from slot to slot, all others packed into one buffer. On a route with several targets
(`Pattern.master_broadcast`) these are broadcasts in which every target takes part; the addressed one keeps the bytes. Idle
sources send an empty header now and then, so that a group's time limit applies to a silent peer and never to a quiet one.
"""

from __future__ import annotations

import logging
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist

from dvla.planes.semaphore import Channel, StopFlag, Stopped
from dvla.planes.transfer_plan import Route
from dvla.planes.transport import Kind, Parcel, TransportError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from torch import Tensor

    from dvla.planes.transfer_plan import TransferPlan

logger = logging.getLogger(__name__)

_NOTHING = 0  # kind of an empty header
_HEAD_WORDS = 11  # kind, target, id, task, version, decision, greedy, generation, stage, slots, bytes; three per slot
_LARGE = 1 << 16  # bytes from which a block travels from slot to slot without being packed
_MAX_UNDER_WAY = 1 << 16  # parcels; slots bound them long before
_CLOSING_S = 5.0
_BEATS = 4  # empty headers per time limit

_REQUEST_FIELDS = frozenset({"images", "state", "ticket", "task"})
_REPLY_FIELDS = frozenset({"actions", "logprobs", "behavior_version"})
_OUTCOME_FIELDS = frozenset({"num_decisions", "success", "executed_steps", "rewards", "behavior_version"})
_ABOUT_EPISODES = (Kind.group, Kind.outcome)


def open_groups(
    plan: TransferPlan, backend: str, timeout_s: float
) -> list[tuple[Route, dist.ProcessGroup, dist.ProcessGroup]]:
    """Make the process groups of a plan: (route, gloo group of its headers, group of its bytes); collective over all ranks.

    Answers run on gloo. NCCL (`backend`) is for ranks whose device no other thread issues NCCL work on; a rank that trains
    with FSDP on NCCL takes gloo here, which also goes straight from host memory to host memory.
    """
    timeout = timedelta(seconds=timeout_s)
    logger.info("%s, over %s", plan.describe(), backend)
    opened = []
    for route, its_backend in [(r, backend) for r in plan.routes()] + [(r, "gloo") for r in plan.back_routes()]:
        ranks = [route.source, *route.targets]
        headers = dist.new_group(ranks, timeout, "gloo")
        payload = headers if its_backend == "gloo" else dist.new_group(ranks, timeout, its_backend)
        opened.append((route, headers, payload))
    return opened


def slot_blocks(
    arrays: Mapping[str, np.ndarray], kind: Kind, slots: Sequence[int], decisions: Sequence[range]
) -> list[np.ndarray]:
    """The memory that travels with a parcel of `kind`: views (n,) uint8 in one fixed order, each contiguous.

    Args:
        arrays: The slot arrays, of `dvla.planes.slots`.
        kind: `group` takes every field, `request` what the policy looks at, `reply` what it answers, `outcome` how the
            episode went.
        slots: Slots of the parcel.
        decisions: Of each slot, which decisions travel.
    """
    blocks = []
    for name, array in arrays.items():
        is_answer = name in _REPLY_FIELDS or name.startswith("record.")
        if (
            kind is Kind.group
            or (kind is Kind.request and name in _REQUEST_FIELDS)
            or (kind is Kind.reply and is_answer)
            or (kind is Kind.outcome and name in _OUTCOME_FIELDS)
        ):
            for slot, span in zip(slots, decisions, strict=True):
                block = array[slot : slot + 1]
                if array.ndim > 1 and name != "initial_state":  # an entry per decision
                    block = block[:, span.start : span.stop]
                if block.size:
                    blocks.append(block.reshape(-1).view(np.uint8))
    return blocks


class CollectiveTransport:
    """See `Transport`: parcels arrive with their bytes in slots of this rank, equal to the bit.

    A sent group's slots are free once its bytes have left. A received request's slot is free once its reply has left.

    Args:
        rank: This rank.
        groups: All routes with their process groups, of `open_groups`; those without this rank are ignored.
        arrays: Slot arrays of this rank, of the same layout as the peers' but for the number of slots.
        landing: Free slots of this rank for what arrives. Enough for all groups that may be open at once, else a group that
            the learner waits for could queue behind others that fill the slots.
        group_size: Most slots of a parcel.
        device: Where the byte buffers lie: the CPU for gloo, the rank's GPU for NCCL.
        stop: The rank's stop flag.
        timeout_s: The time limit of the groups.
    """

    def __init__(
        self,
        rank: int,
        groups: Sequence[tuple[Route, dist.ProcessGroup, dist.ProcessGroup]],
        *,
        arrays: Mapping[str, np.ndarray],
        landing: Channel[int],
        group_size: int,
        device: torch.device,
        stop: StopFlag,
        timeout_s: float,
    ) -> None:
        self._rank, self._arrays, self._landing, self._device = rank, arrays, landing, device
        self._header_words = _HEAD_WORDS + 3 * group_size
        self._timeout_s = timeout_s
        self._inbox: Channel[Parcel | BaseException] = Channel("parcels", _MAX_UNDER_WAY, stop, timeout_s)
        self._outboxes: dict[int, Channel[Parcel]] = {}  # by target; the targets of one route share one
        self._landing_lock = threading.Lock()  # two routes with half of their slots each would wait for ever
        self._has_failed = False
        self._threads: list[threading.Thread] = []
        for route, headers, payload in groups:
            if route.source == rank:
                outbox: Channel[Parcel] = Channel("outbox", _MAX_UNDER_WAY, stop, timeout_s)
                self._outboxes |= dict.fromkeys(route.targets, outbox)
                self._start(_Route(route, headers, payload, rank), outbox)
            elif rank in route.targets:
                self._start(_Route(route, headers, payload, rank), None)

    def _start(self, route: _Route, outbox: Channel[Parcel] | None) -> None:
        """Serve one route on a thread of its own; its error reaches the lane with `receive`."""

        def loop() -> None:
            try:
                if outbox is None:
                    self._take_in(route)
                else:
                    self._send_out(route, outbox)
            except Stopped:
                pass
            except BaseException as error:
                self._has_failed = True
                self._inbox.put(error)

        thread = threading.Thread(target=loop, name=f"dvla-route-{route.ranks.source}", daemon=True)
        thread.start()
        self._threads.append(thread)

    # -- the lanes' side ---------------------------------------------------------------------------------------------

    def fileno(self) -> int:
        """See `Transport`."""
        return self._inbox.semaphore.fileno()

    def send(self, parcel: Parcel) -> None:
        """See `Transport`."""
        self._outboxes[parcel.peer].put(parcel)

    def receive(self) -> Parcel | None:
        """See `Transport`."""
        item = self._inbox.try_get()
        if isinstance(item, BaseException):
            raise item
        return item

    def free(self, group: Parcel) -> None:
        """See `Transport`."""
        for slot in group.slots:
            self._landing.put(slot)

    def close(self) -> None:
        """See `Transport`; waits a few seconds for the peers to close, too, unless one was lost."""
        for target, outbox in self._outboxes.items():
            outbox.put(Parcel(Kind.left, target))
        deadline = time.monotonic() + _CLOSING_S
        for thread in self._threads:
            if not self._has_failed:  # gloo may keep a send that met the death of its peer until the time limit
                thread.join(max(0.0, deadline - time.monotonic()))

    # -- the routes' threads -----------------------------------------------------------------------------------------

    def _send_out(self, route: _Route, outbox: Channel[Parcel]) -> None:
        flying: tuple[Parcel, list[dist.Work]] | None = None  # is on its way while the next one is packed
        while flying is None or flying[0].kind is not Kind.left:
            parcel = self._next_to_send(route, outbox, may_wait=flying is None)
            works = [] if parcel is None else self._post(route, parcel)
            if flying is not None:
                route.finish(flying[1])
                self._has_gone(flying[0])
            flying = None if parcel is None else (parcel, works)
        route.finish(flying[1])

    def _next_to_send(self, route: _Route, outbox: Channel[Parcel], *, may_wait: bool) -> Parcel | None:
        """What to send next, or None; a silence is broken by an empty header."""
        try:
            parcel = outbox.get_within(self._timeout_s / _BEATS if may_wait else 0.0)
        except Stopped:  # the peers would take silence for death
            return Parcel(Kind.left, route.ranks.targets[0])
        if parcel is None and may_wait:
            route.finish(route.send([torch.zeros(self._header_words, dtype=torch.int64)]))
        return parcel

    def _post(self, route: _Route, parcel: Parcel) -> list[dist.Work]:
        """Begin to send a parcel."""
        ends = [int(self._arrays["num_decisions"][slot]) for slot in parcel.slots]
        blocks = slot_blocks(self._arrays, parcel.kind, parcel.slots, _decisions(parcel, ends))
        works = route.send([self._header(parcel, ends, sum(block.size for block in blocks))])
        small, large = _by_size(blocks)
        if small:
            large.append(np.concatenate(small))
        return works + route.send([torch.from_numpy(block).to(self._device) for block in large], is_payload=True)

    def _has_gone(self, parcel: Parcel) -> None:
        if parcel.kind in _ABOUT_EPISODES:
            self._inbox.put(parcel.answer(Kind.freed))
        elif parcel.kind is Kind.reply:
            self.free(parcel)

    def _header(self, parcel: Parcel, ends: list[int], num_bytes: int) -> Tensor:
        header = torch.zeros(self._header_words, dtype=torch.int64)
        ids = [parcel.peer, parcel.id, parcel.task, parcel.version, parcel.decision, parcel.greedy]
        words = [parcel.kind, *ids, parcel.generation, parcel.stage, len(parcel.slots), num_bytes]
        for here, there, end in zip(parcel.slots, parcel.remote or parcel.slots, ends, strict=True):
            words += [here, there, end]
        header[: len(words)] = torch.tensor(words)
        return header

    def _take_in(self, route: _Route) -> None:
        header = torch.zeros(self._header_words, dtype=torch.int64)
        announced = route.receive([header])
        while True:
            route.finish(announced)
            words = header.tolist()
            if words[0] == Kind.left:  # of the source, so that it ends the route for all targets
                self._inbox.put(Parcel(Kind.left, route.ranks.source))
                return
            landed = self._land(route, words) if words[0] != _NOTHING else None
            announced = route.receive([header])  # behind the bytes, before they have come
            if landed is not None:
                landed()

    def _land(self, route: _Route, words: list[int]) -> Callable[[], None]:
        """Begin to receive what a header announces; how to finish that."""
        source = route.ranks.source
        kind, target, number, task, version, decision, greedy, generation, stage, num_slots, num_bytes = words[
            :_HEAD_WORDS
        ]
        table = [words[_HEAD_WORDS + 3 * index :][:3] for index in range(num_slots)]
        theirs, ours, ends = ([row[column] for row in table] for column in range(3))
        is_mine = target == self._rank
        slots = self._places(Kind(kind), ours) if is_mine else [0] * num_slots
        parcel = Parcel(
            Kind(kind),
            source,
            tuple(slots),
            number,
            task,
            version,
            decision,
            bool(greedy),
            generation,
            stage,
            tuple(theirs),
        )
        blocks = slot_blocks(self._arrays, parcel.kind, slots, _decisions(parcel, ends))
        if sum(block.size for block in blocks) != num_bytes:
            raise TransportError(f"rank {source} has another layout of slots than rank {self._rank}")
        if not is_mine:  # what is for others has to be taken, too, and is as large as it would be here
            blocks = [np.empty_like(block) for block in blocks]
        small, large = _by_size(blocks)
        packed = np.empty(sum(block.size for block in small), np.uint8)
        host = [torch.from_numpy(block) for block in [*large, *([packed] if small else [])]]
        there = host if self._device.type == "cpu" else [torch.empty_like(part, device=self._device) for part in host]
        works = route.receive(there, is_payload=True)

        def finish() -> None:
            route.finish(works)
            if there is not host:
                for part, landed in zip(host, there, strict=True):
                    part.copy_(landed)
            begin = 0
            for block in small:
                block[:] = packed[begin : begin + block.size]
                begin += block.size
            if is_mine:
                self._inbox.put(parcel)

        return finish

    def _places(self, kind: Kind, named: list[int]) -> list[int]:
        """Slots of this rank for what arrives: those the sender names for a reply, else free ones."""
        if kind not in (*_ABOUT_EPISODES, Kind.request):
            return named
        with self._landing_lock:
            return [self._landing.get("slots to land in") for _ in named]


def _by_size(blocks: list[np.ndarray]) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The small blocks, which are packed into one, and the large ones."""
    return [block for block in blocks if block.size < _LARGE], [block for block in blocks if block.size >= _LARGE]


def _decisions(parcel: Parcel, ends: list[int]) -> list[range]:
    """Which decisions of each slot travel: all of an episode, or the one a request or reply is about."""
    if parcel.kind in _ABOUT_EPISODES:
        return [range(end) for end in ends]
    return [range(parcel.decision, parcel.decision + 1)] * len(ends)


class _Route:
    """A route with its process groups; used by one thread."""

    def __init__(self, ranks: Route, headers: dist.ProcessGroup, payload: dist.ProcessGroup, rank: int) -> None:
        self.ranks, self._headers, self._payload, self._rank = ranks, headers, payload, rank

    def send(self, tensors: list[Tensor], *, is_payload: bool = False) -> list[dist.Work]:
        """Begin to pass `tensors` to all targets."""
        return self._begin(dist.isend, tensors, self.ranks.targets[0], is_payload)

    def receive(self, tensors: list[Tensor], *, is_payload: bool = False) -> list[dist.Work]:
        """Begin to fill `tensors` with what the source sends."""
        return self._begin(dist.irecv, tensors, self.ranks.source, is_payload)

    def _begin(self, call: Callable, tensors: list[Tensor], peer: int, is_payload: bool) -> list[dist.Work]:
        group = self._payload if is_payload else self._headers
        try:
            if len(self.ranks.targets) == 1:
                return [call(tensor, peer, group=group) for tensor in tensors]
            return [dist.broadcast(tensor, self.ranks.source, group=group, async_op=True) for tensor in tensors]
        except RuntimeError as error:
            raise self._lost(error) from error

    def finish(self, works: list[dist.Work]) -> None:
        """Wait until what was begun is done; raises `TransportError`."""
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise self._lost(error) from error

    def _lost(self, error: RuntimeError) -> TransportError:
        others = sorted({self.ranks.source, *self.ranks.targets} - {self._rank})
        return TransportError(
            f"rank {self._rank} lost its route with ranks {others}: one of them died, or took no part in time ({error})"
        )
