"""How observations, actions and finished groups get from one set of ranks to another: one interface, three ways.

* `LocalTransport` (here): both ends are lanes of one process. Ids pass through a channel.
* `dvla.planes.shared_transport`: both ranks are on one node and map one slot memory. Ids pass through a Unix socket.
* `dvla.planes.collective_transport`: the ranks share no memory. What the slots hold travels, too, into slots of the
  receiver.

A sender hands the slots of a group over with `send` and has them back when a `freed` parcel arrives; the receiver frees
them with `free`. So slots bound what is in flight: no transport holds more than its senders had slots.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import TYPE_CHECKING, Protocol

from dvla.planes.semaphore import Channel, StopFlag, Stopped, WaitTimeoutError, wait_any

if TYPE_CHECKING:
    from typing import Self


class Kind(IntEnum):
    """What a parcel says about its slots."""

    group = 1
    """To the training rank: all episodes of group `id`, whose slots now are its own until it frees them."""
    request = 2
    """To the inference rank: the observation of `decision` lies in the slot, which is lent until the reply."""
    reply = 3
    """To the sampling rank: the actions of `decision` lie in the slot it had lent."""
    dropped = 4
    """To the sampling rank: group `id` had no signal, another may start in its place. Its slots are freed apart."""
    freed = 5
    """To the sampling rank: the slots of group `id` may hold other episodes."""
    left = 6
    """The peer has closed in order: nothing more comes from it."""


@dataclass(frozen=True, slots=True)
class Parcel:
    """Ids; what they are about lies in the slots."""

    kind: Kind
    peer: int
    """The rank it goes to or came from."""
    slots: tuple[int, ...] = ()
    """In the memory of the rank that holds this object; a group's are ordered by member."""
    id: int = 0
    """Number of the group; of a request and its reply the environment."""
    task: int = 0
    version: int = 0
    """At which the group began; of a request and its reply the generation of the environment's worker."""
    decision: int = 0
    """Of a request and its reply."""
    greedy: bool = False
    """Of a request: whether it asks for the likeliest actions."""
    remote: tuple[int, ...] = ()
    """The same slots as the peer counts them, on a parcel that was received."""

    def answer(self, kind: Kind) -> Parcel:
        """The parcel of `kind` that answers this one, about the same slots."""
        return replace(self, kind=kind)


class TransportError(RuntimeError):
    """A peer died or sent what it must not; the message says who."""


class Transport(Protocol):
    """One rank's end. Any thread may send and free; one thread receives."""

    def fileno(self) -> int:
        """Descriptor that is readable while `receive` has something to return or to raise."""

    def send(self, parcel: Parcel) -> None:
        """Pass `parcel` to its peer. That the peer is gone shows at the next `receive`."""

    def receive(self) -> Parcel | None:
        """The next parcel, in the order sent by each peer; None when there is none. Never waits.

        Raises:
            TransportError: A peer died.
        """

    def free(self, group: Parcel) -> None:
        """Give the slots of a received group back."""

    def close(self) -> None:
        """Tell the peers that nothing more comes, and let go of what the end holds."""


def receive_within(transport: Transport, stop: StopFlag, seconds: float, waiting_for: str) -> Parcel:
    """The next parcel, waiting for it. A lane that waits for more than parcels has `wait_any`, as every end is selectable.

    Raises:
        Stopped: The run is stopping.
        TransportError: A peer died.
        WaitTimeoutError: Nothing came within `seconds`.
    """
    deadline = time.monotonic() + seconds
    while True:
        is_ready = wait_any([stop, transport], max(0.0, deadline - time.monotonic()))
        if stop.is_set():
            raise Stopped
        if not is_ready:
            lane = threading.current_thread().name.removeprefix("dvla-")
            raise WaitTimeoutError(
                f"lane {lane} waited {seconds:.0f} s for {waiting_for}; raise runtime.wait_timeout_s if the work can "
                "take that long"
            )
        if (parcel := transport.receive()) is not None:
            return parcel


class LocalTransport:
    """One end of a pair within a process: two channels, one per direction."""

    def __init__(self, outbox: Channel[Parcel], inbox: Channel[Parcel]) -> None:
        self._outbox, self._inbox = outbox, inbox

    @classmethod
    def pair(cls, name: str, capacity: int, stop: StopFlag, timeout_s: float) -> tuple[Self, Self]:
        """Both ends; `capacity` bounds the parcels under way in each direction."""
        one: Channel[Parcel] = Channel(name, capacity, stop, timeout_s)
        other: Channel[Parcel] = Channel(f"{name} (back)", capacity, stop, timeout_s)
        return cls(one, other), cls(other, one)

    def fileno(self) -> int:
        """See `Transport`."""
        return self._inbox.semaphore.fileno()

    def send(self, parcel: Parcel) -> None:
        """See `Transport`; raises OverflowError beyond the capacity."""
        self._outbox.put(replace(parcel, remote=parcel.slots))

    def receive(self) -> Parcel | None:
        """See `Transport`."""
        return self._inbox.try_get()

    def free(self, group: Parcel) -> None:
        """See `Transport`."""
        self.send(group.answer(Kind.freed))

    def close(self) -> None:
        """See `Transport`."""
        self.send(Parcel(Kind.left, peer=0))
