"""Transport within a node: one slot memory that all its ranks map, and a Unix socket per pair that carries ids only.

The ranks meet once. The first of them makes the memory and a socket pair for every link, and hands each rank its ends
(SCM_RIGHTS). Afterwards nothing has a name, so nothing outlives the ranks, however they end. A rank's link to itself is a
pair of channels.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
import sys
import tempfile
import threading
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from dvla.planes.semaphore import Channel, StopFlag, Stopped, WaitTimeoutError
from dvla.planes.slots import create_memory, map_memory
from dvla.planes.transport import Kind, Parcel, TransportError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import numpy as np

_MAX_PACKET = 1 << 16
_MAX_DESCRIPTORS = 253  # the kernel's limit for one message
_HEAD = struct.Struct("<B?xxiiiqqq")  # kind, greedy, decision, generation, stage, id, task, version; then the slots


Pair = tuple[str, int, int]
"""What a link is for, and the two global ranks that it joins."""


@dataclass(frozen=True, slots=True)
class Link:
    """This rank's end of the socket to `peer`."""

    peer: int
    pid: int
    socket: socket.socket

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self.socket.fileno()


class LocalLink:
    """One end of a link of a rank to itself; only ids pass, and slots bound how many."""

    def __init__(self, peer: int, outbox: Channel[Parcel], inbox: Channel[Parcel]) -> None:
        self.peer, self._outbox, self._inbox = peer, outbox, inbox

    def fileno(self) -> int:
        """Readable while there is a parcel."""
        return self._inbox.semaphore.fileno()

    def send(self, parcel: Parcel) -> None:
        """Pass `parcel` to the other end."""
        self._outbox.put(replace(parcel, remote=parcel.slots))

    def receive(self) -> Parcel | None:
        """The next parcel, or None."""
        return self._inbox.try_get()


def local_links(rank: int, stop: StopFlag) -> tuple[LocalLink, LocalLink]:
    """Both ends of a link of `rank` to itself."""
    there: Channel[Parcel] = Channel("parcels", sys.maxsize, stop, 0.0)
    back: Channel[Parcel] = Channel("parcels", sys.maxsize, stop, 0.0)
    return LocalLink(rank, there, back), LocalLink(rank, back, there)


@dataclass(frozen=True, slots=True)
class NodeLinks:
    """What a rank shares with the others of its node."""

    descriptor: int
    """Of the memory; whoever gets this object closes it."""
    memory: np.ndarray
    """(num_bytes,) uint8, all zero at first."""
    first: dict[str, list[Link]]
    """By what they are for: ends of the pairs in which this rank is named first ..."""
    second: dict[str, list[Link]]
    """... and second."""


