"""Transport within a node: one slot memory that all its ranks map, and a Unix socket per pair that carries ids only.

The ranks meet once. The first of them makes the memory and a socket pair for every link, and hands each rank its ends
(SCM_RIGHTS). Afterwards nothing has a name, so nothing outlives the ranks, however they end.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist

from dvla.planes.semaphore import StopFlag, Stopped, WaitTimeoutError
from dvla.planes.slots import create_memory, map_memory
from dvla.planes.transport import Kind, Parcel, TransportError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

_MAX_PACKET = 1 << 16
_MAX_DESCRIPTORS = 253  # the kernel's limit for one message
_HEAD = struct.Struct("<B?xxiqqq")  # kind, greedy, decision, id, task, version; then the slots, 4 bytes each


@dataclass(frozen=True, slots=True)
class Link:
    """This rank's end of the socket to `peer`."""

    peer: int
    pid: int
    socket: socket.socket

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self.socket.fileno()


def connect_node(
    group: dist.ProcessGroup, pairs: Sequence[tuple[int, int]], num_bytes: int, timeout_s: float
) -> tuple[np.ndarray, list[Link]]:
    """Give all ranks of a node one slot memory, and link the pairs of them; collective over `group`.

    Args:
        group: A gloo group of the ranks of the node.
        pairs: Global ranks to link, the same on all.
        num_bytes: Size of the slot memory.
        timeout_s: How long to wait for the other ranks.

    Returns:
        The memory, (num_bytes,) uint8, all zero, and this rank's links.

    Raises:
        MemoryError: The machine has too little memory.
        TransportError: A rank did not come.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as meeting:
        meeting.settimeout(timeout_s)
        where = [(0, 0)]
        if dist.get_rank(group) == 0:
            handle = _listen_unnamed(meeting, dist.get_world_size(group))
            try:
                # Only the same user may look into /proc/<pid>/fd.
                dist.broadcast_object_list([(os.getpid(), handle)], group_src=0, group=group)
                return _serve_node(meeting, group, pairs, num_bytes)
            finally:
                os.close(handle)
        dist.broadcast_object_list(where, group_src=0, group=group)
        try:
            meeting.connect("/proc/{}/fd/{}".format(*where[0]))
            meeting.send(struct.pack("<ii", dist.get_rank(), os.getpid()))
            packet, ends, _, _ = socket.recv_fds(meeting, _MAX_PACKET, _MAX_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
        except OSError as error:
            raise TransportError(f"rank {dist.get_rank()} cannot reach the first rank of its node: {error}") from error
    if not packet:
        raise TransportError(f"the first rank of rank {dist.get_rank()}'s node left before it handed out the slots")
    memory = map_memory(ends[0], num_bytes)
    os.close(ends[0])
    peers = zip(json.loads(packet), ends[1:], strict=True)
    return memory, [Link(peer, pid, socket.socket(fileno=end)) for (peer, pid), end in peers]


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
    meeting: socket.socket, group: dist.ProcessGroup, pairs: Sequence[tuple[int, int]], num_bytes: int
) -> tuple[np.ndarray, list[Link]]:
    """The first rank's part of `connect_node`."""
    me = dist.get_rank()
    missing = set(dist.get_process_group_ranks(group)) - {me}
    pids = {me: os.getpid()}
    with contextlib.ExitStack() as closing:
        descriptor = create_memory("dvla-slots", num_bytes)
        closing.callback(os.close, descriptor)
        guests: dict[int, socket.socket] = {}
        while missing:
            try:
                guest, _ = meeting.accept()
                closing.enter_context(guest)
                guest.settimeout(meeting.gettimeout())
                rank, pids[rank] = struct.unpack("<ii", guest.recv(8))
            except (OSError, struct.error) as error:
                raise TransportError(
                    f"ranks {sorted(missing)} did not come for the slots of their node: {error}"
                ) from error
            guests[rank] = guest
            missing.remove(rank)
        ends: dict[int, list[tuple[int, socket.socket]]] = {rank: [] for rank in pids}
        for one, other in pairs:
            for rank, peer, end in zip(
                (one, other), (other, one), socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET), strict=True
            ):
                ends[rank].append((peer, end))
                if rank != me:
                    closing.enter_context(end)
        for rank, guest in guests.items():
            names = json.dumps([(peer, pids[peer]) for peer, _ in ends[rank]]).encode()
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # who died shows on its links
                socket.send_fds(guest, [names], [descriptor, *(end.fileno() for _, end in ends[rank])])
        memory = map_memory(descriptor, num_bytes)
    return memory, [Link(peer, pids[peer], end) for peer, end in ends[me]]


class SharedTransport:
    """See `Transport`. Slots are counted over the whole memory of the node, so a slot has one number for all its ranks.

    Args:
        rank: This rank.
        links: Its links, of `connect_node`.
        stop: The rank's stop flag.
        timeout_s: How long `send` waits for a peer that does not read.
    """

    def __init__(self, rank: int, links: Sequence[Link], stop: StopFlag, timeout_s: float) -> None:
        self._rank, self._stop, self._timeout_s = rank, stop, timeout_s
        self._links = {link.peer: link for link in links}
        self._open = {link.fileno(): link for link in links}
        self._ready = select.epoll()  # readable itself while any of its sockets is
        for link in links:
            link.socket.setblocking(False)
            self._ready.register(link, select.EPOLLIN)

    def fileno(self) -> int:
        """See `Transport`."""
        return self._ready.fileno()

    def send(self, parcel: Parcel) -> None:
        """See `Transport`.

        Raises:
            Stopped: The run stopped while the peer did not read.
            WaitTimeoutError: The peer did not read in time.
        """
        head = _HEAD.pack(parcel.kind, parcel.greedy, parcel.decision, parcel.id, parcel.task, parcel.version)
        packet = head + struct.pack(f"<{len(parcel.slots)}i", *parcel.slots)
        link = self._links[parcel.peer]
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # `receive` will say who died
            while True:
                try:
                    link.socket.send(packet)
                    return
                except BlockingIOError:
                    self._wait_for_room(link)

    def _wait_for_room(self, link: Link) -> None:
        poll = select.poll()
        poll.register(link, select.POLLOUT)
        poll.register(self._stop, select.POLLIN)
        is_ready = poll.poll(self._timeout_s * 1e3)
        if self._stop.is_set():
            raise Stopped
        if not is_ready:
            lane = threading.current_thread().name.removeprefix("dvla-")
            raise WaitTimeoutError(
                f"lane {lane} of rank {self._rank} waited {self._timeout_s:.0f} s for rank {link.peer} (pid {link.pid}) "
                "to read its messages"
            )

    def receive(self) -> Parcel | None:
        """See `Transport`."""
        for descriptor, _ in self._ready.poll(0, 1):  # the kernel takes the ready ones in turn
            link = self._open[descriptor]
            try:
                packet = link.socket.recv(_MAX_PACKET)
            except ConnectionResetError:
                packet = b""
            if not packet:
                self._forget(link)
                raise TransportError(f"rank {link.peer} (pid {link.pid}) died: its link to rank {self._rank} broke")
            kind, greedy, decision, number, task, version = _HEAD.unpack_from(packet)
            slots = struct.unpack_from(f"<{(len(packet) - _HEAD.size) // 4}i", packet, _HEAD.size)
            if kind == Kind.left:
                self._forget(link)
            return Parcel(Kind(kind), link.peer, slots, number, task, version, decision, greedy, slots)
        return None

    def _forget(self, link: Link) -> None:
        """Wait for this link no more; a send to it stays without effect."""
        self._ready.unregister(link)
        del self._open[link.fileno()]

    def free(self, group: Parcel) -> None:
        """See `Transport`."""
        self.send(group.answer(Kind.freed))

    def close(self) -> None:
        """See `Transport`."""
        for link in self._links.values():
            with contextlib.suppress(OSError):
                link.socket.send(_HEAD.pack(Kind.left, False, 0, 0, 0, 0))
            link.socket.close()
        self._ready.close()