def connect_node(group: dist.ProcessGroup, pairs: Sequence[Pair], num_bytes: int, timeout_s: float) -> NodeLinks:
    """Give all ranks of a node one memory, and link the pairs of them; collective over `group`.

    Args:
        group: A gloo group of the ranks of the node.
        pairs: What to link, the same on all; a rank and itself is left out (`local_links`).
        num_bytes: Size of the memory.
        timeout_s: How long to wait for the other ranks.

    Raises:
        MemoryError: The machine has too little memory.
        TransportError: A rank did not come.
    """
    apart = [pair for pair in pairs if pair[1] != pair[2]]
    if dist.get_world_size(group) == 1:
        descriptor = create_memory("dvla-slots", num_bytes)
        return NodeLinks(descriptor, map_memory(descriptor, num_bytes), {}, {})
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as meeting:
        meeting.settimeout(timeout_s)
        where: list[Any] = [None]
        if dist.get_rank(group) == 0:
            handle = _listen_unnamed(meeting, dist.get_world_size(group))
            try:
                # Only the same user may look into /proc/<pid>/fd.
                where = [(os.getpid(), handle)]
                try:
                    descriptor = create_memory("dvla-slots", num_bytes)
                except (MemoryError, OSError) as error:
                    where = [str(error)]
                dist.broadcast_object_list(where, group_src=0, group=group)
                if isinstance(where[0], str):
                    raise MemoryError(where[0])
                return _serve_node(meeting, group, apart, descriptor, num_bytes)
            finally:
                os.close(handle)
        dist.broadcast_object_list(where, group_src=0, group=group)
        if isinstance(where[0], str):
            raise MemoryError(where[0])
        try:
            meeting.connect("/proc/{}/fd/{}".format(*where[0]))
            meeting.send(struct.pack("<ii", dist.get_rank(), os.getpid()))
            packet, ends, _, _ = socket.recv_fds(meeting, _MAX_PACKET, _MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise TransportError(f"rank {dist.get_rank()} cannot reach the first rank of its node: {error}") from error
    if not packet:
        raise TransportError(f"the first rank of rank {dist.get_rank()}'s node left before it handed out the slots")
    sockets = [socket.socket(fileno=end) for end in ends[1:]]
    return _node_links(ends[0], num_bytes, zip(json.loads(packet), sockets, strict=True))


def _node_links(descriptor: int, num_bytes: int, ends: Iterable[tuple[Sequence[Any], socket.socket]]) -> NodeLinks:
    """Sort the ends of one rank, each with (purpose, whether named first, peer, pid of the peer)."""
    sides: tuple[dict[str, list[Link]], dict[str, list[Link]]] = ({}, {})
    for (purpose, is_first, peer, pid), end in ends:
        sides[0 if is_first else 1].setdefault(purpose, []).append(Link(peer, pid, end))
    return NodeLinks(descriptor, map_memory(descriptor, num_bytes), *sides)


def _listen_unnamed(meeting: socket.socket, backlog: int) -> int:
    """Listen on a socket file without a name; the descriptor through which this user's processes can reach it."""
    with tempfile.TemporaryDirectory(prefix="dvla-") as folder:  # mode 0700
        inside = os.open(folder, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            meeting.bind(f"/proc/self/fd/{inside}/meeting")  # a socket's address has room for 107 characters only
        finally:
            os.close(inside)
        meeting.listen(backlog)
        return os.open(Path(folder) / "meeting", os.O_PATH | os.O_CLOEXEC)


def _serve_node(
    meeting: socket.socket, group: dist.ProcessGroup, pairs: Sequence[Pair], descriptor: int, num_bytes: int
) -> NodeLinks:
    """The first rank's part of `connect_node`."""
    me = dist.get_rank()
    missing = set(dist.get_process_group_ranks(group)) - {me}
    pids = {me: os.getpid()}
    with contextlib.ExitStack() as closing:
        guests: dict[int, socket.socket] = {}
        while missing:
            try:
                guest, _ = meeting.accept()
                closing.enter_context(guest)
                guest.settimeout(meeting.gettimeout())
                rank, pids[rank] = struct.unpack("<ii", guest.recv(8))
            except (OSError, struct.error) as error:
                os.close(descriptor)
                raise TransportError(
                    f"ranks {sorted(missing)} did not come for the slots of their node: {error}"
                ) from error
            guests[rank] = guest
            missing.remove(rank)
        ends: dict[int, list[tuple[tuple[str, bool, int, int], socket.socket]]] = {rank: [] for rank in pids}
        for purpose, one, other in pairs:
            both = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            for rank, peer, end in zip((one, other), (other, one), both, strict=True):
                ends[rank].append(((purpose, rank == one, peer, pids[peer]), end))
                if rank != me:
                    closing.enter_context(end)
        for rank, guest in guests.items():
            names = json.dumps([name for name, _ in ends[rank]]).encode()
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # who died shows on its links
                socket.send_fds(guest, [names], [descriptor, *(end.fileno() for _, end in ends[rank])])
    return _node_links(descriptor, num_bytes, ends[me])


class SharedTransport:
    """See `Transport`. Slots are counted over the whole memory of the node, so a slot has one number for all its ranks.

    Args:
        rank: This rank.
        links: Its links, of `connect_node` and `local_links`, one to a peer.
        stop: The rank's stop flag.
        timeout_s: How long `send` waits for a peer that does not read.
    """

    def __init__(self, rank: int, links: Sequence[Link | LocalLink], stop: StopFlag, timeout_s: float) -> None:
        self._rank, self._stop, self._timeout_s = rank, stop, timeout_s
        self._links = {link.peer: link for link in links}
        self._open = {link.fileno(): link for link in links}
        self._taken_in: deque[Parcel] = deque()
        self._reader: int | None = None  # the thread that receives
        self._ready = select.epoll()  # readable itself while any of its links is
        for link in links:
            if isinstance(link, Link):
                link.socket.setblocking(False)
            self._ready.register(link, select.EPOLLIN)

    @property
    def peers(self) -> list[int]:
        """The ranks at the other ends."""
        return list(self._links)

    @property
    def num_open(self) -> int:
        """Peers that have not left."""
        return len(self._open)

    def fileno(self) -> int:
        """See `Transport`."""
        return self._ready.fileno()

    def send(self, parcel: Parcel) -> None:
        """See `Transport`.

        Raises:
            Stopped: The run stopped while the peer did not read.
            WaitTimeoutError: The peer did not read in time.
        """
        link = self._links[parcel.peer]
        if isinstance(link, LocalLink):
            link.send(parcel)
            return
        words = (parcel.decision, parcel.generation, parcel.stage, parcel.id, parcel.task, parcel.version)
        head = _HEAD.pack(parcel.kind, parcel.greedy, *words)
        packet = head + struct.pack(f"<{len(parcel.slots)}i", *parcel.slots)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `receive` will say who died
            while True:
                try:
                    link.socket.send(packet)
                    return
                except BlockingIOError:
                    self._wait_for_room(link)

    def _wait_for_room(self, link: Link) -> None:
        """Wait until the peer has read; meanwhile take in what has come, for it may wait in the same way for this rank."""
        poll = select.poll()
        poll.register(link, select.POLLOUT)
        poll.register(self._stop, select.POLLIN)
        is_reader = self._reader == threading.get_ident()
        if is_reader:
            poll.register(self._ready, select.POLLIN)
        ready = dict(poll.poll(self._timeout_s * 1e3))
        if self._stop.is_set():
            raise Stopped
        if not ready:
            lane = threading.current_thread().name.removeprefix("dvla-")
            raise WaitTimeoutError(
                f"lane {lane} of rank {self._rank} waited {self._timeout_s:.0f} s for rank {link.peer} (pid {link.pid}) "
                "to read its messages"
            )
        if is_reader and self._ready.fileno() in ready and (parcel := self._next()) is not None:
            self._taken_in.append(parcel)

    def receive(self) -> Parcel | None:
        """See `Transport`.

        A `send` by the same thread may have taken in parcels, which leave the end unreadable: receive all before waiting.
        """
        self._reader = threading.get_ident()
        return self._taken_in.popleft() if self._taken_in else self._next()

    def _next(self) -> Parcel | None:
        for descriptor, _ in self._ready.poll(0, 1):  # the kernel takes the ready ones in turn
            link = self._open[descriptor]
            parcel = link.receive() if isinstance(link, LocalLink) else self._read(link)
            if parcel is not None and parcel.kind is Kind.left:
                self._forget(link)
            return parcel
        return None

    def _read(self, link: Link) -> Parcel:
        try:
            packet = link.socket.recv(_MAX_PACKET)
        except ConnectionResetError:
            # The peer closed with parcels unread. That is said once, and before what it sent itself: perhaps that it left.
            packet = link.socket.recv(_MAX_PACKET)
        if not packet:
            self._forget(link)
            raise TransportError(f"rank {link.peer} (pid {link.pid}) died: its link to rank {self._rank} broke")
        kind, greedy, decision, generation, stage, number, task, version = _HEAD.unpack_from(packet)
        slots = struct.unpack_from(f"<{(len(packet) - _HEAD.size) // 4}i", packet, _HEAD.size)
        return Parcel(
            Kind(kind), link.peer, slots, number, task, version, decision, greedy, generation, stage, remote=slots
        )

    def _forget(self, link: Link | LocalLink) -> None:
        """Wait for this link no more; a send to it stays without effect."""
        self._ready.unregister(link)
        del self._open[link.fileno()]

    def free(self, group: Parcel) -> None:
        """See `Transport`."""
        self.send(group.answer(Kind.freed))

    def leave(self) -> None:
        """Tell the peers that nothing more comes; any thread."""
        for link in self._links.values():
            leave = Parcel(Kind.left, link.peer)
            if isinstance(link, LocalLink):
                link.send(leave)
            else:
                with contextlib.suppress(OSError):
                    link.socket.send(_HEAD.pack(leave.kind, *(0,) * 7))

    def close(self) -> None:
        """See `Transport`; once no other thread uses this end."""
        self.leave()
        for link in self._links.values():
            if isinstance(link, Link):
                link.socket.close()
        self._ready.close()
